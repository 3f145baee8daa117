"""What MkDocs calls when it builds the site: generated pages, the navigation, mathematics."""

from __future__ import annotations

import fnmatch
import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from docs.generate import composition, configured, features, imports, mathml, reference

ROOT = Path(__file__).parents[2]
LINK = re.compile(r"(?<!!)\[([^\]]+)\]\((\.\./[^)#\s]+)(#[^)\s]*)?\)")
VERBATIM = re.compile(r"(<pre.*?</pre>|<code.*?</code>|<[^>]+>)", re.DOTALL)
UNITS = "%|×|ms|s|bytes|KiB|MiB|GiB|MB|kbit/s|Mbit/s|Gbit/s"
UNBROKEN = re.compile(rf"(?<=\d) (?=(?:{UNITS})(?!\w))|(?:(?<=[≥≤])|(?<=&lt;)|(?<=&gt;)) (?=\d)")
SHORT_CODE = re.compile(r"<code>(?=[^<\n]{1,36}</code>)")


def generated() -> dict[str, str]:
    """All generated pages, as Markdown by their path."""
    tables = {"composition.md": composition.page(), "features.md": features.page()}
    return {**configured.pages(), **tables, **reference.pages()}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for path, text in generated().items():
        files.append(File.generated(config, path, content=text))
    config.nav = _expanded(config.nav or [], [file.src_uri for file in files.documentation_pages()])
    return files


def _expanded(nav: list[Any], pages: list[str]) -> list[Any]:
    """A navigation whose patterns (`how-to/*.md`) are replaced by the pages that match; empty parts go."""
    made: list[Any] = []
    for entry in nav:
        if isinstance(entry, str):
            made += sorted(fnmatch.filter(pages, entry), key=lambda path: not path.endswith("index.md"))
            continue
        ((title, inside),) = entry.items()
        if isinstance(inside, str):
            made += [{title: inside}] if inside in pages else []
        elif found := _expanded(inside, pages):
            made.append({title: found})
    return made


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    if page.file.src_uri == "architecture.md":
        head, title, rest = markdown.partition("## Who may import whom\n")
        markdown = f"{head}{title}\n{imports.svg()}\n{rest}"
    folder = (ROOT / "docs" / page.file.src_uri).parent

    def outside(found: re.Match[str]) -> str:
        """A link to a file of the repository that is not on the site becomes text."""
        target = (folder / found[2]).resolve()
        known = target.is_relative_to(ROOT / "docs") or not target.exists()
        return found[0] if known else found[1]

    return LINK.sub(outside, markdown)


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    return mathml.render(_unbroken(html))


def _unbroken(html: str) -> str:
    """Keeps a number and its unit, and a short piece of code, on one line."""
    parts = VERBATIM.split(html)
    parts[::2] = [UNBROKEN.sub("\u00a0", text) for text in parts[::2]]
    return SHORT_CODE.sub('<code class="short">', "".join(parts))

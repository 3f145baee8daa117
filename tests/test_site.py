"""The documentation site: what is generated from the code, its links, and how its pages look in a browser."""

from __future__ import annotations

import doctest
import os
import re
import shlex
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, partial
from html.parser import HTMLParser
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from xml.etree import ElementTree

import pytest

import polyrhythm as pr
from docs.generate import composition, configured, imports, mathml, reference
from docs.generate.hooks import generated
from polyrhythm.cli.entry import main
from polyrhythm.core.docstrings import plain, read
from polyrhythm.core.errors import UsageError
from polyrhythm.core.registry import Row, describe, registered
from tests.support.browser import Browser, chromium
from tests.test_house import MODULES, imported_rooms, package_of

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
ROWS = [("strategies", row) for row in describe()] + [("codecs", row) for row in describe("codec")]
each_class = pytest.mark.parametrize(("folder", "row"), ROWS, ids=lambda value: getattr(value, "name", value))


@cache
def markdown() -> dict[str, str]:
    """All pages by their path in docs/: those that are written and those that are generated."""
    written = {
        str(path.relative_to(DOCS)): path.read_text(encoding="utf-8") for path in sorted(DOCS.rglob("*.md"))
    }
    made = generated()
    assert not written.keys() & made.keys()
    return written | made


def links(text: str) -> list[str]:
    """The targets of links and pictures, outside code."""
    text = re.sub(r"^```.*?^```$|`[^`\n]*`", "code", text, flags=re.MULTILINE | re.DOTALL)
    return re.findall(r"\]\(([^)\s]+)\)", text)


# --- what is generated ------------------------------------------------------------------------------


@each_class
def test_the_page_of_a_class_says_what_the_class_says(folder: str, row: Row) -> None:
    """Its idea, its rule, its fields with their defaults, its paper, and a line in the index."""
    text, index = markdown()[f"{folder}/{row.name}.md"], markdown()[f"{folder}/index.md"]
    doc = read(registered("codec" if folder == "codecs" else "strategy")[row.name])
    assert row.summary in text and row.summary in index
    assert row.paper in text and row.paper in index
    assert f"]({row.name}.md)" in index
    assert doc.rule and doc.rule in text
    for name, takes, default in row.fields:
        assert f"| `{name}` | `{default or ' '}` | {takes} | {doc.fields[name]} |" in text


@each_class
def test_the_rule_of_a_class_becomes_mathml_and_text(folder: str, row: Row) -> None:
    """All LaTeX in a docstring can be rendered: as well-formed MathML without LaTeX in it, and as text."""
    doc = read(registered("codec" if folder == "codecs" else "strategy")[row.name])
    for latex in (
        doc.rule,
        *re.findall(r"(?<!\$)\$([^$\n]+)\$(?!\$)", doc.text + " ".join(doc.fields.values())),
    ):
        tree = ElementTree.fromstring(mathml.block(latex))
        shown = "".join(tree.itertext())
        assert shown and not re.search(r"[\\$&{}]", shown), shown
    assert not re.search(r"[\\${}]", plain(doc.text))


@each_class
def test_the_example_of_a_class_runs(folder: str, row: Row) -> None:
    """What its page shows can be typed as it stands, and its command names a strategy."""
    text = markdown()[f"{folder}/{row.name}.md"]
    (example,) = re.findall(r"^```pycon\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    test = doctest.DocTestParser().get_doctest(example, {}, row.name, None, 0)
    assert test.examples and doctest.DocTestRunner(verbose=False).run(test).failed == 0
    (command,) = re.findall(r"^\$ (.*)$", text, re.MULTILINE)
    named = pr.parse(shlex.split(command)[-1])
    assert row.name in (named.name, getattr(named.codec, "name", ""))


@pytest.mark.slow
@each_class
def test_the_command_of_a_class_trains(
    folder: str, row: Row, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command on its page trains the digits, here for one epoch in simulation."""
    (command,) = re.findall(r"^\$ polyrhythm run (.*)$", markdown()[f"{folder}/{row.name}.md"], re.MULTILINE)
    words = shlex.split(command.replace("examples/", f"{ROOT}/examples/"))
    monkeypatch.chdir(tmp_path)
    assert main(["simulate", *words, "--", "--epochs", "1"]) == 0


def test_the_composition_page_answers_as_the_code_does() -> None:
    """A combination is marked if and only if it can be made."""
    rows = [line.strip("|").split("|") for line in composition.page().splitlines() if line.startswith("|")]
    tables = [(head, body) for head, mark, *body in _tables(rows) if "---" in mark[0]]
    assert len(tables) == 3
    head, body = tables[0]
    assert len(body) == len(describe()) and len(head) == 1 + len(composition.codecs())
    for name, *answers in body:
        for codec, answer in zip(head[1:], answers, strict=True):
            asked = f"{_bare(name)}+{_bare(codec)}"
            assert (answer.strip() == composition.YES) == _can(asked), asked


def _tables(rows: list[list[str]]) -> Iterator[list[list[str]]]:
    """The tables that rows belong to: a new one begins before each row of dashes."""
    starts = [number - 1 for number, row in enumerate(rows) if set(row[0]) == {"-"}]
    for start, stop in zip(starts, [*starts[1:], len(rows)], strict=True):
        yield rows[start:stop]


def _bare(cell: str) -> str:
    return re.search(r"`([^`]+)`", cell)[1]


def _can(text: str) -> bool:
    try:
        pr.parse(text)
    except UsageError:
        return False
    return True


@pytest.mark.slow
def test_the_picture_shows_the_imports_that_the_house_has() -> None:
    """Every package is in it, and each imports what the test of the import rules finds."""
    found: dict[str, set[str]] = {}
    for path in MODULES:
        room = path.relative_to(Path(pr.__file__).parent).parts[0]
        found.setdefault(room, set()).update(imported_rooms(path.read_text(), package_of(path)) - {room})
    assert imports.graph() == found
    ElementTree.fromstring(imports.svg())
    assert "## Who may import whom\n" in markdown()["architecture.md"]


def test_the_reference_has_every_public_name() -> None:
    names = [name for _, members in reference.GROUPS.values() for name in members]
    assert sorted(names) == sorted(pr.__all__)


# --- links ------------------------------------------------------------------------------------------


def test_links_of_the_readme_lead_to_files() -> None:
    for target in links((ROOT / "README.md").read_text(encoding="utf-8")):
        if not re.match(r"\w+:|#", target):
            assert (ROOT / target.partition("#")[0]).exists(), target


def test_links_of_all_pages_lead_to_pages_or_files() -> None:
    """The build checks anchors too."""
    for page, text in markdown().items():
        for target in links(text):
            if re.match(r"\w+:|#", target):
                continue
            path = (DOCS / page).parent / target.partition("#")[0]
            made = os.path.relpath(os.path.normpath(path), DOCS) in markdown()
            assert made or path.exists(), f"{page}: {target}"


def test_every_page_has_a_place_in_the_navigation() -> None:
    """The strict build fails otherwise; this says it sooner."""
    patterns = re.findall(r"([\w/*-]+\.md)$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), re.MULTILINE)
    for page in markdown():
        assert any(Path(page).match(pattern) for pattern in patterns), page


# --- the site ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built as `make docs` builds it: strictly, so a broken link or anchor is an error."""
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "--site-dir", str(folder)],
        capture_output=True, text=True, check=False, cwd=ROOT, env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return folder


class Resources(HTMLParser):
    """Collects what a page loads by itself, and whether LaTeX was left in its text."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        if tag in ("script", "img", "iframe", "source", "video", "audio", "embed"):
            self.found += [given.get("src") or ""]
        if tag == "link" and given.get("rel") not in ("canonical", "next", "prev"):
            self.found += [given.get("href") or ""]


@pytest.mark.slow
def test_the_site_is_complete_and_loads_nothing_from_outside(site: Path) -> None:
    for page in markdown():
        assert (site / page).with_suffix(".html").is_file(), page
    for path in site.rglob("*.html"):
        text = path.read_text(encoding="utf-8")
        resources = Resources()
        resources.feed(text)
        assert not [each for each in resources.found if re.match(r"(https?:)?//", each)], path
        assert "arithmatex" not in text, f"{path}: LaTeX that was not rendered"
    for path in site.rglob("*.css"):
        outside = re.findall(
            r"(?:url\(|@import)\s*[\"']?(?:https?:)?//[^)\"']+", path.read_text(encoding="utf-8")
        )
        assert not outside, path


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        """Says nothing."""


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """The address of a server of these files."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(folder)))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


needs_chromium = pytest.mark.skipif(chromium() is None, reason="needs Chromium; `make browser` installs it")
FITS = "document.documentElement.scrollWidth <= document.documentElement.clientWidth"


@pytest.mark.slow
@needs_chromium
def test_pages_fit_the_window_without_console_errors(site: Path, tmp_path: Path) -> None:
    """No page scrolls sideways, complains, asks another host, or ignores that the system is dark: narrow and
    wide, light or dark. A page is loaded once, and follows when the window and the system change."""
    looks = [(400, "light"), (1400, "dark"), (400, "dark"), (1400, "light")]
    with served(site) as address, Browser(tmp_path) as browser:
        for number, page in enumerate(markdown()):
            name = f"{page.removesuffix('.md')}.html"
            first = number % len(looks)
            browser.show(*looks[first])
            assert browser.open(f"{address}/{name}") == [], name
            for width, scheme in [*looks[first:], *looks[:first]][:2]:
                browser.show(width, scheme)
                assert browser.after_a_frame() == [], (name, width, scheme)
                assert browser.evaluate(FITS), f"{name} is too wide for {width} pixels"
                shown = browser.evaluate("document.body.dataset.mdColorScheme")
                assert shown == {"light": "default", "dark": "slate"}[scheme], name


@pytest.mark.slow
@needs_chromium
def test_the_browser_notices_what_is_wrong_with_a_page(tmp_path: Path) -> None:
    """A console error, a missing file, a request to another host, and a page that is too wide."""
    (tmp_path / "bad.html").write_text(
        """<body style="width: 3000px"><script>console.error("oh")</script><script>nothing()</script>
        <img src="missing.png"><link rel="stylesheet" href="http://127.0.0.2:1/x.css">"""
    )
    with served(tmp_path) as address, Browser(tmp_path / "profile") as browser:
        browser.show(400, "light")
        found = "\n".join(browser.open(f"{address}/bad.html"))
        assert not browser.evaluate(FITS)
    for expected in ("oh", "nothing is not defined", "missing.png", "asks for http://127.0.0.2:1/x.css"):
        assert expected in found


def test_the_pages_of_strategies_are_in_families() -> None:
    """Each strategy is in one family."""
    text = markdown()["strategies/index.md"]
    assert [text.count(f"]({row.name}.md)") for row in describe()] == [1] * len(describe())
    assert len(configured.FAMILIES) == text.count("\n## ")

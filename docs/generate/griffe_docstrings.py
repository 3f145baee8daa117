"""For mkdocstrings: examples become code blocks, and comments beside fields their descriptions."""

from __future__ import annotations

import re
from typing import Any

import griffe

_EXAMPLE = re.compile(r"^>>> .*?(?=\n\n|\Z)", re.MULTILINE | re.DOTALL)
_COMMENT = re.compile(r" {2}# (?!type:|fmt:|noqa)(.+)$")


class Docstrings(griffe.Extension):
    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = fenced(obj.docstring.value)
        elif obj.is_attribute and obj.lines and (comment := _COMMENT.search(obj.lines[-1])):
            text = comment[1]
            obj.docstring = griffe.Docstring(text[0].upper() + text[1:] + ".", parent=obj)


def fenced(text: str) -> str:
    """A docstring whose examples are in code blocks."""
    return _EXAMPLE.sub(lambda found: f"```pycon\n{found[0]}\n```", text)

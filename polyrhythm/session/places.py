"""Which line of the script a call, an error or a thread is at, as in "train.py, line 41"."""

from __future__ import annotations

import os
import sys
import sysconfig
import traceback
from pathlib import Path
from types import FrameType
from typing import NamedTuple

import polyrhythm

_OURS = str(Path(polyrhythm.__file__).parent) + os.sep
_RUNS = _OURS + os.path.join("session", "script.py")  # the script of a node
_INSTALLED = tuple(
    sysconfig.get_path(each) + os.sep for each in ("stdlib", "platstdlib", "purelib", "platlib")
)


class Call(NamedTuple):
    """A call of the script that all workers make together."""

    point: str  # equal on all workers
    text: str  # with the line of this worker's script
    path: str = ""  # the lines of the script that have led to it, the innermost first


def script_call(name: str, anywhere: bool = False) -> Call:
    """The present call of a session. Workers make it in the same line, or `anywhere`."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_OURS):
        frame = frame.f_back
    text = f"{name} ({_place(frame.f_code.co_filename, frame.f_lineno)})"
    point = (
        f"{name} in line {frame.f_lineno}"  # without the file, which may have another name on another host
    )
    return Call(name if anywhere else point, text, _path(frame))


def _path(frame: FrameType | None) -> str:
    lines = []
    while frame is not None and frame.f_code.co_filename != _RUNS:
        if _of_script(frame.f_code.co_filename):
            lines.append(str(frame.f_lineno))
        frame = frame.f_back
    return " ".join(lines)


def place_of_error(error: BaseException) -> str:
    """The line of the script that has led to an error; "" if the script is not part of its traceback."""
    lines = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(error.__traceback__)]
    return next((_place(*each) for each in reversed(lines) if _of_script(each[0])), "")


def place_of_frame(frame: FrameType | None) -> str:
    """The line of the script that a thread or a greenlet with this frame is in."""
    while frame is not None:
        if _of_script(frame.f_code.co_filename):
            return _place(frame.f_code.co_filename, frame.f_lineno)
        frame = frame.f_back
    return ""


def located(message: str, place: str) -> str:
    """A message with a place behind it, unless the place is unknown or in the message already."""
    return message if not place or place in message else f"{message} ({place})"


def _of_script(file: str) -> bool:
    return not file.startswith((_OURS, *_INSTALLED, "<frozen"))


def _place(file: str, line: int) -> str:
    return f"{Path(file).name}, line {line}"

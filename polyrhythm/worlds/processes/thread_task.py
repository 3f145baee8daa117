"""ThreadTask: a function in a thread of its own."""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable
from typing import Any

from polyrhythm.core.group import Task


class ThreadTask(Task):
    """Runs a function in a thread, in a copy of this context; `join` raises what it raised."""

    def __init__(self, function: Callable[..., None], args: tuple[Any, ...]) -> None:
        self._error: BaseException | None = None
        context = contextvars.copy_context()

        def body() -> None:
            try:
                context.run(function, *args)
            except BaseException as error:
                self._error = error

        self._thread = threading.Thread(target=body, name=f"polyrhythm {function.__name__}", daemon=True)
        self._thread.start()

    def join(self) -> None:
        self._thread.join()
        if self._error is not None:
            raise self._error

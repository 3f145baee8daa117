"""Program: what every node runs, a script with its arguments or a function."""

from __future__ import annotations

import contextlib
import runpy
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from importlib import util
from pathlib import Path
from typing import Any

from polyrhythm.core.errors import PolyrhythmError, UsageError


class Program:
    """A script or a function. Calling it runs it once, for one node."""

    def __init__(self, what: str | Path | Callable[[], Any], arguments: Sequence[str] = ()) -> None:
        self.arguments = list(arguments)
        self._main: Callable[[], Any] | None = what if callable(what) else None
        self._script = None if callable(what) else Path(what)
        if self._script is not None and not self._script.is_file():
            raise UsageError(f"there is no script {self._script}; give the path of a Python file")

    @property
    def name(self) -> str:
        return str(self._script) if self._script else getattr(self._main, "__name__", "main")

    @property
    def is_script(self) -> bool:
        return self._script is not None

    def __call__(self) -> None:
        with _ending():
            if self._main is not None:
                self._main()
            else:
                self._enter()
                runpy.run_path(str(self._script), run_name="__main__")

    def load(self) -> Program:
        """For many nodes in one process: a script with a `main()` is imported once, for calling that."""
        if self._script is None or "def main(" not in self._script.read_text(encoding="utf-8"):
            return self
        self._enter()
        specification = util.spec_from_file_location("__polyrhythm_script__", self._script)
        if specification is None or specification.loader is None:
            raise UsageError(f"{self._script} is not a Python file")
        module = util.module_from_spec(specification)
        sys.modules[specification.name] = module
        try:
            with _ending():
                specification.loader.exec_module(module)
        except PolyrhythmError:
            raise
        except Exception as error:
            traceback.print_exc()
            raise PolyrhythmError(f"{self._script} failed: {type(error).__name__}: {error}") from None
        main = getattr(module, "main", None)
        return Program(main, self.arguments) if callable(main) else self

    def _enter(self) -> None:
        """Makes the process look as if Python had been started with the script."""
        assert self._script is not None
        sys.argv = [str(self._script), *self.arguments]
        folder = str(self._script.parent.resolve())
        if folder not in sys.path:
            sys.path.insert(0, folder)


@contextlib.contextmanager
def _ending() -> Iterator[None]:
    """Makes the ways in which a script ends itself, and one that only looks like a bug, plain."""
    try:
        yield
    except SystemExit as end:
        if isinstance(end.__cause__, PolyrhythmError):
            raise end.__cause__ from None
        if end.code not in (None, 0):
            how = f"exit code {end.code}" if isinstance(end.code, int) else f"{end.code}"
            raise PolyrhythmError(f"{_who()} ended the script with {how}") from None
    except ValueError as error:
        if "empty parameter list" not in str(error):
            raise
        raise UsageError(
            "the model has no parameters to train; give the optimizer model.parameters()"
        ) from None


def _who() -> str:
    from polyrhythm.session.context import world_context

    here = world_context.get()
    return str(here.me) if here else "importing"

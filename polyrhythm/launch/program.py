"""Program: the script with its arguments, or the function, that every node runs."""

from __future__ import annotations

import builtins
import contextlib
import dis
import os
import runpy
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from polyrhythm.core import extensions
from polyrhythm.core.errors import PolyrhythmError, UsageError
from polyrhythm.core.registry import unknown_names
from polyrhythm.core.resolve import SCRIPT


class Program:
    """A script or a function. A call runs it once, as one node."""

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

    @property
    def folder(self) -> Path | None:
        """The folder of the script, from which it imports modules."""
        return None if self._script is None else self._script.parent

    def __call__(self) -> None:
        with _ending():
            self._enter_node()
            if self._main is not None:
                self._main()
            else:
                runpy.run_path(str(self._script), run_name="__main__")

    @property
    def places(self) -> list[Path]:
        """Where the script's own modules are: its folder, the current one and PYTHONPATH."""
        if self._script is None:
            return []
        path = os.environ.get("PYTHONPATH", "").split(os.pathsep)
        return [self._script.parent, Path(), *(Path(each) for each in path if each)]

    def load(self, imports: Sequence[str]) -> Callable[[], None]:
        """The program for many nodes in one process: a script is read once, and runs as `__main__` of each.

        Modules of `imports` are imported by each node; see `worlds.simulated.modules`.
        """
        if self._script is None:
            return self
        path, code = str(self._script), self._compiled()

        def run() -> None:
            with _ending():
                self._enter_node()
                extensions.import_modules(imports)
                module = sys.modules["__main__"] = ModuleType("__main__")
                module.__file__, module.__builtins__ = path, builtins  # type: ignore[attr-defined]
                exec(code, module.__dict__)

        return run

    def _compiled(self) -> CodeType:
        assert self._script is not None
        try:
            return compile(self._script.read_bytes(), str(self._script), "exec")
        except (SyntaxError, ValueError) as error:
            raise UsageError(f"{self._script} is not Python code: {error}") from None

    def import_script(self) -> None:
        """Imports the script, which registers the strategies and codecs that it defines."""
        assert self._script is not None
        if "__main__" not in self._script.read_text(encoding="utf-8"):
            raise UsageError(
                f'to import {self._script} would train; put the training under if __name__ == "__main__":'
            )
        self._import()

    def _import(self) -> ModuleType:
        assert self._script is not None
        self._enter()
        try:
            with _ending():
                return extensions.import_file(self._script, SCRIPT)
        except PolyrhythmError:
            raise
        except Exception as error:
            traceback.print_exc()
            raise PolyrhythmError(f"{self._script} failed: {type(error).__name__}: {error}") from None
        return sys.modules[SCRIPT]  # the script has ended itself

    def may_define(self, strategy: str) -> bool:
        """True if the program may define all names in a strategy's text that this process does not know."""
        return all(self.contains(name) for _, name in unknown_names(strategy))

    def contains(self, name: str) -> bool:
        """True if the program contains a text, as it must if it defines a strategy or codec of that name.

        The modules that a script imports from its own folder, from the current one or from PYTHONPATH count
        as part of it. A function is searched alone, because its module has been imported already.
        """
        if self._script is None:
            function = getattr(self._main, "func", self._main)
            code = getattr(function, "__code__", None)
            return isinstance(code, CodeType) and name in _texts(code)
        try:
            return any(name in _texts(code) for code in _code(self._script))
        except Exception:
            return True  # it cannot be read; the first node runs it and reports why

    def check_told(self) -> None:
        """Called when the program trains outside a session. Raises UsageError if it can never have one."""
        if missing := self._missing():
            raise UsageError(
                f"{self._script} never {missing[0]}, so every worker would train all of it by itself: "
                f"add {missing[1]}session = pr.init() and model, optimizer, loader = "
                "session.prepare(model, optimizer, loader)"
            )

    def _missing(self) -> tuple[str, str] | None:
        """What neither the script nor a module beside it does, and what is to be added."""
        if self._script is None:
            return None
        try:
            codes = list(_code(self._script))
            texts = {text for code in codes for text in _texts(code, names=True)}
        except Exception:
            return None  # it cannot be read, but runs
        if not any("polyrhythm" in text for text in texts):
            return "imports polyrhythm", "import polyrhythm as pr, "
        # An integration makes the session by itself.
        if not any(map(_uses_init, codes)) and not any("integrations" in text for text in texts):
            return "calls pr.init()", ""
        return None

    def _enter_node(self) -> None:
        """The script is about to run on a node."""
        from polyrhythm.session.context import session, without_session

        without_session.set(self.check_told)
        if self._script is not None:
            self._enter()
            session.set(None)  # the process that starts the run may have one

    def _enter(self) -> None:
        """Makes the process look as if Python had been started with the script."""
        assert self._script is not None
        sys.argv = [str(self._script), *self.arguments]
        folder = str(self._script.parent.resolve())
        if folder not in sys.path:
            sys.path.insert(0, folder)


def _code(script: Path) -> Iterator[CodeType]:
    """The code of a script, and of the modules beside it that it imports."""
    from modulefinder import ModuleFinder

    installed = tuple({sys.prefix, sys.base_prefix, sys.exec_prefix})
    places = [place for place in sys.path if place and not place.startswith(installed)]
    finder = ModuleFinder(
        [str(script.parent), str(Path().resolve()), *places], excludes=["polyrhythm", "torch"]
    )
    finder.run_script(str(script))
    for module in finder.modules.values():
        if isinstance(code := getattr(module, "__code__", None), CodeType):
            yield code


def _uses_init(code: CodeType) -> bool:
    """True if a piece of code uses something named `init`, other than that of `nn`."""
    before = None
    for instruction in dis.get_instructions(code):
        if instruction.argval == "init" and before != "nn":
            return True
        before = instruction.argval
    return any(_uses_init(constant) for constant in code.co_consts if isinstance(constant, CodeType))


def _texts(code: CodeType, names: bool = False) -> set[str]:
    """All texts in a piece of code, and the names that it uses."""
    found = set(code.co_names) if names else set()
    for constant in code.co_consts:
        if isinstance(constant, str):
            found.add(constant)
        elif isinstance(constant, CodeType):
            found |= _texts(constant, names)
    return found


@contextlib.contextmanager
def _ending() -> Iterator[None]:
    """Explains the ways in which a script ends itself, and one error whose cause is easy to miss."""
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

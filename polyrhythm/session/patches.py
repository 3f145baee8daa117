"""The functions of PyTorch that are replaced while scripts of a run are running.

Scripts and libraries call them without knowing of a session, and PyTorch has no hook in their place. Each
replacement tells the session of the node that is running, and calls the original.
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.utils import clip_grad
from torch.optim import lr_scheduler
from torch.optim.lr_scheduler import LRScheduler, OneCycleLR
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.data import DataLoader
from torch.utils.hooks import RemovableHandle

from polyrhythm.core.errors import UsageError
from polyrhythm.core.requests import ShowNote
from polyrhythm.session.context import on_iterate, session, without_session, world_context

if TYPE_CHECKING:
    from polyrhythm.session.api import Session

Function = Callable[..., Any]
BEFORE = (
    "the script calls backward() before {call}: what it trains there, every worker trains by itself; call "
    "{call} before, unless that is meant"
)


def _backward(original: Function, *args: Any, **kwargs: Any) -> None:
    """`Tensor.backward` looks this function up at each call.

    A hook inside the autograd engine would not do: a strategy may block here, and in simulation hundreds of
    workers share the engine of one thread.
    """
    mine = session.get()
    if mine is None or mine.backward_passes is None:
        _train_alone(mine)
        original(*args, **kwargs)
    else:
        mine.backward_passes.run(lambda: original(*args, **kwargs))


def _train_alone(mine: Session | None) -> None:
    """The script trains something that is not prepared: by mistake, or before it trains with others."""
    check, here = without_session.get(), world_context.get()
    if check is None or here is None or (mine is not None and mine.external is not None):
        return
    without_session.set(None)  # once is enough
    if mine is None:
        check()
    call = "pr.init()" if mine is None else "session.prepare()"
    here.request(ShowNote(BEFORE.format(call=call)))


def _step_scaler(original: Function, scaler: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
    mine = session.get()
    if mine is not None and scaler.is_enabled():
        mine.scaler_steps(optimizer)
    return original(scaler, optimizer, *args, **kwargs)


def _step_scheduler(original: Function, scheduler: LRScheduler, *args: Any, **kwargs: Any) -> None:
    mine = session.get()
    if mine is None or _stepping.get():  # by a scheduler that consists of others
        original(scheduler, *args, **kwargs)
        return

    def step() -> None:
        mine.scheduler_steps(scheduler)
        token = _stepping.set(True)
        try:
            original(scheduler, *args, **kwargs)
        finally:
            _stepping.reset(token)

    mine.after_update(step)


def _save(original: Function, obj: object, f: Any, *args: Any, **kwargs: Any) -> None:
    original(obj, f, *args, **kwargs)
    mine = session.get()
    # Processes and threads that the script has started cannot send requests.
    script = (os.getpid(), threading.get_ident()) in _scripts.values()
    if mine is not None and isinstance(f, str | os.PathLike) and script:
        mine.file_written(f)


def _total_norm(original: Function, tensors: Any, norm_type: float = 2.0, *args: Any, **kwargs: Any) -> Any:
    """`clip_grad_norm_` looks this function up at each call."""
    gradients = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
    norm, mine = original(gradients, norm_type, *args, **kwargs), session.get()
    return norm if mine is None else mine.whole_norm(norm, gradients, float(norm_type))


def _before_optimizer_step(optimizer: torch.optim.Optimizer, *_: object) -> None:
    """PyTorch calls this before each step of any optimizer."""
    mine = session.get()
    if mine is not None:
        mine.optimizer_steps(optimizer)


def _iterate(original: Function, loader: DataLoader[Any]) -> Any:
    if (watch := on_iterate.get()) is not None:
        watch(loader)
    return original(loader)


def _rates_of_one_cycle(original: Function, scheduler: OneCycleLR) -> Any:
    try:
        return original(scheduler)
    except ValueError as error:
        mine = session.get()
        if mine is None or "Tried to step" not in str(error) or not (advice := mine.past_end(scheduler)):
            raise
        raise UsageError(advice) from error


_REPLACEMENTS: tuple[tuple[Any, str, Function], ...] = (
    (torch.autograd, "backward", _backward),
    (torch.amp.GradScaler, "step", _step_scaler),
    (torch, "save", _save),
    (clip_grad, "_get_total_norm", _total_norm),
    (torch.nn.utils, "get_total_norm", _total_norm),
    *(
        (cls, "step", _step_scheduler)
        for cls in vars(lr_scheduler).values()
        if isinstance(cls, type) and issubclass(cls, LRScheduler) and "step" in vars(cls)
    ),
    (OneCycleLR, "get_lr", _rates_of_one_cycle),
    (DataLoader, "__iter__", _iterate),
)
_stepping: ContextVar[bool] = ContextVar("stepping", default=False)  # a scheduler is stepping
_originals: list[Function] = []
_hooks: list[RemovableHandle] = []
# The scripts that are running, in simulation many at a time: the process and the thread of each.
_scripts: dict[object, tuple[int, int]] = {}


@contextmanager
def installed() -> Iterator[None]:
    """A context in which the replacements are in place."""
    me = object()
    if not _scripts:
        for owner, name, replacement in _REPLACEMENTS:
            original = getattr(owner, name)
            _originals.append(original)
            setattr(owner, name, _replaced(original, replacement))
        _hooks.append(register_optimizer_step_pre_hook(_before_optimizer_step))
    _scripts[me] = os.getpid(), threading.get_ident()
    try:
        yield
    finally:
        del _scripts[me]
        if not _scripts:
            for owner, name, _ in _REPLACEMENTS:
                setattr(owner, name, _originals.pop(0))
            _hooks.pop().remove()


def _replaced(original: Function, replacement: Function) -> Function:
    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        return replacement(original, *args, **kwargs)

    return call

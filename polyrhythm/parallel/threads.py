"""Runs functions side by side in threads that have the caller's settings of PyTorch.

Grad mode, inference mode, autocast and the current stream belong to a thread, and a new thread starts without
them.
"""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch


class _Call(threading.Thread):
    """One function in a thread of its own, on a device."""

    def __init__(self, function: Callable[[], Any], device: torch.device) -> None:
        # A daemon: after Ctrl-C the process may end without it.
        super().__init__(name=f"replica on {device}", daemon=True)
        self._function, self._device = function, device
        self._context = contextvars.copy_context()
        self._grad, self._inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        self._autocast = [
            (kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind))
            for kind in dict.fromkeys(("cpu", device.type))
            if torch.amp.is_autocast_available(kind)
        ]
        self._cache = torch.is_autocast_cache_enabled()
        self._stream = _stream(device)
        self.result: Any = None
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            self.result = self._context.run(self._call)
        except BaseException as error:  # raised again by the caller
            error.add_note(f"in the thread of the {self.name}")
            self.error = error

    def _call(self) -> Any:
        with ExitStack() as settings:
            settings.enter_context(torch.inference_mode(self._inference))
            settings.enter_context(torch.set_grad_enabled(self._grad))
            for kind, dtype, enabled in self._autocast:
                settings.enter_context(torch.autocast(kind, dtype, enabled, self._cache))
            if self._stream is not None:
                module = torch.get_device_module(self._device)
                settings.enter_context(module.device(self._device))
                settings.enter_context(module.stream(self._stream))
            return self._function()


def _stream(device: torch.device) -> Any:
    """The caller's current stream on this device; None if this kind of device has no streams."""
    if device.type in ("cpu", "meta"):
        return None
    module = torch.get_device_module(device)
    return module.current_stream(device) if hasattr(module, "stream") else None


def run_threads(calls: Sequence[tuple[Callable[[], Any], torch.device]], turns: bool = False) -> list[Any]:
    """The results of all functions. The first runs in this thread, the others in new ones; or in `turns`.

    Autograd numbers its nodes by thread. New threads for each pass start at 0, so backward adds the gradients
    of several replicas in the same order every time.
    """
    (first, _), *rest = calls
    threads = [_Call(function, device) for function, device in rest]
    try:
        if turns:
            result = first()
        for thread in threads:
            thread.start()
            if turns:
                thread.join()
        if not turns:
            result = first()
    finally:
        for thread in threads:
            if thread.ident is not None:
                thread.join()
    for thread in threads:
        if thread.error is not None:
            raise thread.error
    return [result, *(thread.result for thread in threads)]

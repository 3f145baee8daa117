"""Tensors of any shape, dtype, device and strides as flat tensors in host memory, which groups can move."""

from __future__ import annotations

import torch
from torch import Tensor

from polyrhythm.core.errors import PolyrhythmError, UsageError
from polyrhythm.core.peer import Peer

# The others travel as bytes, and cannot be reduced.
DTYPES = frozenset((
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16,
    torch.int8, torch.uint8, torch.bool,
))  # fmt: skip


def flat(tensor: Tensor) -> Tensor:
    """A flat view of a tensor in host memory, or a copy of one that is elsewhere or not contiguous."""
    if tensor.layout != torch.strided:
        raise UsageError(f"a process group cannot move a tensor of layout {tensor.layout}; use to_dense()")
    found = tensor.detach()
    if found.device.type != "cpu":
        found = found.cpu()  # in the thread and on the stream of the caller
    if not found.is_contiguous() or found.is_conj() or found.is_neg():
        found = found.contiguous().resolve_conj().resolve_neg()
    found = found.as_strided((found.numel(),), (1,))  # a view of one element may keep another stride
    return found if found.dtype in DTYPES else found.view(torch.uint8)


def reducible(tensor: Tensor, op: str) -> Tensor:
    """The same for a reduction. Complex numbers are added as pairs."""
    if tensor.is_complex() and op in ("sum", "mean"):
        tensor = torch.view_as_real(tensor.detach().resolve_conj())
    if tensor.dtype not in DTYPES:
        raise UsageError(f"a process group cannot reduce {tensor.dtype} by {op}; convert it first")
    if op == "mean" and not tensor.is_floating_point():
        raise UsageError(f"the mean of {tensor.dtype} is not {tensor.dtype}: use ReduceOp.SUM, or floats")
    return flat(tensor)


def shares(tensor: Tensor, view: Tensor) -> bool:
    """True if `view` is in the tensor's own memory, so that nothing is to be copied back."""
    return tensor.data_ptr() == view.data_ptr()


def fill(place: Tensor, values: Tensor) -> None:
    """Copies flat values into a tensor."""
    target = place.detach()
    if values.dtype != target.dtype:
        if target.is_complex() and values.dtype == target.real.dtype:
            target = torch.view_as_real(target)
        else:
            values = values.view(target.dtype)
    if values.numel() and not shares(target, values):
        target.copy_(values.view(target.shape))


def check(values: Tensor, place: Tensor, what: str, sender: Peer, me: Peer) -> None:
    """Raises if a tensor that has arrived does not fit where it belongs. `place` may not be flat."""
    fits = values.nbytes == place.nbytes and values.dtype == (
        place.dtype if place.dtype in DTYPES else torch.uint8
    )
    if not fits:
        sent, wanted = (f"{each.numel()} elements of {each.dtype}" for each in (values, place))
        raise PolyrhythmError(f"{sender} sent {sent} in {what}, but {me} has {wanted}: they must be equal")

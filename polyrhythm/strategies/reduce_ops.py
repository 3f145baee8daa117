"""What strategies without servers exchange: means over all workers, through a codec if there is one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from polyrhythm.collectives.arithmetic import cut

if TYPE_CHECKING:
    from torch import Tensor

    from polyrhythm.compress.compressor import Sender
    from polyrhythm.core.codec import Codec
    from polyrhythm.core.node import Node, Task
    from polyrhythm.model.replica import Replica


FEW = 1 << 12  # bytes that may go along with every code


def mean(
    node: Node, replica: Replica, codec: Codec | None, vectors: Sequence[Tensor], *flags: Tensor
) -> None:
    """Replaces the vectors by their mean over all workers, sent through the codec if there is one.

    The flags are told as they are; above 0 is one that any worker has raised.
    """
    if codec is None:
        return node.all_reduce(*vectors, *flags, op="mean")
    begin_mean(node, replica, codec, vectors, *flags)()


def begin_mean(
    node: Node,
    replica: Replica,
    codec: Codec | None,
    vectors: Sequence[Tensor],
    *flags: Tensor,
    start: int = 0,
    stop: int | None = None,
) -> Callable[[], None]:
    """The same, begun and not waited for: whoever calls what it returns waits, and may do so once.

    The vectors are a range of the layout, from `start` to `stop` of it.
    """
    if codec is None:
        return node.begin_all_reduce(*_filled(vectors), *flags, op="mean").join
    sender = sender_of(node, replica, codec, start=start, stop=stop)
    plain = sender.plain(vectors)
    if codec.summable:
        codes = sender.send(vectors)
        task = node.begin_all_reduce(*codes, *plain, *flags, op="mean")

        def summed() -> None:
            task.join()
            sender.combine([codes], vectors)

        return summed
    rest: Task | None = None
    if plain or codec.shared or sum(flag.nbytes for flag in flags) > FEW:
        plain, flags = [*plain, *flags], ()
        rest = node.begin_all_reduce(*plain, op="mean") if plain else None
    coded = None if codec.shared else node.begin_coded_mean(sender, vectors, *flags)

    def join() -> None:
        if coded is not None:
            coded.join()
        else:
            pairs = sender.pairs(vectors)
            codec.mean(node, pairs)
            sender.sent(pairs, vectors)
        if rest is not None:
            rest.join()

    return join


def in_buckets(codec: Codec | None) -> bool:
    """Whether parts of a gradient can be sent by themselves.

    A codec with a memory sees the gradient whole: its codes are short, and one message is better than many.
    """
    return codec is None or (codec.stateless and not codec.feedback and not codec.dense)


def begin_part(
    node: Node, replica: Replica, codec: Codec | None, gradient: Sequence[Tensor], *flags: Tensor
) -> None:
    """Begins the mean of a part of the gradient, which `join_parts` waits for."""
    parts = replica.notes.setdefault("parts", [])
    if codec is None:
        parts.append(node.begin_all_reduce(*gradient, *flags, op="mean").join)
        return
    from polyrhythm.compress.state import Memory

    memory = Memory.alone(0, feedback=False)
    codes = [codec.encode(part, memory) for part in gradient]
    task = node.begin_all_reduce(*codes, *flags, op="mean")

    def join() -> None:
        task.join()
        for part, code in zip(gradient, codes, strict=True):
            codec.decode(code, part.zero_())

    parts.append(join)


def join_parts(replica: Replica) -> bool:
    """Waits for all parts of the gradient; False if there are none."""
    parts = replica.notes.pop("parts", [])
    for join in parts:
        join()
    return bool(parts)


def mean_gradient(node: Node, replica: Replica, codec: Codec | None, *flags: Tensor) -> None:
    """Replaces the whole gradient by its mean over all workers."""
    if codec is not None:
        replica.check_finite(node.me, replica.steps + 1)  # what a codec keeps of one that is not would stay
        rescale(replica, codec)
    mean(node, replica, codec, replica.gradient, *flags)
    if codec is not None and codec.feedback:
        replica.revive()


def check_way(
    node: Node, replica: Replica, codec: Codec | None, *, start: int = 0, stop: int | None = None
) -> None:
    """Raises `NotFinite` if this worker's parameters are not, before a codec is given how far it has come."""
    if codec is not None:
        own = replica.parameters if stop is None else cut(replica.parameters, start, stop)
        replica.layout.check_finite(own, f"{node.me} at step {replica.steps}", start, stop)


def sender_of(
    node: Node,
    replica: Replica,
    codec: Codec,
    *,
    start: int = 0,
    stop: int | None = None,
    feedback: bool | None = None,
) -> Sender:
    """What this worker sends a range of the layout with."""
    from polyrhythm.compress.compressor import Sender

    if (start, stop) not in replica.senders:
        replica.senders[start, stop] = Sender(
            codec, replica.layout, replica, "sent", start=start, stop=stop, feedback=feedback, seed=node.seed,
            worker=node.rank, workers=len(node.workers),
        )  # fmt: skip
    return replica.senders[start, stop]


def rescale(replica: Replica, codec: Codec) -> None:
    """Gradients that were not sent yet are worth what they were when they were computed.

    They are kept without the learning rate, so if SGD's has changed they change with it: the step that they
    are part of later is as long as it would have been.
    """
    import torch

    if not isinstance(replica.optimizer, torch.optim.SGD) or not codec.feedback:
        return
    rates = [float(group["lr"]) for group in replica.optimizer.param_groups]
    before, replica.notes["rates of residuals"] = replica.notes.get("rates of residuals", rates), rates
    if rates == before:
        return
    residual = replica.owed
    for span in replica.spans(whole=True):
        now, then = rates[span.group], before[span.group]
        if now > 0:
            span.of(residual).mul_(then / now)
        else:
            rates[span.group] = then  # a rate of 0 is a pause


def rates_of_residuals(replica: Replica) -> list[float]:
    """The learning rate of each parameter group by which what was not sent yet counts."""
    groups = replica.optimizer.param_groups
    known: list[float] = replica.notes.get("rates of residuals", [])
    return known or [float(group.get("lr", 0.0)) for group in groups]


def numbers(*values: float) -> Tensor:
    """A few numbers in 64 bits, to send."""
    import torch

    return torch.tensor(values, dtype=torch.float64)


def agree(node: Node, *values: float, op: str) -> list[float]:
    """The sum, max or min of each of a few numbers over all workers."""
    mine = numbers(*values)
    node.all_reduce(mine, op=op)
    return mine.tolist()


def _filled(vectors: Sequence[Tensor]) -> list[Tensor]:
    return [vector for vector in vectors if vector.numel()]

"""GradientTransform: changes a gradient before it is encoded."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from polyrhythm.core.codec import Codec, HasTransform

if TYPE_CHECKING:
    from torch import Tensor

    from polyrhythm.compress.state import CodecState


class GradientTransform(ABC):
    """Changes a gradient before it is encoded. What it remembers is in the segment's `CodecState`."""

    replaces_momentum: ClassVar[bool] = False  # it keeps the momentum, so the optimizer must have none

    @property
    def needs_norm(self) -> bool:
        """True if it needs the norm of all that is sent at once, in `state.norm`."""
        return False

    @abstractmethod
    def apply(self, gradient: Tensor, state: CodecState) -> Tensor:
        """The gradient to encode in place of this one, which it must not change."""

    def check_optimizer(self, groups: Sequence[dict[str, Any]]) -> None:
        """Raises UsageError if it cannot work with the optimizer's parameter groups."""


def transform_of(codec: Codec) -> GradientTransform | None:
    """The transform that a codec applies to gradients, if any."""
    return codec.transform() if isinstance(codec, HasTransform) else None


def needs_norm(codec: Codec) -> bool:
    """True if all that is sent at once must be measured before any segment is encoded."""
    transform = transform_of(codec)
    return transform is not None and transform.needs_norm


def check_optimizer(codec: Codec, groups: Sequence[dict[str, Any]]) -> None:
    """Raises UsageError if a codec cannot work with the optimizer's parameter groups."""
    transform = transform_of(codec)
    if transform is not None:
        transform.check_optimizer(groups)

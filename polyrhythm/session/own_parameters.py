"""OwnParameters: frozen parameters that the script computes itself, such as those of a momentum encoder.

No optimizer has them, so no strategy exchanges them. Where replicas differ between workers, so do they, and
`consensus()` would not be one model. A few elements of each are compared with those at `prepare`: such
parameters may be most of the model, as in fine-tuning, and nearly always none of them changes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from polyrhythm.core.strategy import Strategy
from polyrhythm.model.consensus import joined

SAMPLED = 16  # elements of each parameter that are compared
DIFFER = (
    "no optimizer trains {name}, and the script changes it: each worker has its own values, and the model of "
    "session.consensus() those of the worker that calls it; average them by session.mean(), or make it a "
    "buffer, which is that of worker 0"
)


class OwnParameters:
    """The parameters that no optimizer has."""

    def __init__(self, strategy: Strategy, models: Sequence[nn.Module], owned: Sequence[Tensor]) -> None:
        traits = strategy.traits
        together = traits.lockstep and traits.sync_period == 1 and len(strategy.parts) == 1
        equal = together and not traits.parameters_held_by_peers  # so is what is computed from replicas
        known = {id(each) for each in owned}
        self._before = {
            name: (parameter, _sample(parameter))
            for name, parameter in joined(models).named_parameters()
            if not equal and id(parameter) not in known and not parameter.is_meta
        }

    @property
    def note(self) -> str:
        """What to do about the first one that the script has changed; "" if there is none."""
        for name, (parameter, before) in self._before.items():
            if not torch.equal(_sample(parameter), before):
                return DIFFER.format(name=name)
        return ""


def _sample(parameter: Tensor) -> Tensor:
    flat = parameter.detach().reshape(-1)
    places = torch.linspace(0, max(0, len(flat) - 1), min(SAMPLED, len(flat)), device=flat.device).long()
    return flat[places]

"""Replaces the operations of PyTorch whose last bits depend on the processor or on the C library.

MKL computes square roots and matrix products, with other instructions on each processor, and no setting makes
all of them round its square roots alike. Normal numbers are drawn by the logarithm and the cosine of the C
library. In their place come operations that round once, in a fixed order. The environment that `checks.py`
sets takes care of the rest.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

_library = torch.library.Library("aten", "IMPL")  # replaces only as long as it lives


def halved(terms: Tensor, dim: int) -> Tensor:
    """The sum over a dimension, adding one half to the other until one is left."""
    terms = terms.movedim(dim, 0)
    while (count := len(terms)) > 1:
        half = count // 2
        total = terms[:half] + terms[half : 2 * half]
        terms = torch.cat([total, terms[2 * half :]]) if count % 2 else total
    return terms[0]


def replace() -> None:
    """In this process and all that it forks."""
    for name, kernel in {
        "sqrt": _sqrt,
        "sqrt_": lambda x: x.copy_(_sqrt(x)),
        "mm": _mm,
        "addmm_": lambda x, a, b, *, beta=1, alpha=1: x.mul_(beta).add_(_mm(a, b).mul_(alpha)),
        "normal_": _normal,
    }.items():
        _library.impl(name, kernel, "CPU")


def _sqrt(x: Tensor) -> Tensor:
    return torch.as_tensor(np.sqrt(x.detach().numpy()))


def _mm(a: Tensor, b: Tensor) -> Tensor:
    return halved(a[:, :, None] * b, 1)


def _normal(x: Tensor, mean: float = 0.0, std: float = 1.0, *, generator: Any = None) -> Tensor:
    """Nearly normal: the sum of twelve uniform numbers."""
    uniform = torch.rand(12, *x.shape, dtype=x.dtype, generator=generator)
    return x.copy_((halved(uniform, 0) - 6) * std + mean)

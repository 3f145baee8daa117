"""What is wrong if workers that step together end after different numbers of steps."""

from __future__ import annotations


def ended_early(first: object, steps: int, other: object, others_steps: int, strategy: object) -> str:
    """`first` has ended after so many steps, and another worker has taken or begun another number."""
    return (
        f"{first} ended after {steps} steps, but {other} is at step {others_steps}: under {strategy} all "
        "workers take the same number of steps. Let all leave the loop at the same step, or use async, "
        "where each goes at its own pace"
    )

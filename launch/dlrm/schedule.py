"""Learning rates over a training: warm-up, then polynomial decay."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Schedule"]

_LEAST_RATE = 1e-7  # of a rate that has decayed


@dataclass(frozen=True)
class Schedule:
    """MLPerf's schedule of DLRM: a linear warm-up, and a decay with the square of the steps that are left of it.

    With t = 1, 2, ... for the steps, w, s and d for the attributes, a base rate is multiplied by:

        t / w                                 while t < w
        (1 - min(t - s, d - 1) / d) ** 2      from t = s on, where d > 0; a rate stays at 1e-7 or more

    Attributes:
        warmup_steps: w; 0 for none.
        decay_start: s, at least w.
        decay_steps: d; 0 for none.

    Raises:
        ValueError: a number is negative, or the decay begins in the warm-up.

    Source: LRPolicyScheduler of MLPerf Training's recommendation_v2 (torchrec_dlrm).
    """

    warmup_steps: int = 0
    decay_start: int = 0
    decay_steps: int = 0

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value < 0:
                raise ValueError(f"{name} must be at least 0, got {value}")
        if self.decay_steps and self.decay_start < self.warmup_steps:
            raise ValueError(
                f"decay_start must be at least warmup_steps, which is {self.warmup_steps}, got {self.decay_start}"
            )

    def rate(self, base: float, step: int) -> float:
        """Return the rate of a step.

        Args:
            base: the rate between warm-up and decay.
            step: how many steps were done before.
        """
        number = step + 1
        if number < self.warmup_steps:
            return base * number / self.warmup_steps
        if not self.decay_steps or number < self.decay_start:
            return base
        decayed = min(number - self.decay_start, self.decay_steps - 1)
        return max(base * (1 - decayed / self.decay_steps) ** 2, _LEAST_RATE)

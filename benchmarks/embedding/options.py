"""What a run of the benchmark was asked to do."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import harness.tuning

from persistent_ops.ops.embedding_plan import Tuning

from .configs import CONFIGS, Config
from .inputs import DISTRIBUTIONS
from .methods import METHODS

__all__ = ["Options", "parse_grid"]


@dataclass(frozen=True)
class Options:
    """See the command line's help."""

    backend: str = "auto"
    configs: tuple[str, ...] = tuple(CONFIGS)
    methods: tuple[str, ...] = METHODS
    distributions: tuple[str, ...] = DISTRIBUTIONS
    rounds: int = 15
    burst_ms: float = 3.0
    skew_trials: int = 15
    rows: int | None = None
    record_path: str | None = None
    command: str = ""
    timeout: float = 20.0
    tune: tuple[tuple[str, tuple[Any, ...]], ...] = ()
    tune_mode: str = "product"

    def shapes(self, backend: str) -> list[Config]:
        """Return the configs in the sizes of a backend."""
        shapes = [CONFIGS[name] if backend == "cuda" else CONFIGS[name].for_host() for name in self.configs]
        return [shape if self.rows is None else replace(shape, rows=self.rows) for shape in shapes]


def parse_grid(text: str) -> tuple[tuple[str, tuple[Any, ...]], ...]:
    """Read --tune; see `harness.tuning.parse_grid`."""
    return harness.tuning.parse_grid(text, Tuning)

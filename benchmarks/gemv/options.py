"""What a run of the benchmark was asked to do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .methods import METHODS
from .shapes import SHAPES, Shape, shape_named

__all__ = ["Options"]


@dataclass(frozen=True)
class Options:
    """See the command line's help.

    Attributes:
        shapes: names, of SHAPES or others.
        methods: of METHODS.
        rounds: times each method is timed.
        calls: at least in one graph.
        replays: timed one by one for the spread; None for the backend's default.
        burst_ms: length of one time.
        tune: fields of the operator's Tuning and the values to try.
    """

    backend: str = "auto"
    shapes: tuple[str, ...] = tuple(SHAPES)
    methods: tuple[str, ...] = METHODS
    rounds: int = 15
    calls: int = 20
    replays: int | None = None
    burst_ms: float = 3.0
    record_path: str | None = None
    command: str = ""
    timeout: float = 20.0
    tune: tuple[tuple[str, tuple[Any, ...]], ...] = ()
    tune_mode: str = "product"

    def sizes(self, backend: str) -> dict[str, Shape]:
        """Return the shapes in the sizes of a backend, by name."""
        shapes = {name: shape_named(name) for name in self.shapes}
        return shapes if backend == "cuda" else {name: shape.for_host() for name, shape in shapes.items()}

    def replays_on(self, backend: str) -> int:
        """Return how many replays are timed one by one."""
        return self.replays if self.replays is not None else {"cuda": 10_000, "host": 50}[backend]

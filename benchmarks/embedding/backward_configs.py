"""The cases of the backward pass, and the least traffic of a case.

A PE has N lookups of U rows, in tables of rows of w bytes. O is the size in bytes of its part of the batch's gradient;
all PEs together bring as many bytes for its own tables. P is the number of PEs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from harness.ceilings import Ceilings

from .configs import Config

__all__ = ["CONFIGS", "OPTIMIZERS", "Case", "Moved", "backward_moves", "forward_moves", "limit"]

OPTIMIZERS = ("rowwise_adagrad", "sgd", "adagrad")
SECTOR_BYTES = 32  # the least that the memory of a GPU moves
SECTOR_ROWS = SECTOR_BYTES // 4  # whose fp32 states are in one
_INDEX_BYTES = 8

# Each with the optimizers that it is measured with by default.
CONFIGS: dict[str, tuple[Config, tuple[str, ...]]] = {
    config.name: (config, optimizers)
    for config, optimizers in (
        (Config("B2048_T256_P10", 2048, 256, 10), OPTIMIZERS),
        (Config("B2048_T256_P1", 2048, 256, 1), OPTIMIZERS[:1]),
        # fp16: the 16 bits that FBGEMM's tables have too.
        (Config("B16384_T26_P20_D128_fp16", 16384, 26, 20, 128, "fp16"), OPTIMIZERS[:1]),
        (Config("B65536_T7_P8_D128", 65536, 7, 8, 128), OPTIMIZERS[:1]),
        (Config("B512_T32_P10", 512, 32, 10), OPTIMIZERS[:1]),
    )
}


@dataclass(frozen=True)
class Case:
    """A shape, how its tables are updated, and the distribution of its indices."""

    config: Config
    optimizer: str
    distribution: str

    @property
    def title(self) -> str:
        return f"{self.config.name}, {self.optimizer}, {self.distribution}"


@dataclass(frozen=True)
class Moved:
    """Bytes of one PE.

    Attributes:
        read: from its memory.
        updated: read and written, in equal parts.
        sent: to its peers.
    """

    read: float
    updated: float
    sent: float


def limit(ceilings: Ceilings, parts: Sequence[Moved]) -> tuple[float, str]:
    """Return the least microseconds of parts that follow one another, and the bound of each."""
    found = [
        ceilings.limit_seconds(read_bytes=part.read, updated_bytes=part.updated, sent_bytes=part.sent) for part in parts
    ]
    return sum(seconds for seconds, _ in found) * 1e6, "+".join(dict.fromkeys(by for _, by in found))


def backward_moves(config: Config, optimizer: str, world_size: int, *, rows: float, sectors: float) -> Moved:
    """Return the least traffic of a backward pass.

    The gradient is read once, what peers bring is written and read once, rows and their states are read and written,
    and indices are read: (3 - 2 / P) O + 2 U (w + state) + 8 N in all.

    Args:
        config: shape.
        optimizer: of OPTIMIZERS.
        world_size: P.
        rows: U.
        sectors: of memory in which the states of those rows are, where each has one number.
    """
    sent = config.sent_bytes(world_size)
    states = {"sgd": 0.0, "rowwise_adagrad": sectors * SECTOR_BYTES, "adagrad": rows * config.dim * 4}[optimizer]
    return Moved(
        read=config.output_bytes + _INDEX_BYTES * config.lookups,
        updated=2 * sent + 2 * (rows * config.row_bytes + states),
        sent=sent,
    )


def forward_moves(config: Config, world_size: int, *, rows: float) -> Moved:
    """Return the least traffic of a forward pass: each row once, the result, the indices: U w + O + 8 N."""
    read = rows * config.row_bytes + config.output_bytes + _INDEX_BYTES * config.lookups
    return Moved(read=read, updated=0.0, sent=config.sent_bytes(world_size))

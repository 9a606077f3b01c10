"""The cases of the embedding part of a DLRM's step, and their sizes."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
from embedding.configs import Config
from embedding.inputs import DISTRIBUTIONS

from persistent_ops.nn import TableConfig
from persistent_ops.testing.dlrm_batch import DLRM_DIM, DLRM_POOLING, DLRM_ROWS

__all__ = ["CASES", "Case", "Sizes", "sizes_of"]

_HOST_BATCH, _HOST_DIM, _HOST_ROWS, _HOST_HOTNESS = 22, 16, 300, 6


@dataclass(frozen=True)
class Sizes:
    """MLPerf's tables, or as many smaller ones.

    Attributes:
        batch: samples of the global batch.
        dim: D, of every table.
        rows, hotness: of each table: R, and lookups of each sample.
    """

    batch: int
    dim: int
    rows: tuple[int, ...]
    hotness: tuple[int, ...]


def sizes_of(backend: str, batch: int | None, max_rows: int | None) -> Sizes:
    """Return the sizes on a backend; `max_rows`: larger tables have so many."""
    if backend == "cuda":
        sizes = Sizes(65_536, DLRM_DIM, DLRM_ROWS, DLRM_POOLING)
    else:
        rows = tuple(min(each, _HOST_ROWS) for each in DLRM_ROWS)
        sizes = Sizes(_HOST_BATCH, _HOST_DIM, rows, tuple(min(each, _HOST_HOTNESS) for each in DLRM_POOLING))
    if max_rows is not None:
        sizes = dataclasses.replace(sizes, rows=tuple(min(each, max_rows) for each in sizes.rows))
    return sizes if batch is None else dataclasses.replace(sizes, batch=batch)


@dataclass(frozen=True)
class Case:
    """How tables are updated, which dtypes there are, and the distribution of the indices.

    Attributes:
        optimizer: "adagrad" or "rowwise_adagrad".
        distribution: of DISTRIBUTIONS.
        dtype: of the tables: "fp32", "fp16" or "bf16".
        wire: of pooled rows and gradients on their way; None: the tables'.
    """

    optimizer: str
    distribution: str
    dtype: str = "fp32"
    wire: str | None = None

    @property
    def name(self) -> str:
        dtype = "" if self.dtype == "fp32" else f"_{self.dtype}"
        wire = "" if self.wire is None else f"_wire_{self.wire}"
        return f"{self.optimizer}{dtype}{wire}_{self.distribution}"

    @property
    def of_tables(self) -> Case:
        """The case that stands for all that train the same tables in the same way."""
        return dataclasses.replace(self, distribution=DISTRIBUTIONS[0])

    def config(self, sizes: Sizes) -> Config:
        """Return what checks of the backward pass ask of a shape: its dtypes."""
        return Config(self.name, sizes.batch, len(sizes.rows), 1, sizes.dim, self.dtype, max(sizes.rows), self.wire)

    def torch_dtype(self) -> torch.dtype:
        return Config("", 0, 0, 0, dtype=self.dtype).torch_dtype

    def wire_dtype(self) -> torch.dtype:
        return Config("", 0, 0, 0, dtype=self.dtype, wire=self.wire).wire_dtype

    def tables(self, sizes: Sizes) -> list[TableConfig]:
        """Return the tables, of one feature each."""
        return [
            TableConfig(f"t{number}", rows, sizes.dim, [f"f{number}"], data_type=self.torch_dtype())
            for number, rows in enumerate(sizes.rows)
        ]


CASES = {
    case.name: case
    for dtypes in ({}, {"wire": "bf16"}, {"dtype": "fp16"}, {"dtype": "bf16"})
    for optimizer in (("adagrad", "rowwise_adagrad") if not dtypes.get("dtype") else ("rowwise_adagrad",))
    for distribution in DISTRIBUTIONS
    for case in (Case(optimizer, distribution, **dtypes),)
}

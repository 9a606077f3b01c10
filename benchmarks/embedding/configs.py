"""The measured shapes, and the bytes that they move."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch

__all__ = ["CONFIGS", "Config"]

_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Config:
    """One shape, the same on every PE.

    Attributes:
        name: of the shape, also where it was made smaller for the host backend.
        batch: samples of the global batch.
        tables: of each PE.
        pooling: rows per bag.
        dim: elements of a row.
        dtype: of the tables: "fp32", "fp16" or "bf16".
        rows: of each table.
        wire: dtype of pooled rows and of gradients on their way; None: the tables'.
    """

    name: str
    batch: int
    tables: int
    pooling: int
    dim: int = 256
    dtype: str = "fp32"
    rows: int = 100_000
    wire: str | None = None

    @property
    def torch_dtype(self) -> torch.dtype:
        return _DTYPES[self.dtype]

    @property
    def wire_dtype(self) -> torch.dtype:
        return _DTYPES[self.wire or self.dtype]

    @property
    def lookups(self) -> int:
        """Rows that each PE reads per call."""
        return self.batch * self.tables * self.pooling

    @property
    def row_bytes(self) -> int:
        return self.dim * self.torch_dtype.itemsize

    @property
    def read_bytes(self) -> int:
        """Bytes of rows that each PE reads per call."""
        return self.lookups * self.row_bytes

    @property
    def output_bytes(self) -> int:
        """Bytes of each PE's result; also of what it pools in all, whatever the world's size."""
        return self.batch * self.tables * self.dim * self.wire_dtype.itemsize

    def sent_bytes(self, world_size: int) -> float:
        """Return the bytes that each PE sends to its peers per call."""
        return self.output_bytes * (world_size - 1) / world_size

    def for_host(self) -> Config:
        """Return a shape of the same kind that a CPU pools in milliseconds; its batch divides by 1 to 4, 6 and 8."""
        return dataclasses.replace(
            self,
            batch={512: 24, 1024: 48}.get(self.batch, 96),
            tables=min(self.tables, 4),
            pooling=min(self.pooling, 8),
            dim=self.dim // 8,
            rows=1000,
        )


CONFIGS = {
    config.name: config
    for config in (
        Config("B2048_T256_P70", 2048, 256, 70),
        Config("B2048_T256_P10", 2048, 256, 10),
        Config("B2048_T256_P1", 2048, 256, 1),
        Config("B1024_T64_P10", 1024, 64, 10),
        Config("B512_T32_P10", 512, 32, 10),
        Config("B16384_T26_P20_D128_bf16", 16384, 26, 20, 128, "bf16"),
    )
}

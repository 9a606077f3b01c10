"""Options of the demo."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from ..testing.dlrm_batch import DLRM_DIM

__all__ = ["DTYPES", "HOST_PES", "DemoOptions"]

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

HOST_PES = 4
# Small enough for a laptop with two cores: 26 tables of at most this many rows take 270 MB in fp32 at D = 128.
_HOST_MAX_ROWS = 50_000
_HOST_BATCH = 512
_CUDA_BATCH = 16_384


@dataclass(frozen=True)
class DemoOptions:
    """Options of the demo; the command line has one for each but `timeout`.

    Attributes:
        data: Criteo-format file, or None for a synthetic batch.
        steps: batches to run after one warm-up batch; a file may hold fewer.
        batch: samples of the global batch; None takes a default for the backend.
        dim: elements of an embedding row, D.
        dtype: "fp32", "bf16" or "fp16".
        pes: number of PEs; None takes one per GPU, or 4 on the host backend. Only without a launcher.
        backend: "auto", "cuda" or "host".
        max_rows: cap on a table's rows; None takes what fits.
        seed: of tables and synthetic batches.
        timeout: seconds that the PEs wait for each other.
        trace: file for a timeline of all launches, or None.
    """

    data: Path | None = None
    steps: int = 20
    batch: int | None = None
    dim: int = DLRM_DIM
    dtype: str = "fp32"
    pes: int | None = None
    backend: str = "auto"
    max_rows: int | None = None
    seed: int = 0
    timeout: float = 60.0
    trace: str | None = None

    def __post_init__(self) -> None:
        for name in ("steps", "batch", "dim", "pes", "max_rows"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        if not 0 <= self.seed < 1 << 32:
            raise ValueError(f"seed must be 0 to {(1 << 32) - 1}, got {self.seed}")
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, got {self.dtype!r}")
        if self.backend not in ("auto", "cuda", "host"):
            raise ValueError(f"backend must be auto, cuda or host, got {self.backend!r}")

    @property
    def torch_dtype(self) -> torch.dtype:
        """Return the dtype of the tables."""
        return DTYPES[self.dtype]

    def batch_for(self, backend: str) -> int:
        """Return the global batch size on the backend that was taken."""
        return self.batch or (_CUDA_BATCH if backend == "cuda" else _HOST_BATCH)

    def max_rows_for(self, backend: str) -> int | None:
        """Return the cap on a table's rows; None where the GPUs' memory decides."""
        return self.max_rows or (None if backend == "cuda" else _HOST_MAX_ROWS)

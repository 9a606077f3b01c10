"""The options of the training of a DLRM."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from persistent_ops.testing.dlrm_batch import DLRM_POOLING, DLRM_ROWS

from .model import Sizes
from .schedule import Schedule

__all__ = ["ALGORITHMS", "BESIDE_NCCL", "FORMATS", "MODELS", "PLACEMENTS", "PRECISIONS", "Options", "Preset"]

ALGORITHMS = ("sgd", "adagrad", "rowwise_adagrad")
BESIDE_NCCL = ("serial", "room")
FORMATS = ("synthetic", "criteo", "npy", "raw")
PLACEMENTS = ("model", "table_wise", "auto")
PRECISIONS = ("fp32", "bf16")
_TAKEN = {"synthetic": "no file or folder", "criteo": "a text file", "npy": "a folder", "raw": "a file"}
_MOST_HEAP_GIB = 1 << 20
_NUM_SMS_OF_NCCL = 8  # enough for the dense part's few MB
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Preset:
    """A model, and the options that go with it where none are given.

    Attributes:
        dim: width of the tables.
        sizes: further arguments of `Sizes`.
        num_rows, hotness: of the synthetic log's tables.
        slices: columns of these tables, by number, are cut into so many slices under placement "model".
        defaults: of options.
    """

    dim: int
    sizes: dict[str, Any]
    num_rows: tuple[int, ...]
    hotness: tuple[int, ...]
    slices: dict[int, int]
    defaults: dict[str, Any]


MODELS = {
    "small": Preset(
        dim=16,
        sizes={"bottom": (64, 16), "top": (64, 32, 1), "cross_layers": 3, "cross_rank": 32},
        num_rows=(40, 3, 60, 20),
        hotness=(1, 1, 3, 2),
        slices={},
        defaults={
            "batch": 1024,
            "epochs": 2,
            "samples": 300_000,
            "evaluation_samples": 30_000,
            "learning_rate": 0.02,
            "table_learning_rate": 0.1,
            "evaluate_every": 100,
            "checkpoint_every": 400,
            "max_rows": 2000,
        },
    ),
    "mlperf": Preset(
        dim=128,
        sizes={},
        num_rows=DLRM_ROWS,
        hotness=DLRM_POOLING,
        slices={20: 2},  # 100 of a sample's 214 lookups are in this table: whole, it would be twice a PE's fair share
        defaults={
            "batch": 65_536,
            "epochs": 1,
            "samples": 64 * 65_536,
            "evaluation_samples": 4 * 65_536,
            "learning_rate": 0.004,
            "table_learning_rate": 0.004,
            "evaluate_every": 1000,
            "checkpoint_every": 10_000,
            "max_rows": max(DLRM_ROWS),
        },
    ),
}


@dataclass(frozen=True)
class Options:
    """Options of the training; the command line has one for each.

    Attributes:
        model: one of `MODELS`.
        interaction: "dcn" or "dot".
        format: one of `FORMATS`.
        data: file of "criteo" and "raw", folder of "npy"; None for "synthetic".
        days: that the folder has.
        max_rows: larger tables have so many; a row is an id modulo that.
        samples: of the synthetic log that train.
        evaluation_samples: that evaluate; of a file the last ones. A folder's validation set is MLPerf's.
        batch: samples of a step, on all PEs together.
        epochs: to train until; a resumed training continues up to it.
        steps: to stop at, if that is earlier; None for all.
        placement: one of `PLACEMENTS`: tables whole on a PE, but for the model's slices; without these; or where
            measured costs put them.
        replicated_rows: tables of at most so many rows are on every PE, whatever `placement` says.
        optimizer: one of `ALGORITHMS`, of the tables; of the dense part SGD or Adagrad.
        learning_rate, table_learning_rate: of the dense part and of the tables.
        schedule: of both.
        precision: one of `PRECISIONS`, of the dense part's products.
        wire: one of `PRECISIONS`, in which pooled rows and their gradients travel; None for `precision`, which loses
            nothing by it.
        is_compiled: whether torch.compile makes the dense part's kernels.
        is_captured: whether steps are replays of a CUDA graph, as far as they can be.
        beside_nccl: one of `BESIDE_NCCL`: the dense part's sums and the tables' backward pass one after the other, or
            side by side in the room that launches leave.
        compare_steps: of each way, in a comparison that takes the training's place; 0 for the training.
        seed: of the log, the order of samples and all weights.
        backend: "auto", "cuda" or "host".
        output: folder for curves and checkpoints.
        evaluate_every, checkpoint_every: steps; 0 for the end alone.
        is_resumed: go on from the checkpoint in `output`.
        readers: threads that read batches ahead.
        heap_gib: symmetric memory of a PE; None for the package's default.
        timeout: seconds that the PEs wait for each other.
        trace: file for a timeline of all launches, or None.

    Raises:
        ValueError: a choice is unknown or out of range.
    """

    batch: int
    epochs: int
    samples: int
    evaluation_samples: int
    learning_rate: float
    table_learning_rate: float
    evaluate_every: int
    checkpoint_every: int
    max_rows: int
    model: str = "small"
    interaction: str = "dcn"
    format: str = "synthetic"
    data: str | None = None
    days: int = 24
    steps: int | None = None
    placement: str = "model"
    replicated_rows: int = 0
    optimizer: str = "adagrad"
    schedule: Schedule = field(default_factory=Schedule)
    precision: str = "fp32"
    wire: str | None = None
    is_compiled: bool = False
    is_captured: bool = False
    beside_nccl: str = "serial"
    compare_steps: int = 0
    seed: int = 0
    backend: str = "auto"
    output: str = "out/dlrm_train"
    is_resumed: bool = False
    readers: int = 1
    heap_gib: float | None = None
    timeout: float = 60.0
    trace: str | None = None

    def __post_init__(self) -> None:
        choices = {"model": tuple(MODELS), "format": FORMATS, "optimizer": ALGORITHMS, "precision": PRECISIONS}
        choices |= {"interaction": ("dcn", "dot"), "backend": ("auto", "cuda", "host"), "placement": PLACEMENTS}
        choices |= {"beside_nccl": BESIDE_NCCL}
        choices |= {"wire": PRECISIONS} if self.wire is not None else {}
        for name, known in choices.items():
            if getattr(self, name) not in known:
                raise ValueError(f"{name} must be one of {', '.join(known)}, got {getattr(self, name)!r}")
        for name in ("batch", "epochs", "samples", "evaluation_samples", "max_rows", "readers"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        for name in ("evaluate_every", "checkpoint_every", "compare_steps", "replicated_rows"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must be at least 0, got {getattr(self, name)}")
        for name in ("learning_rate", "table_learning_rate", "timeout", *(("heap_gib",) * (self.heap_gib is not None))):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be above 0 and below infinity, got {getattr(self, name)}")
        if self.heap_gib is not None and self.heap_gib > _MOST_HEAP_GIB:
            raise ValueError(f"heap_gib must be at most {_MOST_HEAP_GIB}, got {self.heap_gib:g}")
        if self.steps is not None and self.steps < 1:
            raise ValueError(f"steps must be at least 1, got {self.steps}")
        if self.is_captured and self.compare_steps and self.schedule != Schedule():
            raise ValueError("--graph: FBGEMM reads its rate on the host; leave out --graph, --compare or the schedule")
        if self.beside_nccl == "room" and self.compare_steps:
            raise ValueError("--beside-nccl: baselines of --compare use NCCL's defaults; leave out room or --compare")
        if (self.data is None) != (self.format == "synthetic"):
            raise ValueError(f"data: format {self.format} takes {_TAKEN[self.format]} (--data)")

    @property
    def preset(self) -> Preset:
        return MODELS[self.model]

    @property
    def folder(self) -> Path:
        return Path(self.output)

    @property
    def dense_dtype(self) -> torch.dtype:
        return _DTYPES[self.precision]

    @property
    def wire_dtype(self) -> torch.dtype | None:
        """As the embedding collection takes it: None for its tables' dtype, float32."""
        dtype = _DTYPES[self.wire or self.precision]
        return None if dtype == torch.float32 else dtype

    @property
    def num_sms_of_nccl(self) -> int | None:
        """That launches leave to NCCL's collectives, which need no order with them then; None for one order."""
        return _NUM_SMS_OF_NCCL if self.beside_nccl == "room" else None

    def sizes(self, num_features: int, num_dense: int) -> Sizes:
        """Return the sizes of the dense part."""
        preset = self.preset
        dims = (preset.dim,) * num_features
        return Sizes(dims=dims, num_dense=num_dense, interaction=self.interaction, **preset.sizes)

    def identity(self) -> dict[str, Any]:
        """Return the choices that decide the losses besides samples and sizes: a checkpoint of others is refused."""
        names = ("optimizer", "learning_rate", "table_learning_rate", "precision", "seed")
        chosen = {name: getattr(self, name) for name in names}
        return chosen | {"wire": self.wire or self.precision, "schedule": dict(vars(self.schedule))}

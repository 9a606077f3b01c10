"""Options that the benchmarks of the embedding's forward and backward pass share."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Iterable, Sequence

import torch

from .configs import Config
from .inputs import DISTRIBUTIONS

__all__ = ["add_options", "check_batches", "distributions_of", "expected_backend", "sized"]


def add_options(parser: argparse.ArgumentParser, configs: Iterable[str], rows: str) -> None:
    """Add --configs, --zipf and --rows; `rows`: the help's words for the default."""
    parser.add_argument("--configs", help=f"comma-separated, of {','.join(configs)} (default: all)")
    parser.add_argument("--zipf", choices=("also", "only", "no"), help="Zipf 1.05 indices (default also; quick no)")
    parser.add_argument("--rows", type=int, help=f"rows of each table (default {rows})")


def distributions_of(arguments: argparse.Namespace) -> tuple[str, ...]:
    """Return the distributions of the indices that were asked for."""
    zipf = arguments.zipf or ("no" if arguments.quick or arguments.tune else "also")
    return {"also": DISTRIBUTIONS, "only": ("zipf",), "no": ("uniform",)}[zipf]


def sized(config: Config, backend: str, rows: int | None) -> Config:
    """Return a config in the size of a backend; `rows`: of each table, None for what that has."""
    shape = config if backend == "cuda" else config.for_host()
    return shape if rows is None else dataclasses.replace(shape, rows=rows)


def check_batches(configs: Iterable[Config], worlds: Sequence[int]) -> None:
    """Raise ValueError where a batch does not divide over the PEs of a world."""
    for config in configs:
        for size in worlds:
            if config.batch % size:
                raise ValueError(
                    f"--pes, --worlds: {config.name} has a batch of {config.batch}, which {size} does not divide"
                )


def expected_backend(name: str) -> str:
    """Return the backend that "auto" will be, before there is a world."""
    return "host" if name == "host" or torch.cuda.device_count() == 0 else "cuda"

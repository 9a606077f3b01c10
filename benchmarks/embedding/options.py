"""Options of both benchmarks, of the embedding's forward pass and of its backward pass."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

from harness.command import names
from harness.experiment import Experiment

from persistent_ops.testing.fbgemm_embedding import why_no_fbgemm
from persistent_ops.testing.pes import agree

from .configs import Config
from .inputs import DISTRIBUTIONS

__all__ = ["add_options", "available", "check_batches", "distributions_of", "sized", "wires_of", "without_fbgemm"]

_WIRES = ("fp32", "bf16")


def add_options(parser: argparse.ArgumentParser, configs: Iterable[str], rows: str) -> None:
    """Add --configs, --zipf, --rows and --wire-dtype; `rows`: the help's words for the default."""
    parser.add_argument("--configs", help=f"comma-separated, of {','.join(configs)} (default: all)")
    parser.add_argument("--zipf", choices=("also", "only", "no"), help="Zipf 1.05 indices (default also; quick no)")
    parser.add_argument("--rows", type=int, help=f"rows of each table (default {rows})")
    parser.add_argument(
        "--wire-dtype", help=f"of configs with tables of fp32, comma-separated, of {','.join(_WIRES)} (default fp32)"
    )


def distributions_of(arguments: argparse.Namespace) -> tuple[str, ...]:
    """Return the distributions of the indices that were asked for."""
    zipf = arguments.zipf or ("no" if arguments.quick or arguments.tune else "also")
    return {"also": DISTRIBUTIONS, "only": ("zipf",), "no": ("uniform",)}[zipf]


def wires_of(arguments: argparse.Namespace) -> tuple[str, ...]:
    """Return the dtypes on the wire that were asked for."""
    return names("--wire-dtype", arguments.wire_dtype or "fp32", _WIRES)


def sized(config: Config, backend: str, rows: int | None, wires: Sequence[str]) -> list[Config]:
    """Return a config in the size of a backend.

    Args:
        config: as it is on GPUs.
        backend: name of it.
        rows: of each table; None for what the config has.
        wires: dtypes on the wire where tables are of fp32, each of which makes a config with a name of its own.
    """
    shape = config if backend == "cuda" else config.for_host()
    shape = shape if rows is None else dataclasses.replace(shape, rows=rows)
    if shape.dtype != "fp32":
        return [shape]
    return [
        shape if wire == "fp32" else dataclasses.replace(shape, name=f"{shape.name}_wire_{wire}", wire=wire)
        for wire in wires
    ]


def check_batches(configs: Iterable[Config], worlds: Sequence[int]) -> None:
    """Raise ValueError where a batch does not divide over the PEs of a world."""
    for config in configs:
        for size in worlds:
            if config.batch % size:
                raise ValueError(
                    f"--pes, --worlds: {config.name} has a batch of {config.batch}, which {size} does not divide"
                )


def without_fbgemm(methods: Sequence[str]) -> tuple[str, ...]:
    """Return the methods that do not need FBGEMM."""
    return tuple(name for name in methods if not name.startswith("fbgemm"))


def available(experiment: Experiment[Any], methods: Sequence[str]) -> tuple[str, ...]:
    """Return the methods, without FBGEMM's if a PE does not have it; the record reports that; collective."""
    others = without_fbgemm(methods)
    problem = None if len(others) == len(methods) else agree(why_no_fbgemm())
    if problem is None:
        return tuple(methods)
    experiment.write("left_out", what="FBGEMM", problem=problem)
    return others

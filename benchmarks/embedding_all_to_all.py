"""Benchmark of embedding_all_to_all: persistent-ops bench embedding_all_to_all [OPTIONS]. See README.md beside it."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))

from embedding.configs import CONFIGS
from embedding.methods import METHODS
from embedding.options import Options, parse_grid
from embedding.report import draw_figure, print_tables, print_tuning
from embedding.run import run_pe
from embedding.tune import tune_pe
from harness.command import Benchmark, add_common, add_tuning, chosen_worlds, command_line, names, run_benchmark

_NAME = "embedding_all_to_all"


def main(argv: list[str]) -> int:
    """Run the benchmark; see `run_benchmark`."""
    benchmark = Benchmark(
        _NAME, __doc__, _add_options, _options, run_pe, draw_figure, print_tables, tune_pe, print_tuning
    )
    return run_benchmark(benchmark, argv)


def _add_options(parser: argparse.ArgumentParser) -> None:
    add_common(parser, worlds="2,4,8 (default: one PE per GPU; host 2)", limit=900.0)
    parser.add_argument("--configs", help=f"comma-separated, of {','.join(CONFIGS)} (default: all)")
    parser.add_argument("--methods", help=f"comma-separated, of {','.join(METHODS)} (default: all)")
    parser.add_argument("--rounds", type=int, help="times each method is timed (default 15; quick 3)")
    parser.add_argument("--zipf", choices=("also", "only", "no"), help="Zipf 1.05 indices (default also; quick no)")
    parser.add_argument("--rows", type=int, help="rows of each table (default 100000; host 1000)")
    parser.add_argument("--quick", action="store_true", help="a look: few rounds, and uniform indices")
    add_tuning(parser, "threads=256:192,local_delay=0:0.5")


def _options(arguments: argparse.Namespace, argv: list[str]) -> tuple[Options, list[int]]:
    worlds = chosen_worlds(arguments)
    zipf = arguments.zipf or ("no" if arguments.quick or arguments.tune else "also")
    options = Options(
        backend=arguments.backend,
        configs=names("--configs", arguments.configs, CONFIGS),
        methods=names("--methods", arguments.methods, METHODS),
        distributions={"also": ("uniform", "zipf"), "only": ("zipf",), "no": ("uniform",)}[zipf],
        rounds=arguments.rounds or (3 if arguments.quick else 7 if arguments.tune else 15),
        skew_trials=5 if arguments.quick else 15,
        rows=arguments.rows,
        command=command_line(_NAME, argv),
        tune=parse_grid(arguments.tune) if arguments.tune else (),
        tune_mode=arguments.tune_mode,
    )
    on_host = arguments.backend == "host" or torch.cuda.device_count() == 0
    for size in worlds:
        for shape in options.shapes("host" if on_host else "cuda"):
            if shape.batch % size:
                raise ValueError(
                    f"--pes, --worlds: {shape.name} has a batch of {shape.batch}, which {size} does not divide"
                )
    return options, worlds


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))

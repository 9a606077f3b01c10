"""Benchmark of sparse_all_reduce: persistent-ops bench sparse_all_reduce [OPTIONS]. See README.md beside it."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from harness.command import Benchmark, add_common, at_least, chosen_worlds, command_line, names, run_benchmark
from sparse.cases import CASES, SWEEPS
from sparse.figures import draw_figures
from sparse.methods import METHODS
from sparse.options import Options
from sparse.report import print_tables
from sparse.run import run_pe

_NAME = "sparse_all_reduce"


def main(argv: list[str]) -> int:
    """Run the benchmark; see `run_benchmark`."""
    return run_benchmark(Benchmark(_NAME, __doc__, _add_options, _options, run_pe, draw_figures, print_tables), argv)


def _add_options(parser: argparse.ArgumentParser) -> None:
    add_common(parser, worlds="8,4,2 (default: one PE per GPU; host 2)", limit=600.0)
    parser.add_argument("--cases", help=f"comma-separated, of {','.join(CASES)} (default: all), or none")
    parser.add_argument("--sweeps", help=f"comma-separated, of {','.join(SWEEPS)} (default: all), or none")
    parser.add_argument("--methods", help=f"comma-separated, of {','.join(METHODS)} (default: all)")
    parser.add_argument("--rounds", type=int, help="times each method is timed (default 9, sweeps 5; quick 3)")
    parser.add_argument("--replays", type=int, help="single calls timed for the spread (default: 20 to 1000, by time)")
    parser.add_argument("--quick", action="store_true", help="a look: few rounds, replays and points of the sweeps")
    parser.add_argument(
        "--gloo-gb", type=float, default=0.5, help="most that all PEs have together for Gloo to be timed (default 0.5)"
    )
    parser.add_argument(
        "--room-gb",
        type=float,
        default=4.3,
        help="most of the symmetric heap that allgather and dense may take beside the result (default 4.3)",
    )


def _options(arguments: argparse.Namespace, argv: list[str]) -> tuple[Options, list[int]]:
    worlds = chosen_worlds(arguments, smallest=2, why=": one PE has nothing to send")
    at_least("--rounds", [arguments.rounds])
    replays = arguments.replays
    if replays is None and arguments.quick:
        replays = 20
    options = Options(
        backend=arguments.backend,
        cases=names("--cases", arguments.cases, CASES, or_none=True),
        sweeps=names("--sweeps", arguments.sweeps, SWEEPS, or_none=True),
        methods=names("--methods", arguments.methods, METHODS),
        rounds=arguments.rounds or (3 if arguments.quick else 9),
        replays=replays,
        quick=arguments.quick,
        gloo_bytes=round(arguments.gloo_gb * 1e9),
        room_bytes=round(arguments.room_gb * 1e9),
        command=command_line(_NAME, argv),
    )
    return options, worlds


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))

"""Benchmark of gemv_all_reduce: persistent-ops bench gemv_all_reduce [OPTIONS]. See README.md beside it."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from gemv.methods import METHODS
from gemv.options import Options
from gemv.report import draw_figure, print_tables, print_tuning
from gemv.run import run_pe
from gemv.shapes import SHAPES, shape_named
from gemv.tune import tune_pe
from harness.command import (
    Benchmark,
    add_common,
    add_tuning,
    at_least,
    chosen_worlds,
    command_line,
    names,
    run_benchmark,
)
from harness.tuning import parse_grid

from persistent_ops.ops.gemv_plan import Tuning

_NAME = "gemv_all_reduce"
_WORLDS = "1,2,4,8; in a world of 1 the operator is its GEMV alone (default: one PE per GPU, then 1; host 2,1)"


def main(argv: list[str]) -> int:
    """Run the benchmark; see `run_benchmark`."""
    benchmark = Benchmark(
        _NAME, __doc__, _add_options, _options, run_pe, draw_figure, print_tables, tune_pe, print_tuning, is_fresh=True
    )
    return run_benchmark(benchmark, argv)


def _add_options(parser: argparse.ArgumentParser) -> None:
    add_common(parser, worlds=_WORLDS, limit=600.0)
    parser.add_argument("--shapes", help=f"comma-separated MxK or MxK_Nn (default: {','.join(SHAPES)})")
    parser.add_argument("--methods", help=f"comma-separated, of {','.join(METHODS)} (default: all)")
    parser.add_argument("--rounds", type=int, help="times each method is timed (default 15; quick 3)")
    parser.add_argument("--calls", type=int, default=20, help="calls in a graph, at least (default 20)")
    parser.add_argument("--replays", type=int, help="single calls timed for the spread (default 10000; host 50)")
    parser.add_argument("--quick", action="store_true", help="a look: few rounds and replays")
    add_tuning(parser, "warps=8:12,depth=none:16,work_groups=132:264")


def _options(arguments: argparse.Namespace, argv: list[str]) -> tuple[Options, list[int]]:
    # The largest first: its PEs compile side by side what the world of one needs too.
    worlds = chosen_worlds(arguments, default=lambda pes: sorted({1, pes}, reverse=True))
    at_least("--rounds", [arguments.rounds])
    at_least("--calls", [arguments.calls])
    replays = arguments.replays
    if replays is None and arguments.quick:
        replays = 20
    methods = names("--methods", arguments.methods, METHODS)
    if arguments.tune and not arguments.methods:
        methods = ("fused", "gemv_alone")
    options = Options(
        backend=arguments.backend,
        shapes=tuple(shape_named(name).name for name in (arguments.shapes.split(",") if arguments.shapes else SHAPES)),
        methods=methods,
        rounds=arguments.rounds or (3 if arguments.quick else 7 if arguments.tune else 15),
        calls=arguments.calls,
        replays=replays,
        command=command_line(_NAME, argv),
        tune=parse_grid(arguments.tune, Tuning) if arguments.tune else (),
        tune_mode=arguments.tune_mode,
    )
    return options, worlds


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))

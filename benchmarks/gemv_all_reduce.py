"""Benchmark of gemv_all_reduce: persistent-ops bench gemv_all_reduce [OPTIONS]. See README.md beside it."""

from __future__ import annotations

import argparse
import dataclasses
import shlex
import sys
import traceback
from pathlib import Path

import torch
from rich.console import Console

sys.path.insert(0, str(Path(__file__).resolve().parent))

from gemv.methods import METHODS
from gemv.options import Options
from gemv.report import draw_figure, print_tables, print_tuning
from gemv.run import run_pe
from gemv.shapes import SHAPES
from gemv.tune import tune_pe
from harness.pes import is_first_process, run_on_pes, started_pes, without_multicast
from harness.record import read_lines
from harness.tuning import parse_grid

from persistent_ops.ops.gemv_plan import Tuning

_HOST_PES = 2


def main(argv: list[str]) -> int:
    """Run the benchmark.

    Args:
        argv: the options, without the program's name.

    Returns:
        0, 1 where a check of a result failed, 2 where an option is wrong.
    """
    parser = _parser()
    try:
        arguments = parser.parse_args(argv)
    except SystemExit as leaving:
        return int(leaving.code or 0)
    try:
        options, worlds = _options(arguments, argv)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    without_multicast()
    folder = Path(arguments.out)
    is_tuning = bool(options.tune)
    path = folder / f"gemv_all_reduce{'_tuning' if is_tuning else ''}.jsonl"
    is_printer = is_first_process()
    if is_printer:
        folder.mkdir(parents=True, exist_ok=True)
        path.write_text("")
    options = dataclasses.replace(options, record_path=str(path.resolve()))
    passed = True
    for num_pes in worlds:
        try:
            function = tune_pe if is_tuning else run_pe
            passed &= run_on_pes(function, num_pes, options, timeout=arguments.limit, fresh=len(worlds) > 1)
        except Exception:  # what has been measured is worth its table
            traceback.print_exc()
            passed = False
            break
    lines = read_lines(path) if is_printer else []
    if lines:
        console = Console(width=120)
        if is_tuning:
            print_tuning(lines, console)
        else:
            draw_figure(lines, path.with_suffix(".png"))
            print_tables(lines, console)
    return 0 if passed else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="persistent-ops bench gemv_all_reduce", description=__doc__)
    parser.add_argument("--pes", type=int, help="PEs to start without a launcher; instead of --worlds")
    parser.add_argument(
        "--worlds",
        help="worlds to run one after the other, such as 1,2,4,8; in a world of 1 the operator is its GEMV alone "
        "(default: one PE per GPU, then 1; host 2,1)",
    )
    parser.add_argument("--backend", choices=("auto", "cuda", "host"), default="auto")
    parser.add_argument("--out", default="out/bench", help="folder of the JSON lines and the figure")
    parser.add_argument("--shapes", help=f"comma-separated, of {','.join(SHAPES)} (default: all)")
    parser.add_argument("--methods", help=f"comma-separated, of {','.join(METHODS)} (default: all)")
    parser.add_argument("--rounds", type=int, help="times each method is timed (default 15; quick 3)")
    parser.add_argument("--calls", type=int, default=20, help="calls in a graph, at least (default 20)")
    parser.add_argument("--replays", type=int, help="single calls timed for the spread (default 10000; host 50)")
    parser.add_argument("--quick", action="store_true", help="a look: few rounds and replays")
    parser.add_argument(
        "--tune", help="time the operator over a grid: warps=8:12,depth=none:16,work_groups=132:264,..."
    )
    parser.add_argument("--tune-mode", choices=("product", "star"), default="product", help="star: one field at a time")
    parser.add_argument("--limit", type=float, default=600.0, help="seconds for each world, where PEs are started here")
    return parser


def _options(arguments: argparse.Namespace, argv: list[str]) -> tuple[Options, list[int]]:
    """Return the options and the sizes of the worlds; ValueError for what does not fit."""
    started = started_pes()
    if started is not None and (arguments.pes not in (None, started) or arguments.worlds):
        raise ValueError(f"--pes, --worlds: a launcher started {started} PEs; leave them out")
    pes = arguments.pes if arguments.pes is not None else started
    if arguments.worlds:
        worlds = [int(size) for size in arguments.worlds.split(",")]
    elif pes is not None:
        worlds = [pes]
    else:
        gpus = torch.cuda.device_count() if arguments.backend != "host" else 0
        # The largest first: its PEs compile side by side what the world of one needs too.
        worlds = sorted({1, gpus or _HOST_PES}, reverse=True)
    for name, numbers in (
        ("--pes, --worlds", worlds),
        ("--rounds", [arguments.rounds]),
        ("--calls", [arguments.calls]),
    ):
        if any(number is not None and number < 1 for number in numbers):
            raise ValueError(f"{name}: expected numbers of at least 1, got {numbers}")
    replays = arguments.replays
    if replays is None and arguments.quick:
        replays = 20
    methods = _names("--methods", arguments.methods, METHODS)
    if arguments.tune and not arguments.methods:
        methods = ("fused", "gemv_alone")
    options = Options(
        backend=arguments.backend,
        shapes=_names("--shapes", arguments.shapes, tuple(SHAPES)),
        methods=methods,
        rounds=arguments.rounds or (3 if arguments.quick else 7 if arguments.tune else 15),
        calls=arguments.calls,
        replays=replays,
        command=shlex.join(["persistent-ops", "bench", "gemv_all_reduce", *argv]),
        tune=parse_grid(arguments.tune, Tuning) if arguments.tune else (),
        tune_mode=arguments.tune_mode,
    )
    return options, worlds


def _names(option: str, text: str | None, known: tuple[str, ...]) -> tuple[str, ...]:
    names = tuple(text.split(",")) if text else known
    unknown = [name for name in names if name not in known]
    if unknown:
        raise ValueError(f"{option}: there is no {', '.join(unknown)}; there are {', '.join(known)}")
    return names


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))

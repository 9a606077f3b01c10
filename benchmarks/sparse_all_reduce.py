"""Benchmark of sparse_all_reduce: persistent-ops bench sparse_all_reduce [OPTIONS]. See README.md beside it."""

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

from harness.pes import is_first_process, run_on_pes, started_pes, without_multicast
from harness.record import read_lines
from sparse.cases import CASES, SWEEPS
from sparse.figures import draw_figures
from sparse.methods import METHODS
from sparse.options import Options
from sparse.report import print_tables
from sparse.run import run_pe

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
    path = folder / "sparse_all_reduce.jsonl"
    is_printer = is_first_process()
    if is_printer:
        folder.mkdir(parents=True, exist_ok=True)
        path.write_text("")
    options = dataclasses.replace(options, record_path=str(path.resolve()))
    passed = True
    for num_pes in worlds:
        try:
            passed &= run_on_pes(run_pe, num_pes, options, timeout=arguments.limit)
        except Exception:  # what has been measured is worth its table
            traceback.print_exc()
            passed = False
            break
    lines = read_lines(path) if is_printer else []
    if lines:
        draw_figures(lines, path)
        print_tables(lines, Console(width=120))
    return 0 if passed else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="persistent-ops bench sparse_all_reduce", description=__doc__)
    parser.add_argument("--pes", type=int, help="PEs to start without a launcher (default: one per GPU; host 2)")
    parser.add_argument("--worlds", help="worlds to run one after the other, such as 8,4,2; instead of --pes")
    parser.add_argument("--backend", choices=("auto", "cuda", "host"), default="auto")
    parser.add_argument("--out", default="out/bench", help="folder of the JSON lines and the figures")
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
    parser.add_argument("--limit", type=float, default=600.0, help="seconds for each world, where PEs are started here")
    return parser


def _options(arguments: argparse.Namespace, argv: list[str]) -> tuple[Options, list[int]]:
    """Return the options and the sizes of the worlds; ValueError for what does not fit."""
    started = started_pes()
    if started is not None and (arguments.pes not in (None, started) or arguments.worlds):
        raise ValueError(f"--pes, --worlds: a launcher started {started} PEs; leave them out")
    gpus = torch.cuda.device_count() if arguments.backend != "host" else 0
    pes = arguments.pes if arguments.pes is not None else started
    worlds = [pes if pes is not None else gpus or _HOST_PES]
    if arguments.worlds:
        worlds = [int(size) for size in arguments.worlds.split(",")]
    if any(size < 2 for size in worlds):
        raise ValueError(f"--pes, --worlds: expected numbers of at least 2, got {worlds}: one PE has nothing to send")
    if arguments.rounds is not None and arguments.rounds < 1:
        raise ValueError(f"--rounds: expected a number of at least 1, got {arguments.rounds}")
    replays = arguments.replays
    if replays is None and arguments.quick:
        replays = 20
    options = Options(
        backend=arguments.backend,
        cases=_names("--cases", arguments.cases, tuple(CASES), or_none=True),
        sweeps=_names("--sweeps", arguments.sweeps, SWEEPS, or_none=True),
        methods=_names("--methods", arguments.methods, METHODS),
        rounds=arguments.rounds or (3 if arguments.quick else 9),
        replays=replays,
        quick=arguments.quick,
        gloo_bytes=round(arguments.gloo_gb * 1e9),
        room_bytes=round(arguments.room_gb * 1e9),
        command=shlex.join(["persistent-ops", "bench", "sparse_all_reduce", *argv]),
    )
    return options, worlds


def _names(option: str, text: str | None, known: tuple[str, ...], *, or_none: bool = False) -> tuple[str, ...]:
    if or_none and text == "none":
        return ()
    names = tuple(text.split(",")) if text else known
    unknown = [name for name in names if name not in known]
    if unknown:
        raise ValueError(f"{option}: there is no {', '.join(unknown)}; there are {', '.join(known)}")
    return names


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))

"""Benchmark of embedding_all_to_all: persistent-ops bench embedding_all_to_all [OPTIONS]. See README.md beside it."""

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

from embedding.configs import CONFIGS
from embedding.methods import METHODS
from embedding.options import Options, parse_grid
from embedding.report import draw_figure, print_tables, print_tuning
from embedding.run import run_pe
from embedding.tune import tune_pe
from harness.pes import is_first_process, run_on_pes, started_pes, without_multicast
from harness.record import read_lines

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
    is_tuning = bool(options.tune)
    folder = Path(arguments.out)
    path = folder / f"embedding_all_to_all{'_tuning' if is_tuning else ''}.jsonl"
    is_printer = is_first_process()
    if is_printer:
        folder.mkdir(parents=True, exist_ok=True)
        path.write_text("")
    options = dataclasses.replace(options, record_path=str(path.resolve()))
    passed = True
    for num_pes in worlds:
        try:
            passed &= run_on_pes(tune_pe if is_tuning else run_pe, num_pes, options, timeout=arguments.limit)
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
    parser = argparse.ArgumentParser(prog="persistent-ops bench embedding_all_to_all", description=__doc__)
    parser.add_argument("--pes", type=int, help="PEs to start without a launcher (default: one per GPU; host 2)")
    parser.add_argument("--worlds", help="worlds to run one after the other, such as 2,4,8; instead of --pes")
    parser.add_argument("--backend", choices=("auto", "cuda", "host"), default="auto")
    parser.add_argument("--out", default="out/bench", help="folder of the JSON lines and the figure")
    parser.add_argument("--configs", help=f"comma-separated, of {','.join(CONFIGS)} (default: all)")
    parser.add_argument("--methods", help=f"comma-separated, of {','.join(METHODS)} (default: all)")
    parser.add_argument("--rounds", type=int, help="times each method is timed (default 15; quick 3)")
    parser.add_argument("--zipf", choices=("also", "only", "no"), help="Zipf 1.05 indices (default also; quick no)")
    parser.add_argument("--rows", type=int, help="rows of each table (default 100000; host 1000)")
    parser.add_argument("--quick", action="store_true", help="a look: few rounds, and uniform indices")
    parser.add_argument("--tune", help="time the fused operator over a grid: threads=256:192,local_delay=0:0.5,...")
    parser.add_argument("--tune-mode", choices=("product", "star"), default="product", help="star: one field at a time")
    parser.add_argument("--limit", type=float, default=900.0, help="seconds for each world, where PEs are started here")
    return parser


def _options(arguments: argparse.Namespace, argv: list[str]) -> tuple[Options, list[int]]:
    """Return the options and the sizes of the worlds; ValueError for what does not fit."""
    started = started_pes()
    if started is not None and (arguments.pes not in (None, started) or arguments.worlds):
        raise ValueError(f"--pes, --worlds: a launcher started {started} PEs; leave them out")
    gpus = torch.cuda.device_count() if arguments.backend != "host" else 0
    worlds = [arguments.pes or started or gpus or _HOST_PES]
    if arguments.worlds:
        worlds = [int(size) for size in arguments.worlds.split(",")]
    zipf = arguments.zipf or ("no" if arguments.quick or arguments.tune else "also")
    rounds = arguments.rounds or (3 if arguments.quick else 7 if arguments.tune else 15)
    options = Options(
        backend=arguments.backend,
        configs=_names("--configs", arguments.configs, tuple(CONFIGS)),
        methods=_names("--methods", arguments.methods, METHODS),
        distributions={"also": ("uniform", "zipf"), "only": ("zipf",), "no": ("uniform",)}[zipf],
        rounds=rounds,
        skew_trials=5 if arguments.quick else 15,
        rows=arguments.rows,
        command=shlex.join(["persistent-ops", "bench", "embedding_all_to_all", *argv]),
        tune=parse_grid(arguments.tune) if arguments.tune else (),
        tune_mode=arguments.tune_mode,
    )
    for size in worlds:
        for shape in options.shapes("host" if gpus == 0 else "cuda"):
            if size < 1 or shape.batch % size:
                raise ValueError(
                    f"--pes, --worlds: {shape.name} has a batch of {shape.batch}, which {size} does not divide"
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

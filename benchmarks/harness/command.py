"""What the commands of all benchmarks share: options, worlds one after the other, the record, and the exit code."""

from __future__ import annotations

import argparse
import dataclasses
import shlex
import sys
import traceback
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from .pes import is_first_process, run_on_pes, started_pes, without_multicast
from .record import read_lines

__all__ = [
    "Benchmark",
    "add_common",
    "add_tuning",
    "at_least",
    "chosen_worlds",
    "command_line",
    "names",
    "run_benchmark",
]

_HOST_PES = 2
_WORLDS = "--pes, --worlds"


@dataclass(frozen=True)
class Benchmark:
    """One operator's benchmark.

    Attributes:
        name: of the operator.
        description: of the command.
        add_options: adds its own options to the parser.
        options: makes, of the parsed options and the command's arguments, a dataclass with a field `record_path`, and
            the sizes of the worlds; ValueError for what does not fit.
        measure: what every PE runs, given the dataclass; returns whether all checks passed.
        draw: draws what was recorded, given the lines and the path of the (first) figure.
        print_tables: prints it.
        tune: in place of `measure` where the dataclass has a `tune`.
        print_tuning: prints what that recorded.
        is_fresh: whether a world of one gets a process of its own where several worlds are run.
    """

    name: str
    description: str | None
    add_options: Callable[[argparse.ArgumentParser], None]
    options: Callable[[argparse.Namespace, list[str]], tuple[Any, list[int]]]
    measure: Callable[[Any], bool]
    draw: Callable[[list[dict[str, Any]], Path], None]
    print_tables: Callable[[list[dict[str, Any]], Console], None]
    tune: Callable[[Any], bool] | None = None
    print_tuning: Callable[[list[dict[str, Any]], Console], None] | None = None
    is_fresh: bool = False


def run_benchmark(benchmark: Benchmark, argv: list[str]) -> int:
    """Run a benchmark.

    Args:
        benchmark: which one.
        argv: the options, without the program's name.

    Returns:
        0, 1 where a check of a result failed, 2 where an option is wrong.
    """
    prog = f"persistent-ops bench {benchmark.name}"
    parser = argparse.ArgumentParser(prog=prog, description=benchmark.description)
    benchmark.add_options(parser)
    try:
        arguments = parser.parse_args(argv)
    except SystemExit as leaving:
        return int(leaving.code or 0)
    try:
        options, worlds = benchmark.options(arguments, argv)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    without_multicast()
    measure, print_lines = benchmark.measure, benchmark.print_tables
    is_tuning = benchmark.tune is not None and benchmark.print_tuning is not None and bool(options.tune)
    if is_tuning:
        measure, print_lines = benchmark.tune, benchmark.print_tuning
    path = Path(arguments.out) / f"{benchmark.name}{'_tuning' if is_tuning else ''}.jsonl"
    is_printer = is_first_process()
    if is_printer:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("")
    options = dataclasses.replace(options, record_path=str(path.resolve()))
    fresh = benchmark.is_fresh and len(worlds) > 1
    passed = True
    for num_pes in worlds:
        try:
            passed &= run_on_pes(measure, num_pes, options, timeout=arguments.limit, fresh=fresh)
        except Exception:  # what has been measured is worth its table
            traceback.print_exc()
            passed = False
            break
    lines = read_lines(path) if is_printer else []
    if lines and not is_tuning:
        _draw(benchmark, lines, path.with_suffix(".png"))
    if lines:
        print_lines(lines, Console(width=120))
    return 0 if passed else 1


def _draw(benchmark: Benchmark, lines: list[dict[str, Any]], path: Path) -> None:
    """Draw the figure, or say in one line why there is none: the measurement before it may have taken hours."""
    try:
        benchmark.draw(lines, path)
    except Exception as error:
        is_missing = isinstance(error, ImportError) and error.name == "matplotlib"
        remedy = "matplotlib is not installed (pip install 'persistent-ops[plot]')"
        print(f"no figure: {remedy if is_missing else f'{type(error).__name__}: {error}'}", file=sys.stderr)


def add_common(parser: argparse.ArgumentParser, *, worlds: str, limit: float) -> None:
    """Add the options that every benchmark has.

    Args:
        parser: of the command.
        worlds: what the help says of --worlds.
        limit: default of --limit, in seconds.
    """
    parser.add_argument("--pes", type=int, help="PEs to start without a launcher; instead of --worlds")
    parser.add_argument("--worlds", help=f"worlds to run one after the other, such as {worlds}")
    parser.add_argument("--backend", choices=("auto", "cuda", "host"), default="auto")
    parser.add_argument("--out", default="out/bench", help="folder of the JSON lines and the figures")
    parser.add_argument("--limit", type=float, default=limit, help="seconds for each world, where PEs are started here")


def add_tuning(parser: argparse.ArgumentParser, example: str) -> None:
    """Add the options that time the operator over a grid; `example` is one."""
    parser.add_argument("--tune", help=f"time the operator over a grid: {example},...")
    parser.add_argument("--tune-mode", choices=("product", "star"), default="product", help="star: one field at a time")


def chosen_worlds(
    arguments: argparse.Namespace,
    *,
    smallest: int = 1,
    why: str = "",
    default: Callable[[int], list[int]] = lambda pes: [pes],
) -> list[int]:
    """Return the sizes of the worlds to run.

    Args:
        arguments: the parsed options.
        smallest: world that makes sense; `why` is for who asks for a smaller one.
        default: what is run where nothing was asked for, given the number of GPUs, or 2 on the host.

    Raises:
        ValueError: a launcher has started other PEs, or a world is too small.
    """
    started = started_pes()
    if started is not None and (arguments.pes not in (None, started) or arguments.worlds):
        raise ValueError(f"{_WORLDS}: a launcher started {started} PEs; leave them out")
    pes = arguments.pes if arguments.pes is not None else started
    if arguments.worlds:
        worlds = [int(size) for size in arguments.worlds.split(",")]
    elif pes is not None:
        worlds = [pes]
    else:
        gpus = torch.cuda.device_count() if arguments.backend != "host" else 0
        worlds = default(gpus or _HOST_PES)
    at_least(_WORLDS, worlds, smallest, why)
    return worlds


def at_least(option: str, numbers: Collection[int | None], smallest: int = 1, why: str = "") -> None:
    """Raise ValueError where a number that was given is too small."""
    if any(number is not None and number < smallest for number in numbers):
        raise ValueError(f"{option}: expected numbers of at least {smallest}, got {list(numbers)}{why}")


def names(option: str, text: str | None, known: Collection[str], *, or_none: bool = False) -> tuple[str, ...]:
    """Return the names that an option lists, or all that there are; "none" is no name where `or_none` is set."""
    if or_none and text == "none":
        return ()
    chosen = tuple(text.split(",")) if text else tuple(known)
    unknown = [name for name in chosen if name not in known]
    if unknown:
        raise ValueError(f"{option}: there is no {', '.join(unknown)}; there are {', '.join(known)}")
    return chosen


def command_line(name: str, argv: list[str]) -> str:
    """Return the command as one would type it again."""
    return shlex.join(["persistent-ops", "bench", name, *argv])

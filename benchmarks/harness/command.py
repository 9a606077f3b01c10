"""The common parts of all benchmarks' commands: options, worlds one after the other, the record, the exit code."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import math
import shlex
import sys
import traceback
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from persistent_ops.runtime.errors import PersistentOpsError
from persistent_ops.testing.figures import pyplot, why_none
from persistent_ops.testing.output_files import check_outputs
from persistent_ops.testing.pes import is_first_process, is_said_by_launch, run_on_pes, started_pes, without_multicast
from persistent_ops.testing.record import read_lines, select

from .experiment import Experiment, measure
from .figures import draw_sweep
from .report import print_report, print_tunings
from .tracing import timeline_tables
from .tuning import Grid, occupancies, parse_grid
from .world import chosen_backend, more_pes_than_gpus

__all__ = ["at_least", "names", "run_benchmark"]

_HOST_PES = 2
_WORLDS = "--pes, --worlds"


def run_benchmark(experiment: type[Experiment[Any]], argv: list[str]) -> int:
    """Run a benchmark.

    Args:
        experiment: which one; each PE makes one of its own.
        argv: the options, without the program's name.

    Returns:
        0, 1 where a check of a result failed, 2 where an option is wrong.
    """
    try:
        arguments, worlds, options = _read(experiment, argv)
        path = Path(options.record_path)
        check_outputs(files={"--out": path}, folders={"--out": path.parent})
    except SystemExit as leaving:  # of the parser
        return int(leaving.code or 0)
    except (ValueError, PersistentOpsError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    without_multicast()
    is_printer = is_first_process()
    if is_printer:
        path.parent.mkdir(parents=True, exist_ok=True)
    before = _states_beside(path)
    options = dataclasses.replace(options, record_path=str(path.resolve()))
    passed, is_whole = _measure_worlds(experiment, worlds, options, limit=arguments.limit)
    if is_printer:
        lines = read_lines(path) if _state_of(path) != before.get(path, ()) else []
        console = Console(width=120)
        if lines:
            _show(experiment, arguments, options, lines, console)
            written = sorted(file.name for file, state in _states_beside(path).items() if before.get(file) != state)
            console.print(f"Written to {path.parent}: {', '.join(written)}", soft_wrap=True, highlight=False)
        if not is_whole:
            kept = f"what was measured before is in {path}" if lines else "nothing was measured"
            console.print(f"NOT FINISHED: {kept}", soft_wrap=True)
    return 0 if passed else 1


def _read(experiment: type[Experiment[Any]], argv: list[str]) -> tuple[argparse.Namespace, list[int], Any]:
    """Return the options as they were given, the worlds to run, and the options of each.

    Raises:
        SystemExit: of the parser, for --help too.
        ValueError, PersistentOpsError: an option does not fit, or a launcher's variable.
    """
    name = experiment.name
    description = sys.modules[experiment.__module__].__doc__
    parser = argparse.ArgumentParser(prog=f"persistent-ops bench {name}", description=description)
    _add_common(parser, experiment)
    experiment.add_options(parser)
    arguments = parser.parse_args(argv)
    worlds = _worlds(arguments, experiment)
    common = {**_common(arguments, experiment), "command": shlex.join(["persistent-ops", "bench", name, *argv])}
    options = experiment.read_options(arguments, worlds, common)
    what = f"_sweep_{arguments.sweep}" if arguments.sweep else "_tuning" if options.tune else ""
    what = "_timeline" if options.traces else what
    return arguments, worlds, dataclasses.replace(options, record_path=str(Path(arguments.out) / f"{name}{what}.jsonl"))


def _measure_worlds(
    experiment: type[Experiment[Any]], worlds: list[int], options: Any, *, limit: float
) -> tuple[bool, bool]:
    """Measure in one world after the other; return whether all checks passed, and whether all worlds were measured."""
    path = Path(options.record_path)
    before, is_written, passed = _state_of(path), False, True
    fresh = experiment.is_fresh and len(worlds) > 1
    for world_size in worlds:
        options = dataclasses.replace(options, replaces_record=not is_written)
        try:
            passed &= run_on_pes(measure, world_size, experiment, options, timeout=limit, fresh=fresh)
        except Exception as error:  # what has been measured is worth its table
            if (world_size > 1 or fresh) and is_said_by_launch(error):
                print(f"error: {error}", file=sys.stderr)
            else:
                traceback.print_exc()
            return False, False
        is_written = is_written or _state_of(path) != before
    return passed, True


def _show(
    experiment: type[Experiment[Any]],
    arguments: argparse.Namespace,
    options: Any,
    lines: list[dict[str, Any]],
    console: Console,
) -> None:
    """Print and draw a record."""
    figure = Path(options.record_path).with_suffix(".png")
    if options.tune:
        print_tunings(lines, console)
        if arguments.sweep:
            _draw(functools.partial(draw_sweep, field=options.tune[0][0]), lines, figure)
    elif options.traces:
        for part in timeline_tables(lines):
            console.print(part, soft_wrap=isinstance(part, str))
    else:
        if select(lines, "time"):
            _draw(experiment.draw, lines, figure)
        print_report(experiment, lines, console)


def _state_of(path: Path) -> tuple[int, ...]:
    """Return what changes when a file is written."""
    try:
        status = path.stat()
    except OSError:
        return ()
    return status.st_ino, status.st_size, status.st_mtime_ns


def _states_beside(path: Path) -> dict[Path, tuple[int, ...]]:
    """Return the states of the files in its folder."""
    return {file: _state_of(file) for file in path.parent.glob("*") if file.is_file()}


def _draw(draw: Callable[[list[dict[str, Any]], Path], None], lines: list[dict[str, Any]], path: Path) -> None:
    """Draw the figure, or say in one line why there is none: the measurement before it may have taken hours."""
    try:
        pyplot()
        draw(lines, path)
    except Exception as error:
        print(f"no figure: {why_none(error)}", file=sys.stderr)


def _add_common(parser: argparse.ArgumentParser, experiment: type[Experiment[Any]]) -> None:
    known = ",".join(experiment.labels)
    parser.add_argument("--pes", type=int, help="PEs to start without a launcher, in place of --worlds")
    parser.add_argument("--worlds", help=f"numbers of PEs to run one after the other, such as {experiment.worlds_help}")
    parser.add_argument("--backend", choices=("auto", "cuda", "host"), default="auto")
    parser.add_argument("--out", default="out/bench", help="folder for JSON lines and figures")
    limit = "seconds for each world, if this command starts the PEs"
    parser.add_argument("--limit", type=float, default=experiment.time_limit, help=limit)
    parser.add_argument("--methods", help=f"comma-separated, of {known} (default: all)")
    parser.add_argument("--rounds", type=int, help=f"timed runs of each method {experiment.rounds_help}")
    parser.add_argument("--quick", action="store_true", help=f"a quick run: {experiment.quick_help}")
    timelines = "record timelines of the first case, and time what recording costs, nothing else"
    parser.add_argument("--trace", action="store_true", help=f"{timelines} (methods: the first one)")
    parser.set_defaults(tune=None, tune_mode="product", sweep=None)
    if experiment.knobs:
        sweep = "time the operator over the number of CTAs (occupancy) or the size of a slice, and draw the times"
        parser.add_argument("--sweep", choices=tuple(experiment.knobs), help=sweep)
    if experiment.operator is not None:
        fields = [field.name for field in dataclasses.fields(experiment.operator.default_tuning)]
        grid = f"time the operator over a grid, FIELD=VALUE:VALUE,..., of {', '.join(fields)}"
        parser.add_argument("--tune", help=grid)
        parser.add_argument("--tune-mode", choices=("product", "star"), help="star: one field at a time")


def _common(arguments: argparse.Namespace, experiment: type[Experiment[Any]]) -> dict[str, Any]:
    """Return the options that all benchmarks have; ValueError for what does not fit."""
    at_least("--rounds", [arguments.rounds])
    if not 0 < arguments.limit < math.inf:
        raise ValueError(f"--limit: expected seconds above 0 and below infinity, got {arguments.limit:g}")
    is_tuned = arguments.tune or arguments.sweep
    rounds = arguments.rounds or (3 if arguments.quick else 7 if is_tuned else experiment.rounds)
    methods = names("--methods", arguments.methods, experiment.labels)
    tune: Grid = ()
    if bool(arguments.sweep) + bool(arguments.tune) + bool(arguments.trace) > 1:
        raise ValueError("--sweep, --tune, --trace: expected one of them")
    if arguments.sweep:
        field, values = experiment.knobs[arguments.sweep]
        tune = ((field, values or occupancies(arguments.backend)),)
    elif arguments.tune and experiment.operator is not None:
        tune = parse_grid(arguments.tune, type(experiment.operator.default_tuning))
    if tune and not arguments.methods:
        methods = experiment.tuned_methods
    elif arguments.trace and not arguments.methods:
        methods = experiment.traced_methods or methods[:1]
    found = {"backend": arguments.backend, "methods": methods, "rounds": rounds, "traces": arguments.trace}
    return {**found, "tune": tune, "tune_mode": arguments.tune_mode}


def _worlds(arguments: argparse.Namespace, experiment: type[Experiment[Any]]) -> list[int]:
    """Return the sizes of the worlds to run.

    Raises:
        ValueError: a launcher has started other PEs, or a world is too small, or larger than worlds can be here.
    """
    started = started_pes()
    if started is not None and (arguments.pes not in (None, started) or arguments.worlds):
        raise ValueError(f"{_WORLDS}: a launcher started {started} PEs; leave them out")
    pes = arguments.pes if arguments.pes is not None else started
    if arguments.worlds:
        try:
            worlds = [int(size) for size in arguments.worlds.split(",")]
        except ValueError:
            raise ValueError(f"--worlds: expected whole numbers with commas, got {arguments.worlds!r}") from None
    elif pes is not None:
        worlds = [pes]
    else:
        gpus = torch.cuda.device_count() if arguments.backend != "host" else 0
        worlds = experiment.default_worlds(gpus or _HOST_PES)
    at_least(_WORLDS, worlds, experiment.smallest_world, experiment.smallest_why)
    if started is None and chosen_backend(arguments.backend) == "cuda" and max(worlds) > torch.cuda.device_count():
        raise ValueError(more_pes_than_gpus(max(worlds)))
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

"""The common parts of this folder's programs: shared options, first checks, the start of PEs, the end of a run."""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import functools
import itertools
import math
import os
import shlex
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape

import persistent_ops as po
from persistent_ops.testing.machine import shares_gpu
from persistent_ops.testing.output_files import check_outputs
from persistent_ops.testing.pes import (
    gather,
    is_first_process,
    is_said_by_launch,
    run_on_pes,
    started_pes,
    without_multicast,
)
from persistent_ops.testing.record import append_line, what_ran

__all__ = [
    "add_common_options",
    "append_record",
    "caveat",
    "check_arguments",
    "command",
    "hardware_of",
    "own_folder",
    "run_as_asked",
    "traced",
    "where_it_ran",
]

_INTERRUPTED = 130  # of a command that Ctrl-C ended, as shells count
_HOST_PES = (2, 4)  # at least and at most


def command(main: Callable[[list[str]], int]) -> Callable[[list[str]], int]:
    """Let a program end with an exit code and a line, for any cause.

    A wrong option, unusable data and a backend that cannot run are 2, Ctrl-C is 130, PEs that were killed or ran out of
    time are 1. What else goes wrong in a PE is raised, with its traceback.
    """

    @functools.wraps(main)
    def run(argv: list[str]) -> int:
        try:
            return main(argv)
        except SystemExit as leaving:  # of the parser
            return int(leaving.code or 0)
        except KeyboardInterrupt:
            Console(stderr=True).show_cursor()  # which a progress bar hides, and its PE is gone
            print("interrupted", file=sys.stderr)
            return _INTERRUPTED
        except (ValueError, po.BackendUnavailableError, po.SymmetricHeapError) as error:
            print(f"error: {error}", file=sys.stderr)
            return 2
        except po.PersistentOpsError as error:
            if not is_said_by_launch(error):
                raise
            Console(stderr=True).show_cursor()
            print(f"error: {error}", file=sys.stderr)
            return 1

    return run


def add_common_options(parser: argparse.ArgumentParser, *, limit: float, host_pes: str) -> None:
    """Add the options that all programs have.

    Args:
        parser: of the program.
        limit: default of --limit.
        host_pes: how many PEs are started on the host backend, for the help.
    """
    parser.add_argument("--backend", choices=("auto", "cuda", "host"), default="auto")
    parser.add_argument(
        "--pes", type=int, help=f"PEs to start without a launcher (default: one per GPU; host {host_pes})"
    )
    parser.add_argument(
        "--limit", type=float, default=limit, help="seconds for the whole run, if this command starts the PEs"
    )
    parser.add_argument("--json", type=Path, help="file to which a line with all results is appended")
    parser.add_argument("--trace", help="file for a timeline of all launches (docs/timelines.md)")


def check_arguments(arguments: argparse.Namespace, *, output: str | None = None) -> None:
    """Raise where PEs cannot be started, or a result could not be written: that is one line then, not one per PE.

    Args:
        arguments: of the command line: the common ones, and `seed`.
        output: folder that is written, or None.

    Raises:
        ValueError: it names the option, or the launcher's variable, what was expected and what came.
    """
    if arguments.pes is not None and arguments.pes < 1:
        raise ValueError(f"--pes: expected at least 1, got {arguments.pes}")
    if arguments.seed is not None and not 0 <= arguments.seed < 1 << 32:
        raise ValueError(f"--seed: expected 0 to {(1 << 32) - 1}, got {arguments.seed}")
    if not 0 < arguments.limit < math.inf:
        raise ValueError(f"--limit: expected seconds above 0 and below infinity, got {arguments.limit:g}")
    try:
        check_outputs(files={"--json": arguments.json, "--trace": arguments.trace}, folders={"--output": output})
    except po.BootstrapError as error:
        raise ValueError(str(error)) from error


@contextlib.contextmanager
def own_folder(folder: Path, *, checkpoint: Path | None = None) -> Iterator[None]:
    """Keep other runs from writing to a folder meanwhile. What is made of its path goes again if nothing is written.

    Of a launcher's processes the first one does it, because that one writes.

    Args:
        folder: of --output.
        checkpoint: in it, which the run would replace; a line says so.

    Raises:
        ValueError: another run writes to the folder.
    """
    if not is_first_process():
        yield
        return
    made = list(itertools.takewhile(lambda each: not each.exists(), (folder, *folder.parents)))
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)  # until it is closed
        except BlockingIOError as error:
            raise ValueError(
                f"--output: another run writes to {str(folder)!r}; pass another folder, or wait for its end"
            ) from error
        except OSError:
            pass  # a file system that has no locks
        if checkpoint is not None and checkpoint.exists():
            told = "will be replaced by this run's first checkpoint; --resume goes on from it"
            print(f"note: {checkpoint} {told}", file=sys.stderr)
        yield
    finally:
        with contextlib.suppress(OSError):
            for each in made:
                each.rmdir()
        os.close(descriptor)


def run_as_asked(
    run_pe: Callable[..., dict[str, Any]],
    options: Any,
    arguments: argparse.Namespace,
    *,
    check: Callable[[int, int], object],
    host_pes: int | None = None,
) -> tuple[dict[str, Any], bool]:
    """Be one of a launcher's PEs, or start them.

    Args:
        run_pe: called with the options on every PE; calls `po.init()` itself.
        options: with `backend`.
        arguments: with `pes` and `limit`.
        check: called with the numbers of GPUs and PEs before any is started: what is wrong is one error then, not one
            per PE.
        host_pes: PEs to start on the host backend where --pes does not say; None for 2 to 4, as there are cores.

    Returns:
        The report of rank 0, or of this PE; and whether this process prints it.
    """
    without_multicast()
    world_size = started_pes()
    if world_size is None:
        gpus = torch.cuda.device_count() if options.backend != "host" else 0
        least, most = _HOST_PES
        world_size = arguments.pes or gpus or host_pes or min(max(os.cpu_count() or least, least), most)
        check(gpus, world_size)
    elif arguments.pes not in (None, world_size):
        raise ValueError(f"--pes: a launcher started {world_size} PEs; leave it out")
    report: dict[str, Any] = run_on_pes(run_pe, world_size, options, timeout=arguments.limit, fresh=True)
    return report, is_first_process()


@contextlib.contextmanager
def traced(path: str | None) -> Iterator[None]:
    """Record a timeline into the file of --trace, if there is one; a file that cannot be written costs no results."""
    if path is None:
        yield
        return
    with contextlib.ExitStack() as stack:
        stack.enter_context(po.trace(path))
        yield
        try:
            stack.pop_all().close()
        except OSError as error:
            print(f"no timeline: {error}", file=sys.stderr)


def where_it_ran() -> dict[str, Any]:
    """Return the PEs, their hardware and the versions of what ran, for a report; collective."""
    on_gpu = po.backend() == "cuda"
    versions: dict[str, str | None] = {"torch": torch.__version__, "persistent_ops": po.__version__}
    if on_gpu:
        versions |= {"cuda": str(torch.version.cuda), "nccl": ".".join(map(str, torch.cuda.nccl.version()))}
    return {
        "pes": po.world_size(),
        "backend": po.backend(),
        "hardware": gather(torch.cuda.get_device_name(po.device()) if on_gpu else "CPU process"),
        "shares_gpu": shares_gpu(),
        "versions": versions,
    }


def hardware_of(report: dict[str, Any]) -> str:
    """Return the description of the PEs in a report with `where_it_ran`."""
    hardware = ", ".join(f"{count} x {name}" for name, count in Counter(report["hardware"]).items())
    return f"on the {report['backend']} backend: {escape(hardware)}"


def caveat(report: dict[str, Any]) -> list[str]:
    """Return a warning line if the times of such a report mean little."""
    if report["backend"] == "host":
        return ["[yellow]The PEs are processes that share this machine's cores: times say nothing about GPUs[/]"]
    if report["shares_gpu"]:
        return ["[yellow]Several PEs share a GPU: times say nothing about one PE per GPU[/]"]
    return []


def append_record(path: Path | None, program: str, argv: list[str], report: dict[str, Any]) -> bool:
    """Append a line with everything to --json's file, if given. Print an error and return False if that fails."""
    ran = shlex.join(["python", f"launch/{program}.py", *argv])
    try:
        if path is not None:
            append_line(path, {**what_ran(ran), **report})
    except OSError as error:  # the finished run may have taken hours
        print(f"error: --json: {error}", file=sys.stderr)
        return False
    return True

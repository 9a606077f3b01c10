#!/usr/bin/env python3
"""Word vectors with sparse gradients: CBOW with negative sampling, DistributedDataParallel over the PEs.

    python launch/sparse_embedding_train.py                       all GPUs, or host PEs; Python's own sources
    python launch/sparse_embedding_train.py --text FILE_OR_FOLDER --steps 5000
    python launch/sparse_embedding_train.py --resume --steps 800  from the checkpoint of the run before
    launch/torchrun.sh 8 python launch/sparse_embedding_train.py --batch 65536 --dim 256

Exits with 1 where losses are not those of one process, with 2 where an option, the text or the checkpoint is wrong.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "benchmarks"))
sys.path.insert(0, str(Path(__file__).resolve().parent))

from early_checks import check_arguments
from harness.figures import why_none
from harness.record import append_line, what_ran
from sparse_training.loop import read_text, run_pe
from sparse_training.options import Options
from sparse_training.report import passed, plot, print_report

import persistent_ops as po
from persistent_ops.runtime import launchers

_MAX_HOST_PES = 4


def main(argv: list[str]) -> int:
    """Run the training.

    Args:
        argv: the options, without the program's name.

    Returns:
        0, 1 where losses are not those of one process, 2 where an option, the text or the checkpoint is wrong.
    """
    try:
        arguments = _parser().parse_args(argv)
    except SystemExit as leaving:
        return int(leaving.code or 0)
    os.environ["NCCL_NVLS_ENABLE"] = "0"  # the package uses no NVLink multicast, and neither does what it runs beside
    try:
        options = _options(arguments)
        check_arguments(arguments, output=options.output)
        report, is_printer = _run(options, arguments.pes, arguments.limit)
    except (ValueError, po.BackendUnavailableError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if is_printer:
        try:
            plot(report, options.plot_path)
        except Exception as error:  # the training behind it may have taken hours
            print(f"no loss curve: {why_none(error)}", file=sys.stderr)
        print_report(report, Console())
        if arguments.json is not None:
            command = shlex.join(["python", "launch/sparse_embedding_train.py", *argv])
            append_line(arguments.json, {**what_ran(command), **report})
    return 0 if passed(report) else 1


def _run(options: Options, pes: int | None, limit: float) -> tuple[dict[str, Any], bool]:
    """Be one of a launcher's PEs, or start them; returns the report and whether this process prints it."""
    environment = launchers.detect(os.environ)
    if environment.launcher != "single":
        if pes not in (None, environment.world_size):
            raise ValueError(f"--pes: {environment.launcher} started {environment.world_size} processes; leave it out")
        return run_pe(options), environment.rank == 0
    read_text(options)  # before any PE is started: what is wrong here is then one error, not one per PE
    gpus = torch.cuda.device_count() if options.backend != "host" else 0
    num_pes = pes or gpus or min(max(os.cpu_count() or 2, 2), _MAX_HOST_PES)
    return po.launch(run_pe, num_pes, options, timeout=limit)[0], True


def _parser() -> argparse.ArgumentParser:
    default = Options()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", help="file or folder (default: the sources of Python's standard library)")
    for name, text in (
        ("max-bytes", "of the text that are read"),
        ("min-count", "times that a word must occur"),
        ("max-words", "size of the vocabulary"),
        ("dim", "length of the vectors"),
        ("window", "words before and after"),
        ("negatives", "words drawn against each"),
        ("batch", "words of a step, on all PEs together"),
        ("steps", "to train until"),
        ("seed", "of vectors, order and draws"),
        ("checkpoint-every", "steps"),
        ("check-steps", "steps that one process repeats alone, to compare; 0 for none"),
        ("overlap-steps", "steps that are timed to tell what the backward pass hides; 0 for none"),
    ):
        value = getattr(default, name.replace("-", "_"))
        parser.add_argument(f"--{name}", type=int, default=value, help=f"{text} (default {value})")
    for name, text in (
        ("keep", "share of the text above which a word is left out now and then"),
        ("learning-rate", "of SparseAdam"),
        ("timeout", "seconds that PEs wait for each other"),
    ):
        value = getattr(default, name.replace("-", "_"))
        parser.add_argument(f"--{name}", type=float, default=value, help=f"{text} (default {value:g})")
    parser.add_argument("--words", default=",".join(default.words), help="whose neighbours are printed, with commas")
    parser.add_argument("--output", default=default.output, help=f"folder (default {default.output})")
    parser.add_argument("--resume", action="store_true", help="go on from the checkpoint in --output")
    parser.add_argument("--backend", choices=("auto", "cuda", "host"), default="auto")
    parser.add_argument("--pes", type=int, help="PEs to start without a launcher (default: one per GPU; host 2 to 4)")
    parser.add_argument("--limit", type=float, default=3600.0, help="seconds for the whole, where PEs are started here")
    parser.add_argument("--json", type=Path, help="file to which one line with all results is appended")
    parser.add_argument("--trace", help="file for a timeline of all launches (docs/timelines.md)")
    return parser


def _options(arguments: argparse.Namespace) -> Options:
    taken = {name: value for name, value in vars(arguments).items() if name not in ("resume", "pes", "limit", "json")}
    taken["words"] = tuple(word for word in arguments.words.lower().split(",") if word)
    return Options(**taken, is_resumed=arguments.resume)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))

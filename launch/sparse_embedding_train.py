#!/usr/bin/env python3
"""Word vectors with sparse gradients: CBOW with negative sampling, DistributedDataParallel over the PEs.

    python launch/sparse_embedding_train.py                       all GPUs, or host PEs; Python's own sources
    python launch/sparse_embedding_train.py --text FILE_OR_FOLDER --steps 5000
    python launch/sparse_embedding_train.py --resume --steps 800  from the checkpoint of the run before
    launch/torchrun.sh 8 python launch/sparse_embedding_train.py --batch 65536 --dim 256

Exits with 1 where losses differ from one process's losses, or the run was cut off; with 2 where an option, the text or
the checkpoint is wrong.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from curves import draw_if_possible
from program import add_common_options, append_record, check_arguments, command, own_folder, run_as_asked
from rich.console import Console
from sparse_training.loop import read_text, run_pe
from sparse_training.options import Options
from sparse_training.report import passed, plot, print_report


@command
def main(argv: list[str]) -> int:
    """Run the training.

    Args:
        argv: the options, without the program's name.

    Returns:
        0, 1 where losses differ from one process's losses, 2 where an option, the text or the checkpoint is wrong;
        others see `program.command`.
    """
    arguments = _parser().parse_args(argv)
    options = _options(arguments)
    check_arguments(arguments, output=options.output)
    replaced = None if options.is_resumed else options.checkpoint_path
    with own_folder(Path(options.output), checkpoint=replaced):
        report, is_printer = run_as_asked(run_pe, options, arguments, check=lambda *_: read_text(options))
        if is_printer:
            draw_if_possible("loss curve", lambda: plot(report, options.plot_path))
            print_report(report, Console())
        is_written = append_record(arguments.json if is_printer else None, "sparse_embedding_train", argv, report)
    return 0 if is_written and passed(report) else 1


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
        ("overlap-steps", "timed steps that show what the backward pass hides; 0: none"),
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
    parser.add_argument("--words", default=",".join(default.words), help="comma-separated; their neighbors are printed")
    parser.add_argument("--output", default=default.output, help=f"folder of results (default {default.output})")
    parser.add_argument("--resume", action="store_true", help="continue from the checkpoint in --output")
    add_common_options(parser, limit=3600.0, host_pes="2 to 4")
    return parser


def _options(arguments: argparse.Namespace) -> Options:
    taken = {name: value for name, value in vars(arguments).items() if name not in ("resume", "pes", "limit", "json")}
    taken["words"] = tuple(word for word in arguments.words.lower().split(",") if word)
    return Options(**taken, is_resumed=arguments.resume)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))

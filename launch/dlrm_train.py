#!/usr/bin/env python3
"""DLRM: tables over the PEs through po.nn.ShardedEmbeddingBagCollection, the dense part under DistributedDataParallel.

    python launch/dlrm_train.py                                       all GPUs, or host PEs; a synthetic click log
    python launch/dlrm_train.py --resume --epochs 3                   from the checkpoint of a run before
    python launch/dlrm_train.py --format criteo --data FILE --evaluation-samples 10000
    launch/torchrun.sh 4 python launch/dlrm_train.py --model mlperf --format npy --data FOLDER --precision bf16
    launch/torchrun.sh 4 python launch/dlrm_train.py --model mlperf --compare 50   beside other tables

Exits with 1 where the AUC stays more than 0.01 below the best possible one, losses that are compared differ, or the run
was cut off; with 2 where an option, the data or the checkpoint is wrong, or the training diverges.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from typing import Any

from curves import draw_if_possible
from dlrm import checkpoint
from dlrm.captured_step import check_machine
from dlrm.data import check_data
from dlrm.options import ALGORITHMS, BESIDE_NCCL, FORMATS, MODELS, PLACEMENTS, PRECISIONS, Options
from dlrm.report import draw
from dlrm.schedule import Schedule
from dlrm.summary import print_summary, problems
from dlrm.training import History
from dlrm.workload import run_pe
from program import add_common_options, append_record, check_arguments, command, own_folder, run_as_asked
from rich.console import Console

from persistent_ops.testing.record import pes_text


@command
def main(argv: list[str]) -> int:
    """Run the training, or the comparison.

    Args:
        argv: the options, without the program's name.

    Returns:
        0, 1 where a result is wrong, 2 where an option, the data or the checkpoint is; others see `program.command`.
    """
    arguments = _parser().parse_args(argv)
    options = _options(arguments)
    if options.num_sms_of_nccl is not None:
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")  # see po.nn.leave_room
    check_arguments(arguments, output=None if options.compare_steps else options.output)

    def check(gpus: int, world_size: int) -> None:
        check_data(options)
        if options.is_captured:
            check_machine(has_gpus=gpus > 0, shares_gpu=world_size > gpus)

    with _folder(options):
        report, is_printer = run_as_asked(run_pe, options, arguments, check=check)
        if is_printer:
            _tell(options, report)
        is_written = append_record(arguments.json if is_printer else None, "dlrm_train", argv, report)
    return 0 if is_written and not problems(report) else 1


def _folder(options: Options) -> contextlib.AbstractContextManager[None]:
    """Return the lock that keeps the folder to this run; a comparison writes to none."""
    if options.compare_steps:
        return contextlib.nullcontext()
    return own_folder(options.folder, checkpoint=None if options.is_resumed else checkpoint.pointer(options.folder))


def _tell(options: Options, report: dict[str, Any]) -> None:
    """Draw and print the result of the training."""
    if "losses" in report:
        history = History(report["losses"], report["evaluations"])
        title = f"DLRM, {options.model}, {report['source']}, {pes_text(report['pes'])} on {report['backend']}"
        path, best = options.folder / "curves.png", report["best_auc"]
        draw_if_possible("curves", lambda: draw(history, path, title=title, best_auc=best))
    print_summary(report, Console())


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=tuple(MODELS), default="small", help="model, and the defaults below")
    parser.add_argument(
        "--interaction", choices=("dcn", "dot"), default="dcn", help="cross layers of DCNv2, or dot products"
    )
    parser.add_argument(
        "--format", choices=FORMATS, default="synthetic", help="format of --data; npy: MLPerf's .npy, .npz"
    )
    parser.add_argument("--data", help="file (criteo: text; raw: HugeCTR's) or folder (npy)")
    parser.add_argument(
        "--optimizer", choices=ALGORITHMS, default="adagrad", help="of the tables; dense: SGD or Adagrad"
    )
    parser.add_argument("--precision", choices=PRECISIONS, default="fp32", help="dtype of the dense part's products")
    parser.add_argument("--wire", choices=PRECISIONS, help="dtype of rows on the links (default: --precision)")
    parser.add_argument(
        "--placement", choices=PLACEMENTS, default="model", help="of the tables; auto: by measured costs"
    )
    parser.add_argument("--compile", action="store_true", help="compile the dense part with torch.compile")
    parser.add_argument("--graph", action="store_true", help="run steps as replays of a CUDA graph (GPUs)")
    parser.add_argument(
        "--beside-nccl",
        choices=BESIDE_NCCL,
        default=Options.beside_nccl,
        help="dense all-reduce and the tables' backward pass: in one order, or side by side",
    )
    for name, kind, text in _NUMBERS:
        parser.add_argument(f"--{name}", type=kind, help=f"{text} ({_default(name)})")
    parser.add_argument(
        "--compare", type=int, default=0, metavar="STEPS", help="compare methods over STEPS steps, do not train"
    )
    parser.add_argument(
        "--output", default=Options.output, help=f"folder of checkpoints and results (default {Options.output})"
    )
    parser.add_argument("--resume", action="store_true", help="continue from the checkpoint in --output")
    add_common_options(parser, limit=3600.0, host_pes="2 to 4")
    return parser


_NUMBERS = (
    ("days", int, "of the folder, of which the last one evaluates"),
    ("max-rows", int, "of a table; rows are ids modulo that"),
    ("replicated-rows", int, "tables of at most so many are on every PE"),
    ("samples", int, "of the synthetic log that train"),
    ("evaluation-samples", int, "that evaluate; a file's last ones"),
    ("batch", int, "samples of a step, on all PEs together"),
    ("epochs", int, "to train until"),
    ("steps", int, "to stop at, if that is earlier"),
    ("learning-rate", float, "of the dense part"),
    ("table-learning-rate", float, "of the tables"),
    ("warmup-steps", int, "in which rates rise"),
    ("decay-start", int, "step from which rates fall, where there are decay steps"),
    ("decay-steps", int, "in which they fall, with the square of what is left"),
    ("evaluate-every", int, "steps; 0: at the end"),
    ("checkpoint-every", int, "steps; 0: at the end"),
    ("readers", int, "threads that read batches ahead"),
    ("seed", int, "of the log, the order and all weights"),
    ("heap-gib", float, "symmetric memory of a PE"),
    ("timeout", float, "seconds that PEs wait for each other"),
)


def _default(name: str) -> str:
    """Return the help text for an option's default."""
    field = name.replace("-", "_")
    if field in MODELS["small"].defaults:
        return "default " + ", ".join(f"{model} {_number(preset.defaults[field])}" for model, preset in MODELS.items())
    found = getattr(Options, field, getattr(Schedule, field, None))
    return "default: all there is" if found is None else f"default {_number(found)}"


def _number(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:g}"


def _options(arguments: argparse.Namespace) -> Options:
    given = {name: value for name, value in vars(arguments).items() if value is not None}
    for name in ("pes", "limit", "json"):
        given.pop(name, None)
    rates = {name: given.pop(name) for name in ("warmup_steps", "decay_start", "decay_steps") if name in given}
    given["is_compiled"], given["is_resumed"] = given.pop("compile"), given.pop("resume")
    given["is_captured"] = given.pop("graph")
    given["compare_steps"] = given.pop("compare")
    return Options(**{**MODELS[arguments.model].defaults, **given, "schedule": Schedule(**rates)})


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))

"""The work of one PE of the training: open the log, train or compare, report."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any

from program import traced, where_it_ran
from rich.console import Console

import persistent_ops as po
from persistent_ops.testing.fbgemm_embedding import fbgemm_version
from persistent_ops.testing.machine import share_cores, shares_gpu
from persistent_ops.testing.pes import gather
from persistent_ops.testing.progress import progress_bar

from .captured_step import check_machine, own_stream
from .compare import compare
from .data import Data, open_data
from .options import Options
from .table_memory import check_memory
from .training import Plan, Training
from .way import make_collection, make_training

__all__ = ["run_pe"]


def run_pe(options: Options) -> dict[str, Any]:
    """Train on this PE. Collective.

    Args:
        options: the same on every PE.

    Returns:
        What was done and measured, what JSON can carry: of a training `losses` of all steps, `first_step` of this run,
        `evaluations`, `best_auc` (None for files), `num_replays` (steps of this run that were replays of a CUDA graph),
        `timed_steps` and their `seconds`; of a comparison `compared`, see `compare.compare`; of both `placements` of
        the tables, and what was run on what.

    Raises:
        ValueError: data, checkpoint or plan do not do.
        PersistentOpsError: see the package.
    """
    heap = None if options.heap_gib is None else int(options.heap_gib * 2**30)
    po.init(options.backend, operator_timeout=options.timeout, heap_size=heap)
    try:
        share_cores()
        if options.compare_steps and shares_gpu():
            raise ValueError("--compare: expected a GPU for each PE, as gloo exchanges no GPU memory; pass fewer --pes")
        if options.num_sms_of_nccl is not None and (po.backend() == "host" or shares_gpu()):
            raise ValueError("--beside-nccl: room is for NCCL, which needs a GPU for each PE; leave it out")
        stream: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
        if options.is_captured:
            check_machine(has_gpus=po.backend() == "cuda", shares_gpu=shares_gpu())
            stream = own_stream(po.device())
        data = open_data(options)
        check_memory(options, data.train.num_rows)
        with po.process_group(max_ctas=options.num_sms_of_nccl), traced(options.trace), stream:
            collection = make_collection(options, data)
            if options.placement == "auto" and po.rank() == 0:
                Console().print(collection.placement_table())
            if options.compare_steps:
                result = {"compared": compare(options, data, collection)}
            else:
                result = _trained(options, data, collection)
            placements = {name: dataclasses.asdict(each) for name, each in collection.placements().items()}
            return {**_what_ran_on_what(options, data), "placements": placements, **result}
    finally:
        po.finalize()


def _trained(options: Options, data: Data, collection: po.nn.ShardedEmbeddingBagCollection) -> dict[str, Any]:
    training = make_training(options, data, collection)
    with contextlib.closing(training):
        return _run(training, options, data)


def _run(training: Training, options: Options, data: Data) -> dict[str, Any]:
    if options.is_resumed:
        training.resume(options.folder)
    first_step = training.step
    plan = Plan(
        epochs=options.epochs,
        most_steps=options.steps,
        evaluate_every=options.evaluate_every,
        checkpoint_every=options.checkpoint_every,
        folder=options.folder,
    )
    last_step = min(options.epochs * training.batches.num_batches, options.steps or 2**62)
    with progress_bar("training", first_step=first_step, last_step=last_step) as show:
        history = training.run(plan, show)
    po.check()
    return {
        "batches": training.batches.describe(),
        "first_step": first_step,
        "losses": history.losses,
        "evaluations": history.evaluations,
        "best_auc": _best_auc(data, options.timeout),
        "num_replays": training.num_replays,
        "timed_steps": training.timed_steps,
        "seconds": max(gather(training.seconds, timeout=options.timeout)),
    }


def _best_auc(data: Data, timeout: float) -> float | None:
    """Let rank 0 compute it for all."""
    best: float | None = gather(data.best_auc() if po.rank() == 0 else None, timeout=timeout)[0]
    return best


def _what_ran_on_what(options: Options, data: Data) -> dict[str, Any]:
    report = where_it_ran()
    report["versions"]["fbgemm"] = fbgemm_version()
    return {
        **report,
        "options": dataclasses.asdict(options),
        "source": data.name,
        "num_rows": list(data.train.num_rows),
        "hotness": list(data.train.hotness),
        "num_samples": data.train.num_samples,
        "num_evaluated": data.evaluation.num_samples,
    }

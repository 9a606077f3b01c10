"""The same training with other tables: steps in turn, losses beside one another, times.

Ways round differently, and a training magnifies that. Adagrad's first step moves a weight by the learning rate however
small its gradient is, so where the gradient is little more than rounding, its sign decides; and steps that overshoot
multiply what differs. All ways therefore begin every round with the same weights and states, and a round is short.
"""

from __future__ import annotations

import functools
import itertools
import statistics
import time
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from embedding_step.exchanged import ExchangedEmbedding, own_slots, parts_of
from embedding_step.exchanged_fbgemm import FbgemmEmbedding, fused_tables, why_no_fbgemm
from embedding_step.row_update import RowUpdate
from harness.pes import agree, gather
from harness.timing import in_turn

import persistent_ops as po
from persistent_ops.runtime.world import World

from .data import Data
from .dense_optimizer import DENSE_OPTIMIZERS, EPS
from .embedding import EmbeddingModule
from .options import Options
from .training import Training
from .way import make_training

__all__ = ["OWN", "compare", "disagreements"]

OWN = "persistent_ops"
_LEAST_ROUNDS = 5  # of which the first is not timed
_MOST_STEPS = 3  # of a round
_HELD_BATCHES = 8  # that are read beforehand, and come again
# Relative, of losses within a round. The "mlperf" model from its first weights on (batch 160, host, bf16), against the
# same with first rows that differ by a rounding of fp32: 2e-4 behind the first step, and behind a later one up to 10
# times what it was before. The third loss of a round then differs by 2e-3; in fp32, where it begins with 1e-7, by 1e-6.
# The tolerances are 10 times that.
_TOLERANCES = {"fp32": 1e-5, "bf16": 2e-2}


def compare(
    options: Options, data: Data, collection: po.nn.ShardedEmbeddingBagCollection, world: World, group: str
) -> dict[str, Any]:
    """Make the steps of all ways; collective.

    Args:
        options, data, collection: of the training.
        world: of this PE, with torch's default process group.
        group: that group's backend.

    Returns:
        `losses` of every step, of which there are as many as asked for or some more, and `seconds` per step (median
        over the rounds, maximum over the PEs) by way; `tolerance` of losses; `left_out`: lines that say which way is
        not there, and why.
    """
    ways, left_out = _ways(options, collection, world, group)
    trainings = {name: make_training(options, data, embedding, world) for name, embedding in ways.items()}
    burst = min(-(-options.compare_steps // _LEAST_ROUNDS), _MOST_STEPS)
    num_rounds = max(-(-options.compare_steps // burst), _LEAST_ROUNDS)
    batches = itertools.cycle(_held(trainings[OWN]))
    taken = list(itertools.islice(batches, burst * num_rounds))
    walks = {name: training.steps(taken) for name, training in trainings.items()}
    shares: dict[str, list[torch.Tensor]] = {name: [] for name in walks}
    seconds: dict[str, list[float]] = {name: [] for name in walks}
    order = in_turn(walks, num_rounds)
    for _ in range(num_rounds):
        _begin_alike(collection, ways, trainings)
        for name in itertools.islice(order, len(walks)):
            world.backend.synchronize()
            world.barrier()
            begin = time.perf_counter()
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "Sparse invariant checks")  # of torch's optimizers
                warnings.filterwarnings("ignore", "fbgemm::dense.*autograd kernel")  # it has one, of the older kind
                shares[name] += itertools.islice(walks[name], burst)
            world.check()
            world.backend.synchronize()
            seconds[name].append((time.perf_counter() - begin) / burst)
    return {
        "losses": {name: _sums(each) for name, each in shares.items()},
        "seconds": {
            name: max(gather(world.bootstrap, statistics.median(each[1:]), timeout=options.timeout))
            for name, each in seconds.items()
        },
        "tolerance": _TOLERANCES["bf16" if torch.bfloat16 in (options.dense_dtype, options.wire_dtype) else "fp32"],
        "left_out": left_out,
    }


def disagreements(compared: dict[str, Any]) -> dict[str, float]:
    """Return the largest relative difference of a way's losses from this package's, by way."""
    own = compared["losses"][OWN]
    return {
        name: max(abs(one - other) / abs(other) for one, other in zip(losses, own, strict=True))
        for name, losses in compared["losses"].items()
        if name != OWN
    }


def _begin_alike(
    collection: po.nn.ShardedEmbeddingBagCollection,
    ways: Mapping[str, EmbeddingModule],
    trainings: Mapping[str, Training],
) -> None:
    """Let the others take over this package's weights and states."""
    for name, embedding in ways.items():
        if isinstance(embedding, ExchangedEmbedding):
            embedding.take_over(collection)
            trainings[name].take_over(trainings[OWN])


def _ways(
    options: Options, collection: po.nn.ShardedEmbeddingBagCollection, world: World, group: str
) -> tuple[dict[str, EmbeddingModule], list[str]]:
    exchange = {"nccl": "NCCL", "gloo": "gloo"}[group]
    makers = {
        f"torch + {exchange}": functools.partial(_with_torch, collection, options),
        f"FBGEMM + {exchange}": functools.partial(_with_fbgemm, collection, options),
    }
    ways: dict[str, EmbeddingModule] = {OWN: collection}
    left_out = []
    for name, make in makers.items():
        made, problem = _made(make)
        problem = agree(world.bootstrap, problem, timeout=options.timeout)
        if problem is None:
            assert made is not None
            ways[name] = made
        else:
            left_out.append(f"{name} is left out: {problem}")
    return ways, left_out


def _made(make: Callable[[], EmbeddingModule]) -> tuple[EmbeddingModule | None, str | None]:
    try:
        return make(), None
    except Exception as error:  # another library's, of any version; or no memory for the tables once more
        return None, (str(error) or type(error).__name__).splitlines()[0]


def _with_torch(collection: po.nn.ShardedEmbeddingBagCollection, options: Options) -> EmbeddingModule:
    return ExchangedEmbedding(collection, _tables_optimizer(options), wire_dtype=options.wire_dtype)


def _with_fbgemm(collection: po.nn.ShardedEmbeddingBagCollection, options: Options) -> EmbeddingModule:
    problem = why_no_fbgemm()
    if problem is not None:
        raise ValueError(f"it cannot be imported ({problem})")
    rate = options.table_learning_rate
    parts = parts_of(collection, own_slots(collection.layout, dist.get_rank())[0])
    fused = fused_tables(
        [rows.shape for rows, *_ in parts],
        options.optimizer,
        rate,
        eps=EPS,
        dtype=torch.float32,
        wire_dtype=options.wire_dtype or torch.float32,
        device=next(collection.parameters()).device,
    )
    return FbgemmEmbedding(collection, fused, rate, _tables_optimizer(options), wire_dtype=options.wire_dtype)


def _tables_optimizer(options: Options) -> Callable[..., torch.optim.Optimizer]:
    """Return what makes the optimizer of tables: torch's, or, as it has no row-wise Adagrad, one of its operators."""
    rate = options.table_learning_rate
    if options.optimizer == "rowwise_adagrad":
        width = options.preset.dim
        return functools.partial(RowUpdate, algorithm=options.optimizer, lr=rate, eps=EPS, width=width)
    return functools.partial(DENSE_OPTIMIZERS[options.optimizer], lr=rate)


def _held(training: Training) -> list[Any]:
    """Return the first batches of the first epoch, on the device."""
    batches = training.batches
    numbers = range(min(_HELD_BATCHES, batches.num_batches))
    return [(batches.read(0, number).to(training.device), batches.size(number)) for number in numbers]


def _sums(shares: list[torch.Tensor]) -> list[float]:
    sums = torch.stack(shares).double()
    if dist.get_world_size() > 1:
        dist.all_reduce(sums)
    return [float(each) for each in sums.tolist()]

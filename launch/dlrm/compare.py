"""The same training with other tables: steps in turn, losses beside one another, times."""

from __future__ import annotations

import functools
import itertools
import statistics
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from harness.pes import agree, gather
from harness.timing import in_turn

import persistent_ops as po
from persistent_ops.runtime.world import World

from .data import Data
from .embedding import EmbeddingModule
from .options import Options
from .peers import ExchangedEmbedding, FbgemmEmbedding, why_no_fbgemm
from .training import Training
from .way import EPS, make_collection, make_training

__all__ = ["OWN", "compare", "disagreements"]

OWN = "persistent_ops"
_ROUNDS = 5  # of which the first is not timed
_HELD_BATCHES = 8  # that are read beforehand, and come again
# Relative. Sums of the same numbers in another order round otherwise, and Adagrad's first steps let small gradients
# count as much as large ones; products in bf16 have 8 bits.
_TOLERANCES = {"fp32": 1e-5, "bf16": 2e-2}


def compare(options: Options, data: Data, world: World, group: str) -> dict[str, Any]:
    """Make the steps of all ways; collective.

    Args:
        options, data: of the training.
        world: of this PE, with torch's default process group.
        group: that group's backend.

    Returns:
        `losses` of every step and `seconds` per step (median over the rounds, maximum over the PEs) by way;
        `tolerance` of losses; `left_out`: lines that say which way is not there, and why.
    """
    ways, left_out = _ways(options, data, world, group)
    trainings = {name: make_training(options, data, embedding, world) for name, embedding in ways.items()}
    burst = -(-options.compare_steps // _ROUNDS)
    batches = itertools.cycle(_held(trainings[OWN]))
    taken = list(itertools.islice(batches, burst * _ROUNDS))
    walks = {name: training.steps(taken) for name, training in trainings.items()}
    shares: dict[str, list[torch.Tensor]] = {name: [] for name in walks}
    seconds: dict[str, list[float]] = {name: [] for name in walks}
    for name in in_turn(walks, _ROUNDS):
        world.barrier()
        begin = time.perf_counter()
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Sparse invariant checks")  # of torch's optimizers
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
        "tolerance": _TOLERANCES[options.precision],
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


def _ways(options: Options, data: Data, world: World, group: str) -> tuple[dict[str, EmbeddingModule], list[str]]:
    collection = make_collection(options, data, world)
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
    rate = options.table_learning_rate
    if options.optimizer == "rowwise_adagrad":
        raise ValueError("torch.optim has no row-wise Adagrad")
    if options.optimizer == "sgd":
        return ExchangedEmbedding(collection, lambda tables: torch.optim.SGD(tables, lr=rate))
    return ExchangedEmbedding(collection, lambda tables: torch.optim.Adagrad(tables, lr=rate, eps=EPS))


def _with_fbgemm(collection: po.nn.ShardedEmbeddingBagCollection, options: Options) -> EmbeddingModule:
    problem = why_no_fbgemm()
    if problem is not None:
        raise ValueError(f"it cannot be imported ({problem})")
    return FbgemmEmbedding(collection, options.optimizer, options.table_learning_rate)


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

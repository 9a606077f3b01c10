"""The same training with other tables: steps take turns, losses and times are compared.

Ways (kinds of tables) round differently, and a training magnifies the difference. Adagrad's first step moves a weight
by the learning rate even if its gradient is tiny; the sign of such a gradient may be due to rounding. Steps that
overshoot multiply the difference. So all ways begin every round with the same weights and states, and the losses of the
round's first steps are compared.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist

import persistent_ops as po
from persistent_ops.testing.exchanged_embedding import ExchangedEmbedding, KnownCounts, own_slots, parts_of
from persistent_ops.testing.fbgemm_embedding import FbgemmEmbedding, fused_tables, why_no_fbgemm
from persistent_ops.testing.pes import agree, gather
from persistent_ops.testing.row_update import RowUpdate
from persistent_ops.testing.timing import in_turn

from .captured_step import EAGER_STEPS
from .data import Data
from .dense_optimizer import DENSE_OPTIMIZERS, EPS, make_capturable
from .options import Options
from .records import Batch
from .training import Training
from .way import make_training

__all__ = ["OWN", "compare", "disagreements"]

OWN = "persistent_ops"
_Result = TypeVar("_Result")
_Held = tuple[Batch, int]  # this PE's samples, and how many the global batch has
_LEAST_ROUNDS = 5  # of which the first is not timed
_MOST_STEPS = 10  # of a round, which begins on GPUs that have nothing to do
_COMPARED_STEPS = 3  # of a round
_HELD_BATCHES = 8  # read before the first step, then repeated
# Relative, of losses within a round. Measured: the "mlperf" model from its first weights on (batch 160, host, bf16),
# against the same model with first rows that differ by a rounding of fp32. Losses differ by 2e-4 after the first step,
# and after each later step by up to 10 times more: the third loss by 2e-3. In fp32 they begin with 1e-7, and the third
# differs by 1e-6. The tolerances are 10 times these.
_TOLERANCES = {"fp32": 1e-5, "bf16": 2e-2}


def compare(options: Options, data: Data, collection: po.nn.ShardedEmbeddingBagCollection) -> dict[str, Any]:
    """Make the steps of all ways; collective, with torch's default process group.

    Args:
        options, data, collection: of the training.

    Returns:
        `losses` of every step that is compared, `steps` that are timed of each way, which are those asked for or some
        more but for the first round's, and `seconds` per step (median over the rounds, maximum over the PEs) by way;
        `tolerance` of losses; `left_out`: lines that say which way is not there, and why.

    Raises:
        ValueError: steps are to be captured, and the log has no whole batch.
    """
    own = make_training(options, data, collection)
    held = _held(own, only_whole=options.is_captured)
    others, left_out = _others(options, collection, held, sum(data.train.hotness))
    with contextlib.ExitStack() as end:
        trainings = {OWN: end.enter_context(contextlib.closing(own))}
        for name, embedding in others.items():
            trainings[name] = end.enter_context(contextlib.closing(make_training(options, data, embedding)))
        return _compared(options, collection, others, trainings, held, left_out)


def _compared(
    options: Options,
    collection: po.nn.ShardedEmbeddingBagCollection,
    others: Mapping[str, ExchangedEmbedding],
    trainings: Mapping[str, Training],
    held: Sequence[_Held],
    left_out: list[str],
) -> dict[str, Any]:
    burst = min(-(-options.compare_steps // _LEAST_ROUNDS), _MOST_STEPS)
    num_rounds = max(-(-options.compare_steps // burst), _LEAST_ROUNDS)
    num_first = EAGER_STEPS + 1 if options.is_captured else 0  # of which the last is captured
    taken = list(itertools.islice(itertools.cycle(held), num_first + burst * num_rounds))
    walks = {name: training.steps(taken) for name, training in trainings.items()}

    def walk(name: str, num_steps: int) -> list[torch.Tensor]:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Sparse invariant checks")  # of torch's optimizers
            warnings.filterwarnings("ignore", "fbgemm::dense.*autograd kernel")  # it has one, of the older kind
            made = list(itertools.islice(walks[name], num_steps))
        trainings[name].wait()
        _synchronize()
        return made

    walk(OWN, num_first)
    for name in others:
        _, problem = _tried(functools.partial(walk, name, num_first))
        if problem is not None:  # which the others may wait for in NCCL, and not come to hear
            print(f"PE {po.rank()}: {name}: {problem}", file=sys.stderr, flush=True)
        problem = agree(problem, timeout=options.timeout)
        if problem is not None:
            left_out.append(f"{name} is left out: {problem}")
            del walks[name]
    shares: dict[str, list[torch.Tensor]] = {name: [] for name in walks}
    seconds: dict[str, list[float]] = {name: [] for name in walks}
    order = in_turn(walks, num_rounds)
    for _ in range(num_rounds):
        for name, embedding in others.items():
            if name in walks:
                embedding.take_over(collection)
                trainings[name].take_over(trainings[OWN])
        for name in itertools.islice(order, len(walks)):
            _synchronize()
            po.barrier()
            begin = time.perf_counter()
            made = walk(name, burst)
            seconds[name].append((time.perf_counter() - begin) / burst)
            shares[name] += made[:_COMPARED_STEPS]
    return {
        "losses": {name: _sums(each) for name, each in shares.items()},
        "steps": burst * (num_rounds - 1),
        "seconds": {
            name: max(gather(statistics.median(each[1:]), timeout=options.timeout)) for name, each in seconds.items()
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


def _others(
    options: Options,
    collection: po.nn.ShardedEmbeddingBagCollection,
    held: Sequence[_Held],
    lookups_per_sample: int,
) -> tuple[dict[str, ExchangedEmbedding], list[str]]:
    """Return the ways there are beside this package's, and why others are not there."""
    exchange = {"nccl": "NCCL", "gloo": "gloo"}[dist.get_backend()]
    makers = {
        f"torch + {exchange}": functools.partial(_with_torch, collection, options),
        f"FBGEMM + {exchange}": functools.partial(_with_fbgemm, collection, options, held, lookups_per_sample),
    }
    ways: dict[str, ExchangedEmbedding] = {}
    left_out = []
    for name, make in makers.items():
        made, problem = _tried(make)
        problem = agree(problem, timeout=options.timeout)
        if problem is None:
            assert made is not None
            ways[name] = made
        else:
            left_out.append(f"{name} is left out: {problem}")
    return ways, left_out


def _tried(make: Callable[[], _Result]) -> tuple[_Result | None, str | None]:
    try:
        return make(), None
    except Exception as error:  # another library's, of any version; or no memory for the tables once more
        return None, (str(error) or type(error).__name__).splitlines()[0]


def _with_torch(collection: po.nn.ShardedEmbeddingBagCollection, options: Options) -> ExchangedEmbedding:
    if options.is_captured:
        raise ValueError("its optimizer asks on the host how many rows have gradients, and no graph captures that")
    device = next(collection.parameters()).device
    return ExchangedEmbedding(collection, _tables_optimizer(options, device), wire_dtype=options.wire_dtype)


def _with_fbgemm(
    collection: po.nn.ShardedEmbeddingBagCollection,
    options: Options,
    held: Sequence[_Held],
    lookups_per_sample: int,
) -> ExchangedEmbedding:
    problem = why_no_fbgemm()
    if problem is not None:
        raise ValueError(f"it cannot be imported ({problem})")
    if options.is_captured and any(batch.values.numel() < batch.num_samples * lookups_per_sample for batch, _ in held):
        raise ValueError("a graph holds how many lookups each exchange brings, and samples differ in that")
    rate, device = options.table_learning_rate, next(collection.parameters()).device
    parts = parts_of(collection, own_slots(collection.layout, dist.get_rank())[0])
    fused = fused_tables(
        [rows.shape for rows, *_ in parts],
        options.optimizer,
        rate,
        eps=EPS,
        dtype=torch.float32,
        wire_dtype=options.wire_dtype or torch.float32,
        device=device,
    )
    made = FbgemmEmbedding(collection, fused, rate, _tables_optimizer(options, device), wire_dtype=options.wire_dtype)
    if options.is_captured:
        made.read = KnownCounts()
    return made


def _tables_optimizer(options: Options, device: torch.device) -> Callable[..., torch.optim.Optimizer]:
    """Return the constructor of the tables' optimizer: torch's; torch has no row-wise Adagrad, so `RowUpdate`."""
    rate = options.table_learning_rate
    if options.optimizer == "rowwise_adagrad":
        width = options.preset.dim
        return functools.partial(RowUpdate, optimizer=options.optimizer, lr=rate, eps=EPS, width=width)
    if options.is_captured:
        return functools.partial(make_capturable, options.optimizer, rate=rate, device=device)
    return functools.partial(DENSE_OPTIMIZERS[options.optimizer], lr=rate)


def _held(training: Training, *, only_whole: bool) -> list[_Held]:
    """Return the first batches of the first epoch, on the device."""
    batches = training.batches
    numbers = range(min(_HELD_BATCHES, batches.num_batches))
    found = [number for number in numbers if not only_whole or batches.size(number) == batches.batch_size]
    if not found:
        raise ValueError(
            f"--graph: expected a whole batch of {batches.batch_size} samples, got fewer; pass a smaller --batch"
        )
    return [(batches.read(0, number).to(training.device), batches.size(number)) for number in found]


def _synchronize() -> None:
    """Wait for all launches of this PE, and raise their errors."""
    po.check()
    if po.backend() == "cuda":
        torch.cuda.synchronize()


def _sums(shares: list[torch.Tensor]) -> list[float]:
    sums = torch.stack(shares).double()
    if dist.get_world_size() > 1:
        dist.all_reduce(sums)
    return [float(each) for each in sums.tolist()]

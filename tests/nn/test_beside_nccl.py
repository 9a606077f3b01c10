"""Launches beside NCCL's collectives, in opposite order on two GPUs: with an order, with room, and with neither."""

# Without `from __future__ import annotations`: DDP compares the annotations of a hook with types, not with their names.

import contextlib
import dataclasses
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from dlrm.captured_step import EAGER_STEPS, StepGraph, own_stream
from kept_pes import in_processes
from test_dlrm_graph import on_gpus, run_on_gpu
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel
from worlds import error_of, init_with_impatient_kernels

import persistent_ops as po
from persistent_ops.nn.order_all_reduce import average_in_order
from persistent_ops.ops.embedding.inputs_plan import OPERATOR as INPUTS, Tuning as InputsTuning
from persistent_ops.runtime import world as po_world

NUM_SMS = 8  # that are left to NCCL
COLUMNS = 16
ROWS = 20_000
SAMPLES = 1024  # of a PE
LOOKUPS = 256  # of a sample: more than enough for each warp of the backward pass, which waits for peers with its first
LARGE = 1 << 20  # parameters, so that NCCL's kernels have WGs that fit no SM with one of ours
RATE = 1 / 64
LATE_CYCLES = 300_000_000  # 0.15 s or more
TIMEOUT_S = 8.0
FORCED_STEPS = 3


class Dense(torch.nn.Module):
    """Parameters whose gradients are complete before the gradient of the tables' result."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.full((2 * COLUMNS,), 1 / 32, device=device))
        self.large = torch.nn.Parameter(torch.zeros(LARGE, device=device))

    def forward(self, pooled: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
        return ((pooled @ self.weight) * factors).sum() + (self.large * factors.sum()).sum()


class Arrival:
    """Sums of dense gradients, and launches that wait for peers. One of them is late on PE 0, the other on PE 1.

    Attributes:
        is_ordered: whether sums and launches are put in one order.
        is_forced: whether something is late.
    """

    def __init__(self, module: DistributedDataParallel, is_ordered: bool) -> None:
        self.is_ordered, self.is_forced = is_ordered, False
        module.register_comm_hook(module.process_group, self._average)
        self._late = torch.cuda.Stream()

    def delay_launch(self) -> None:
        """Delay the next work on the current stream on PE 1."""
        if self.is_forced and po.rank() == 1:
            torch.cuda._sleep(LATE_CYCLES)

    def _average(self, group: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        hook = average_in_order if self.is_ordered else allreduce_hook
        if not (self.is_forced and po.rank() == 0):
            return hook(group, bucket)
        self._late.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._late):
            torch.cuda._sleep(LATE_CYCLES)
            return hook(group, bucket)


class Ahead:
    """An exchange of lookups on a stream of its own, as of the next batch, whose WGs fill the GPU."""

    def __init__(self, arrival: Arrival, device: torch.device) -> None:
        INPUTS.tune(po_world.current(), InputsTuning(piece_lookups=16))  # as many WGs as there is room for
        self._arrival = arrival
        self._inputs = po.EmbeddingInputs(
            [[(0, ROWS)]] * 2, num_features=1, max_batch=SAMPLES, lookups_per_sample=LOOKUPS
        )
        self._lengths = torch.full((SAMPLES,), LOOKUPS, device=device)
        self._values = [_lookups(rank, 0)[: SAMPLES * LOOKUPS].to(device) for rank in range(2)]
        self._stream = torch.cuda.Stream(device)

    def send(self) -> Any:
        """Send them after the work on the current stream; collective."""
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            self._arrival.delay_launch()
            values = self._values[po.rank()]
            return self._inputs.exchange(values, lengths=self._lengths, batch_per_rank=[SAMPLES] * 2)

    def has_come(self, lookups: Any) -> bool:
        """Return whether they are the gradients of both PEs."""
        with lookups:
            found = [lookups.source(rank).indices for rank in range(2)]
            return all(
                torch.equal(indices[: SAMPLES * LOOKUPS].long(), values)
                for indices, values in zip(found, self._values, strict=True)
            )


def _lookups(rank: int, step: int) -> torch.Tensor:
    """Return the lookups of the global batch in a PE's table."""
    return (torch.arange(2 * SAMPLES * LOOKUPS) * 7919 + 104_729 * step + 31 * rank) % ROWS


def _factors(rank: int, step: int) -> torch.Tensor:
    return (torch.arange(SAMPLES) * 7 + 3 * rank + 4 * step).remainder(5).sub(1).float() * (1 + (rank + step) % 3)


def _table(rank: int) -> torch.Tensor:
    return (torch.arange(ROWS * COLUMNS).view(ROWS, COLUMNS) * 13 + 5 * rank).remainder(7).sub(3).float()


class Expected:
    """The same training on one process, in float64: all numbers of the tables are exact in float32 too."""

    def __init__(self) -> None:
        self.tables = [_table(rank).double() for rank in range(2)]
        self.gradients: list[torch.Tensor] = []

    def step(self, step: int) -> None:
        factors = torch.cat([_factors(rank, step) for rank in range(2)]).double()
        of_lookups = factors.repeat_interleave(LOOKUPS)
        weight = []
        for rank, table in enumerate(self.tables):
            lookups = _lookups(rank, step)
            times = torch.zeros(ROWS, dtype=torch.float64).index_add_(0, lookups, of_lookups)
            weight.append(times @ table / 2)
            table -= RATE / 32 * times[:, None]
        self.gradients = [torch.cat(weight), factors.sum().expand(LARGE) / 2]


class Step:
    """A training step with tensors at fixed addresses, so that it can be captured."""

    def __init__(
        self, arrival: Arrival, module: DistributedDataParallel, device: torch.device, ahead: Ahead | None = None
    ) -> None:
        self.arrival, self._module = arrival, module
        self._ahead, self._sent = ahead, None
        self.table = _table(po.rank()).to(device)
        self.optimizer = po.EmbeddingOptimizer([self.table], "sgd", lr=RATE)
        self._offsets = torch.arange(2 * SAMPLES + 1, device=device) * LOOKUPS
        self._lookups = _lookups(po.rank(), 0).to(device)
        self._factors = _factors(po.rank(), 0).to(device)
        self.expected, self._number = Expected(), 0

    def load(self) -> None:
        """Copy the inputs of the next step."""
        self.expected.step(self._number)
        self._lookups.copy_(_lookups(po.rank(), self._number))
        self._factors.copy_(_factors(po.rank(), self._number))
        self._number += 1

    def __call__(self) -> torch.Tensor:
        self._module.zero_grad(set_to_none=False)
        pooled = po.embedding_all_to_all([self.table], self._lookups, self._offsets, optimizer=self.optimizer)
        if self._ahead is None:
            pooled.register_hook(lambda _: self.arrival.delay_launch())
        else:
            self._sent = self._ahead.send()
        loss: torch.Tensor = self._module(pooled, self._factors)
        loss.backward()
        return loss.detach()

    def is_right(self) -> bool:
        """Return whether table and dense gradients equal the gradients of one process."""
        po.check()
        if self._ahead is not None and not self._ahead.has_come(self._sent):
            return False
        weight, large = (each.grad.cpu().double() for each in self._module.parameters())
        own, expected = self.expected.tables[po.rank()], self.expected.gradients
        scale = float(expected[0].abs().max())
        is_right = torch.equal(self.table.cpu().double(), own) and torch.equal(large, expected[1])
        return is_right and torch.allclose(weight, expected[0], rtol=1e-4, atol=1e-5 * scale)


@dataclasses.dataclass
class Seen:
    """What a PE reports.

    Attributes:
        are_right: for each forced step that has ended, whether its results are right.
        error: name and text of the error of the step after these.
        num_sms: SMs that its launches may use, and SMs of the GPU.
        goes_on: whether the world could be used afterwards.
    """

    are_right: list[bool] = dataclasses.field(default_factory=list)
    error: tuple[str, str] = ("", "")
    num_sms: tuple[int, int] = (0, 0)
    goes_on: bool = False


def _meet_in_opposite_order(backend: str, way: str, is_captured: bool, is_ahead: bool = False) -> Seen:
    """Train on this PE's GPU; see `Arrival`. `way`: "serial", "room", or "neither". `is_ahead`: see `Ahead`."""
    # Streams that share a hardware queue would run in one order. No effect if CUDA has been initialized.
    os.environ.update(NCCL_NVLS_ENABLE="0", CUDA_DEVICE_MAX_CONNECTIONS="32")
    init_with_impatient_kernels(backend, TIMEOUT_S, 256 << 20)
    try:
        world, seen = po_world.current(), Seen()
        device = world.backend.device
        with po.process_group(timeout=120, max_ctas=NUM_SMS if way == "room" else None), own_stream(device):
            module = DistributedDataParallel(Dense(device))
            if way == "room":
                po.nn.leave_room(module, num_sms=NUM_SMS)
            seen.num_sms = world.backend.num_sms, torch.cuda.get_device_properties(device).multi_processor_count
            arrival = Arrival(module, is_ordered=way != "room")
            step = Step(arrival, module, device, Ahead(arrival, device) if is_ahead else None)
            for _ in range(EAGER_STEPS):
                step.load()
                step()
                assert step.is_right()
            arrival.is_ordered, arrival.is_forced = way == "serial", True
            with contextlib.ExitStack() as stack:
                run: Callable[[], Any] = step
                if is_captured:
                    graph = StepGraph(step)
                    stack.callback(graph.close)
                    run = graph.replay
                for _ in range(FORCED_STEPS):
                    step.load()
                    world.barrier()  # the PEs begin together: what is late is so by the cycles above
                    seen.error = _error_of_one(run)
                    if seen.error[0]:
                        break
                    seen.are_right.append(step.is_right())
            seen.goes_on = _goes_on()
        return seen
    finally:
        po.finalize()


def _error_of_one(run: Callable[[], Any]) -> tuple[str, str]:
    """Return what a step raises on this PE, after both kernels have left the GPU."""

    def once() -> None:
        run()
        po.check()

    name, text, _ = error_of(once)
    torch.cuda.synchronize()
    told = po_world.current().bootstrap.exchange("step-ended", name.encode())
    if any(told):
        po.recover()
        name = name or "no error"  # though the other PE has one
    return name, text


def _assert_right_or_deadlocked(found: list[Seen], way: str) -> bool:
    """Check the PEs' reports; return whether the PEs waited for each other until the time-out.

    With neither an order nor room they may: whether both kernels find room on a GPU is the scheduler's choice.
    """
    errors = [seen.error[0] for seen in found]
    has_deadlocked = errors == ["PeerTimeoutError"] * 2
    assert errors == ["", ""] or (has_deadlocked and way == "neither"), [seen.error for seen in found]
    for seen in found:
        assert seen.goes_on and all(seen.are_right) and len(seen.are_right) <= FORCED_STEPS
        assert has_deadlocked == (len(seen.are_right) < FORCED_STEPS)
    if way == "neither":
        count = len(found[0].are_right) + has_deadlocked
        warnings.warn(f"{int(has_deadlocked)} of {count} runs deadlocked, the last one", stacklevel=2)
    return has_deadlocked


def _goes_on() -> bool:
    """Return whether launches and NCCL's collectives still work."""
    own = torch.full((3,), float(po.rank() + 1), device=po.device())
    total = po.all_reduce(own)
    dist.all_reduce(own)
    po.check()
    return bool((total == 3).all() and (own == 3).all())


@pytest.mark.gpu
@pytest.mark.apart
@pytest.mark.parametrize("is_captured", [False, True], ids=["eager", "captured"])
@pytest.mark.parametrize("way", ["serial", "room", "neither"])
def test_opposite_arrival(backend: str, way: str, is_captured: bool) -> None:
    """PE 0's backward pass comes before its NCCL kernel, PE 1's comes after. NCCL needs a GPU for each PE."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    found = in_processes(_meet_in_opposite_order, 2, backend, way, is_captured, timeout=250)
    for seen in found:
        taken, total = seen.num_sms
        assert taken == (total - NUM_SMS if way == "room" else total)
    if not _assert_right_or_deadlocked(found, way):
        return
    (_, text), (_, told) = (seen.error for seen in found)
    assert "for PE 1" in text and "PE 1 has not called the operator" in text and "NCCL" in text
    assert "because of PE 1 (this PE)" in told
    assert "PE 1 called the operator too late, or its launch found no room" in told


@pytest.mark.gpu
@pytest.mark.apart
@pytest.mark.parametrize("way", ["serial", "neither"])
def test_an_exchange_that_is_ahead(backend: str, way: str) -> None:
    """PE 0's exchange comes before its NCCL kernel, PE 1's comes after."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    found = in_processes(_meet_in_opposite_order, 2, backend, way, False, True, timeout=250)
    _assert_right_or_deadlocked(found, way)


@pytest.mark.gpu
@pytest.mark.apart
@pytest.mark.parametrize("is_captured", [False, True], ids=["eager", "captured"])
def test_a_training_with_room_has_the_losses_of_one_in_order(backend: str, is_captured: bool, tmp_path: Path) -> None:
    """With tables of all placements: replicated tables also add up their gradients over the PEs."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    options = on_gpus(tmp_path, backend, replicated_rows=20, evaluate_every=0)
    ordered, beside = (
        in_processes(run_on_gpu, 2, dataclasses.replace(options, **changes), timeout=250)
        for changes in ({}, {"beside_nccl": "room", "is_captured": is_captured})
    )
    for one, other in zip(ordered, beside, strict=True):
        assert other["num_replays"] == (12 if is_captured else 0)
        assert len(set(other["losses"])) == 25 and other["losses"] == pytest.approx(one["losses"], rel=1e-4)


def _multiply_beside(backend: str, has_room: bool) -> list[bool]:
    """Multiply and exchange on one stream, add up with NCCL on another; return for each step whether both are right.

    With room, PE 0's collective comes late, and PE 1's product. Without, the streams are put in one order.
    """
    os.environ.update(NCCL_NVLS_ENABLE="0", CUDA_DEVICE_MAX_CONNECTIONS="32")
    init_with_impatient_kernels(backend, TIMEOUT_S, 256 << 20)
    try:
        device, rank, are_right = po.device(), po.rank(), []
        with po.process_group(timeout=120, max_ctas=NUM_SMS if has_room else None):
            a = torch.full((1024, 512), float(rank + 1), dtype=torch.bfloat16, device=device)
            b = torch.ones(512, 2048, dtype=torch.bfloat16, device=device)
            ones = torch.ones(LARGE, device=device)
            dist.all_reduce(ones.clone())
            if has_room:
                po.nn.leave_room(dist.group.WORLD, num_sms=NUM_SMS)
            po.gemm_reduce_scatter(a, b, algorithm="fused")
            of_product, of_collective = torch.cuda.Stream(device), torch.cuda.Stream(device)
            for step in range(FORCED_STEPS):
                torch.cuda.synchronize()
                po.barrier()
                if has_room:
                    with torch.cuda.stream(of_product if rank else of_collective):
                        torch.cuda._sleep(LATE_CYCLES)
                with torch.cuda.stream(of_product):
                    result = po.gemm_reduce_scatter(a, b, algorithm="fused")
                if not has_room:
                    of_collective.wait_stream(of_product)
                with torch.cuda.stream(of_collective):
                    total = ones * (step + 1)
                    dist.all_reduce(total)
                torch.cuda.synchronize()
                po.check()
                are_right.append(bool((result == 3 * 512).all() and (total == 2 * (step + 1)).all()))
        return are_right
    finally:
        po.finalize()


@pytest.mark.gpu
@pytest.mark.apart
@pytest.mark.parametrize("has_room", [False, True], ids=["serial", "room"])
def test_products_that_are_exchanged(backend: str, has_room: bool) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    assert in_processes(_multiply_beside, 2, backend, has_room, timeout=250) == [[True] * FORCED_STEPS] * 2

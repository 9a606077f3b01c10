"""What only a GPU has: CUDA graphs, streams, device-side occupancy. One GPU is enough; PEs share it then."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from embedding_cases import CASES, Case, expected_bits, make_inputs, split_of
from kept_pes import in_processes

import persistent_ops as po

pytestmark = pytest.mark.gpu
_CASE = Case("graphs", dims=lambda rank: (64, 128, 8), batch=lambda world: 24, max_pooling=5)


def _buffers(case: Case, rank: int, world: int) -> dict[str, Any]:
    """Device tensors of fixed size that hold any iteration's lookups; unused room of indices is cut off by offsets."""
    rows = len(case.dims(rank)) * sum(split_of(case, world))
    device = po.device()
    return {
        "tables": [w.to(device) for w in make_inputs(case, rank, world, 0)[0]],
        "indices": torch.zeros(rows * case.max_pooling, dtype=torch.int64, device=device),
        "offsets": torch.zeros(rows + 1, dtype=torch.int64, device=device),
    }


def _load(buffers: dict[str, Any], case: Case, rank: int, world: int, iteration: int) -> None:
    _, indices, offsets, _ = make_inputs(case, rank, world, iteration)
    buffers["indices"][: indices.numel()].copy_(indices)
    buffers["offsets"].copy_(offsets)


def _call(buffers: dict[str, Any], **options: Any) -> torch.Tensor:
    # bounds="ignore": the buffers are larger than the lookups, so the last offset is not the number of indices
    return po.embedding_all_to_all(
        buffers["tables"], buffers["indices"], buffers["offsets"], bounds="ignore", **options
    )


def _want(case: Case, rank: int, world: int, iteration: int) -> torch.Tensor:
    inputs = [make_inputs(case, pe, world, iteration) for pe in range(world)]
    return expected_bits(case, inputs, rank, split_of(case, world))


def _graph_program(replays: int) -> list[str]:
    po.init("cuda", operator_timeout=20.0, heap_size=256 << 20)
    rank, world = po.rank(), po.world_size()
    problems: list[str] = []
    buffers = _buffers(_CASE, rank, world)
    _load(buffers, _CASE, rank, world, 0)
    _call(buffers)
    _call(buffers, schedule="oblivious")
    po.check()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            first = _call(buffers)
            second = _call(buffers, schedule="oblivious")
    wants = [_want(_CASE, rank, world, i) for i in range(5)]
    for replay in range(replays):
        _load(buffers, _CASE, rank, world, replay % 5)
        first.fill_(float("nan"))
        second.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        for name, output in (("aware", first), ("oblivious", second)):
            if not torch.equal(output.cpu(), wants[replay % 5]):
                problems.append(f"replay {replay}, {name}: wrong bits")
        # Now and then an eager call between replays.
        if replay % 50 == 7 and not torch.equal(_call(buffers).cpu(), wants[replay % 5]):
            problems.append(f"eager call after replay {replay}: wrong bits")
        if problems:
            break
    po.check()
    po.finalize()
    return problems


def _stream_program() -> list[str]:
    po.init("cuda", operator_timeout=20.0, heap_size=256 << 20)
    rank, world = po.rank(), po.world_size()
    problems: list[str] = []
    buffers = [_buffers(_CASE, rank, world) for _ in range(2)]
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    for i, one in enumerate(buffers):
        _load(one, _CASE, rank, world, i)
        _call(one)
    po.check()
    for round_ in range(20):
        outputs = []
        for i in (0, 1):
            with torch.cuda.stream(streams[i]):
                if (round_ + rank) % 3 == 0:
                    torch.cuda._sleep(2_000_000)  # PEs and streams drift
                outputs.append(_call(buffers[i]))
        torch.cuda.synchronize()
        for i in (0, 1):
            if not torch.equal(outputs[i].cpu(), _want(_CASE, rank, world, i)):
                problems.append(f"round {round_}, stream {i}: wrong bits")
    po.check()
    po.finalize()
    return problems


def _capture_needs_a_call_before() -> list[str]:
    po.init("cuda", operator_timeout=20.0, heap_size=64 << 20)
    buffers = _buffers(_CASE, po.rank(), po.world_size())
    _load(buffers, _CASE, po.rank(), po.world_size(), 0)
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            _call(buffers)
    except RuntimeError as error:
        problems = [] if "call it once before the capture" in str(error) else [str(error)]
    else:
        problems = ["no error"]
    po.finalize()
    return problems


def _bad_index_before_a_capture() -> list[str]:
    po.init("cuda", operator_timeout=20.0, heap_size=64 << 20)
    rank, world, device = po.rank(), po.world_size(), po.device()
    weights, lookups, bounds, _ = make_inputs(_CASE, rank, world, 0)
    tables, indices, offsets = [w.to(device) for w in weights], lookups.to(device), bounds.to(device)

    def call() -> torch.Tensor:
        return po.embedding_all_to_all(tables, indices, offsets)

    call()
    po.check()
    problems: list[str] = []
    for turn in range(3):
        indices[0] = 10**6
        call()
        torch.cuda.synchronize()  # the kernel has reported it, and nobody has asked
        graph, is_told = torch.cuda.CUDAGraph(), False
        with torch.cuda.graph(graph):
            try:
                output = call()
            except IndexError:
                is_told = True
                output = call()
        if not is_told:
            problems.append(f"turn {turn}: the capture's first launch did not tell of the bad index")
        indices.copy_(lookups)
        for _ in range(turn):
            graph.replay()
        torch.cuda.synchronize()
        if turn and not torch.equal(output.cpu(), _want(_CASE, rank, world, 0)):
            problems.append(f"turn {turn}: wrong bits")
        po.check()
    po.finalize()
    return problems


def _heap_after_heap() -> list[str]:
    """Use nearly all of heaps of different sizes, one after the other in one process."""
    problems: list[str] = []
    for heap_size in (64 << 20, 1 << 30, 128 << 20):
        before = {name: value for name, value in os.environ.items() if name.startswith("NVSHMEM_")}
        po.init("cuda", operator_timeout=60.0, heap_size=heap_size)
        after = {name: value for name, value in os.environ.items() if name.startswith("NVSHMEM_")}
        if after != before | {"NVSHMEM_DISABLE_NVLS": "1"}:
            problems.append(f"variables: {before} became {after}")
        mine = po.empty(heap_size - (16 << 20), dtype=torch.uint8)
        mine.fill_(po.rank() + 1)
        po.barrier()
        peer = (po.rank() + 1) % po.world_size()
        if int(po.peer_view(mine, peer)[-1]) != peer + 1:
            problems.append(f"heap of {heap_size} bytes: the end of PE {peer}'s is wrong")
        po.barrier()
        po.finalize()
    return problems


def _devices(reverse: bool) -> tuple[int, int]:
    """Return this PE's device in a world that may find one chosen, and in the next, which must find none of ours."""
    rank = int(os.environ["PERSISTENT_OPS_RANK"])
    if reverse:
        torch.cuda.set_device(torch.cuda.device_count() - 1 - rank)
    found = []
    for _ in range(2):
        po.init("cuda", operator_timeout=60.0, heap_size=64 << 20)
        found.append(int(po.device().index))
        po.barrier()
        po.finalize()
    return found[0], found[1]


def _pes() -> int:
    return max(2, min(4, torch.cuda.device_count()))


def test_a_thousand_graph_replays_with_changing_inputs() -> None:
    replays = 1001 if torch.cuda.device_count() > 1 else 301
    assert in_processes(_graph_program, _pes(), replays, timeout=300) == [[]] * _pes()


def test_two_streams_share_a_workspace() -> None:
    assert in_processes(_stream_program, _pes(), timeout=200) == [[]] * _pes()


def test_first_call_inside_a_capture_is_refused() -> None:
    assert in_processes(_capture_needs_a_call_before, 1, timeout=100) == [[]]


def test_bad_indices_are_still_told_after_a_capture_has_told_one() -> None:
    assert in_processes(_bad_index_before_a_capture, 2, timeout=100) == [[], []]


def test_each_world_has_the_heap_size_that_it_asked_for() -> None:
    assert in_processes(_heap_after_heap, _pes(), timeout=200) == [[]] * _pes()


@pytest.mark.parametrize("reverse", [False, True])
def test_the_device_that_was_chosen_is_taken(reverse: bool) -> None:
    count = torch.cuda.device_count()
    order = range(count - 1, -1, -1) if reverse else range(count)
    assert po.launch(_devices, count, reverse, timeout=200) == [(index, index) for index in order]


def test_gpus_with_different_numbers_of_pes_are_refused() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    with pytest.raises(po.BootstrapError, match="some GPUs carry more PEs than others"):
        po.launch(_takes_the_first_but_for_the_last, 3, timeout=100)


def _takes_the_first_but_for_the_last() -> None:
    torch.cuda.set_device(int(os.environ["PERSISTENT_OPS_RANK"]) // 2)
    po.init("cuda", operator_timeout=60.0, heap_size=64 << 20)


def test_cases_exist() -> None:
    assert len({case.name for case in CASES}) == len(CASES)

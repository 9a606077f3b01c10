"""`po.trace` except for the timelines themselves, which the operators' protocol tests check."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
import struct
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from gpu_kernels import SAMPLE
from host_driver.build import CUDA
from worlds import in_world

import persistent_ops as po
from persistent_ops.ops.all_reduce_plan import OPERATOR as ALL_REDUCE
from persistent_ops.ops.gemv_plan import OPERATOR, Tuning
from persistent_ops.runtime.clock_alignment import align_clocks
from persistent_ops.runtime.compile.jit import compile_cuda
from persistent_ops.runtime.world import current
from persistent_ops.timeline import Clock, Launch, PeTimeline, Span, Tasks, Timeline, _aligned

# The kernels' calls for timelines: each is a statement on a line of its own.
_HOOK = re.compile(
    r"^ *(?:const )?(?:trace_send\(.*\)|(?:Wait|Task)Trace trace\(.*\)|trace\.looked_in_vain\(.*\));\n", re.M
)


def _without_hooks(folder: Path) -> tuple[Path, int]:
    """Copy the kernels' sources without calls for timelines; return the copy, and the number of removed lines."""
    root = folder / "cuda"
    shutil.copytree(CUDA, root)
    count = 0
    for path in [*(root / "comm").glob("*.cuh"), *(root / "kernels").rglob("*.cuh")]:
        text, found = _HOOK.subn("", path.read_text().replace("return trace.came();", "return true;"))
        path.write_text(text)
        assert "trace" not in re.sub(r"//.*", "", text).replace("platform/trace.cuh", ""), path
        count += found
    return root, count


_SAMPLES = {each.request.name: each for each in SAMPLE if each.arch == "sm_90" and not each.request.traces}


@pytest.mark.slow
@pytest.mark.host
@pytest.mark.parametrize("kernel", sorted(_SAMPLES))
def test_a_kernel_that_does_not_trace_is_the_same_to_the_byte(tmp_path: Path, kernel: str) -> None:
    root, count = _without_hooks(tmp_path)
    assert count >= 12
    request = _SAMPLES[kernel].request
    source, arch = request.source(), f"sm_90{request.shape.architecture_suffix}"
    with_hooks = compile_cuda(source, arch=arch).path.read_bytes()
    assert compile_cuda(dataclasses.replace(source, root=root), arch=arch).path.read_bytes() == with_hooks


# ---- the context ---------------------------------------------------------------------------------------------------


def _x() -> torch.Tensor:
    return torch.ones(3000, device=po.device())


def _in_and_out() -> list[Any]:
    world, found = current(), []
    po.all_reduce(_x())
    kept = dict(ALL_REDUCE.state(world).plans)
    with po.trace() as timeline:
        po.all_reduce(_x())
        for nested in (lambda: po.trace().__enter__(), lambda: po.trace(capacity=0).__enter__()):
            with pytest.raises((RuntimeError, ValueError)) as caught:
                nested()
            found.append(str(caught.value))
    inside = len(timeline.pes[0].launches)
    po.all_reduce(_x())
    found += [inside > 0, len(timeline.pes[0].launches) == inside, dict(ALL_REDUCE.state(world).plans) == kept]
    found.append(world.tracer is None)
    return [*found, any(request.traces for request, _ in world._kernels)]


def test_only_what_is_launched_inside_traces(backend: str) -> None:
    for found in in_world(_in_and_out, 2, backend):
        assert "cannot be nested" in found[0] and "capacity" in found[1]
        assert found[2:] == [True, True, True, True, False]


def _small() -> tuple[list[int], bool]:
    with po.trace(capacity=3 * 2500) as timeline:
        right = [bool((po.all_reduce(_x()) == po.world_size()).all()) for _ in range(5)]
    po.check()
    own = timeline.pes[0]
    return [len(own.launches), own.dropped], all(right)


def test_what_finds_no_room_is_dropped_and_counted(backend: str) -> None:
    for (kept, dropped), right in in_world(_small, 2, backend):
        assert right and kept == 3 and dropped >= 2


def _divide(timelines: list[Timeline]) -> None:
    with po.trace() as timeline:
        timelines.append(timeline)
        po.all_reduce(_x())
        raise ZeroDivisionError


def _raises() -> tuple[int, bool]:
    timelines: list[Timeline] = []
    with pytest.raises(ZeroDivisionError):
        _divide(timelines)
    return len(timelines[0].pes), bool((po.all_reduce(_x()) == po.world_size()).all())


def test_what_is_raised_inside_comes_out(backend: str) -> None:
    assert in_world(_raises, 2, backend) == [(1, True)] * 2


def _alone_with_grids() -> list[Any]:
    grids = (3, 2, 3)
    x = torch.ones(16, device=po.device())
    weights = {grid: torch.ones(8 * grid, 16, device=po.device()) for grid in grids}
    OPERATOR.tune(po.runtime.world.current(), Tuning(work_groups=3))
    with po.trace() as timeline:
        for grid in grids:
            po.gemv(weights[grid], x)
    own = timeline.pes[0].launches
    return [sorted(launch.wg for launch in own), [(each.launches, each.work_groups) for each in timeline.summary()]]


def test_products_of_a_pe_alone_are_apart_though_they_have_one_epoch(backend: str) -> None:
    assert in_world(_alone_with_grids, 1, backend) == [[[0, 0, 0, 1, 1, 1, 2, 2], [(3, 3)]]]


def _one_cannot_begin(folder: Path) -> list[str]:
    with pytest.raises((OSError, RuntimeError)) as caught, po.trace(folder / "none" / "timeline.json"):
        pass
    return [type(caught.value).__name__, str(caught.value), bool((po.all_reduce(_x()) == po.world_size()).all())]


def test_where_one_pe_cannot_begin_none_does(backend: str, tmp_path: Path) -> None:
    (first, _, is_right), (second, text, is_right_too) = in_world(_one_cannot_begin, 2, backend, tmp_path)
    assert (first, second, is_right, is_right_too) == ("FileNotFoundError", "RuntimeError", True, True)
    assert "PE 0 cannot begin" in text


def _file_behind_trace(path: Path) -> int:
    x = _x()
    with po.trace(path):
        for _ in range(20):
            po.all_reduce(x)
    return len(json.loads(path.read_text())["traceEvents"])


def test_the_file_is_whole_when_a_pe_goes_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    events = Timeline.events

    def slow_events(timeline: Timeline) -> dict[str, Any]:
        time.sleep(0.5)
        return events(timeline)

    monkeypatch.setattr(Timeline, "events", slow_events)  # of threads, which share the class
    first, second = in_world(_file_behind_trace, 2, "host", tmp_path / "timeline.json")
    assert first == second > 0


def _much(calls: int) -> tuple[int, int]:
    x = torch.ones(8, device=po.device())
    with po.trace() as timeline:
        for _ in range(calls):
            po.all_reduce(x, algorithm="slices")
    return len(timeline.pes), sum(len(pe.launches) for pe in timeline.pes)


def test_more_than_the_store_takes_at_a_time_arrives(monkeypatch: pytest.MonkeyPatch, backend: str) -> None:
    monkeypatch.setattr("persistent_ops.timeline._PIECE", 1000)  # of threads, which share the module
    (pes, launches), (own, _) = in_world(_much, 2, "host", 50)
    assert (pes, own) == (2, 1) and launches >= 100


# ---- clocks --------------------------------------------------------------------------------------------------------


def _clocks() -> list[tuple[float, float]]:
    return [align_clocks(current())[:2] for _ in range(3)]


@pytest.mark.host
@pytest.mark.parametrize("transport", ["auto", "staged"])
def test_pes_of_one_machine_have_one_clock(backend: str, transport: str) -> None:
    first, *others = in_world(_clocks, 3, backend, transport=transport)
    assert first == [(0.0, 0.0)] * 3
    for clocks in others:
        for offset, error in clocks:
            assert abs(offset) <= error + 1 and error < 50e6


def test_times_are_moved_to_the_clock_of_pe_0() -> None:
    """A clock that is 1000 ns ahead at its 2000, and 1100 ahead at its 12000."""
    tasks = Tasks(1, 2000.0, 7000.0, 5.0)
    span = Span("wait", "", 0, 0, 7000.0, 12000.0)
    own = PeTimeline(1, [Launch("x", 0, 1, 2, 0, 1, 1, 2000.0, 12000.0, 0.0, None, tasks, [span], 0)], 0, 0.0)
    moved = _aligned(own, Clock(1000.0, 20.0, 2000.0), Clock(1100.0, 30.0, 12000.0))
    launch = moved.launches[0]
    assert (launch.begin, launch.end, moved.clock_error) == (1000.0, 10900.0, 30.0)
    assert (launch.others.begin, launch.others.end) == (1000.0, 5950.0) and launch.own is None  # type: ignore[union-attr]
    assert (launch.spans[0].begin, launch.spans[0].end) == (5950.0, 10900.0)


# ---- graphs --------------------------------------------------------------------------------------------------------


def _replayed() -> list[Any]:
    x = _x()
    out = torch.empty_like(x)
    with po.trace() as timeline:
        po.all_reduce(x, out=out)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            po.all_reduce(x, out=out)
        for _ in range(4):
            graph.replay()
    inside = len({launch.epoch for launch in timeline.pes[0].launches if launch.operator == "all_reduce"})
    out.zero_()
    graph.replay()
    torch.cuda.synchronize()
    return [inside, bool((out == po.world_size()).all())]


@pytest.mark.gpu
def test_a_graph_that_was_captured_inside_traces() -> None:
    assert in_world(_replayed, 2, "cuda") == [[5, True]] * 2


# ---- summary and figure --------------------------------------------------------------------------------------------


def _made() -> Timeline:
    """Two PEs, a launch of two WGs of two warps; PE 1 begins 10 us late, and PE 0 waits for it."""

    def launch(wg: int, begin: float, *, waited: float) -> Launch:
        spans = [Span("wait", "block 7", 1, 0, begin + 2e3, begin + 2e3 + waited)] if waited else []
        own, others = Tasks(1, begin + 15e3, begin + 20e3, 5e3), Tasks(3, begin, begin + 2e3, 2e3)
        return Launch("sum", 0, 5, 2, wg, 2, 2, begin, begin + 20e3 + wg, waited, own, others, spans, 0)

    return Timeline(
        [
            PeTimeline(0, [launch(wg, 1e6, waited=13e3) for wg in range(2)], 0, 0.0),
            PeTimeline(1, [launch(wg, 1.01e6, waited=0.0) for wg in range(2)], 0, 250.0),
        ]
    )


def test_summary() -> None:
    first, second = _made().summary()
    assert (first.pe, first.operator, first.launches, first.work_groups) == (0, "sum", 1, 2)
    assert first.us == pytest.approx(20.001) and first.skew_us == second.skew_us == pytest.approx(10.0)
    assert first.waiting == pytest.approx(13 / 40, rel=1e-3) and second.waiting == 0.0
    assert (first.own, first.others) == (pytest.approx(5 / 40, rel=1e-3), pytest.approx(2 / 40, rel=1e-3))
    assert first.waits == [(1, "block 7", pytest.approx(26.0))] and second.waits == []
    assert first.hidden == pytest.approx(1 - 13 / 40, rel=1e-3) and second.hidden == 1.0
    assert first.slowest_wg == 1
    assert str(first) == (
        "PE 0, sum: 20.0 us, the mean of 1; 12% own tasks, 5% for others, 32% waiting, 68% of the exchange hidden; "
        "WG 1 of 2 mostly ends last; PEs begin within 10.0 us\n  26.0 us for PE 1: block 7"
    )
    assert str(second._replace(hidden=None, skew_us=None)) == (
        "PE 1, sum: 20.0 us, the mean of 1; 12% own tasks, 5% for others, 0% waiting; WG 1 of 2 mostly ends last"
    )


def test_a_summary_has_the_range_of_the_pieces_that_were_waited_for() -> None:
    timeline = _made()
    spans = timeline.pes[0].launches[1].spans
    spans += [spans[0]._replace(what="block 12"), spans[0]._replace(what="tile 3 of 4"), spans[0]._replace(peer=0)]
    first, _ = timeline.summary()
    assert [(peer, what) for peer, what, _ in first.waits] == [(1, "block 7 to 12"), (1, "tile 3 of 4"), (0, "block 7")]


def test_a_launch_that_was_cut_off_is_not_counted() -> None:
    timeline = _made()
    own = timeline.pes[0].launches
    own += [own[0]._replace(epoch=6, end=own[0].end + 1e9)]  # and no other WG of it
    first, _ = timeline.summary()
    assert (first.launches, first.us) == (1, pytest.approx(20.001))


def test_events_and_figure(tmp_path: Path) -> None:
    timeline = _made()
    events = json.loads(json.dumps(timeline.events()))["traceEvents"]
    launches = [event for event in events if event.get("cat") == "launch"]
    assert [(event["pid"], event["ts"]) for event in launches] == [(0, 0.0)] * 2 + [(1, 10.0)] * 2
    names = {event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert {"WG 0", "WG 1, own tasks", "WG 1, warp 0"} <= names
    timeline.draw(tmp_path / "timeline.png", "sum")
    assert (tmp_path / "timeline.png").stat().st_size > 5000
    with pytest.raises(ValueError, match="expected one of \\['sum'\\], got 'product'"):
        timeline.draw(tmp_path / "none.png", "product")


def test_of_many_ctas_some_are_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    axes, drawn = pytest.importorskip("matplotlib.axes").Axes, []
    barh = axes.barh

    def noting(self: Any, wg: int, *args: Any, **how: Any) -> Any:
        drawn.append(wg)
        return barh(self, wg, *args, **how)

    monkeypatch.setattr(axes, "barh", noting)
    pe = _made().pes[0]
    for count in (24, 25, 264):
        launches = [pe.launches[0]._replace(wg=wg, num_wgs=count) for wg in range(count)]
        Timeline([pe._replace(launches=launches)]).draw(tmp_path / f"{count}.png")
        assert drawn == list(range(0, count, -(-count // 24)))
        drawn.clear()


@pytest.mark.parametrize("pes", [1, 2, 3, 4])
def test_panels_stand_two_in_a_row(pes: int, tmp_path: Path) -> None:
    one = _made().pes[0]
    Timeline([one._replace(pe=pe) for pe in range(pes)]).draw(tmp_path / "panels.png")
    size = struct.unpack(">II", (tmp_path / "panels.png").read_bytes()[16:24])
    assert size == (600 * min(pes, 2), 480 * -(-pes // 2))


def test_a_launch_that_there_is_not_is_not_drawn(tmp_path: Path) -> None:
    timeline = _made()
    launches = timeline.pes[0].launches
    launches += [wg._replace(epoch=6, begin=wg.begin + 1e5) for wg in launches]
    for launch in (2, 50, -3):
        with pytest.raises(ValueError, match=f"^launch: expected -2 to 1, the 2 launches of sum .*{launch}$"):
            timeline.draw(tmp_path / "none.png", launch=launch)
    assert not any(tmp_path.iterdir())
    for launch in (1, -2):
        timeline.draw(tmp_path / f"{launch}.png", launch=launch)
    assert len(list(tmp_path.iterdir())) == 2

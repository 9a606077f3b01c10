"""The benchmark of sparse_all_reduce, small, on the host backend."""

from __future__ import annotations

import functools
import importlib
import math
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import benchmark_runs
import pytest
import torch
from worlds import in_world

import persistent_ops as po
from persistent_ops.ops.sparse_plan import OPERATOR, SparsePlan
from persistent_ops.runtime.operator import OperatorState

OURS = ["auto", "owner", "allgather", "dense", "into", "into_owner", "into_allgather"]
BASELINES = ["gloo", "dense_reduce", "gather_add", "union_reduce", "gather_add_graph", "union_reduce_graph"]
SWEPT = ["auto", "owner", "allgather", "dense", "into", "dense_reduce", "gather_add", "union_reduce"]
CASE = "100kx512_4k_zipf"
PRINTED = ["correct: ", "over best", "phases of single launches", "host: of an eager call", "sparsity, 2 PEs"]
PRINTED += ["overlap, 2 PEs", "99.99%", "say nothing about GPUs"]

pytestmark = pytest.mark.host


def module(name: str) -> Any:
    return importlib.import_module(name)


run, lines_of = (functools.partial(each, "sparse_all_reduce") for each in (benchmark_runs.run, benchmark_runs.lines_of))


def test_measures_every_method_and_records_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--rounds", "3", "--replays", "7", "--cases", CASE, "--out", str(tmp_path)) == 0
    (ceilings,) = lines_of(tmp_path, "ceilings")
    sparse = [0.0001, 0.001, 0.01, 0.1]
    shared = [1.0, 0.5, 0.0]  # the smallest union first

    cases = lines_of(tmp_path, "case")
    assert [(line["group"], line["shape"]["point"]) for line in cases] == [
        ("cases", None),
        *(("sparsity", point) for point in sparse),
        *(("overlap", point) for point in shared),
    ]
    for line in cases:
        _check_case(line, ceilings["store"])
    assert [line["union_rows"] for line in cases[-3:]] == [1000, 1500, 2000]

    times = lines_of(tmp_path, "time")
    measured = [(line["group"], line["shape"]["point"], line["method"]) for line in times]
    assert measured == [
        *(("cases", None, method) for method in OURS + BASELINES),
        *(("sparsity", point, method) for point in sparse for method in SWEPT),
        *(("overlap", point, method) for point in shared for method in SWEPT),
    ]
    union_rows = {line["case"]: line["union_rows"] for line in cases}
    for line in times:
        _check_time(line, union_rows[line["case"]])

    spreads = {line["method"]: line for line in lines_of(tmp_path, "spread")}
    assert set(spreads) <= set(OURS + BASELINES) and "auto" in spreads
    for line in spreads.values():
        assert line["replays"] == 7
        assert 0 < line["us_median"] <= line["us_p90"] <= line["us_p99"]
    phases = [line for line in lines_of(tmp_path, "phases") if line["group"] == "cases"]
    assert [line["method"] for line in phases] == [name for name in OURS if name != "dense"]
    assert all(list(line["us"]) == ["row sets", "row numbers", "rows"] for line in phases)
    assert all(us > 0 for line in phases for us in line["us"].values())
    hosts = lines_of(tmp_path, "host")
    assert [(line["group"], line["method"]) for line in hosts] == [
        ("cases", name) for name in ("auto", "owner", "allgather")
    ]
    assert all(line["us"] > 0 for line in hosts)

    checks = lines_of(tmp_path, "check")
    assert len(checks) == len(cases)
    assert all(line["failures"] == [] and line["largest_difference"] <= line["tolerance"] for line in checks)
    assert lines_of(tmp_path, "skipped") == []
    for name in ("sparse_all_reduce", "sparse_all_reduce_sparsity", "sparse_all_reduce_overlap"):
        assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    printed = capsys.readouterr().out
    assert [text for text in PRINTED if text not in printed] == [] and "WRONG" not in printed


def _check_case(line: dict[str, Any], bytes_per_second: float) -> None:
    rows, row_bytes = line["shape"]["rows_per_rank"], line["shape"]["dim"] * 4
    # What two PEs have together is counted twice where both have it.
    assert line["union_rows"] + line["rows_with_several"] == 2 * rows
    assert line["lacked_rows"] == rows == line["unicast_rows"]
    assert line["limit_us"] == pytest.approx(rows * row_bytes / bytes_per_second * 1e6)
    assert line["input_bytes"] == rows * (row_bytes + 8)
    assert line["result_bytes"] == line["union_rows"] * (row_bytes + 8)


def _check_time(line: dict[str, Any], union_rows: int) -> None:
    rounds, shape, method = line["seconds_by_pe_and_round"], line["shape"], line["method"]
    assert len(rounds) == 2 and len(rounds[0]) in (2, 3)  # 2: a slow method
    assert line["calls_per_replay"] == (1 if method in ("dense_reduce", "gloo") else 2)
    rows = shape["rows"] if "dense" in method else union_rows if "union" in method else shape["rows_per_rank"]
    assert line["sent_value_bytes"] / (shape["dim"] * 4) == rows
    if method in ("owner", "allgather", "into_owner", "into_allgather"):
        assert line["algorithm"] == method.removeprefix("into_")


def test_says_what_it_leaves_out_and_why(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    limits = ["--gloo-gb", "0.00001", "--room-gb", "0.00005"]
    arguments = ["--rounds", "1", "--replays", "2", "--cases", CASE, "--sweeps", "none"]
    assert run(*arguments, *limits, "--methods", "auto,dense,allgather,gloo", "--out", str(tmp_path)) == 0
    skipped = {line["method"]: line["reason"] for line in lines_of(tmp_path, "skipped")}
    assert list(skipped) == ["dense", "allgather", "gloo"]
    assert "at most 1e-05 GB (--gloo-gb)" in skipped["gloo"]
    assert "of the symmetric heap beside the result; at most 5e-05 GB (--room-gb)" in skipped["dense"]
    assert [line["method"] for line in lines_of(tmp_path, "time")] == ["auto"]
    printed = capsys.readouterr().out
    assert f"skipped: operator, dense (at most 5e-05 GB (--room-gb)): {CASE}: 0.000306 GB of" in printed
    assert printed.count("│ skipped │") == 3


def _run_with_a_wrong_algorithm(options: Any) -> bool:
    right = po.sparse_all_reduce

    def wrong(x: torch.Tensor, *, algorithm: str) -> Any:
        result = right(x, algorithm=algorithm)
        if algorithm == "owner" and po.rank() == 1:
            result.values()[-1, -1] += 2.0**-20
        return result

    po.sparse_all_reduce = wrong  # in a process of its own
    subject = module("harness.timing").Subject
    module("sparse_all_reduce").record = lambda world, calls: subject(lambda: None, len(calls))  # a replay does nothing
    return bool(module("harness.experiment").measure(module("sparse_all_reduce").SparseAllReduce, options))


def test_a_wrong_result_on_one_pe_fails_on_all(tmp_path: Path) -> None:
    options = module("sparse_all_reduce").Options(
        backend="host",
        cases=(CASE,),
        sweeps=(),
        methods=("auto", "owner", "into", "gather_add"),
        rounds=1,
        replays=2,
        record_path=str(tmp_path / "sparse_all_reduce.jsonl"),
    )
    assert po.launch(_run_with_a_wrong_algorithm, 2, options, timeout=120) == [False, False]
    (check,) = lines_of(tmp_path, "check")
    places = [f"PE 1, owner, {place}" for place in ("input 0", "input 0, repeated", "input 1")]
    places += [f"PE {pe}, into, a replay" for pe in range(2)]
    assert [failure.split(": ")[0] for failure in check["failures"]] == places
    assert "1 values have other bits" in check["failures"][0]


def _host_times(wait: float) -> tuple[float, float]:
    """Time a sum that waits long for its number of rows: with and without the wait."""
    await_report = SparsePlan.await_report

    def late(plan: SparsePlan, *arguments: Any) -> tuple[int, float]:
        time.sleep(wait)
        return await_report(plan, *arguments)

    x = torch.eye(4).to_sparse(1)
    po.sparse_all_reduce(x)
    with mock.patch.object(SparsePlan, "await_report", late):
        begin, world = time.perf_counter(), po.runtime.world.current()
        host = module("sparse.host_time").time_host(world, lambda: po.sparse_all_reduce(x), trials=3)
        return host, time.perf_counter() - begin


def test_host_time_is_without_the_wait() -> None:
    """Alone, for what is replaced is of all PEs that are threads."""
    ((host, whole),) = in_world(_host_times, 1, "host", 0.5)
    assert 0 < host < 0.5 and whole > 1.5


# ---- limits ----------------------------------------------------------------------------------------------------------


def _traffic(row_sets: list[set[int]], pe: int) -> Any:
    union = sorted(set().union(*row_sets))
    contributors = torch.tensor([sum(row in rows for rows in row_sets) for row in union])
    is_own = torch.tensor([row in row_sets[pe] for row in union])
    return module("sparse.limits").count_traffic(contributors, is_own, len(row_sets))


def test_limits_of_small_examples() -> None:
    # Rows 0 and 1 of one PE each, row 2 of two, row 3 of all three.
    row_sets = [{0, 2, 3}, {1, 2, 3}, {3}]
    traffic = [_traffic(row_sets, pe) for pe in range(3)]
    assert [each.union for each in traffic] == [4] * 3
    assert [each.several for each in traffic] == [2] * 3
    # PE 0 knows row 0, and waits for something of 1, 2 and 3; PE 2 has a part of row 3 alone.
    assert [each.lacked for each in traffic] == [3, 3, 4]
    # Messages: 2 and 2 for rows 0 and 1, 1 + 2 for row 2, 2 + 2 for row 3; a third of 11 for each PE.
    assert [each.unicast for each in traffic] == pytest.approx([11 / 3] * 3)


def test_sent_rows() -> None:
    sent = module("sparse.limits").sent_rows
    sizes = {"rows": 1000, "rows_per_rank": 10, "union": 30.0, "unicast": 26.0, "world_size": 4}
    assert {scheme: sent(scheme, **sizes) for scheme in ("owner", "gather", "union", "dense")} == {
        "owner": 26.0,
        "gather": 30.0,
        "union": 45.0,
        "dense": 1500.0,
    }


def test_crossover() -> None:
    crossover = module("sparse.report").crossover
    assert crossover([0.01, 0.1, 1.0], [1.0, 10.0, 100.0], [10.0, 10.0, 10.0]) == pytest.approx(0.1)
    assert crossover([0.01, 1.0], [1.0, 100.0], [10.0, 10.0]) == pytest.approx(0.1)
    assert crossover([0.01, 0.1], [1.0, 5.0], [10.0, 10.0]) is None
    assert crossover([0.01, 0.1], [20.0, 30.0], [10.0, 10.0]) == 0.01
    # Faster at first as well: it is the last place that counts.
    assert crossover([0.01, 0.1, 1.0], [20.0, 1.0, 100.0], [10.0] * 3) == pytest.approx(10**-0.5)
    assert crossover([], [], []) is None


# ---- inputs ----------------------------------------------------------------------------------------------------------


def _rows(case: Any, world_size: int, number: int = 0) -> list[torch.Tensor]:
    device = torch.device("cpu")
    draw = module("sparse.inputs").draw_rows
    return [draw(case, rank=pe, world_size=world_size, number=number, device=device) for pe in range(world_size)]


def _union(rows: list[torch.Tensor]) -> int:
    return torch.unique(torch.cat(rows)).numel()


def test_rows_are_distinct_and_sorted_and_differ_from_set_to_set() -> None:
    for case in module("sparse.cases").CASES.values():
        small = case.for_host()
        first, second = _rows(small, 3), _rows(small, 3, 1)
        for rows in first + second:
            assert rows.numel() == small.rows_per_rank and rows.dtype == torch.int64
            assert bool((rows.diff() > 0).all())
            assert int(rows[0]) >= 0 and int(rows[-1]) < small.rows
        assert not torch.equal(first[0], second[0])
        assert torch.equal(first[0], first[1]) == (case.shared == 1.0)
        assert small.rows_per_rank / small.rows == pytest.approx(case.rows_per_rank / case.rows)


def test_zipf_rows_overlap_as_intended() -> None:
    case = module("sparse.cases").CASES[CASE]
    rows = _rows(case, 8)
    assert _union(rows[1:]) == pytest.approx(12_700, rel=0.02)
    uniform = module("sparse.cases").Case("as many", case.rows, case.rows_per_rank, case.dim, "uniform")
    assert _union(_rows(uniform, 8)) > 2 * _union(rows)


def test_sums_of_the_inputs_depend_on_their_order() -> None:
    """Otherwise no check could distinguish the operator's order of additions from another order."""
    inputs, case = module("sparse.inputs"), module("sparse.cases").CASES["5Mx2048_50k_identical"].for_host()
    device = torch.device("cpu")
    a, b, c = (inputs.draw_set(case, rank=pe, world_size=3, number=0, device=device).values for pe in range(3))
    assert not torch.equal((a + b) + c, (b + c) + a)
    assert max(float(part.abs().max()) for part in (a, b, c)) < 1


# ---- checks ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def three(monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Any, list[Any]]:
    """Return PE 0's world of three PEs, whose inputs are all in this process, what it expects and the inputs."""
    check, case = module("sparse.check"), module("sparse.cases").CASES["5Mx2048_50k_zipf"].for_host()
    device = torch.device("cpu")
    inputs = [module("sparse.inputs").draw_set(case, rank=pe, world_size=3, number=0, device=device) for pe in range(3)]
    begin = [0]

    def gathered(world: object, own: torch.Tensor) -> torch.Tensor:
        if own.dtype == torch.int64:
            return torch.stack([rows.indices for rows in inputs])
        begin[0] += own.shape[1]
        return torch.stack([rows.values[:, begin[0] - own.shape[1] : begin[0]] for rows in inputs])

    monkeypatch.setattr(check, "_gathered", gathered)
    monkeypatch.setattr(check, "_GATHERED_BYTES", 3 * case.rows_per_rank * 4 * 5)  # columns come in pieces
    world = SimpleNamespace(size=3, rank=0)
    union, traffic = check.survey(world, inputs[0])
    assert union.numel() == traffic.union
    expected, wrong = check.reference(world, inputs[0], union)
    assert wrong == [] and begin[0] == case.dim
    return check, expected, inputs


def test_the_reference_is_the_sum_in_the_order_of_the_pes(three: tuple[Any, Any, list[Any]]) -> None:
    _, expected, inputs = three
    exact = sum(rows.sparse.double().to_dense() for rows in inputs)[expected.union]
    assert float((expected.values - exact).abs().max()) < 2.0**-22
    row = next(int(r) for r in expected.union if all(int(r) in rows.indices for rows in inputs))
    a, b, c = (rows.values[int(torch.searchsorted(rows.indices, row))] for rows in inputs)
    assert torch.equal(expected.values[int(torch.searchsorted(expected.union, row))], (a + b) + c)


def test_a_method_that_drops_work_is_found(three: tuple[Any, Any, list[Any]]) -> None:
    check, expected, _ = three
    union, values = expected.union, expected.values
    assert check.difference((union, values.clone()), expected, exactly=True) == ([], 0.0)

    other_order = values.clone()
    other_order[3, 1] = torch.nextafter(other_order[3, 1], torch.tensor(9.0))
    assert check.difference((union, other_order), expected, exactly=False)[0] == []
    (text,), worst = check.difference((union, other_order), expected, exactly=True)
    assert text.startswith("1 values have other bits") and 0 < worst < expected.tolerance

    dropped = values.clone()
    dropped[-1] = 0
    assert "from the sum, tolerance" in check.difference((union, dropped), expected, exactly=False)[0][0]
    never_written = values.clone()
    never_written[0, 0] = math.nan
    (text,), worst = check.difference((union, never_written), expected, exactly=False)
    assert text.startswith("inf from the sum") and worst == math.inf
    for wrong_rows in (union[:-1], union.flip(0), union + 1):
        assert "rows, or others than" in check.difference((wrong_rows, values), expected, exactly=False)[0][0]
    assert "values of shape" in check.difference((union, values[:, :-1]), expected, exactly=False)[0][0]


# ---- memory ----------------------------------------------------------------------------------------------------------


def test_memory_is_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the benchmark allocates is not the operator's; what the operator keeps from before is."""
    allocated, peak, heap_used = [1000], [0], [50]

    def reset(device: object) -> None:
        peak[0] = allocated[0]

    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: allocated[0])
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", reset)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: peak[0])

    class FreeList:
        size = 10_000

        @property
        def free_bytes(self) -> int:
            return self.size - heap_used[0]

    def nbytes(number: int) -> Any:
        return SimpleNamespace(nbytes=number)

    kept = {"headers": nbytes(2), "progress": nbytes(3), "planes": nbytes(5)}
    state = OperatorState(cast(Any, SimpleNamespace(workspace=None)), OPERATOR)
    state.areas.update(gather=nbytes(15), **kept)
    world = SimpleNamespace(
        backend=SimpleNamespace(name="cuda", device=None),
        check=lambda: None,
        heap=SimpleNamespace(free_list=FreeList(), reclaim=lambda: None),
        kept={OPERATOR.name: state},
    )
    methods = SimpleNamespace(symmetric_bytes=300, kept_bytes=lambda name: {"gather_add": 77, "into": 8}.get(name, 0))
    meter = module("sparse.memory").MemoryMeter(world)
    allocated[0] += 5  # the operator has kept this from an earlier case
    # 50 bytes are in use: 10 that the operator needs, 15 for "allgather", 25 of earlier cases' graphs.
    meter.case_begins()
    allocated[0] += 600  # the case's buffers
    heap_used[0] += methods.symmetric_bytes
    meter.case_ready()

    def call() -> None:
        peak[0] = max(peak[0], allocated[0] + 40)
        heap_used[0] += 100  # the result

    def measured(name: str) -> int:
        allocated[0] += 20  # a plan, in the first call
        found: int = meter.measure(methods, name, call)
        heap_used[0] -= 100
        return found

    assert measured("auto") == 40 + (5 + 20) + (10 + 100)
    assert measured("allgather") == 40 + (5 + 40) + (10 + 100 + 15)
    state.areas.update(gather=nbytes(70))  # the earlier graphs keep the room that was too small
    heap_used[0] += 70
    assert measured("allgather") == 40 + (5 + 60) + (10 + 100 + 70)
    # The room of "allgather" is not counted for others; the benchmark's buffer is the result here.
    assert meter.measure(methods, "into", lambda: None) == 8 + (5 + 60) + (10 + 300)
    assert measured("gather_add") == 77 + 40

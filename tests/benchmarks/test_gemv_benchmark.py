"""The benchmark of gemv_all_reduce, small, on the host backend."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import benchmark_runs
import pytest
import torch

import persistent_ops as po
from persistent_ops.testing import symmetric_memory as po_symmetric_memory

QUICK = ["--shapes", "8192x1024"]

pytestmark = pytest.mark.host


def module(name: str) -> Any:
    return importlib.import_module(name)


run, lines_of = (functools.partial(each, "gemv_all_reduce") for each in (benchmark_runs.run, benchmark_runs.lines_of))


def test_measures_every_method_and_records_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shapes = "8192x1024,100x40_N3,8192x3584_N8"
    assert run("--shapes", shapes, "--replays", "7", "--out", str(tmp_path)) == 0
    runs = lines_of(tmp_path, "run")
    assert [line["pes"] for line in runs] == [2, 1]
    ceilings = {line["pes"]: line for line in lines_of(tmp_path, "ceilings")}

    times = lines_of(tmp_path, "time")
    together = ["fused", "one_shot", "two_shot", "prefetch", "cublas_alone", "cublas_nccl"]
    alone = ["gemv_alone", "gemv_alone_prefetch", "cublas_alone"]
    assert [(line["pes"], line["shape_name"], line["method"]) for line in times] == [
        (pes, shape, method)
        for pes, methods in ((2, together), (1, alone))
        for shape in shapes.split(",")
        for method in methods
    ]
    for line in times:
        shape = line["shape"]
        assert line["weight_bytes"] == shape["rows"] * shape["columns"] * 2
        assert line["limit_us"] == pytest.approx(line["weight_bytes"] / ceilings[line["pes"]]["read"] * 1e6)
        assert line["calls_per_graph"] >= 20
        assert line["calls_per_graph"] % shape["copies"] == 0
    spreads = lines_of(tmp_path, "spread")
    assert [(line["pes"], line["method"]) for line in spreads] == [
        *[(2, "fused"), (2, "cublas_nccl")] * 3,
        *[(1, "gemv_alone"), (1, "cublas_alone")] * 3,
    ]
    for line in spreads:
        assert line["replays"] == 7
        assert 0 < line["us_median"] <= line["us_p90"] <= line["us_p99"] <= line["us_p999"]
    checks = lines_of(tmp_path, "check")
    assert len(checks) == 6
    assert all(line["failures"] == [] and 0 < line["largest_share_of_bound"] <= 1 for line in checks)
    assert (tmp_path / "gemv_all_reduce.png").read_bytes().startswith(b"\x89PNG")
    printed = capsys.readouterr().out
    assert "speedup" in printed and "over cuBLAS" in printed
    assert "say nothing about GPUs" in printed
    assert "WRONG" not in printed


def _shifted(result: torch.Tensor) -> torch.Tensor:
    """Move the largest value by four units in its last place."""
    place = int(result.abs().argmax())
    result.view(-1).view(torch.int16)[place] += 4
    return result


def _spoil(monkeypatch: pytest.MonkeyPatch, is_wrong: Callable[[torch.Tensor, dict[str, Any]], bool]) -> None:
    right = po.gemv_all_reduce

    def wrong(weight: torch.Tensor, x: torch.Tensor, **options: Any) -> torch.Tensor:
        result = right(weight, x, **options)
        return _shifted(result) if is_wrong(x, options) else result

    monkeypatch.setattr(po, "gemv_all_reduce", wrong)


@pytest.mark.parametrize(
    ("shape", "is_wrong", "complaint"),
    [
        ("8192x1024", lambda x, options: True, "from the fp64 result as rounding explains"),
        ("8192x1024", lambda x, options: options["algorithm"] == "two_shot", "two_shot, copy 0: other bits than fused"),
        (
            "8192x1024",
            lambda x, options: options["prefetch_weight"],
            "gemv_alone_prefetch, copy 0: other bits than fused",
        ),
        ("8192x3584_N8", lambda x, options: x.dim() == 1, "vector 7 alone gives other bits than among 8"),
    ],
)
def test_a_wrong_result_gives_exit_code_1(
    shape: str,
    is_wrong: Callable[[torch.Tensor, dict[str, Any]], bool],
    complaint: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    _spoil(monkeypatch, is_wrong)
    # A world of one PE alone runs in this process, where the patch is.
    methods = ["--methods", "cublas_alone"]
    assert run("--shapes", shape, "--pes", "1", *methods, "--out", str(tmp_path)) == 1
    (check,) = lines_of(tmp_path, "check")
    assert any(complaint in failure for failure in check["failures"])
    assert "WRONG" in capsys.readouterr().out


def test_a_result_that_does_not_repeat_gives_exit_code_1(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = iter(range(1000))
    _spoil(monkeypatch, lambda x, options: next(calls) == 1)
    assert run(*QUICK, "--pes", "1", "--methods", "cublas_alone", "--out", str(tmp_path)) == 1
    (check,) = lines_of(tmp_path, "check")
    assert check["failures"] == ["PE 0, gemv_alone, copy 0: a second run gives other bits"]


def test_pes_that_differ_give_exit_code_1(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def two(digests: list[str]) -> list[list[str]]:
        return [[*digests[:-1], "another"], digests]

    monkeypatch.setattr(module("gemv.check"), "gather", two)
    assert run(*QUICK, "--pes", "1", "--methods", "cublas_alone", "--out", str(tmp_path)) == 1
    (check,) = lines_of(tmp_path, "check")
    assert check["failures"] == ["PE 0, gemv_alone, copy 2: other bits than on PE 0"]


def test_an_unfused_method_that_drops_work_gives_exit_code_1(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    methods = module("gemv.methods")
    monkeypatch.setattr(methods.Methods, "cublas_alone", lambda self, weight: self.out)  # as others have left it
    assert run(*QUICK, "--pes", "1", "--methods", "cublas_alone", "--out", str(tmp_path)) == 1
    (check,) = lines_of(tmp_path, "check")
    assert len(check["failures"]) == 1
    assert "PE 0, cublas_alone, " in check["failures"][0]


@pytest.mark.parametrize(("pes", "method"), [(1, "gemv_alone"), (2, "fused")])
def test_a_timeline_has_what_the_operator_is_in_a_world(tmp_path: Path, pes: int, method: str) -> None:
    assert run("--trace", "--pes", str(pes), "--rounds", "2", "--out", str(tmp_path)) == 0
    assert [(line["method"], line["pe"]) for line in lines_of(tmp_path, "timeline", of="timeline")] == [
        (method, pe) for pe in range(pes)
    ]
    assert [line["method"] for line in lines_of(tmp_path, "tracing_cost", of="timeline")] == [method]


def test_a_tuning_with_wrong_results_gives_exit_code_1(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _spoil(monkeypatch, lambda x, options: True)
    assert run(*QUICK, "--pes", "1", "--tune", "work_groups=1", "--out", str(tmp_path)) == 1
    rows = lines_of(tmp_path, "tune", of="tuning")
    assert len(rows) == 2
    assert all("rounding explains" in row["problem"] for row in rows)


def test_the_fastest_product_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    methods, shapes = module("gemv.methods"), module("gemv.shapes")
    world = SimpleNamespace(size=1, rank=0, bootstrap=None)
    world.backend = SimpleNamespace(name="cuda", device=torch.device("cpu"))
    seconds = {"mv": 3e-6, "mm": 1e-6, "mm_lt": 0.0}
    one = methods.Methods(world, shapes.Shape(16, 8), torch.zeros(3 * 16 * 8, dtype=torch.bfloat16), None, seed=0)

    def record(world: object, calls: list[Any]) -> object:
        assert len(calls) == 3
        if one.product == "mm_lt":
            raise RuntimeError("no cuBLASLt here")
        return object()

    monkeypatch.setattr(methods, "record", record)
    monkeypatch.setattr(methods, "agree", lambda problem: problem)
    monkeypatch.setattr(methods, "gather", lambda value: [value, 2 * value])
    monkeypatch.setattr(
        methods, "time_interleaved", lambda world, subjects, **options: {name: [seconds[name]] for name in subjects}
    )
    us = one.choose_product(world, rounds=1, burst_seconds=0.0)
    assert us == {"mv": pytest.approx(6.0), "mm": pytest.approx(2.0)}
    assert one.product == "mm"


def test_why_there_is_no_symmetric_memory_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch.distributed._symmetric_memory as symmetric_memory

    def fail(*arguments: Any, **options: Any) -> None:
        raise RuntimeError("no peer access")

    monkeypatch.setattr(symmetric_memory, "get_backend", lambda device: "CUDA")
    monkeypatch.setattr(symmetric_memory, "empty", fail)
    monkeypatch.setattr(po_symmetric_memory, "agree", lambda problem: problem)
    for name, value in {"backend": "cuda", "world_size": 2, "device": torch.device("cpu")}.items():
        monkeypatch.setattr(po, name, lambda value=value: value)
    found = po_symmetric_memory.symmetric_buffer(16, torch.bfloat16)
    assert found == (None, "RuntimeError: no peer access")


def test_replays_are_timed_one_by_one_and_the_subjects_take_turns() -> None:
    timing = module("harness.timing")
    called: list[str] = []
    world = SimpleNamespace(backend=SimpleNamespace(name="host"), barrier=lambda: called.append("|"))
    subjects = {name: [lambda text=f"{name}{i}": called.append(text) for i in range(2)] for name in "ab"}
    times = timing.time_replays(world, subjects, replays=timing._BATCH + 3)
    assert [len(times[name]) for name in "ab"] == [timing._BATCH + 3] * 2
    batches = "".join(called).split("|")[1:]
    expected = [name + str(i % 2) for name in "ab" for i in range(-1, 3)]  # the first of a batch is not timed
    assert batches[2:] == ["".join(expected[:4]), "".join(expected[4:])]
    assert batches[0].startswith("a1a0a1") and batches[1].startswith("b1b0b1")

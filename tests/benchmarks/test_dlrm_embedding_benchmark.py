"""The benchmark of the embedding part of a DLRM's step, small, on the host backend."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import benchmark_runs
import pytest
import torch
from embedding_step.methods import BaselineStep, OurStep

from persistent_ops.testing.fbgemm_embedding import why_no_fbgemm
from persistent_ops.testing.row_update import RowUpdate

METHODS = ["fused", "fused_eager", "fused_ahead", "fbgemm", "fbgemm_eager", "torch_eager"]

pytestmark = pytest.mark.host


run = functools.partial(benchmark_runs.run, "dlrm_embedding", "--calls", "2")
lines_of = functools.partial(benchmark_runs.lines_of, "dlrm_embedding")


def own_methods() -> list[str]:
    return [name for name in METHODS if why_no_fbgemm() is None or not name.startswith("fbgemm")]


# ---- what is measured ------------------------------------------------------------------------------------------------


def test_measures_every_method_and_records_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cases = ["adagrad_uniform", "adagrad_zipf", "rowwise_adagrad_zipf"]
    arguments = ("--cases", ",".join(cases), "--replicated-rows", "110", "--pes", "2", "--out", str(tmp_path))
    assert run(*arguments) == 0
    times = lines_of(tmp_path, "time")
    assert [(line["case"], line["method"]) for line in times] == [
        (case, method) for case in cases for method in own_methods()
    ]
    for line in times:
        assert [len(each) for each in line["seconds_by_pe_and_round"]] == [3, 3]
        assert line["limit_us"] == pytest.approx(sum(line["phases_limit_us"]))
        assert line["unique_rows"] < line["lookups"] and line["sent_bytes"] > 0
    checks = lines_of(tmp_path, "check")
    assert len(checks) == 3
    for check in checks:
        assert check["failures"] == [] and 0 < check["worst_share"] <= 1 and 0 < check["worst_share_of_baselines"] <= 1
    phases = [(line["case"], line["method"], sorted(line["us"])) for line in lines_of(tmp_path, "phases")]
    kinds = {"fused_eager": ["backward", "exchange", "forward", "sort"]}
    assert phases == [
        (case, method, kinds.get(method, ["backward", "exchange", "forward"]))
        for case in cases
        for method in own_methods()
        if method.endswith("_eager")
    ]
    assert all("replicated: t5 t8" in line["text"] for line in lines_of(tmp_path, "placement"))
    assert (tmp_path / "dlrm_embedding.png").read_bytes().startswith(b"\x89PNG")
    printed = " ".join(capsys.readouterr().out.split())
    assert "correct" in printed and "speedup" in printed and "sort" in printed and "replicated: t5 t8" in printed
    _check_documents_table(tmp_path, cases)


def _check_documents_table(folder: Path, cases: list[str]) -> None:
    """The documents' table of such a record, which is not shown while it has not run on GPUs."""
    tables = importlib.import_module("tables")
    (found,) = tables.read_runs(folder)
    assert "ran without a GPU" in tables.problems(found)
    main, phases = tables._TABLES["dlrm_embedding"](found)
    assert all(f"`{case}`" in main and f"`{case}`" in phases for case in cases) and "speedup over best baseline" in main


@pytest.mark.parametrize("cases", ["rowwise_adagrad_fp16_zipf", "adagrad_wire_bf16_uniform,rowwise_adagrad_bf16_zipf"])
def test_other_dtypes_are_right(cases: str, tmp_path: Path) -> None:
    methods = ("--methods", "fused_eager,fbgemm_eager,torch_eager")
    assert run("--cases", cases, *methods, "--pes", "2", "--out", str(tmp_path)) == 0
    assert [line["failures"] for line in lines_of(tmp_path, "check")] == [[]] * len(cases.split(","))
    left_out = [line["what"] for line in lines_of(tmp_path, "left_out")]
    assert "rowwise_adagrad_bf16_zipf, fbgemm" in left_out or "bf16_zipf" not in cases or why_no_fbgemm() is not None
    assert {line["method"] for line in lines_of(tmp_path, "time")} >= {"fused_eager", "torch_eager"}


def test_slices_of_a_table_are_right(tmp_path: Path) -> None:
    cases, methods = "adagrad_uniform,rowwise_adagrad_zipf", "fused_eager,fbgemm_eager,torch_eager"
    arguments = ("--cases", cases, "--methods", methods, "--placement", "model", "--pes", "2", "--out", str(tmp_path))
    assert run(*arguments) == 0
    assert all("column_wise x 4" in line["text"] for line in lines_of(tmp_path, "placement"))
    assert [line["failures"] for line in lines_of(tmp_path, "check")] == [[], []]


def test_first_values_differ_in_all_tables_rows_and_columns() -> None:
    """Each distribution is uniform, and a slice has the distribution of its table."""
    module, slot = (
        importlib.import_module("embedding_step.tables"),
        importlib.import_module("embedding_step.check").Slot,
    )
    rows = torch.cat([torch.arange(3000), torch.arange(39_997_000, 40_000_000)])
    whole = [module.first_rows(slot(table, 0, table, 128), rows) for table in (0, 19)]
    both = torch.cat(whole)
    assert both.min() >= -1 and both.max() < 1 and abs(float(both.mean())) < 3e-3
    assert float(both.std()) == pytest.approx(3**-0.5, rel=1e-2)
    assert len(both.unique(dim=0)) == len(both)
    assert abs(float(torch.corrcoef(torch.stack([part.flatten() for part in whole]))[0, 1])) < 5e-3
    assert abs(float(torch.corrcoef(both[:, :16].T).fill_diagonal_(0).abs().max())) < 5e-2
    assert torch.equal(module.first_rows(slot(19, 2, 19, 32), rows), whole[1][:, 64:96])
    states = module.first_states(slot(0, 0, 0, 128), rows, is_rowwise=True)
    assert states.shape == (6000, 1) and 0.5 <= float(states.min()) < 0.51 and 1.49 < float(states.max()) < 1.5


def test_one_pe_moves_what_its_lookups_touch(tmp_path: Path) -> None:
    arguments = ("--cases", "adagrad_uniform", "--methods", "fused", "--placement", "table_wise", "--pes", "1")
    assert run(*arguments, "--batch", "10", "--max-rows", "50", "--out", str(tmp_path)) == 0
    (line,) = lines_of(tmp_path, "time")
    cases, lookups = (importlib.import_module(f"embedding_step.{name}") for name in ("cases", "lookups"))
    sizes = cases.sizes_of("host", 10, 50)
    unique = 0
    for number in range(2):
        batch = lookups.draw_batch(sizes, "uniform", rank=0, world_size=1, number=number, device=torch.device("cpu"))
        parts = batch.values.split([10 * hotness for hotness in sizes.hotness])
        assert all(
            int(part.min()) >= 0 and int(part.max()) < rows for part, rows in zip(parts, sizes.rows, strict=True)
        )
        assert batch.lengths.tolist() == [hotness for hotness in sizes.hotness for _ in range(10)]
        unique += sum(len(set(part.tolist())) for part in parts)
    count, result, row_bytes = 10 * sum(sizes.hotness), 10 * 26 * 16 * 4, 16 * 4
    assert (line["unique_rows"], line["lookups"], line["sent_bytes"]) == (unique / 2, count, 0)
    moved = (8 + 4) * count + (unique / 2 * row_bytes + 4 * count + result) + (result + 4 * count)
    assert line["memory_bytes"] == moved + 2 * unique / 2 * (row_bytes + row_bytes)


# ---- what is wrong ---------------------------------------------------------------------------------------------------


def _twice(right: Callable[..., Any]) -> Callable[..., Any]:
    def wrong(self: Any, pooled: torch.Tensor) -> None:
        right(self, pooled)
        right(self, self.pool(self.send(0)))

    return wrong


def _nothing(right: Callable[..., Any]) -> Callable[..., Any]:
    def wrong(self: Any, pooled: torch.Tensor) -> None:
        pooled.backward(torch.zeros_like(pooled))

    return wrong


def _a_little_more(right: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *arguments: right(*arguments) * (1 + 1e-4)


def _other_columns(right: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *arguments: right(*arguments).roll(16, 1)


@pytest.mark.parametrize(
    ("owner", "name", "fault", "method", "complaint"),
    [
        (OurStep, "back", _twice, "fused_eager", "table"),
        (OurStep, "back", _nothing, "fused_eager", "table"),
        (OurStep, "pool", _other_columns, "fused_eager", "pooled rows are"),
        (BaselineStep, "back", _twice, "torch_eager", "table"),
        (BaselineStep, "pool", _a_little_more, "torch_eager", "pooled rows are"),
        (RowUpdate, "_scaled", _a_little_more, "torch_eager", "table"),
    ],
)
def test_a_wrong_result_gives_exit_code_1_and_no_figure(
    owner: type[Any],
    name: str,
    fault: Callable[..., Any],
    method: str,
    complaint: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(owner, name, fault(getattr(owner, name)))
    # A world of one PE runs in this process, where the patch is.
    assert run("--pes", "1", "--methods", "fused_eager,torch_eager", "--out", str(tmp_path)) == 1
    (check,) = lines_of(tmp_path, "check")
    assert any(complaint in failure for failure in check["failures"]), check["failures"]
    assert all(failure.startswith(f"PE 0, {method}, ") for failure in check["failures"])
    label = importlib.import_module("dlrm_embedding").LABELS[method].format(collective="gloo")
    printed = capsys.readouterr().out
    assert "WRONG" in printed and f"│ {label} " not in printed


def test_other_bits_ahead_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ahead = OurStep.run_ahead
    monkeypatch.setattr(OurStep, "run_ahead", lambda self, numbers: ahead(self, [0] * len(numbers)))
    assert run("--pes", "1", "--methods", "fused_eager,fused_ahead", "--out", str(tmp_path)) == 1
    (check,) = lines_of(tmp_path, "check")
    assert any("fused_ahead, other bits" in failure for failure in check["failures"])


def test_what_finds_no_memory_is_told_and_not_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise torch.OutOfMemoryError("the GPU is full")

    monkeypatch.setattr(RowUpdate, "_update", full)
    assert run("--pes", "1", "--methods", "torch_eager,fused_eager", "--out", str(tmp_path)) == 1
    (check,) = lines_of(tmp_path, "check")
    assert [failure.split(";")[0] for failure in check["failures"]] == ["PE 0, torch_eager, PE 0: the GPU is full"]
    assert [line["method"] for line in lines_of(tmp_path, "time")] == ["fused_eager"]

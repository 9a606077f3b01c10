"""The benchmark of embedding_all_to_all, small, on the host backend."""

from __future__ import annotations

import functools
import importlib
import pkgutil
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import benchmark_runs
import pytest
import torch

from persistent_ops.ops.embedding.plan import Tuning

QUICK = ["--configs", "B512_T32_P10"]

pytestmark = pytest.mark.host


run, lines_of = (
    functools.partial(each, "embedding_all_to_all") for each in (benchmark_runs.run, benchmark_runs.lines_of)
)


def test_measures_every_method_and_records_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*QUICK, "--pes", "2", "--zipf", "also", "--out", str(tmp_path)) == 0
    (ceilings,) = lines_of(tmp_path, "ceilings")
    assert ceilings["read"] > 0
    assert ceilings["store"] > 0

    times = lines_of(tmp_path, "time")
    methods = ["fused", "oblivious", "unfused_own", "unfused_torch", "pooling_own", "pooling_torch"]
    assert [(line["distribution"], line["method"]) for line in times] == [
        (distribution, method) for distribution in ("uniform", "zipf") for method in methods
    ]
    for line in times:
        shape = line["shape"]
        pooled = shape["batch"] * shape["tables"] * shape["dim"] * 4
        assert line["sent_bytes"] == (0 if line["method"].startswith("pooling") else pooled / 2)
        assert line["read_bytes"] == pooled * shape["pooling"]
        lookups = shape["batch"] * shape["tables"] * shape["pooling"]
        rows = (line["memory_bytes"] - pooled - 8 * lookups) / (4 * shape["dim"])
        assert 0 < rows <= min(lookups, shape["tables"] * shape["rows"])
        assert rows < lookups or line["distribution"] == "uniform", "hot rows are counted once"
        assert line["limit_us"] == pytest.approx(
            max(line["memory_bytes"] / ceilings["read"], pooled / 2 / ceilings["store"]) * 1e6
        )
    skews = lines_of(tmp_path, "skew")
    assert [line["method"] for line in skews] == ["fused", "oblivious"] * 2
    assert all(line["skew"] >= 0 for line in skews)
    checks = lines_of(tmp_path, "check")
    assert len(checks) == 2
    assert all(line["failures"] == [] for line in checks)
    assert all(0 <= line["largest_difference"] <= line["tolerance"] for line in checks)
    assert (tmp_path / "embedding_all_to_all.png").read_bytes().startswith(b"\x89PNG")
    printed = capsys.readouterr().out
    assert "zipf indices, 2 PEs" in printed
    assert "say nothing about GPUs" in printed
    assert "WRONG" not in printed


def _off_by_a_bit(right: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def wrong(*arguments: Any) -> torch.Tensor:
        result = right(*arguments).clone()
        result[-1, -1] += 1e-3
        return result

    return wrong


@pytest.mark.parametrize(
    ("place", "complaint"),
    [
        ("embedding.check.reference", "from the unfused result"),
        ("embedding.methods.Methods.oblivious", "the oblivious order gives other bits"),
        ("embedding.methods.Methods.unfused_own", "without its exchange gives other bits"),
    ],
)
def test_a_wrong_result_gives_exit_code_1(
    place: str, complaint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(place, _off_by_a_bit(pkgutil.resolve_name(place)))
    # A world of one PE runs in this process, where the patch is.
    assert run(*QUICK, "--pes", "1", "--methods", "fused", "--out", str(tmp_path)) == 1
    (check,) = lines_of(tmp_path, "check")
    assert any(complaint in failure for failure in check["failures"])
    assert "WRONG" in capsys.readouterr().out


def test_tuning_sorts_and_reports_what_does_not_compile(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    grid = "rows_in_flight=8:16,slice_samples=2:40"
    assert run(*QUICK, "--pes", "2", "--out", str(tmp_path), "--tune", grid) == 0
    rows = lines_of(tmp_path, "tune", of="tuning")
    assert [(row["tuning"]["rows_in_flight"], row["tuning"]["slice_samples"]) for row in rows] == [
        (8, None),  # the default
        (8, 2),
        (8, 40),
        (16, 2),
        (16, 40),
    ]
    for row in rows:
        if row["tuning"]["slice_samples"] == 40:
            assert row["us"] is None
            assert "slice_samples: expected 1 to 32" in row["problem"]
        else:
            assert row["us"] > 0
            assert row["problem"] is None
    printed = capsys.readouterr().out
    assert "(default)" in printed
    assert "did not run" in printed
    timed = [float(text.split("│")[1]) for text in printed.splitlines() if "slice_samples=" in text]
    assert timed == sorted(timed)
    assert len(timed) == 3


def test_the_wire_may_be_narrower_than_the_tables(tmp_path: Path) -> None:
    arguments = (*QUICK, "--pes", "2", "--methods", "fused,unfused_torch", "--wire-dtype", "fp32,bf16")
    assert run(*arguments, "--out", str(tmp_path)) == 0
    sent = {line["config"]: line["sent_bytes"] for line in lines_of(tmp_path, "time")}
    assert sent["B512_T32_P10"] == 2 * sent["B512_T32_P10_wire_bf16"] > 0
    checks = {line["config"]: line for line in lines_of(tmp_path, "check")}
    assert all(line["failures"] == [] for line in checks.values())
    assert checks["B512_T32_P10"]["tolerance"] < checks["B512_T32_P10_wire_bf16"]["tolerance"]


@pytest.mark.parametrize("gpus", [0, 2])
def test_more_pes_than_gpus_are_refused_before_a_run(
    gpus: int, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    assert run("--backend", "cuda", "--pes", "3", "--out", str(tmp_path / "new")) == 2
    told = capsys.readouterr().err
    why = f"--pes: 3 PEs on {gpus} GPUs; NCCL takes one PE per GPU" if gpus else "--backend cuda: there is no GPU"
    assert told.startswith(f"error: {why}") and told.count("\n") == 1
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("inside", ["", "/folder"])
def test_a_record_that_cannot_be_written_gives_exit_code_2(
    inside: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    assert run("--backend", "host", "--pes", "1", "--quick", "--out", f"{tmp_path}/file{inside}") == 2
    told = capsys.readouterr().err
    assert re.match(rf"error: --out: expected a \w+ that can be written, got '{tmp_path}/file.*\n\Z", told)


def test_a_grid_is_swept_as_a_product_or_a_star() -> None:
    tuning: Any = importlib.import_module("harness.tuning")
    grid = tuning.parse_grid("threads=256:192,local_delay=0:0.5,work_groups=none:3", Tuning)
    assert grid == (("threads", (256, 192)), ("local_delay", (0.0, 0.5)), ("work_groups", (None, 3)))
    seen = [(t.threads, t.local_delay, t.work_groups) for t in tuning.combinations(Tuning, grid, "product")]
    assert len(seen) == len(set(seen)) == 1 + 8  # the default comes first
    star = [(t.threads, t.local_delay, t.work_groups) for t in tuning.combinations(Tuning, grid, "star")]
    none = None
    assert star == [(none, 0.0, none), (256, 0.0, none), (192, 0.0, none), (none, 0.5, none), (none, 0.0, 3)]


def test_zipf_ranks_have_their_frequencies() -> None:
    configs: Any = importlib.import_module("embedding.configs")
    inputs: Any = importlib.import_module("embedding.inputs")
    config = configs.Config("small", batch=1000, tables=2, pooling=100, dim=8, rows=1000)
    drawn = inputs.draw_lookups(config, "zipf", seed=1, device=torch.device("cpu"))
    weights = torch.arange(1, 1001, dtype=torch.float64) ** -1.05
    expected = weights / weights.sum() * 100_000
    for table, indices in enumerate(drawn.indices.view(2, -1)):
        counts = indices.bincount(minlength=1000).sort(descending=True).values
        for rank in (0, 1, 5, 50):
            assert float(counts[rank]) == pytest.approx(float(expected[rank]), rel=0.15), f"table {table}"
    hottest = [int(indices.bincount().argmax()) for indices in drawn.indices.view(2, -1)]
    assert hottest[0] != hottest[1]


@pytest.mark.parametrize("wrong", [0, 1])
def test_the_store_ceiling_notices_stores_that_did_not_arrive(wrong: int) -> None:
    ceilings: Any = importlib.import_module("harness.ceilings")

    class World:
        rank, size = 0, 2

    segment = 4096
    buffer = torch.zeros(2 * segment // 4, dtype=torch.int32)
    mark = 2
    words = [mark, ~mark, ceilings._int32(mark * 0x9E3779B9), mark << 16]
    buffer.view(2, -1, 4)[1] = torch.tensor(words, dtype=torch.int32)
    if not wrong:
        ceilings._check_stored(World(), buffer, segment, "store")
        return
    buffer[-3] = 0
    with pytest.raises(RuntimeError, match="does not find what PE 1 should have stored"):
        ceilings._check_stored(World(), buffer, segment, "store")

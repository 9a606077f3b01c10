"""The main job: synthetic batches, placement, the reference, and a complete run on the host backend."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import re
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from criteo_cases import criteo_line, write
from hypothesis import given, settings, strategies as st
from rich.console import Console

from persistent_ops.demo import placement, report, run, unfused
from persistent_ops.demo.options import DemoOptions
from persistent_ops.demo.pe import PeReport, differences
from persistent_ops.testing import dlrm_batch, lookups

ROWS = tuple(min(rows, 1000) for rows in dlrm_batch.DLRM_ROWS)


# ---- placement -----------------------------------------------------------------------------------------------------


def best_makespan(costs: Sequence[int], world_size: int) -> int:
    """Return the smallest possible maximum, by trying every placement."""
    return min(
        max(sum(cost for cost, pe in zip(costs, owners, strict=True) if pe == each) for each in range(world_size))
        for owners in itertools.product(range(world_size), repeat=len(costs))
    )


@settings(max_examples=150, deadline=None)
@given(st.lists(st.integers(0, 50), min_size=1, max_size=7), st.integers(1, 3))
def test_placement_is_within_its_bound_of_the_best(costs: list[int], world_size: int) -> None:
    placed = placement.place_tables(costs, world_size)
    assert sorted(itertools.chain(*placed)) == list(range(len(costs)))
    assert all(tables == sorted(tables) for tables in placed)
    makespan = max(sum(costs[table] for table in tables) for tables in placed)
    assert makespan <= (4 / 3 - 1 / (3 * world_size)) * best_makespan(costs, world_size) + 1e-9
    assert placement.place_tables(costs, world_size) == placed


def test_placement_finds_the_obvious_best() -> None:
    assert placement.place_tables([5, 1, 5, 1], 2) == [[0, 1], [2, 3]]
    assert placement.place_tables([1.0, 1.0], 4) == [[0], [1], [], []]


def test_costs_grow_with_pooling_and_width() -> None:
    one, ten = placement.lookup_costs([1, 10], 64, 4)
    assert one < ten < 10 * one
    assert placement.lookup_costs([10], 128, 4)[0] == 2 * ten


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(1, 60), min_size=1, max_size=8), st.integers(1, 3), st.integers(0, 200))
def test_row_cap_is_the_largest_that_fits(num_rows: list[int], world_size: int, spare: int) -> None:
    placed = placement.place_tables(num_rows, world_size)
    budget = (max(len(tables) for tables in placed) + spare) * 8
    cap = placement.fit_rows(num_rows, placed, 8, budget)

    def largest(cap: int) -> int:
        return max(sum(min(num_rows[table], cap) for table in tables) for tables in placed) * 8

    assert 1 <= cap <= max(num_rows)
    assert largest(cap) <= budget
    assert cap == max(num_rows) or largest(cap + 1) > budget


# ---- lookups and the reference -------------------------------------------------------------------------------------


def test_features_are_joined_feature_major_and_cut_again() -> None:
    first = lookups.FeatureLookups(np.array([7, 8, 9]), np.array([2, 0, 1]))
    second = lookups.FeatureLookups(np.array([4]), np.array([0, 1, 0]))
    indices, offsets = lookups.concatenate([first, second])
    assert indices.tolist() == [7, 8, 9, 4]
    assert offsets.tolist() == [0, 2, 2, 3, 3, 4, 4]
    cut = unfused.split_features(torch.from_numpy(indices), torch.from_numpy(offsets), 2)
    assert [(i.tolist(), o.tolist()) for i, o in cut] == [([7, 8, 9], [0, 2, 2, 3]), ([4], [0, 0, 1, 1])]


def test_no_feature_at_all() -> None:
    indices, offsets = lookups.concatenate([])
    assert indices.tolist() == []
    assert offsets.tolist() == [0]
    assert unfused.split_features(torch.from_numpy(indices), torch.from_numpy(offsets), 0) == []


def test_differences_are_relative_to_each_table() -> None:
    expected = torch.tensor([[100.0, 1.0], [50.0, 0.5]])
    actual = expected + torch.tensor([[0.1, 0.0], [0.0, 0.1]])
    largest, relative = differences(actual, expected, table_dim=1)
    assert largest == pytest.approx(0.1, rel=1e-4)
    assert relative == pytest.approx(0.1, rel=1e-4)  # of the second table, whose largest value is 1


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_value_that_is_not_finite_is_never_within_tolerance(value: float) -> None:
    actual = torch.ones(2, 4)
    actual[1, 2] = value
    assert differences(actual, torch.ones(2, 4), table_dim=2) == (math.inf, math.inf)


def test_empty_bags_must_be_exact_zeros() -> None:
    assert differences(torch.zeros(2, 4), torch.zeros(2, 4), table_dim=2) == (0.0, 0.0)
    assert differences(torch.full((2, 4), 1e-30), torch.zeros(2, 4), table_dim=2)[1] == math.inf
    assert differences(torch.zeros(0, 4), torch.zeros(0, 4), table_dim=2) == (0.0, 0.0)
    with pytest.raises(ValueError, match="different shapes"):
        differences(torch.zeros(2, 4), torch.zeros(4, 2), table_dim=2)


# ---- options and report --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"steps": 0}, "steps must be at least 1, got 0"),
        ({"batch": -1}, "batch must be at least 1, got -1"),
        ({"dim": 0}, "dim must be"),
        ({"pes": 0}, "pes must be"),
        ({"max_rows": 0}, "max_rows must be"),
        ({"seed": -1}, "seed must be 0 to 4294967295, got -1"),
        ({"dtype": "fp64"}, "dtype must be one of fp32, bf16, fp16, got 'fp64'"),
        ({"backend": "tpu"}, "backend must be auto, cuda or host, got 'tpu'"),
    ],
)
def test_options_are_checked(option: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        DemoOptions(**option)  # type: ignore[arg-type]


def pe_report(rank: int, **changes: object) -> PeReport:
    base = PeReport(
        rank=rank, backend="host", place="pid 7", hardware="CPU process", num_tables=13, rows=10, lookups=123_456,
        bytes_sent=1_770_000, steps=3, batch=512, row_cap=50_000, reference="gloo", largest_difference=1e-7,
        relative_difference=1e-8, fused=0.010, unfused=0.014, pooling=0.009, exchange=0.004,
    )  # fmt: skip
    return dataclasses.replace(base, **changes)


def test_hidden_share_uses_the_slowest_pe_and_stays_between_zero_and_one() -> None:
    assert report.exchange_hidden([pe_report(0), pe_report(1, pooling=0.008)]) == pytest.approx(0.75)
    assert report.exchange_hidden([pe_report(0, fused=0.002)]) == 1.0
    assert report.exchange_hidden([pe_report(0, fused=0.2)]) == 0.0
    assert report.exchange_hidden([pe_report(0, bytes_sent=0)]) is None


def test_the_report_fits_a_terminal_and_says_what_was_found() -> None:
    console = Console(width=80, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    report.print_report(
        [pe_report(0, place="pid 4194304"), pe_report(1, relative_difference=0.5)], DemoOptions(), console
    )
    text = console.export_text()
    assert "…" not in text
    assert "123K" in text
    assert "1.77MB" in text
    assert "WRONG" in text
    assert "75% of the exchange was hidden" in text
    assert "its times say nothing about GPUs" in " ".join(text.split())


def test_passing_needs_every_pe() -> None:
    assert report.passed([pe_report(0), pe_report(1)], dtype="fp32")
    assert not report.passed([pe_report(0), pe_report(1, relative_difference=2e-5)], dtype="fp32")
    assert report.passed([pe_report(0, relative_difference=2e-5)], dtype="bf16")
    assert not report.passed([pe_report(0, relative_difference=math.nan)], dtype="bf16")


# ---- the whole job -------------------------------------------------------------------------------------------------


def quiet() -> Console:
    return Console(width=100, record=True, file=open("/dev/null", "w"))


def test_synthetic_run_on_the_host_agrees_with_the_reference(tmp_path: Path) -> None:
    console, path = quiet(), tmp_path / "timeline.json"
    options = DemoOptions(steps=2, batch=37, dim=24, pes=3, backend="host", max_rows=500, trace=str(path))
    assert run.run_demo(options, console=console) == 0
    names = [event["name"] for event in json.loads(path.read_text())["traceEvents"] if event.get("cat") == "launch"]
    assert names.count("embedding_all_to_all") >= 3 * 3
    text = console.export_text()
    assert "correct" in text
    assert "3 x CPU process" in text


def test_run_on_a_file_with_a_short_last_batch(tmp_path: Path) -> None:
    path = write(tmp_path / "day_0.csv", [criteo_line(number, ",") for number in range(49)])
    console = quiet()
    options = DemoOptions(data=path, steps=9, batch=24, dim=8, dtype="bf16", pes=2, backend="host", max_rows=100)
    assert run.run_demo(options, console=console) == 0
    text = console.export_text()
    assert "day_0.csv" in text
    assert "3 steps" in text  # 24 + 24 + 1 samples: the last batch has fewer samples than there are PEs


def test_a_malformed_file_fails_before_any_pe_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import persistent_ops as po

    def no_launch(*_: object) -> None:
        raise AssertionError("PEs were started")

    monkeypatch.setattr(po, "launch", no_launch)
    path = write(tmp_path / "data", [criteo_line(0), "bad"])
    with pytest.raises(ValueError, match="line 2"):
        run.run_demo(DemoOptions(data=path, backend="host"), console=quiet())


def test_a_wrong_result_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Break one value on one PE: the demo must not pass."""
    import persistent_ops as po
    from persistent_ops.demo import pe

    def broken(*args: object, **kwargs: object) -> torch.Tensor:
        output = fused(*args, **kwargs).clone()  # type: ignore[arg-type]
        output[0, 5] += 0.01
        return output

    fused = po.embedding_all_to_all
    monkeypatch.setattr(po, "embedding_all_to_all", broken)
    options = DemoOptions(steps=1, batch=8, dim=16, pes=1, backend="host", max_rows=50)
    (answer,) = pe.run_pe(options)
    assert answer["largest_difference"] == pytest.approx(0.01, rel=1e-3)
    assert not report.passed([PeReport(**answer)], dtype="fp32")


@pytest.mark.skipif(sys.platform != "linux", reason="mpiexec of the wheel mpich is for Linux")
@pytest.mark.slow
def test_demo_under_mpiexec_is_one_pe_per_process(tmp_path: Path) -> None:
    import os
    import shutil
    import subprocess

    mpiexec = shutil.which("mpiexec.hydra", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    assert mpiexec is not None, "mpiexec.hydra comes with the extra 'dev'"
    command = [mpiexec, "-n", "2", sys.executable, "-m", "persistent_ops", "demo", "--backend", "host"]
    command += ["--steps", "1", "--batch", "16", "--dim", "8", "--max-rows", "50"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=Path(__file__).parents[2])
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("Fused embedding + All-to-All") == 1
    assert "2 x CPU process" in done.stdout


@pytest.mark.gpu
def test_demo_on_the_gpus_agrees_with_the_reference() -> None:
    console = quiet()
    pes = max(2, torch.cuda.device_count())
    options = DemoOptions(steps=2, batch=101, dim=64, pes=pes, backend="cuda", max_rows=1000)
    assert run.run_demo(options, console=console) == 0
    assert "correct" in console.export_text()

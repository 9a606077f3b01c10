"""The benchmark of the embedding's backward pass, small, on the host backend."""

from __future__ import annotations

import functools
import importlib
import pkgutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import benchmark_runs
import pytest
import torch

from persistent_ops.testing.fbgemm_embedding import why_no_fbgemm

SMALL = ("--configs", "B512_T32_P10")
NARROW = (*SMALL, "--wire-dtype", "bf16")
BITS16 = ("--configs", "B16384_T26_P20_D128_fp16")
OURS = ["fused", "fused_eager", "forward_backward", "sort", "kernel", "kernel_alone"]
METHODS = ["fused", "fused_eager", "unfused_torch", *OURS[2:], "exchange"]

pytestmark = pytest.mark.host


run, lines_of = (
    functools.partial(each, "embedding_backward") for each in (benchmark_runs.run, benchmark_runs.lines_of)
)


# ---- what is measured ------------------------------------------------------------------------------------------------


def test_measures_every_method_and_records_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*SMALL, "--pes", "2", "--zipf", "also", "--methods", ",".join(METHODS), "--out", str(tmp_path)) == 0
    times = lines_of(tmp_path, "time")
    assert [(line["distribution"], line["method"]) for line in times] == [
        (distribution, method) for distribution in ("uniform", "zipf") for method in METHODS
    ]
    (ceilings,) = lines_of(tmp_path, "ceilings")
    assert ceilings["update"] == max(rate for way, rate in ceilings["ways"].items() if way.startswith("update"))
    unique = {}
    for line in times:
        assert [len(each) for each in line["seconds_by_pe_and_round"]] == [3, 3]
        assert line["config"] == "B512_T32_P10" and line["optimizer"] == "rowwise_adagrad"
        unique[line["distribution"]] = line["unique_rows"]
        _check_limits(line, ceilings)
    assert unique["zipf"] < unique["uniform"] < times[0]["lookups"]
    for check in lines_of(tmp_path, "check"):
        assert check["failures"] == [] and check["sets"] == 3
        assert 0 < check["worst_share"] <= 1 and 0 < check["worst_share_of_baselines"] <= 1
    assert (tmp_path / "embedding_backward.png").read_bytes().startswith(b"\x89PNG")
    printed = capsys.readouterr().out
    assert "correct" in printed and "share" in printed and "hidden" in printed and "update" in printed
    assert "say nothing about GPUs" in printed


def _check_limits(line: dict[str, Any], ceilings: dict[str, Any]) -> None:
    shape, method = line["shape"], line["method"]
    output = shape["batch"] * shape["tables"] * shape["dim"] * 4
    rows, sent = line["unique_rows"] * shape["dim"] * 4, output / 2
    if method in ("sort", "exchange"):
        assert "limit_us" not in line and line["sent_bytes"] == (sent if method == "exchange" else 0)
        return
    # (3 - 2 / P) O + 2 U w + 8 N, and states: a sector of 32 bytes has the states of at most eight rows.
    backward = 2 * output + 2 * rows + 8 * line["lookups"]
    forward = rows + output + 8 * line["lookups"] if method == "forward_backward" else 0
    states = line["memory_bytes"] - backward - forward
    assert 2 * 4 * line["unique_rows"] <= states <= 2 * 32 * line["unique_rows"]
    assert line["sent_bytes"] == {"kernel_alone": 0, "forward_backward": 2 * sent}.get(method, sent)
    reading, sending = output + 8 * line["lookups"], sent / ceilings["store"]
    memory = reading / ceilings["read"] + (backward + states - reading) / ceilings["update"]
    limit = max(memory, sending if line["sent_bytes"] else 0)
    limit += max(forward / ceilings["read"], sending) if forward else 0
    assert line["limit_us"] == pytest.approx(limit * 1e6)


@pytest.mark.parametrize(
    ("arguments", "optimizers"), [(SMALL, "sgd,adagrad"), (BITS16, "adagrad,sgd"), (NARROW, "rowwise_adagrad,sgd")]
)
def test_every_optimizer_and_16_bits_are_right(arguments: tuple[str, ...], optimizers: str, tmp_path: Path) -> None:
    methods = ("--methods", "fused,unfused_torch,forward_backward,kernel_alone")
    assert run(*arguments, *methods, "--optimizers", optimizers, "--pes", "3", "--out", str(tmp_path)) == 0
    checks = lines_of(tmp_path, "check")
    assert [line["optimizer"] for line in checks] == optimizers.split(",")
    assert all(line["failures"] == [] for line in checks)
    # fp32 sums rounded to 16 bits can equal rounded fp64 sums; torch's sums are rounded to 16 bits before that.
    assert all(0 <= line["worst_share"] <= 1 and 0 < line["worst_share_of_baselines"] <= 1 for line in checks)


def test_fbgemm_agrees(tmp_path: Path) -> None:
    if why_no_fbgemm() is not None:
        pytest.skip("needs fbgemm_gpu (on CPUs: fbgemm-gpu-cpu)")
    methods = ["fused", "fbgemm", "fbgemm_eager", "fbgemm_step", "fbgemm_step_eager"]
    both = ("--configs", f"{SMALL[1]},{BITS16[1]}")
    for config, optimizers, pes in ((both, "rowwise_adagrad,sgd,adagrad", "2"), (NARROW, "rowwise_adagrad", "1")):
        arguments = (*config, "--optimizers", optimizers, "--methods", ",".join(methods))
        assert run(*arguments, "--pes", pes, "--out", str(tmp_path)) == 0
        assert sorted({line["method"] for line in lines_of(tmp_path, "time")}) == sorted(methods)
        assert all(0 < line["worst_share_of_baselines"] <= 1 for line in lines_of(tmp_path, "check"))


# ---- what is wrong ---------------------------------------------------------------------------------------------------


def _twice(right: Callable[..., None]) -> Callable[..., None]:
    def wrong(*arguments: Any, **options: Any) -> None:
        right(*arguments, **options)
        right(*arguments, **options)

    return wrong


def _nothing(right: Callable[..., None]) -> Callable[..., None]:
    return lambda *arguments, **options: None


def _other_row(right: Callable[..., None]) -> Callable[..., None]:
    """Change an element of a row that nobody looks up, if only in its last bit."""

    def wrong(self: Any, number: int) -> None:
        right(self, number)
        looked_up = torch.cat([drawn.indices.view(self._config.tables, -1)[1] for drawn in self._sets])
        (row,) = (torch.bincount(looked_up, minlength=self._config.rows) == 0).nonzero()[:1].flatten().tolist()
        self._tables[1].view(torch.int32)[row, 3] += 1

    return wrong


def _other_state(right: Callable[..., None]) -> Callable[..., None]:
    def wrong(self: Any, number: int) -> None:
        right(self, number)
        self.states[2].mul_(1 + 1e-4)

    return wrong


@pytest.mark.parametrize(
    ("place", "fault", "method", "complaint"),
    [
        ("backward_methods.OurBackward.backward", _twice, "fused", "fused, table"),
        ("backward_methods.OurBackward.backward", _nothing, "fused", "fused, table"),
        ("backward_methods.OurBackward.backward", _other_row, "fused", "fused, an untouched row of table 1"),
        ("backward_methods.OurBackward.backward", _other_state, "fused", "state of table 2"),
        ("backward_methods.OurBackward.forward_backward", _twice, "forward_backward", "forward_backward, other bits"),
        ("backward_methods.OurBackward.kernel_alone", _nothing, "kernel_alone", "kernel_alone, other bits"),
        ("backward_baselines.TorchUpdate._step", _twice, "unfused_torch", "unfused_torch, "),
    ],
)
def test_a_wrong_result_gives_exit_code_1_and_no_figure(
    place: str,
    fault: Callable[..., Any],
    method: str,
    complaint: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    place = f"embedding.{place}"
    monkeypatch.setattr(place, fault(pkgutil.resolve_name(place)))
    methods = ("--methods", ",".join(dict.fromkeys(["fused", method, "exchange"])))
    # A world of one PE runs in this process, where the patch is.
    assert run(*SMALL, "--pes", "1", *methods, "--out", str(tmp_path)) == 1
    (check,) = lines_of(tmp_path, "check")
    assert any(complaint in failure for failure in check["failures"]), check["failures"]
    assert all(failure.startswith(f"PE 0, {method}, ") for failure in check["failures"])
    label = importlib.import_module("embedding_backward").LABELS[method].format(collective="gloo")
    printed = capsys.readouterr().out
    assert "WRONG" in printed and f"│ {label} " not in printed


def test_what_of_fbgemm_cannot_be_captured_is_left_out_and_its_eager_calls_are_timed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, baselines = (
        importlib.import_module(name) for name in ("embedding_backward", "embedding.backward_baselines")
    )

    class Stand:
        """In the place of FBGEMM, which need not be installed."""

        stream = None

        def __init__(self, config: Any, optimizer: str, storage: torch.Tensor, sets: Any, *, is_gpu: bool) -> None:
            self.state = torch.zeros(len(storage))
            self._update = baselines.TorchUpdate(config, optimizer, storage, self.state, sets)

        def backward(self, received: torch.Tensor, number: int) -> None:
            self._update.update(received, number)

    def record(world: Any, calls: Any, stream: Any = None) -> Any:
        raise RuntimeError("operation not permitted when stream is capturing\nand more")

    monkeypatch.setattr(module, "Fbgemm", Stand)
    monkeypatch.setattr("embedding.options.why_no_fbgemm", lambda: None)
    monkeypatch.setattr(module, "record", record)
    assert run(*SMALL, "--pes", "1", "--methods", "fbgemm,fbgemm_eager", "--out", str(tmp_path)) == 0
    assert [line["method"] for line in lines_of(tmp_path, "time")] == ["fbgemm_eager"]
    (line,) = lines_of(tmp_path, "left_out")
    assert line["what"] == "B512_T32_P10, rowwise_adagrad, uniform, fbgemm"
    assert line["problem"] == "PE 0: FBGEMM was not captured: operation not permitted when stream is capturing"


def test_what_cannot_be_made_or_has_no_room_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = importlib.import_module("embedding_backward")

    def fail(*arguments: Any, **options: Any) -> None:
        raise NotImplementedError("no such table here")

    def no_room(self: Any, case: Any) -> str | None:
        return "needs more than there is" if case.optimizer == "adagrad" else None

    monkeypatch.setattr(module, "Fbgemm", fail)
    monkeypatch.setattr("embedding.options.why_no_fbgemm", lambda: None)
    monkeypatch.setattr(module.EmbeddingBackward, "_why_no_room", no_room)
    arguments = ("--optimizers", "adagrad,sgd", "--methods", "fused,fbgemm", "--pes", "1")
    assert run(*SMALL, *arguments, "--out", str(tmp_path)) == 0
    assert [(line["optimizer"], line["method"]) for line in lines_of(tmp_path, "time")] == [("sgd", "fused")]
    assert [(line["what"], line["problem"]) for line in lines_of(tmp_path, "left_out")] == [
        ("B512_T32_P10, adagrad, uniform", "PE 0: needs more than there is"),
        ("B512_T32_P10, sgd, uniform, FBGEMM", "PE 0: NotImplementedError: no such table here"),
    ]


def test_the_room_of_a_case_is_what_it_allocates() -> None:
    """With FBGEMM for a moment twice the tables; later the states of the operator and those that the peers share."""
    configs, inputs = map(importlib.import_module, ("embedding.configs", "embedding.backward_inputs"))
    config = configs.Config("small", 8, 2, 1, dim=16, rows=10_000)
    training = inputs.Training([config], torch.device("cpu"), 0)
    tables, buffers = 2 * 10_000 * 64, 6 * 8 * 2 * 64
    assert training.room(config, "sgd", ["fused"]) == tables + buffers
    assert training.room(config, "adagrad", ["fused", "fbgemm"]) == 4 * tables + buffers
    assert training.room(config, "rowwise_adagrad", ["fused"]) == tables + tables // 16 + buffers
    training.storage(config)
    assert training.room(config, "sgd", ["fused"]) == buffers


# ---- options, bounds, ceilings ---------------------------------------------------------------------------------------


def test_a_timeline_of_a_part(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Also of a kernel that is launched with what an earlier call has prepared."""
    arguments = ("--trace", "--methods", "kernel_alone,exchange", "--rounds", "2", "--pes", "1")
    assert run(*SMALL, *arguments, "--rows", "50", "--out", str(tmp_path)) == 0
    (line,) = lines_of(tmp_path, "timeline", of="timeline")
    # Two calls, and two replays of them.
    assert (line["method"], line["operator"], line["launches"]) == ("kernel_alone", "embedding_backward", 6)
    assert (tmp_path / "embedding_backward_kernel_alone_timeline.png").exists()
    assert "no figure: exchange launches none" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("name", "optimizer", "touched", "us", "by"),
    [
        ("B2048_T256_P10", "sgd", 0.9044, 2550, "HBM"),
        ("B2048_T256_P10", "adagrad", 0.9044, 4782, "HBM"),
        ("B65536_T7_P8_D128", "rowwise_adagrad", 0.1898, 509, "NVLink"),
    ],
)
def test_bounds_of_four_pes(name: str, optimizer: str, touched: float, us: float, by: str) -> None:
    """100,000 rows a table, uniform: the share of lookups that are rows is (1 - (1 - 1/R)^n) R / n."""
    configs, ceilings = map(importlib.import_module, ("embedding.backward_configs", "harness.ceilings"))
    config, _ = configs.CONFIGS[name]
    moved = configs.backward_moves(config, optimizer, 4, rows=touched * config.lookups, sectors=7 * 12_500)
    found = ceilings.Ceilings(read=4.35e12, store=346e9)
    seconds, which = found.limit_seconds(read_bytes=moved.read, updated_bytes=moved.updated, sent_bytes=moved.sent)
    assert seconds * 1e6 == pytest.approx(us, rel=2e-3) and which == by


@pytest.mark.parametrize("fault", ["none", "other word", "two rows", "nothing"])
def test_the_update_ceiling_notices_what_was_not_updated(fault: str) -> None:
    ceilings: Any = importlib.import_module("harness.ceilings")

    class World:
        rank = 0

        def check(self) -> None:
            pass

    buffer = torch.arange(4000 * 32, dtype=torch.int32)
    gaps = buffer.view(1000, 4, 32)  # rows of 128 bytes

    def update() -> None:
        if fault != "nothing":
            gaps[:, 2] += 1
        if fault == "two rows":
            gaps[5, 3] += 1
        if fault == "other word":
            gaps[999, 2, 31] -= 1

    check = (World(), buffer.view(torch.uint8), update, (1000, 128, 4), "update")
    if fault == "none":
        ceilings._check_updated(*check)
        return
    with pytest.raises(RuntimeError, match="does not find what its update should have left"):
        ceilings._check_updated(*check)

"""The DLRM training in a CUDA graph: replayed steps, their inputs, refused options; on GPUs also the losses."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import dlrm.training
import dlrm.workload
import dlrm_train
import numpy as np
import pytest
import torch
import torch.distributed as dist
from dlrm.batches import Batches
from dlrm.captured_step import EAGER_STEPS, CapturedStep, StepGraph
from dlrm.dense_optimizer import DENSE_OPTIMIZERS, make_capturable, optimizer_state
from dlrm.embedding import PlainEmbedding
from dlrm.model import DenseModel
from dlrm.options import Options
from dlrm.records import Span
from dlrm.schedule import Schedule
from dlrm.summary import problems
from dlrm.training import Plan, Training
from dlrm.workload import run_pe
from kept_pes import in_processes
from test_dlrm_train import one_process, options_of
from test_dlrm_training import ROWS, SIZES, log_of
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

import persistent_ops as po
from persistent_ops.runtime import world as po_world
from persistent_ops.testing.fbgemm_embedding import why_no_fbgemm

CPU = torch.device("cpu")
RATE = 0.02
SCHEDULE = Schedule(warmup_steps=5, decay_start=14, decay_steps=20)  # rates change in the steps of every kind

pytestmark = pytest.mark.filterwarnings("ignore:Sparse invariant checks")


class Again:
    """Stands for a graph on the host: a replay calls the program, where all is refused that a capture refuses.

    Args:
        events: to which "captured" is added, and "given back".
        program: see `StepGraph`.
    """

    def __init__(self, events: list[str], program: Callable[[], torch.Tensor]) -> None:
        self._events, self._program = events, program
        events.append("captured")

    def replay(self) -> torch.Tensor:
        with pytest.MonkeyPatch.context() as patch:
            if po.is_initialized():
                patch.setattr(torch.Tensor, "tolist", None)
                patch.setattr(po_world.current().workspace, "is_capturing", lambda: True)
            return self._program()

    def close(self) -> None:
        self._events.append("given back")


class SecondFails(Again):
    """Cannot be made where another one has been."""

    def __init__(self, events: list[str], program: Callable[[], torch.Tensor]) -> None:
        super().__init__(events, program)
        if events.count("captured") == 2:
            raise RuntimeError("operation not permitted when stream is capturing\nand more")


@contextlib.contextmanager
def stands_in(kind: type[Again] = Again) -> Iterator[list[str]]:
    """Let `Again`, or another one, stand for graphs; yields its events."""
    events: list[str] = []
    make = functools.partial(CapturedStep, make_graph=functools.partial(kind, events))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dlrm.training, "CapturedStep", make)
        yield events


# ---- batches and decisions -------------------------------------------------------------------------------------------


class NoGraph:
    """Has the methods of torch.cuda.CUDAGraph; a replay writes to where the captured program's result lies."""

    def __init__(self) -> None:
        self.result, self.is_reset = torch.zeros(()), False

    def replay(self) -> None:
        self.result += 1

    def reset(self) -> None:
        self.is_reset = True


def test_what_replays_return_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """And threads that read batches may allocate while a step is captured, on the stream of the eager ones."""
    graph, stream = NoGraph(), object()
    seen: list[Any] = []

    @contextlib.contextmanager
    def capture(of: NoGraph, **options: Any) -> Iterator[None]:
        seen.extend([of, options])
        yield

    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: graph)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    monkeypatch.setattr(torch.cuda, "graph", capture)
    captured = StepGraph(lambda: graph.result)
    assert seen == [graph, {"stream": stream, "capture_error_mode": "thread_local"}]
    shares = [captured.replay() for _ in range(3)]
    assert torch.stack(shares).tolist() == [1, 2, 3]
    captured.close()
    assert graph.is_reset
    with pytest.raises(RuntimeError, match="given back"):
        captured.replay()


def test_a_graph_whose_program_fails_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the traceback of its error keeps it, and what it has of NCCL's, beyond the process group's end."""
    graph = NoGraph()

    def program() -> torch.Tensor:
        raise ValueError("no step")

    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: graph)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: None)
    monkeypatch.setattr(torch.cuda, "graph", lambda *_, **__: contextlib.nullcontext())
    with pytest.raises(ValueError, match="no step"):
        StepGraph(program)
    assert graph.is_reset


# ---- optimizers ------------------------------------------------------------------------------------------------------


def _parameters(device: str) -> list[torch.nn.Parameter]:
    parameters = [torch.nn.Parameter(torch.arange(6.0, device=device).view(shape)) for shape in ((2, 3), (6,))]
    for each in parameters:
        each.grad = torch.ones_like(each) / 4
    return parameters


def test_adagrad_reads_nothing_of_the_device_on_the_host() -> None:
    """On a GPU that is a fake one: what waits for a number there raises, as it does in a capture."""

    def step(is_listwise: bool) -> None:
        with FakeTensorMode(allow_non_fake_inputs=True):
            optimizer = DENSE_OPTIMIZERS["adagrad"](_parameters("cuda"), lr=RATE)
            made = make_capturable("adagrad", _parameters("cuda"), RATE, CPU)
            for group, own in zip(optimizer.param_groups, made.param_groups, strict=True):
                group["lr"], group["foreach"] = torch.ones((), device="cuda"), own["foreach"] and is_listwise
            assert {state["step"].device.type for state in optimizer.state.values()} == {"cpu"}
            optimizer.step()

    step(is_listwise=True)
    with pytest.raises(DataDependentOutputException):
        step(is_listwise=False)


# ---- trainings whose graphs have a stand-in --------------------------------------------------------------------------


def training_of(
    *, optimizer: str = "adagrad", is_captured: bool = False, is_capturable: bool = True, **more: Any
) -> Training:
    """Return a training of 6 batches an epoch, the last of 13 samples."""
    log = log_of(813)
    model = DenseModel(SIZES, seed=1)
    kinds = {"sgd": torch.optim.SGD, "adagrad": functools.partial(torch.optim.Adagrad, eps=1e-8)}
    embedding = PlainEmbedding(ROWS, SIZES.dims, lambda each: kinds[optimizer](each, lr=0.05), seed=1)
    if is_capturable:
        made = make_capturable(optimizer, model.parameters(), RATE, CPU)
    else:
        made = DENSE_OPTIMIZERS[optimizer](model.parameters(), lr=RATE)
    batches = Batches(Span(log, 0, 313), batch_size=60, seed=0)
    evaluation = Batches(Span(log, 313, 500), batch_size=60)
    more = {"evaluation": evaluation, "schedule": SCHEDULE, **more}
    return Training(model, embedding, made, batches, is_captured=is_captured, **more)


def test_a_captured_training_has_the_losses_of_an_eager_one() -> None:
    """24 steps: 4 of them with smaller batches, 11 eager, 9 replays; evaluations and the schedule in between."""
    plan = Plan(epochs=4, evaluate_every=5)
    expected = training_of().run(plan)
    with stands_in() as events:
        training = training_of(is_captured=True)
        rates = [group["lr"] for group in training._optimizer.param_groups]
        found = training.run(plan)
    assert found.losses == expected.losses and found.evaluations == expected.evaluations
    assert len(set(found.losses)) == 24 and training.num_replays == 9 and events == ["captured"]
    (rate,) = rates
    assert training._optimizer.param_groups[0]["lr"] is rate, "which a graph reads"
    assert float(rate) == pytest.approx(SCHEDULE.rate(RATE, 23)) and float(rate) < RATE / 2
    assert training._embedding.optimizer.param_groups[0]["lr"] == pytest.approx(SCHEDULE.rate(0.05, 23))
    training.close()
    assert events == ["captured", "given back"]


def test_a_training_looks_at_what_launches_have_reported() -> None:
    steps: list[int] = []
    with stands_in():
        watch: Any = SimpleNamespace(launched=lambda step: None, wait=lambda: steps.append(training.step))
        training = training_of(is_captured=True, watch=watch)
        training.run(Plan(epochs=3, most_steps=14, losses_every=6))
    assert steps == [6, 12, 14]


def test_replays_alone_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a clock by which an eager step takes 100 s, a capture 1000, and a replay 1."""
    clock = SimpleNamespace(now=0.0)

    class Timed(Again):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            clock.now += 1000.0

        def replay(self) -> torch.Tensor:
            begin = clock.now
            result = super().replay()
            clock.now = begin + 1.0
            return result

    def learn(self: Training, *arguments: Any) -> torch.Tensor:
        clock.now += 100.0
        return learns(self, *arguments)

    learns = Training._learn
    monkeypatch.setattr(Training, "_learn", learn)
    monkeypatch.setattr(dlrm.training, "time", SimpleNamespace(perf_counter=lambda: clock.now))
    make = functools.partial(CapturedStep, make_graph=functools.partial(Timed, []))
    monkeypatch.setattr(dlrm.training, "CapturedStep", make)
    training = training_of(is_captured=True)
    training.run(Plan(epochs=4))  # steps 14 to 24 but for the smaller batches of steps 18 and 24; step 14 is captured
    assert training.num_replays == 9
    assert (training.timed_steps, training.seconds) == (8, 8.0)
    eager = training_of()
    eager.run(Plan(epochs=4))
    assert (eager.timed_steps, eager.seconds) == (14, 1400.0), "all but the first ten"


def _check_saved_rate(folder: Path, optimizer: str, step: int) -> None:
    """Rates are saved as they were chosen, not as float32 has them, in which they reach the device."""
    saved = torch.load(folder / (folder / "latest").read_text() / "training.pt", weights_only=True)
    (group,) = saved["optimizer"]["param_groups"]
    plain = {"sgd": torch.optim.SGD, "adagrad": torch.optim.Adagrad}[optimizer]([torch.zeros(1)])
    assert sorted(group) == sorted(optimizer_state(plain)["param_groups"][0])
    assert type(group["lr"]) is float and group["lr"] == SCHEDULE.rate(RATE, step) != float(torch.tensor(group["lr"]))


@pytest.mark.parametrize("optimizer", ["sgd", "adagrad"])
@pytest.mark.parametrize(("before", "behind"), [(True, True), (False, True), (True, False)])
def test_checkpoints_of_captured_and_eager_trainings_are_alike(
    tmp_path: Path, optimizer: str, before: bool, behind: bool
) -> None:
    """Rates return into their tensors, step counts include all steps, the choice of kernels stays."""
    plan = Plan(epochs=5)  # 25 whole batches and 5 smaller ones
    make = functools.partial(training_of, optimizer=optimizer)
    expected = make().run(plan).losses
    with stands_in() as events:
        first = make(is_captured=before, is_capturable=before)
        first.run(dataclasses.replace(plan, most_steps=16, folder=tmp_path))
        _check_saved_rate(tmp_path, optimizer, 15)
        second = make(is_captured=behind, is_capturable=behind)
        second.run(Plan(epochs=3, most_steps=15))  # a graph of a step that knows other states than are loaded
        group = second._optimizer.param_groups[0]
        had, fused = group["lr"], group["fused"]
        second.resume(tmp_path)
        group = second._optimizer.param_groups[0]
        assert events == ["captured"] * (before + behind) + ["given back"] * behind
        assert group["fused"] == fused and isinstance(group["lr"], torch.Tensor) == behind
        assert not behind or group["lr"] is had
        assert float(group["lr"]) == pytest.approx(SCHEDULE.rate(RATE, 15))
        counts = {float(state["step"]) for state in second._optimizer.state.values() if "step" in state}
        assert counts == (set() if optimizer == "sgd" else {16.0})
        second.save(tmp_path)
        _check_saved_rate(tmp_path, optimizer, 15)
        found = second.run(dataclasses.replace(plan, folder=tmp_path)).losses
        _check_saved_rate(tmp_path, optimizer, 29)
    assert first.num_replays == (3 if before else 0)
    assert events.count("captured") == before + 2 * behind
    assert found == pytest.approx(expected, rel=1e-5) and len(found) == 30


def test_replays_are_counted_in_checkpoints(tmp_path: Path) -> None:
    """A replay on a GPU runs no host code, so it does not change counters of the host."""
    with stands_in():
        training = training_of(is_captured=True)
        for state in training._optimizer.state.values():
            assert state["step"] == 0
        training.run(Plan(epochs=3, most_steps=14))
        for state in training._optimizer.state.values():
            state["step"] -= 3  # as after replays
        training.save(tmp_path)
    saved = torch.load(tmp_path / (tmp_path / "latest").read_text() / "training.pt", weights_only=True)
    assert {float(state["step"]) for state in saved["optimizer"]["state"].values()} == {14.0}


def test_what_is_loaded_is_on_the_host(tmp_path: Path) -> None:
    """From where the optimizer takes its sums to the device; it reads counts of steps on the host."""
    training = training_of()
    training.run(Plan(most_steps=2, folder=tmp_path))
    training.device = torch.device("cuda", 1)  # to which nothing can be brought here
    training.resume(tmp_path)
    state = optimizer_state(training._optimizer)["state"].values()
    assert {(float(each["step"]), each["step"].device.type) for each in state} == {(2.0, "cpu")}


# ---- with tables over the PEs ----------------------------------------------------------------------------------------


def run_on_host(
    options: Options, refuses_evaluations: bool = False, graph: type[Again] = Again
) -> tuple[dict[str, Any], list[str]]:
    """Be a PE of a training whose graphs have a stand-in; return its report, or error, and what happened in order."""

    def evaluate(_: Training) -> Any:
        raise ValueError("no evaluation")

    destroy = dist.destroy_process_group

    def gone(*arguments: Any) -> None:
        events.append("group destroyed")
        destroy(*arguments)

    with stands_in(graph) as events, pytest.MonkeyPatch.context() as patch:
        patch.setattr(dlrm.workload, "check_machine", lambda **_: None)
        patch.setattr(dlrm.workload, "own_stream", lambda _: contextlib.nullcontext())
        patch.setattr(dist, "destroy_process_group", gone)
        if refuses_evaluations:
            patch.setattr(Training, "evaluate", evaluate)
        try:
            return run_pe(options), events
        except ValueError as error:
            return {"error": str(error)}, events


@pytest.mark.host
@pytest.mark.parametrize(
    ("world", "changes"),
    [
        (2, {"replicated_rows": 20}),
        (3, {"interaction": "dot", "optimizer": "sgd", "precision": "bf16"}),
        (1, {"replicated_rows": 10_000}),
    ],
    ids=["replicated", "dot", "alone"],
)
def test_steps_do_nothing_that_a_capture_refuses(world: int, changes: dict[str, Any], tmp_path: Path) -> None:
    """10 whole batches an epoch and a smaller one: with 25 steps 11 are eager, 2 smaller, and 12 replays."""
    rates = {"learning_rate": 0.005, "table_learning_rate": 0.02}
    options = options_of(tmp_path, steps=25, epochs=3, schedule=SCHEDULE, **rates, **changes)
    found = in_processes(run_on_host, world, dataclasses.replace(options, is_captured=True), timeout=200)
    expected = one_process(options, precision=options.dense_dtype, schedule=SCHEDULE)
    expected.run(Plan(epochs=3, most_steps=25))
    tolerance = 2e-5 if options.precision == "fp32" else 2e-2
    for report, events in found:
        assert report["num_replays"] == 12
        assert report["losses"] == pytest.approx(expected.history.losses, rel=tolerance)
        assert events == ["captured", "given back", "group destroyed"], "NCCL's part must not outlive its group"


def gappy_text(folder: Path) -> dict[str, Any]:
    """Write a log of 711 samples, every one of another number of lookups than those beside it; return its options."""
    drawer = np.random.default_rng(7)
    lines = []
    for number in range(711):
        dense = [str(value) for value in drawer.integers(0, 9, 13)]
        drawn = drawer.integers(0, 99, 26)
        ids = [f"{value:x}" if column % 7 >= number % 6 else "" for column, value in enumerate(drawn)]
        lines.append("\t".join([str(drawer.integers(2)), *dense, *ids]))
    path = folder / "log.txt"
    path.write_text("\n".join(lines) + "\n")
    return {"format": "criteo", "data": str(path), "evaluation_samples": 50, "max_rows": 40, "replicated_rows": 20}


@pytest.mark.host
def test_batches_may_have_fewer_lookups_than_there_is_room_for(tmp_path: Path) -> None:
    options = options_of(tmp_path, steps=16, epochs=2, **gappy_text(tmp_path))
    expected = in_processes(run_pe, 2, options, timeout=200)[0]
    for report, _ in in_processes(run_on_host, 2, dataclasses.replace(options, is_captured=True), timeout=200):
        assert report["num_replays"] == 4 and len(set(report["losses"])) == 16
        assert report["losses"] == pytest.approx(expected["losses"], rel=1e-5)
        assert report["evaluations"][-1]["loss"] == pytest.approx(expected["evaluations"][-1]["loss"], rel=1e-4)


@pytest.mark.host
def test_a_training_that_ends_with_an_error_gives_its_graph_back(tmp_path: Path) -> None:
    options = options_of(tmp_path, steps=20, evaluate_every=15, is_captured=True)
    ((report, events),) = in_processes(run_on_host, 1, options, True, timeout=200)
    assert report == {"error": "no evaluation"} and events == ["captured", "given back", "group destroyed"]


@pytest.mark.host
@pytest.mark.parametrize("optimizer", ["adagrad", "rowwise_adagrad", "sgd"])
def test_a_comparison_of_replays(optimizer: str, tmp_path: Path) -> None:
    """Of FBGEMM's tables, where it is installed; torch's wait for a number on the host."""
    options = options_of(tmp_path, compare_steps=21, replicated_rows=20, optimizer=optimizer, is_captured=True)
    fbgemm = "FBGEMM + gloo"
    for report, events in in_processes(run_on_host, 2, options, timeout=200):
        compared, ways = report["compared"], {"persistent_ops"} | ({fbgemm} if why_no_fbgemm() is None else set())
        assert set(compared["losses"]) == set(compared["seconds"]) == ways and not problems(report)
        assert compared["steps"] == 20 and all(len(set(each)) == 15 for each in compared["losses"].values())
        assert compared["left_out"][0].startswith("torch + gloo is left out: PE 0: its optimizer asks on the host")
        captured, given_back = ["captured"] * len(ways), ["given back"] * len(ways)
        assert events == [*captured, *given_back, "group destroyed"]


@pytest.mark.host
@pytest.mark.skipif(why_no_fbgemm() is not None, reason="needs fbgemm_gpu (on CPUs: fbgemm-gpu-cpu)")
def test_a_comparison_goes_on_without_what_cannot_be_captured(tmp_path: Path) -> None:
    options = options_of(tmp_path, compare_steps=1, is_captured=True)
    ((report, events),) = in_processes(run_on_host, 1, options, False, SecondFails, timeout=200)
    assert list(report["compared"]["losses"]) == ["persistent_ops"] and report["compared"]["steps"] == 4
    assert report["compared"]["left_out"][1] == (
        "FBGEMM + gloo is left out: PE 0: operation not permitted when stream is capturing"
    )
    assert events == ["captured", "captured", "given back", "group destroyed"]


@pytest.mark.host
def test_a_comparison_of_replays_wants_as_many_lookups_of_every_sample(tmp_path: Path) -> None:
    options = options_of(tmp_path, compare_steps=1, is_captured=True, **gappy_text(tmp_path))
    for report, _ in in_processes(run_on_host, 2, options, timeout=200):
        left_out = report["compared"]["left_out"]
        assert set(report["compared"]["losses"]) == {"persistent_ops"}
        assert [line.split(" is left out: ")[0] for line in left_out] == ["torch + gloo", "FBGEMM + gloo"]
        assert "samples differ in that" in left_out[1] or why_no_fbgemm() is not None


@pytest.mark.host
def test_a_comparison_of_replays_wants_a_whole_batch(tmp_path: Path) -> None:
    options = options_of(tmp_path, compare_steps=1, batch=700, is_captured=True)
    ((report, events),) = in_processes(run_on_host, 1, options, timeout=200)
    assert report == {"error": "--graph: expected a whole batch of 700 samples, got fewer; pass a smaller --batch"}
    assert events == ["group destroyed"]


# ---- messages and refused options ------------------------------------------------------------------------------------


REFUSED = {
    "--graph --backend host": (8, "--graph: expected a GPU, as the host backend has no CUDA graphs"),
    "--graph": (0, "--graph: expected a GPU, as the host backend has no CUDA graphs"),
    "--graph --pes 3": (2, "--graph: expected a GPU for each PE, as gloo's sums cannot be captured"),
    "--graph --compare 5 --warmup-steps 2": (8, "--graph: FBGEMM reads its rate on the host"),
}


@pytest.mark.parametrize("arguments", REFUSED)
def test_what_cannot_be_captured_is_refused(
    arguments: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Before a PE is started."""
    num_gpus, message = REFUSED[arguments]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_gpus)
    monkeypatch.setattr(po, "launch", None)
    assert dlrm_train.main([*arguments.split(), "--output", str(tmp_path)]) == 2
    told = capsys.readouterr().err
    assert told.startswith(f"error: {message}") and told.count("\n") == 1


@pytest.mark.host
def test_a_launcher_s_pe_on_the_host_refuses_too(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="--graph: expected a GPU, as the host backend"):
        in_processes(run_pe, 1, options_of(tmp_path, is_captured=True), timeout=200)


# ---- on GPUs ---------------------------------------------------------------------------------------------------------


def run_on_gpu(options: Options) -> dict[str, Any]:
    """Be a PE of a training."""
    os.environ["NCCL_NVLS_ENABLE"] = "0"  # as the command does
    return run_pe(options)


def on_gpus(output: Path, backend: str, **changes: Any) -> Options:
    """Return options of 25 steps, at rates at which a rounding does not grow much."""
    rates = {"learning_rate": 0.005, "table_learning_rate": 0.02}
    return options_of(
        output, backend=backend, steps=25, epochs=3, schedule=SCHEDULE, heap_gib=0.25, **{**rates, **changes}
    )


def _agree(world: int, folder: Path, backend: str, kind: dict[str, Any]) -> None:
    """Compare a captured training with an eager one."""
    changes = gappy_text(folder) if kind.get("format") == "criteo" else kind
    options = on_gpus(folder / "eager", backend, **changes)
    expected = in_processes(run_on_gpu, world, options, timeout=250)
    captured = dataclasses.replace(options, is_captured=True, output=str(folder / "captured"))
    found = in_processes(run_on_gpu, world, captured, timeout=250)
    tolerance = 1e-4 if options.precision == "fp32" else 2e-2
    for one, other in zip(found, expected, strict=True):
        assert (one["num_replays"], other["num_replays"]) == (12, 0)
        assert len(one["losses"]) == len(set(one["losses"])) == 25
        assert one["losses"] == pytest.approx(other["losses"], rel=tolerance)
        for mine, wanted in zip(one["evaluations"], other["evaluations"], strict=True):
            assert mine["loss"] == pytest.approx(wanted["loss"], rel=tolerance)
            assert mine["auc"] == pytest.approx(wanted["auc"], abs=1e-2)


KINDS: dict[str, dict[str, Any]] = {
    "adagrad": {},
    "replicated": {"replicated_rows": 20, "optimizer": "rowwise_adagrad"},
    "dot": {"interaction": "dot", "optimizer": "sgd", "replicated_rows": 10_000},
    "bf16": {"precision": "bf16"},
    "missing lookups": {"format": "criteo"},
}


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_replays_have_the_losses_of_eager_steps(backend: str, kind: str, tmp_path: Path) -> None:
    _agree(1, tmp_path, backend, KINDS[kind])


@pytest.mark.gpu
def test_a_captured_training_is_resumed(backend: str, tmp_path: Path) -> None:
    """From another one's checkpoint; counts of steps and rates of both are where a capture wants them."""
    options = on_gpus(tmp_path / "eager", backend, evaluate_every=0)
    (expected,) = in_processes(run_on_gpu, 1, options, timeout=250)
    captured = dataclasses.replace(options, is_captured=True, output=str(tmp_path / "captured"))
    (first,) = in_processes(run_on_gpu, 1, dataclasses.replace(captured, steps=13), timeout=250)
    (second,) = in_processes(run_on_gpu, 1, dataclasses.replace(captured, is_resumed=True), timeout=250)
    assert first["num_replays"] == 1 and second["first_step"] == 13
    assert second["num_replays"] == 0 and second["losses"] == pytest.approx(expected["losses"], rel=1e-4)
    again = dataclasses.replace(captured, is_resumed=True, steps=40, epochs=4)
    (third,) = in_processes(run_on_gpu, 1, again, timeout=250)
    assert third["first_step"] == 25 and third["num_replays"] == 40 - 25 - 1 - EAGER_STEPS
    eager = dataclasses.replace(options, is_resumed=True, steps=40, epochs=4)
    (fourth,) = in_processes(run_on_gpu, 1, eager, timeout=250)
    assert third["losses"] == pytest.approx(fourth["losses"], rel=1e-3)


@pytest.mark.gpu
@pytest.mark.apart
@pytest.mark.parametrize("kind", KINDS)
def test_replays_on_two_gpus(backend: str, kind: str, tmp_path: Path) -> None:
    """With NCCL's sums of the dense part in the graph."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    _agree(2, tmp_path, backend, KINDS[kind])


@pytest.mark.gpu
def test_pes_that_share_a_gpu_refuse(backend: str, tmp_path: Path) -> None:
    world = torch.cuda.device_count() * 2
    with pytest.raises(AssertionError, match="--graph: expected a GPU for each PE"):
        in_processes(run_on_gpu, world, on_gpus(tmp_path, backend, is_captured=True), timeout=250)

"""The training loop does the same as plain torch, and continues after an interruption."""

from __future__ import annotations

import dataclasses
import os
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from dlrm import checkpoint
from dlrm.batches import Batches
from dlrm.click_log import ClickLog
from dlrm.embedding import PlainEmbedding
from dlrm.metrics import auroc
from dlrm.model import DenseModel, Sizes
from dlrm.records import Span
from dlrm.training import Plan, Training
from torch.nn import functional as F

ROWS, HOTNESS = (40, 3, 60, 20), (1, 1, 3, 2)
SIZES = Sizes(dims=(8, 8, 8, 8), num_dense=4, bottom=(32, 8), top=(32, 16, 1), cross_layers=2, cross_rank=16)
CPU = torch.device("cpu")

pytestmark = pytest.mark.filterwarnings("ignore:Sparse invariant checks")


def log_of(num_samples: int) -> ClickLog:
    return ClickLog(num_samples, num_rows=ROWS, hotness=HOTNESS, seed=3, num_dense=SIZES.num_dense)


def adagrad(rate: float) -> Any:
    return lambda parameters: torch.optim.Adagrad(parameters, lr=rate, eps=1e-8)


def training_of(
    num_train: int,
    num_evaluate: int,
    batch_size: int,
    *,
    embedding: Any = None,
    optimizer: Any = None,
    sizes: Sizes = SIZES,
    seed: int = 0,
    **options: Any,
) -> Training:
    log = log_of(num_train + num_evaluate)
    model = DenseModel(sizes, seed=1)
    embedding = embedding or PlainEmbedding(ROWS, sizes.dims, adagrad(0.05), seed=1)
    optimizer = (optimizer or adagrad(0.02))(model.parameters())
    own = {"rank": dist.get_rank(), "world_size": dist.get_world_size()} if dist.is_initialized() else {}
    batches = Batches(Span(log, 0, num_train), batch_size=batch_size, seed=seed, **own)
    evaluation = Batches(Span(log, num_train, num_evaluate), batch_size=4096, **own) if num_evaluate else None
    return Training(model, embedding, optimizer, batches, evaluation=evaluation, **options)


# ---- against plain torch -------------------------------------------------------------------------------------------


def reference_losses(num_steps: int, num_train: int, batch_size: int, table_rate: float) -> list[float]:
    """Train in float64 with sums of rows, the loss's mean, dense gradients, and Adagrad written out."""
    log = log_of(num_train)
    model = DenseModel(SIZES, seed=1).double()
    tables = [
        each.detach().double().requires_grad_()
        for each in PlainEmbedding(ROWS, SIZES.dims, adagrad(0), seed=1).parameters()
    ]
    rates = [(each, 0.02) for each in model.parameters()] + [(each, table_rate) for each in tables]
    sums = [torch.zeros_like(each) for each, _ in rates]
    batches = Batches(log, batch_size=batch_size, seed=0)
    losses = []
    for step in range(num_steps):
        records = log.read(batches.numbers(*divmod(step, batches.num_batches)))
        columns = torch.from_numpy(records.rows).split(HOTNESS, dim=1)
        pooled = [table[own].sum(dim=1) for table, own in zip(tables, columns, strict=True)]
        logits = model(torch.from_numpy(records.dense).double(), torch.cat(pooled, dim=1))
        clicks = torch.from_numpy(records.labels).double()
        loss = -(clicks * F.logsigmoid(logits) + (1 - clicks) * F.logsigmoid(-logits)).mean()
        for each, _ in rates:
            each.grad = None
        loss.backward()
        losses.append(float(loss.detach()))
        with torch.no_grad():
            for (each, rate), total in zip(rates, sums, strict=True):
                assert each.grad is not None
                total += each.grad.square()
                each -= rate * each.grad / (total.sqrt() + 1e-8)
    return losses


def test_losses_are_those_of_plain_torch() -> None:
    training = training_of(500, 0, 64)
    found = training.run(Plan(epochs=3)).losses  # 8 batches an epoch, the last one of 52 samples
    expected = reference_losses(24, 500, 64, 0.05)
    assert len(found) == 24 and expected[-1] < 0.95 * expected[0]
    assert found == pytest.approx(expected, rel=3e-5)


def test_an_evaluation_is_of_all_samples_and_changes_nothing() -> None:
    training = training_of(300, 5000, 64)
    model, embedding = training._model, training._embedding
    found = training.evaluate()
    assert model.training and embedding.training and found["step"] == 0
    records = Batches(Span(log_of(5300), 300, 5000), batch_size=5000).read(0, 0)
    with torch.no_grad():
        logits = model(records.dense, embedding((records.values, records.lengths)))
    assert found["auc"] == pytest.approx(auroc(logits, records.labels), abs=1e-6)
    expected = F.binary_cross_entropy_with_logits(logits.double(), records.labels.double())
    assert found["loss"] == pytest.approx(float(expected), rel=1e-6)
    plain = training_of(300, 0, 64).run(Plan(epochs=2))
    history = training.run(Plan(epochs=2, evaluate_every=3))
    assert [each["step"] for each in history.evaluations] == [3, 6, 9, 10]
    assert history.losses == plain.losses and not plain.evaluations


def test_the_plan() -> None:
    training = training_of(300, 0, 64)  # 5 batches an epoch
    seen: list[tuple[int, float]] = []
    history = training.run(Plan(epochs=9, most_steps=7, losses_every=3), lambda *each: seen.append(each))
    assert training.step == len(history.losses) == 7 and training.position == (1, 2)
    assert seen == [(step, history.losses[step - 1]) for step in (3, 6, 7)]
    training.run(Plan(epochs=2))
    assert len(history.losses) == 10 and training.position == (2, 0)
    with pytest.raises(ValueError, match="the plan ends with step 10, and 10 have been done"):
        training.run(Plan(epochs=2))
    with pytest.raises(ValueError, match="no samples to evaluate with"):
        training.evaluate()


def test_a_training_that_diverges_says_so() -> None:
    training = training_of(300, 0, 64, optimizer=lambda parameters: torch.optim.SGD(parameters, lr=1e20))
    with pytest.raises(ValueError, match=r"the loss of step \d+ is (nan|inf): the training has diverged"):
        training.run(Plan(epochs=4))


# ---- checkpoints ---------------------------------------------------------------------------------------------------


def state_of(training: Training) -> list[torch.Tensor]:
    """Return all tensors of a training."""

    def tensors(value: Any) -> list[torch.Tensor]:
        if isinstance(value, torch.Tensor):
            return [value.clone()]
        values = value.values() if isinstance(value, dict) else value if isinstance(value, list) else []
        return [each for one in values for each in tensors(one)]

    parts = (training._model, training._optimizer, training._embedding, training._embedding.optimizer)
    return [each for part in parts for each in tensors(part.state_dict())]


ADAM = {"optimizer": lambda parameters: torch.optim.Adam(parameters, lr=0.01)}  # whose step count must come back too


@pytest.mark.parametrize("steps", [7, 10, 12])  # within an epoch, at its end, and another epoch's
@pytest.mark.parametrize("options", [{}, ADAM], ids=["adagrad", "adam"])
def test_a_resumed_training_has_the_bits_of_one_that_was_not_interrupted(
    tmp_path: Path, steps: int, options: dict[str, Any]
) -> None:
    plan = Plan(epochs=3, evaluate_every=4)  # 5 batches an epoch
    whole = training_of(300, 500, 64, **options)
    expected = whole.run(plan)
    first = training_of(300, 500, 64, **options)
    first.run(dataclasses.replace(plan, most_steps=steps, folder=tmp_path))
    second = training_of(300, 500, 64, **options)
    second.resume(tmp_path)
    assert (second.step, second.position) == (steps, divmod(steps, 5))
    assert all(torch.equal(a, b) for a, b in zip(state_of(second), state_of(first), strict=True))
    found = second.run(dataclasses.replace(plan, folder=tmp_path))
    assert found.losses == expected.losses
    assert found.evaluations[-1] == expected.evaluations[-1]
    assert len(state_of(whole)) > 30
    assert all(torch.equal(a, b) for a, b in zip(state_of(second), state_of(whole), strict=True))


def test_the_folder_has_one_checkpoint_and_an_interrupted_one_does_not_count(tmp_path: Path) -> None:
    training = training_of(300, 0, 64)
    training.run(Plan(epochs=2, checkpoint_every=3, folder=tmp_path))
    (only,) = tmp_path.glob("step-*")
    assert only.name.startswith("step-10.") and (tmp_path / "latest").read_text() == only.name
    assert not (tmp_path / "latest.writing").exists() and not list(tmp_path.glob("*.part"))

    class Interrupted(PlainEmbedding):
        def state_dict(self, *args: Any, **kwargs: Any) -> Any:
            raise KeyboardInterrupt

    other = training_of(300, 0, 64, embedding=Interrupted(ROWS, SIZES.dims, adagrad(0.05)))
    with pytest.raises(KeyboardInterrupt):
        other.run(Plan(most_steps=1, folder=tmp_path))
    assert (tmp_path / "latest.writing").exists()
    again = training_of(300, 0, 64)
    again.resume(tmp_path)
    assert again.step == 10
    again.save(tmp_path)  # the same step again
    (only,) = tmp_path.glob("step-*")
    assert only.name.startswith("step-10.") and not (tmp_path / "latest.writing").exists()


def test_what_others_keep_in_the_folder_stays(tmp_path: Path) -> None:
    names = ("step-by-step", "step-10", "step-10.notahash", "step-3.0123abcd", "writing")
    for name in names:
        (tmp_path / name).mkdir()
        (tmp_path / name / "notes.txt").touch()
    training_of(300, 0, 64).run(Plan(epochs=2, checkpoint_every=3, folder=tmp_path))
    assert all((tmp_path / name / "notes.txt").exists() for name in names)
    assert len(list(tmp_path.iterdir())) == len(names) + 2


def test_checkpoints_that_do_not_do_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="there is no checkpoint in"):
        training_of(300, 0, 64).resume(tmp_path)
    training_of(300, 0, 64, identity={"rate": 0.1}).run(Plan(most_steps=2, folder=tmp_path))
    training_of(300, 0, 64, identity={"rate": 0.1}).resume(tmp_path)
    for options, message in (
        ({"identity": {"rate": 0.2}}, "is of another training: rate 0.1, not 0.2"),
        ({"seed": 1}, "is of another training: batches"),
        ({"batch_size": 60}, "is of another training: batches"),
        ({"num_train": 301}, "is of another training: batches"),
        (
            {"identity": {"rate": 0.1}, "sizes": dataclasses.replace(SIZES, interaction="dot")},
            "another training: sizes",
        ),
        (
            {"identity": {"rate": 0.1}, "embedding": PlainEmbedding((41, 3, 60, 20), SIZES.dims, adagrad(0.05))},
            "embedding cannot be loaded into these tables",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            training_of(**{"num_train": 300, "num_evaluate": 0, "batch_size": 64, **options}).resume(tmp_path)
    (folder,) = tmp_path.glob("step-*")
    (folder / "training.pt").write_bytes(b"nothing")
    with pytest.raises(ValueError, match="is no checkpoint of this program"):
        training_of(300, 0, 64).resume(tmp_path)


class MakesFolder:
    """Whoever unpickles it makes a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self._folder),)


def _damage(training: Training, step: Path, kind: str, made: Path) -> None:
    """Change a checkpoint so that whoever trusts it runs code, or reads elsewhere."""
    metadata = step / "embedding" / ".metadata"
    if kind == "metadata":
        metadata.write_bytes(pickle.dumps(MakesFolder(made)))
    elif kind == "value":
        tables = checkpoint._tables(training._embedding)
        tables["optimizer"]["param_groups"][0]["lr"] = MakesFolder(made)
        shutil.rmtree(step / "embedding")
        with checkpoint._quietly_alone():
            dcp.save(tables, checkpoint_id=step / "embedding", no_dist=True)
    else:
        outside = step.parent.parent / "outside.distcp"
        known = pickle.loads(metadata.read_bytes())
        for stored in known.storage_data.values():
            shutil.copy(step / "embedding" / stored.relative_path, outside)
            stored.relative_path = f"../../../{outside.name}"
        metadata.write_bytes(pickle.dumps(known))


@pytest.mark.parametrize("kind", ["metadata", "value", "path"])
def test_nothing_in_a_checkpoint_is_run_or_followed(tmp_path: Path, kind: str) -> None:
    folder, made = tmp_path / "out", tmp_path / "made"
    training = training_of(300, 0, 64)
    training.run(Plan(most_steps=2, folder=folder))
    (step,) = folder.glob("step-*")
    _damage(training, step, kind, made)
    with pytest.raises(ValueError, match="embedding cannot be loaded into these tables") as raised:
        training_of(300, 0, 64).resume(folder)
    assert not made.exists()
    if kind == "path":
        assert "outside.distcp', which is no file of its folder" in str(raised.value)
    else:
        assert f"{os.mkdir.__module__}.mkdir" in str(raised.value)


def test_a_checkpoint_is_on_the_disk_before_it_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    training = training_of(300, 0, 64)
    training.run(Plan(most_steps=2, folder=tmp_path))
    done: list[tuple[str, str]] = []

    def noted(module: Any, name: str) -> None:
        call = getattr(module, name)

        def run(what: Any, *rest: Any, **options: Any) -> Any:
            path = os.readlink(f"/proc/self/fd/{what}") if isinstance(what, int) else os.fspath(what)
            done.append((name, os.path.relpath(path, tmp_path)))
            return call(what, *rest, **options)

        monkeypatch.setattr(module, name, run)

    for module, name in ((os, "fsync"), (os, "replace"), (Path, "rename"), (shutil, "rmtree")):
        noted(module, name)
    training.save(tmp_path)
    renamed = done.index(("rename", "latest.writing"))
    parts = ("training.pt", "embedding/__0_0.distcp", "embedding/.metadata.tmp", "embedding", ".")
    assert {("fsync", os.path.normpath(f"latest.writing/{part}")) for part in parts} <= set(done[:renamed])
    (old,) = [path for name, path in done if name == "rmtree" and path.startswith("step-")]
    later = [("fsync", "."), ("fsync", "latest.part"), ("replace", "latest.part"), ("fsync", "."), ("rmtree", old)]
    assert done[renamed + 1 :] == later

"""Embedding collections in a training: DLRM against one process, schedulers, clamped gradients, loops."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from kept_pes import in_processes
from sharded_embedding_cases import CASES, Reference, batch_of, gradient_of
from test_dlrm_training import HOTNESS, ROWS, SIZES, Plan, training_of
from worlds import error_of, in_world, world_of

import persistent_ops as po
from persistent_ops.nn import TableConfig, TablePlacement
from persistent_ops.runtime import world as po_world

pytestmark = pytest.mark.filterwarnings("ignore:Sparse invariant checks")

# ---- a DLRM ----------------------------------------------------------------------------------------------------------


def _dlrm_tables() -> po.nn.ShardedEmbeddingBagCollection:
    return po.nn.ShardedEmbeddingBagCollection(
        [TableConfig(f"t{n}", rows, SIZES.dims[n], [f"f{n}"]) for n, rows in enumerate(ROWS)],
        max_batch=4096,
        lookups_per_sample={f"f{n}": hotness for n, hotness in enumerate(HOTNESS)},
        placement={"t0": "replicated", "t2": TablePlacement("column_wise", 2)},
        optimizer="adagrad",
        lr=0.05,
        seed=1,
    )


def _dlrm(folder: str, resumes: bool) -> tuple[list[float], list[dict[str, float]], int]:
    with world_of("host", "gloo"):
        training = training_of(301, 900, 60, embedding=_dlrm_tables())
        if resumes:
            training.resume(Path(folder))
        history = training.run(Plan(epochs=2 if resumes else 1, evaluate_every=4, folder=Path(folder)))
        po.check()
        return history.losses, history.evaluations, training.step


@pytest.mark.host
def test_a_dlrm_has_the_losses_of_one_process(tmp_path: Path) -> None:
    """One epoch on three PEs, some of which have none of the last batch's sample; another one on two."""
    history = training_of(301, 900, 60).run(Plan(epochs=2, evaluate_every=4))
    assert {each[2] for each in in_processes(_dlrm, 3, str(tmp_path), False, timeout=200)} == {6}
    for losses, evaluations, steps in in_processes(_dlrm, 2, str(tmp_path), True, timeout=200):
        assert steps == 12 and losses == pytest.approx(history.losses, rel=2e-5)
        by_step = {each["step"]: each for each in evaluations}
        for wanted in history.evaluations:
            assert by_step[wanted["step"]] == pytest.approx(wanted, rel=5e-5)


# ---- rates and scales ------------------------------------------------------------------------------------------------

_SHARED = next(case for case in CASES if case.name == "slices")


def _wrong_rates() -> list[tuple[str, str]]:
    module, told = _SHARED.make(), []
    for rate in (torch.tensor(0.5), None, "0.1", torch.ones(2)):
        module.optimizer.param_groups[0]["lr"] = rate
        told.append(error_of(module.optimizer.step)[:2])
    return told


def test_rates_that_are_none_are_refused() -> None:
    """Also a wrong rate that follows a rate in a tensor."""
    (told,) = in_world(_wrong_rates, 1, "host")
    assert told[0][0] == "" and told[1] == ("TypeError", "lr: expected a number, got None")
    assert told[2] == ("TypeError", "lr: expected a number, got '0.1'")
    assert told[3] == ("ValueError", "lr: expected a tensor of one element, got shape [2]")


def _scheduled(zeroes_behind: bool, as_tensor: bool) -> list[str]:
    """Train under a scheduler, with the gradients' mean over the PEs; return the tables that differ from torch's."""
    module, reference = _SHARED.make(), Reference(_SHARED)
    kinds = [torch.optim.lr_scheduler.ExponentialLR(each, 0.5) for each in (module.optimizer, reference.optimizer)]
    if as_tensor:
        module.optimizer.param_groups[0]["lr"] = torch.tensor(0.5)
    for step in range(5):
        if not zeroes_behind:
            module.optimizer.zero_grad()
        batch = batch_of(_SHARED, po.rank(), step)
        result = module(batch.values.to(po.device()), batch.lengths.to(po.device()))
        result.backward(gradient_of(_SHARED, po.rank(), step).to(po.device()))
        module.optimizer.step()
        if zeroes_behind:
            module.optimizer.zero_grad()
        reference.step(po.world_size(), step, 1 / po.world_size())
        for kind in kinds:
            kind.step()
    po.check()
    wrong = []
    for name, table in reference.tables.items():
        for (_, column), block in module.state_dict()[f"embedding_bags.{name}.weight"].shards:
            wanted = table.detach()[:, column : column + block.shape[1]]
            if not torch.allclose(block.cpu(), wanted, rtol=2e-5, atol=2e-5):
                wrong.append(name)
    return wrong


@pytest.mark.parametrize(("zeroes_behind", "as_tensor"), [(False, False), (True, False), (True, True)])
def test_rates_are_those_of_torch_under_its_schedulers(backend: str, zeroes_behind: bool, as_tensor: bool) -> None:
    assert in_world(_scheduled, 3, backend, zeroes_behind, as_tensor) == [[]] * 3


def _rates_in_captures() -> dict[str, list[list[float]]]:
    """The rates that update tables after changes of the rate, in captures and between them."""
    tables = [TableConfig("a", 5, 4, ["a"]), TableConfig("b", 6, 4, ["b"])]
    module = po.nn.ShardedEmbeddingBagCollection(tables, max_batch=4, lr=0.5, placement={"b": "replicated"})
    optimizer, group = module.optimizer, module.optimizer.param_groups[0]
    seen: dict[str, list[list[float]]] = {"number": [], "elsewhere": [], "on the device": []}

    def call(kind: str) -> None:
        for each in (optimizer.zero_grad, optimizer.step):
            each()
            seen[kind].append([float(own.lr) for own in optimizer._optimizers])

    def capture(kind: str) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(po_world.current().workspace, "is_capturing", lambda: True)
            call(kind)

    group["lr"] = 0.25
    capture("number")
    call("number")
    group["lr"] = torch.empty((), device="meta")  # whose copy to where kernels read it would be refused
    capture("elsewhere")
    group["lr"] = torch.tensor(0.125, device=po.device())
    capture("on the device")
    return seen


def test_a_capture_keeps_no_rate_of_the_host() -> None:
    (found,) = in_world(_rates_in_captures, 1, "host")
    before, changed = [[0.5, 0.5]] * 2, [[0.25, 0.25]] * 2
    assert found == {"number": before + changed, "elsewhere": changed, "on the device": [[0.125, 0.125]] * 2}


def _loaded_rates() -> list[Any]:
    tables = [TableConfig("a", 5, 4, ["a"])]
    one, other = (po.nn.ShardedEmbeddingBagCollection(tables, max_batch=4, lr=lr) for lr in (0.5, 0.25))
    rate = other.optimizer.param_groups[0]["lr"] = torch.tensor(0.25, device=po.device())
    other.optimizer.load_state_dict(one.optimizer.state_dict())
    seen = [other.optimizer.param_groups[0]["lr"] is rate, float(rate), float(other.optimizer._optimizers[0].lr)]
    one.optimizer.param_groups[0]["lr"] = 0.125
    one.optimizer.load_state_dict(other.optimizer.state_dict())
    seen += [float(one.optimizer.param_groups[0]["lr"]), float(one.optimizer._optimizers[0].lr)]
    saved = other.optimizer.state_dict()
    rate.fill_(1.0)  # as a scheduler does
    other.optimizer.load_state_dict(saved)
    return [*seen, float(rate)]


def test_a_rate_in_a_tensor_is_loaded_into_it(backend: str) -> None:
    assert in_world(_loaded_rates, 1, backend) == [[True, 0.5, 0.5, 0.5, 0.5, 0.5]]


def _clamped() -> list[bool]:
    module, plain = _SHARED.make(max_gradient=0.25), _SHARED.make()
    before = {name: shards.clone() for name, shards in module.state_dict().items()}
    batch = batch_of(_SHARED, po.rank(), 0)
    gradient = gradient_of(_SHARED, po.rank(), 0)
    most = 0.25 * po.world_size()  # of what is divided by the number of PEs
    module(batch.values, batch.lengths).backward(gradient)
    plain(batch.values, batch.lengths).backward(gradient.clamp(-most, most))
    right = []
    for name, shards in module.state_dict().items():
        for (_, found), (_, wanted), (_, old) in zip(
            shards.shards, plain.state_dict()[name].shards, before[name].shards, strict=True
        ):
            right.append(torch.equal(found, wanted) and not torch.equal(found, old))
    assert float(gradient.abs().max()) > most
    return right


def test_elements_of_gradients_are_clamped() -> None:
    found = in_world(_clamped, 2, "host")
    assert all(map(all, found)) and sum(map(len, found)) == 7


# ---- steps that are not like the others ------------------------------------------------------------------------------


def _in_a_loop() -> list[Any]:
    """Other parts of training loops: checks in inference mode, skipped steps, evaluations."""
    tables = [TableConfig("a", 50, 4, ["a"]), TableConfig("b", 60, 4, ["b"]), TableConfig("c", 8, 4, ["c"])]
    owners = {"a": TablePlacement(ranks=(1,)), "b": TablePlacement(ranks=(0,)), "c": "replicated"}
    module = po.nn.ShardedEmbeddingBagCollection(tables, max_batch=8, lr=0.1, placement=owners)
    device = po.device()
    values = torch.arange(6, device=device) + po.rank()
    lengths = torch.ones(6, dtype=torch.int64, device=device)

    def forward() -> torch.Tensor:
        pooled: torch.Tensor = module(values, lengths, batch_per_rank=[2, 2])
        return pooled

    def trains(pooled: torch.Tensor) -> bool:
        before = {name: each.detach().clone() for name, each in module.named_parameters()}
        pooled.view(2, 3, 4).sum().backward()
        po.check()
        changed = [not torch.equal(before[name], each) for name, each in module.named_parameters()]
        return sum(changed) == 2  # the own one and the replica

    with torch.inference_mode():
        forward()
    seen = [trains(forward()) for _ in range(3)]
    for _ in range(3):
        forward()  # left out
    seen += [trains(forward()) for _ in range(3)]
    pooled = forward()
    with torch.no_grad():
        for _ in range(3):
            forward()
    return [*seen, trains(pooled), trains(forward())]


def test_loops_may_check_leave_out_and_evaluate(backend: str) -> None:
    assert in_world(_in_a_loop, 2, backend) == [[True] * 8] * 2


def _fixed_options() -> list[Any]:
    """Values that schedulers and checkpoints change, in addition to the rate."""
    tables = [TableConfig("a", 5, 4, ["a"])]
    module = po.nn.ShardedEmbeddingBagCollection(tables, max_batch=4, optimizer="adam", lr=0.1)
    values, lengths = torch.arange(2), torch.ones(2, dtype=torch.int64)
    saved = module.optimizer.state_dict()
    seen: list[Any] = []
    for name, value in (("eps", 0.5), ("weight_decay", 0.5), ("betas", (0.5, 0.999))):
        group = module.optimizer.param_groups[0]
        had, group[name] = group[name], value
        calls = (module.optimizer.step, module.optimizer.zero_grad, lambda: module(values, lengths))
        seen.append([error_of(call)[0] for call in calls])
        group[name] = had
        other = {**saved, "param_groups": [{**saved["param_groups"][0], name: value}]}
        told, text, _ = error_of(lambda other=other: module.optimizer.load_state_dict(other))
        seen.append([told, f"saved with {name}" in text])
    module.optimizer.load_state_dict(saved)
    seen.append([error_of(lambda: copy.deepcopy(module))[1][:40]])
    return seen


def test_only_the_rate_may_change() -> None:
    refused = [["NotImplementedError"] * 3, ["ValueError", True]] * 3
    expected = [*refused, ["a ShardedEmbeddingBagCollection belongs to its "[:40]]]
    assert in_world(_fixed_options, 1, "host") == [expected]


def _weights_differentiated_twice() -> str:
    tables, weights = [torch.ones(5, 4)], torch.ones(2, requires_grad=True)
    pooled = po.embedding_all_to_all(
        tables, torch.arange(2), torch.arange(3), weights, pooling="sum", optimizer=po.EmbeddingOptimizer(tables)
    )
    (gradient,) = torch.autograd.grad((pooled**2).sum(), [weights], create_graph=True)
    return error_of(lambda: gradient.sum().backward())[1]


def test_a_gradient_s_gradient_is_refused() -> None:
    """It would lack the terms from the tables and the weights."""
    (text,) = in_world(_weights_differentiated_twice, 1, "host")
    assert "once_differentiable" in text, text

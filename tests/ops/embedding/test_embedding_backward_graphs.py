"""Training steps in CUDA graphs: forward and backward pass, preceded by the exchange of the lookups."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence

import pytest
import torch
from bits import difference
from checks import TURNS_PER_LOOK, Checks
from embedding_backward_cases import SMALL, Case, Training, case_of, columns_of, make_gradient, make_inputs
from embedding_cases import Case as Shape, split_of
from embedding_lookups_cases import brought, make_exchange
from gpu_turns import gpus_alone
from graphs import NUM_INPUTS, Graph, num_replays, world_size
from worlds import in_world

import persistent_ops as po

_NARROW = dataclasses.replace(SMALL, name="narrow", dtype=torch.bfloat16, pooling="mean")
_WEIGHTED = dataclasses.replace(SMALL, name="weighted", is_weighted=True)
_CASES = [case_of(optimizer) for optimizer in ("sgd", "adagrad", "adam")]
_CASES += [Case("rowwise, L2", _NARROW, "rowwise_adagrad", (("weight_decay", 0.01),)), case_of("sgd", _WEIGHTED)]


def _rate(turn: int) -> float:
    return 0.1 / (1 + turn % 7)


class _Steps(Training):
    """A training whose steps use buffers at fixed addresses.

    Args:
        case: what is trained.
        way: "global batch", or "exchange": each PE passes the lookups of its own samples.
    """

    def __init__(self, case: Case, way: str) -> None:
        super().__init__(case)
        self._is_exchanged = way == "exchange"
        rank, world = self._rank, self._world
        self._split, self._dims = split_of(case.shape, world), columns_of(case, world)
        self._given = [self._inputs_of(turn) for turn in range(NUM_INPUTS)]
        most = max(indices.numel() for indices, *_ in self._given)
        self._buffers = [tensor.new_zeros(most if n != 1 else tensor.shape) for n, tensor in enumerate(self._given[0])]
        first = sum(self._split[:rank])
        self._gradients = [
            make_gradient(case, world, turn, 0)[first : first + self._split[rank]].to(po.device())
            for turn in range(NUM_INPUTS)
        ]
        self._gradient = self._gradients[0].clone()
        self._exchange = make_exchange(case, bounds="ignore") if self._is_exchanged else None

    def _inputs_of(self, turn: int) -> list[torch.Tensor]:
        """Return indices and offsets, and factors if there are any."""
        case = self._case
        own = make_inputs(case, self._rank, self._world, turn)
        given = brought(case, turn) if self._is_exchanged else (own.indices, own.offsets, own.factors)
        return [tensor.to(po.device()) for tensor in given if tensor is not None]

    def load(self, turn: int) -> None:
        """Fill the buffers. What is after the last offset belongs to no bag."""
        for buffer, tensor in zip(self._buffers, self._given[turn % NUM_INPUTS], strict=True):
            buffer.zero_()[: tensor.numel()] = tensor
        self._gradient.copy_(self._gradients[turn % NUM_INPUTS])
        self.optimizer.lr.fill_(_rate(turn))

    def run(self) -> None:
        """Make a step; collective."""
        indices, offsets, *rest = self._buffers
        factors = rest[0] if rest else None
        choices = {
            "pooling": self._case.shape.pooling,
            "bounds": "ignore",
            "dim_per_rank": self._dims,
            "dtype": self._case.dtype,
            "optimizer": self.optimizer,
        }
        if self._exchange is None:
            arguments = (self.tables, indices, offsets, factors)
            po.embedding_all_to_all(*arguments, batch_per_rank=self._split, **choices).backward(self._gradient)
            return
        given = {"offsets": offsets, "per_sample_weights": factors, "batch_per_rank": self._split}
        with self._exchange.exchange(indices, **given) as lookups:
            po.embedding_all_to_all(self.tables, lookups, **choices).backward(self._gradient)

    def follow(self, turn: int) -> None:
        """Apply the step to the model."""
        self.model.step(turn % NUM_INPUTS, 0, _rate(turn))

    def trained(self) -> list[torch.Tensor]:
        """Return tables and states."""
        return [*self.tables, *(state for table in self.tables for state in self.optimizer.state(table))]

    def wanted(self) -> list[torch.Tensor]:
        """Return the model's tables and states."""
        return [*self.model.tables, *(state for states in self.model.states for state in states)]

    def check(self, checks: Checks, wanted: Sequence[torch.Tensor], turn: int) -> None:
        """Compare the trained tensors with the model's tensors after a turn."""
        for number, pair in enumerate(zip(self.trained(), wanted, strict=True)):
            checks.compare(f"turn {turn}, {self._case.name}, tensor {number}", *pair)

    def problem(self) -> str | None:
        found = (difference(*pair) for pair in zip(self.trained(), self.wanted(), strict=True))
        return next((f"{self._case.name}, tensor {n}: {each}" for n, each in enumerate(found) if each), None)


def _replayed(way: str, replays: int) -> list[str]:
    """Replay a step of several trainings, with other lookups, gradients and rates each time. Some steps are eager."""
    trainings = [_Steps(case, way) for case in _CASES]
    for training in trainings:
        training.load(0)
        training.run()
    po.check()
    graph = Graph(lambda: [training.run() for training in trainings])
    for training in trainings:
        training.begin()
    wanted: dict[int, list[list[torch.Tensor]]] = {}
    for turn in range(replays):
        for training in trainings:
            training.follow(turn)
        if turn % TURNS_PER_LOOK == 0 or turn + 1 == replays:
            wanted[turn] = [[tensor.to(po.device(), copy=True) for tensor in each.wanted()] for each in trainings]
    checks = Checks()
    with gpus_alone():
        for turn in range(replays):
            if (turn + po.rank()) % 17 == 0:
                time.sleep(0.002)
            for training in trainings:
                training.load(turn)
            if turn % 50 == 7:
                for training in trainings:
                    training.run()
            else:
                graph.replay()
            if turn in wanted:
                for training, tensors in zip(trainings, wanted[turn], strict=True):
                    training.check(checks, tensors, turn)
                if problems := checks.look():
                    return problems
    po.check()
    return []


@pytest.mark.slow
@pytest.mark.apart
@pytest.mark.parametrize("way", ["global batch", "exchange"])
def test_a_thousand_replays_with_changing_inputs(backend: str, way: str) -> None:
    pes = world_size(backend)
    assert in_world(_replayed, pes, backend, way, num_replays(backend, pes)) == [[]] * pes


# ---- a row with very many lookups -----------------------------------------------------------------------------------


def _with_many_lookups(optimizer: str, rows: int, drawn: str) -> tuple[list[str], list[bytes]]:
    """Run steps and replay them; return what is wrong, and the bytes that PE 0 trains, which are equal in any world."""
    shape = Shape(
        "many lookups",
        dims=lambda rank: (16,) if rank == 0 else (),
        batch=lambda world: 2048,
        rows=rows,
        max_pooling=76,
        dtype=torch.bfloat16,
    )
    case = Case(f"{optimizer}, many lookups of one of {rows} rows", shape, optimizer, drawn=drawn)
    training, graph = _Steps(case, "global batch"), None
    problems = []
    for turn in range(4):
        training.load(turn)
        if turn == 0:
            training.run()
        elif graph is None:
            po.check()
            kept = [tensor.clone() for tensor in training.trained()]
            graph = Graph(training.run)
            for tensor, before in zip(training.trained(), kept, strict=True):  # on the host, the capture was a step
                tensor.copy_(before)
            training.optimizer.loaded(turn)
        if graph is not None:
            graph.replay()
        training.follow(turn)
        problems += filter(None, [training.problem()])
        if po.rank() == 0:
            most = int(make_inputs(case, 0, po.world_size(), turn).indices.bincount().max())
            problems += [f"{most} lookups of a row"] if most < 65_536 else []
    po.check()
    return problems, [tensor.cpu().view(torch.uint8).numpy().tobytes() for tensor in training.trained()]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("optimizer", "rows", "drawn"),
    [("sgd", 1, "uniform"), ("rowwise_adagrad", 3, "hot")],
)
def test_bits_of_a_row_with_65536_lookups(backend: str, optimizer: str, rows: int, drawn: str) -> None:
    seen = [in_world(_with_many_lookups, world, backend, optimizer, rows, drawn) for world in (1, 2, 3, 4)]
    assert [problems for of_pes in seen for problems, _ in of_pes] == [[]] * 10
    assert all(of_pes[0] == seen[0][0] for of_pes in seen)


def _first_step_in_a_capture() -> tuple[list[str], str | None]:
    """The first backward pass is refused in a capture, which harms neither. Then the pass is made."""
    training = _Steps(_CASES[1], "global batch")
    training.optimizer = po.EmbeddingOptimizer(training.tables, _CASES[1].optimizer, lr=0.1)  # which has made no pass
    told = []
    for _ in range(2):
        with pytest.raises(RuntimeError) as error:
            Graph(training.run)
        told.append(str(error.value))
    training.begin()
    training.load(3)
    training.run()
    graph = Graph(training.run)
    training.begin()
    for turn in (1, 2):
        training.load(turn)
        graph.replay()
        training.follow(turn)
    return told, training.problem()


def test_first_backward_pass_inside_a_capture_is_refused(backend: str) -> None:
    for told, found in in_world(_first_step_in_a_capture, 2, backend):
        assert found is None
        assert all("the first call" in text and "call it once before the capture" in text for text in told), told

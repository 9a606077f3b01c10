"""Sparse gradients under DistributedDataParallel: against one process in fp64, and with tables unused on some PEs."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from kept_pes import in_processes
from torch.nn.parallel import DistributedDataParallel
from worlds import message_of, world_of

import persistent_ops as po
from persistent_ops.nn import ddp
from persistent_ops.nn.ddp import _HOOK, allow_unused_sparse, ddp_sparse_hook
from persistent_ops.ops.sparse_plan import Layout, state_of
from persistent_ops.runtime import world as po_world

WORLDS = (1, 2, 3, 4)
DIM = 6
ROWS = {"first": 50, "bags": 37, "means": 29}
STEPS = 7
# A gradient is a sum of at most some hundred products; each addition rounds by 2^-24 of a partial sum.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2.0**-8, torch.bfloat16: 2.0**-5}


class Model(torch.nn.Module):
    """Three sparse tables between and after dense layers. Each batch says which of them are looked up."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self.first = torch.nn.Embedding(ROWS["first"], DIM, sparse=True)
        self.bags = torch.nn.EmbeddingBag(ROWS["bags"], DIM, sparse=True, mode="sum")
        self.means = torch.nn.EmbeddingBag(ROWS["means"], DIM, sparse=True, mode="mean")
        self.inner = torch.nn.Linear(DIM, 5)
        self.outer = torch.nn.Linear(5, 1, bias=False)
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.uniform_(-1, 1, generator=generator)

    def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        hidden = batch["offset"]
        if "first" in batch:
            hidden = hidden + self.first(batch["first"]).sum(0)
        for name in ("bags", "means"):
            if name in batch:
                hidden = hidden + getattr(self, name)(batch[name], batch[f"{name}_offsets"]).sum(0)
        return self.outer(torch.tanh(self.inner(hidden))).sum()


Pattern = Callable[[str, int, int, int], str]


def everything(name: str, step: int, rank: int, world: int) -> str:
    return "used"


def missing(kind: str, name: str, step: int, rank: int, world: int) -> str:
    """Each table is in turn used, missed by one PE, by all but one, by all, and used again."""
    turn = (step + list(ROWS).index(name)) % 4
    special = (step + 1) % world
    is_missed = {0: False, 1: rank == special, 2: rank != special, 3: True}[turn]
    return kind if is_missed else "used"


def no_row(name: str, step: int, rank: int, world: int) -> str:
    """One PE has no lookups in a table, and the others do not use the table: alternately, with a table that all use."""
    if (step + list(ROWS).index(name)) % 3 == 0:
        return "used"
    return "empty" if rank == step % world else "unused"


def batch_of(pattern: Pattern, step: int, rank: int, world: int) -> dict[str, torch.Tensor]:
    """Return a batch that depends on step and rank, with rows that occur several times and on several PEs."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    batch = {"offset": torch.rand(DIM, generator=generator)}
    for name, rows in ROWS.items():
        what = pattern(name, step, rank, world)
        if what == "unused":
            continue
        count = 0 if what == "empty" else 5 + (step * 7 + rank * 3) % 23
        batch[name] = torch.randint(0, rows // 2 + 3 * rank, (count,), generator=generator)
        if name != "first":
            batch[f"{name}_offsets"] = torch.tensor([0, count // 3, count // 2])
    return batch


@dataclass(frozen=True)
class Case:
    """One way to train.

    Attributes:
        options: of DistributedDataParallel.
        micro: backward passes per step; all but the last in no_sync().
    """

    name: str
    pattern: Pattern = everything
    options: tuple[tuple[str, Any], ...] = ()
    micro: int = 1
    zero: str = "before"


FIND = (("find_unused_parameters", True),)
CASES = [
    Case("all used"),
    Case("all used, a gradient stays", zero="never"),
    Case("all used, gradients are views", options=(("gradient_as_bucket_view", True),)),
    Case("all used, small buckets", options=(("bucket_cap_mb", 1e-5),)),
    Case("empty batches", functools.partial(missing, "empty")),
    Case("unused", functools.partial(missing, "unused"), FIND),
    Case("unused, zeroed after the forward pass", functools.partial(missing, "unused"), FIND, zero="between"),
    Case("unused, zeroed in place", functools.partial(missing, "unused"), FIND, zero="in place"),
    Case("unused, accumulated", functools.partial(missing, "unused"), FIND, micro=3),
    Case("empty on one PE, unused on others", no_row, FIND),
    Case("empty, found to be used", functools.partial(missing, "empty"), FIND),
    # A static graph is the same in each step: step 1 has all of the four turns.
    Case(
        "unused, static",
        lambda name, step, rank, world: missing("unused", name, 1, rank, world),
        (("static_graph", True),),
    ),
]


def wrapped(model: torch.nn.Module, *, may_be_unused: bool = False, **options: Any) -> DistributedDataParallel:
    module = DistributedDataParallel(model.to(po.device()), **options)
    module.register_comm_hook(None, ddp_sparse_hook)
    if may_be_unused:
        allow_unused_sparse(module)
    return module


def on_device(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.to(po.device()) for name, tensor in batch.items()}


def everywhere(value: Any) -> list[Any]:
    """Return every PE's value."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def dense(gradient: torch.Tensor) -> torch.Tensor:
    return (gradient.to_dense() if gradient.is_sparse else gradient).cpu().double()


def problems_of(step: int, model: torch.nn.Module, exact: torch.nn.Module) -> list[str]:
    """Compare the gradients of a module with one process' gradients, and with the other PEs' gradients."""
    problems = []
    expected = dict(exact.named_parameters())
    for name, parameter in model.named_parameters():
        where, gradient, reference = f"step {step}: {name}", parameter.grad, expected[name].grad
        if len(set(everywhere(None if gradient is None else dense(gradient).numpy().tobytes()))) != 1:
            problems.append(f"{where}: other bits on another PE")
        if gradient is None or reference is None:
            if gradient is not reference:
                problems.append(f"{where}: {'no' if gradient is None else 'a'} gradient, unlike one process")
            continue
        is_table = name.split(".")[0] in ROWS
        if gradient.is_sparse != is_table or gradient.dtype != parameter.dtype:
            problems.append(f"{where}: a gradient of {gradient.dtype}, {gradient.layout}")
        error = (dense(gradient) - dense(reference)).abs().max()
        if not float(error) <= TOLERANCE[parameter.dtype] * (1 + float(dense(reference).abs().max())):
            problems.append(f"{where}: off by {float(error)}")
        if is_table:
            rows = reference.coalesce().indices()[0].tolist() if reference.is_sparse else []
            if not gradient.is_coalesced() or gradient.indices()[0].tolist() != rows:
                problems.append(f"{where}: other rows than one process has")
    return problems


def train(case: Case) -> list[str]:
    """Train with DDP and, in fp64, with one process on all PEs' batches; compare all gradients of all steps."""
    world, rank = po.world_size(), po.rank()
    may_be_unused = any(name in ("find_unused_parameters", "static_graph") for name, _ in case.options)
    model = wrapped(Model(), may_be_unused=may_be_unused, **dict(case.options))
    exact = Model().double()
    descents = [torch.optim.SGD(each.parameters(), lr=0.05) for each in (model, exact)]
    problems = []
    for step in range(STEPS):
        if case.zero != "never":
            exact.zero_grad()
        if case.zero in ("before", "in place"):
            model.zero_grad(set_to_none=case.zero == "before")
        for number in range(case.micro):
            part = step * case.micro + number
            with contextlib.nullcontext() if number == case.micro - 1 else model.no_sync():
                loss = model(on_device(batch_of(case.pattern, part, rank, world)))
                if case.zero == "between":
                    model.zero_grad()
                loss.backward()
        for number in range(case.micro):
            for peer in range(world):
                batch = batch_of(case.pattern, step * case.micro + number, peer, world)
                (
                    exact({name: each.double() if name == "offset" else each for name, each in batch.items()}) / world
                ).backward()
        po.check()
        if case.zero == "in place":
            # A zeroed gradient exists: an unused table has an empty gradient, or a dense one of zeros.
            for (name, parameter), reference in zip(model.module.named_parameters(), exact.parameters(), strict=True):
                if reference.grad is None and parameter.grad is not None and not bool(dense(parameter.grad).any()):
                    if step == 0:
                        problems.append(f"step 0: {name}: a gradient without use")
                    parameter.grad = None
        problems += problems_of(step, model.module, exact)
        for descent in descents:
            descent.step()
    return problems


@functools.cache
def trained(backend: str, world: int) -> list[dict[str, list[str]]]:
    # Processes: torch.distributed has one default group per process.
    return in_processes(training_program, world, backend, timeout=250)


def training_program(backend: str) -> dict[str, list[str]]:
    with world_of(backend):
        return {case.name: train(case) for case in CASES}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("world", WORLDS)
def test_gradients_are_those_of_one_process(backend: str, world: int, case: Case) -> None:
    assert [results[case.name] for results in trained(backend, world)] == [[]] * world


# ---- one check each ------------------------------------------------------------------------------------------------


class Tables(torch.nn.Module):
    """Bags of one row per entry, so that a gradient is known without a reference: what flows in."""

    def __init__(self, rows: int, *dims: int, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.tables = torch.nn.ModuleList(
            torch.nn.EmbeddingBag(rows, d, sparse=True, mode="sum", dtype=dtype) for d in dims
        )

    def forward(self, rows: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        return torch.stack([table(rows.view(-1, 1)).sum() * scale for table in self.tables]).sum()


def rows_of(*rows: int) -> torch.Tensor:
    return torch.tensor(rows, device=po.device())


def check_dense_bits() -> list[str]:
    """Dense gradients must be those that DDP computes without a hook, bit by bit."""

    def gradients(has_hook: bool) -> list[torch.Tensor]:
        torch.manual_seed(3)
        layers = [torch.nn.Linear(9, 17), torch.nn.ReLU(), torch.nn.Linear(17, 3)]
        module = DistributedDataParallel(torch.nn.Sequential(*layers).to(po.device()), bucket_cap_mb=1e-4)
        if has_hook:
            module.register_comm_hook(None, ddp_sparse_hook)
        generator = torch.Generator().manual_seed(po.rank())
        for _ in range(3):
            module(torch.randn(7, 9, generator=generator).to(po.device())).square().sum().backward()
        return [parameter.grad.clone() for parameter in module.parameters() if parameter.grad is not None]

    pairs = list(zip(gradients(False), gradients(True), strict=True))
    return [f"parameter {number}" for number, pair in enumerate(pairs) if not torch.equal(*pair)]


def check_dtypes() -> list[str]:
    problems = []
    world, rank = po.world_size(), po.rank()
    for dtype in (torch.float16, torch.bfloat16):
        module = wrapped(Tables(40, 3, dtype=dtype))
        for step in range(2):
            module.zero_grad()
            module(rows_of(rank, 30, 30), scale=0.1 * (rank + 1 + step)).backward()
            scales = [torch.tensor(0.1 * (peer + 1 + step), dtype=dtype).double() for peer in range(world)]
            expected = torch.zeros(40, 3).double()
            for peer, scale in enumerate(scales):
                expected[peer] += scale / world
                expected[30] += 2 * scale / world
            gradient = module.module.tables[0].weight.grad
            error = float((dense(gradient) - expected).abs().max())
            if gradient.dtype != dtype or error > 2 * torch.finfo(dtype).eps:
                problems.append(f"{dtype}: off by {error}")
    return problems


def check_two_modules() -> list[str]:
    """Two modules in one backward pass: their buckets come in turns."""
    problems = []
    world, rank = po.world_size(), po.rank()
    modules = [wrapped(Tables(20, 4, 5)), wrapped(Tables(25, 3))]
    for step in range(3):
        for module in modules:
            module.zero_grad()
        (modules[0](rows_of(rank, 10)) + modules[1](rows_of(step, 11 + rank), 2.0)).backward()
        for number, module in enumerate(modules):
            for table in module.module.tables:
                expected = torch.zeros(table.weight.shape).double()
                if number == 0:
                    expected[10] = 1.0
                    expected[:world] += 1.0 / world
                else:
                    expected[step] = 2.0
                    expected[11 : 11 + world] = 2.0 / world
                if not torch.allclose(dense(table.weight.grad), expected, rtol=1e-6):
                    problems.append(f"step {step}: module {number}")
    return problems


def check_tables_of_one_shape() -> list[str]:
    """Sums of equal layout must not wait for each other, nor use each other's room for results."""
    world, rank = po.world_size(), po.rank()
    tables = torch.nn.ModuleList([Tables(1000, 3) for _ in range(4)])

    class Each(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tables = tables

        def forward(self, batches: list[torch.Tensor]) -> torch.Tensor:
            return sum(table(rows) for table, rows in zip(self.tables, batches, strict=True))

    module = wrapped(Each())
    state = state_of(po_world.current())
    layout = Layout(1000, (3,), torch.float32, "mean")
    under_way = []
    finish = ddp._finish

    def counted(exchanges: list[Any], group: Any) -> None:
        rooms = state.rooms.values()
        under_way.append(sum(room.layout == layout and room.unresolved is not None for room in rooms))
        finish(exchanges, group)

    ddp._finish = counted
    problems = []
    try:
        for step in range(4):
            module.zero_grad()
            used = [torch.arange(count, device=po.device())[rank::world] + step for count in (900, 3, 300, 1)]
            module(used).backward()
            for number, count in enumerate((900, 3, 300, 1)):
                expected = torch.zeros(1000, 3)
                expected[step : step + count] = 1.0 / world
                gradient = tables[number].tables[0].weight.grad
                if not torch.equal(dense(gradient).float(), expected):
                    problems.append(f"step {step}, table {number}: {gradient}")
    finally:
        ddp._finish = finish
    rooms = sorted(room.rows for (each, tag), room in state.rooms.items() if each == layout and tag != 0)
    if rooms != [64, 64, 320, 960]:
        problems.append(f"room for results: {rooms}")
    return problems if under_way == [4] * 4 else [*problems, f"under way at the end of backward passes: {under_way}"]


class GivenGradient(torch.autograd.Function):
    """Zero, whose gradient for the table has ones in the given rows, which may be out of range."""

    @staticmethod
    def forward(context: Any, table: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        context.save_for_backward(rows)
        context.shape = table.shape
        return table.new_zeros(())

    @staticmethod
    def backward(context: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        (rows,) = context.saved_tensors
        values = torch.ones(rows.numel(), context.shape[1], device=rows.device)
        return torch.sparse_coo_tensor(rows[None], values, context.shape, check_invariants=False), None


def check_a_bad_row() -> list[str]:
    """A bad row raises on its PE when gradients are complete on all PEs. The same module continues."""
    problems = []
    rank = po.rank()

    class Given(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tables = torch.nn.ModuleList(torch.nn.Embedding(600, 4, sparse=True) for _ in range(3))

        def forward(self, rows: torch.Tensor) -> torch.Tensor:
            return torch.stack([GivenGradient.apply(table.weight, rows) for table in self.tables]).sum()

    given = Given()
    module = wrapped(given)
    # The third union outgrows the room of the first two, so that all PEs launch again.
    for step, rows in enumerate((rows_of(1, 2), rows_of(3), torch.arange(400, device=po.device()), rows_of(4, 5))):
        is_bad = step == 2 and rank == 0
        module.zero_grad()
        backward = module(torch.cat([rows, rows_of(600)]) if is_bad else rows).backward
        said = message_of(IndexError, backward)
        if ("row 600" in said) != is_bad:
            problems.append(f"step {step}: {said}")
        for table in given.tables:
            expected = torch.zeros(600, 4)
            expected[rows.cpu()] = 1.0
            if not torch.allclose(dense(table.weight.grad).float(), expected):
                problems.append(f"step {step}: {table.weight.grad}")
    return problems


def check_after_recovery() -> list[str]:
    """After po.recover(), a pass that only one PE gave up between two buckets is not waited for."""
    problems = []
    rank, world = po.rank(), po_world.current()
    first, second = (torch.nn.Parameter(torch.zeros(90, 4, device=po.device())) for _ in range(2))

    def reduce(parameter: torch.nn.Parameter, *rows: int, is_last: bool) -> torch.Tensor:
        gradient = torch.sparse_coo_tensor(
            rows_of(*rows)[None], torch.ones(len(rows), 4, device=po.device()), (90, 4), is_coalesced=True
        )
        number = 0 if parameter is first else 1
        bucket = SimpleNamespace(
            buffer=lambda: gradient, parameters=lambda: [parameter], is_last=lambda: is_last, index=lambda: number
        )
        return ddp_sparse_hook(None, bucket).wait() if is_last else ddp_sparse_hook(None, bucket)

    reduce(first, 1, is_last=True)
    timeout, world.workspace.timeout = world.workspace.timeout, 5.0  # of the second one's first launch, and all others
    try:
        reduce(first, 1, is_last=False)
        if rank != 0:
            message = message_of(po.PeerTimeoutError, lambda: reduce(second, 2, 30, is_last=True))
            if "PE 0" not in message:
                problems.append(message)
    finally:
        world.workspace.timeout = timeout
    po.recover()
    for step in range(3):
        total = reduce(second, step, 40 + step, is_last=True).coalesce()
        if total.indices().tolist() != [[step, 40 + step]] or total.values().tolist() != [[1.0] * 4] * 2:
            problems.append(f"step {step}: {total}")
    return problems


def check_uneven_inputs() -> list[str]:
    """PEs with fewer batches join: what the others send must arrive, the joined ones' own gradients count as 0."""
    problems = []
    world, rank = po.world_size(), po.rank()
    model = Tables(30, 4, 2)
    torch.nn.init.zeros_(model.tables[0].weight)
    torch.nn.init.zeros_(model.tables[1].weight)
    module = wrapped(model)
    descent = torch.optim.SGD(module.parameters(), lr=1.0)
    with module.join():
        for step in range(2 + rank):
            module.zero_grad()
            module(rows_of(step, 20)).backward()
            descent.step()
    expected = torch.zeros(30).double()
    for peer in range(world):
        for step in range(2 + peer):
            expected[step] -= 1 / world
            expected[20] -= 1 / world
    for table in model.tables:
        if not torch.allclose(dense(table.weight.data), expected[:, None].expand(table.weight.shape), rtol=1e-5):
            problems.append(f"a table of {table.embedding_dim}: {table.weight[:, 0].tolist()}")
    return problems


def check_after_an_aborted_pass() -> list[str]:
    """A pass that fails between its buckets must leave nothing that the next pass waits for."""
    rank = po.rank()
    model = torch.nn.ModuleDict({"good": Tables(20, 4), "bad": Tables(20, 4, dtype=torch.float64)})

    class Both(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bad, self.good = model["bad"], model["good"]  # the one that is registered last is reduced first

        def forward(self, rows: torch.Tensor) -> torch.Tensor:
            return self.good(rows) + self.bad(rows).float()

    module = wrapped(Both())
    problems = []
    said = message_of(TypeError, module(rows_of(rank)).backward)
    if "expected float32, float16 or bfloat16, got torch.float64" not in said:
        problems.append(said)
    left = len(_HOOK.state(po_world.current()).own)
    if left != 1:
        problems.append(f"{left} gradients were under way when the pass was aborted; the check proves nothing")
    model.zero_grad()
    module = wrapped(model["good"])
    for step in range(2):
        module.zero_grad()
        module(rows_of(5 + step)).backward()
        gradient = module.module.tables[0].weight.grad.coalesce()
        if gradient.indices().tolist() != [[5 + step]] or gradient.values().tolist() != [[1.0] * 4]:
            problems.append(f"step {step}: {gradient}")
    return problems


def check_no_synchronization() -> list[str]:
    """In no_sync() an unused table keeps no gradient, for every reason that makes DDP wait."""
    module = wrapped(Model(), may_be_unused=True, find_unused_parameters=True)
    without = on_device({"offset": torch.ones(DIM)})
    with module.no_sync():
        module(without).backward()
    problems = [name for name in ROWS if getattr(module.module, name).weight.grad is not None]
    with module.no_sync():
        loss = module(without)
    loss.backward()  # DDP follows the forward pass
    return problems + [name for name in ROWS if getattr(module.module, name).weight.grad is not None]


def check_errors() -> list[str]:
    world, rank = po.world_size(), po.rank()
    alone = [dist.new_group([peer]) for peer in range(world)][rank]
    module = DistributedDataParallel(Tables(8, 2).to(po.device()), process_group=alone)
    module.register_comm_hook(alone, ddp_sparse_hook)
    plain = DistributedDataParallel(Tables(8, 2).to(po.device()))
    group = f"state: expected a process group whose ranks are the PEs, got rank 0 of 1 on PE {rank} of {world}"
    expected = {
        group: message_of(ValueError, lambda: module(rows_of(1)).backward()),
        "expected a DistributedDataParallel, got Tables": message_of(
            TypeError,
            lambda: allow_unused_sparse(Tables(8, 2)),  # type: ignore[arg-type]
        ),
        "expected DistributedDataParallel(..., find_unused_parameters=True)": message_of(
            ValueError, lambda: allow_unused_sparse(plain)
        ),
    }
    return [f"{said!r} instead of {text!r}" for text, said in expected.items() if text not in said]


CHECKS = {
    check.__name__: check
    for check in (
        check_dense_bits,
        check_dtypes,
        check_two_modules,
        check_tables_of_one_shape,
        check_a_bad_row,
        check_after_recovery,
        check_uneven_inputs,
        check_after_an_aborted_pass,
        check_no_synchronization,
        check_errors,
    )
}


def checking_program(backend: str) -> dict[str, list[str]]:
    with world_of(backend):
        return {name: check() for name, check in CHECKS.items()}


@functools.cache
def checked(backend: str, world: int) -> list[dict[str, list[str]]]:
    return in_processes(checking_program, world, backend, timeout=250)


@pytest.mark.parametrize("name", CHECKS)
@pytest.mark.parametrize("world", [2, 3])
def test_the_hook(backend: str, world: int, name: str) -> None:
    assert [results[name] for results in checked(backend, world)] == [[]] * world


# ---- torch.compile -------------------------------------------------------------------------------------------------


def compiled_program(backend: str) -> list[bool]:
    """A whole step is compiled, its backward pass too, before the hook has run once."""
    with world_of(backend) as world:
        numbers = torch.tensor([1, 5, 5, 2 + world.rank], device=po.device())
        gradients = []
        for compiles in (True, False):
            torch.manual_seed(1)
            model = torch.nn.Sequential(torch.nn.Embedding(20, 4, sparse=True), torch.nn.Linear(4, 2)).to(po.device())
            module = wrapped(model)

            def step(numbers: torch.Tensor, module: Any = module) -> torch.Tensor:
                module.zero_grad()
                loss = module(numbers).square().sum()
                loss.backward()
                return loss  # type: ignore[no-any-return]

            (torch.compile(step, backend="eager") if compiles else step)(numbers)
            gradients.append([parameter.grad.to_dense() for parameter in model.parameters()])  # type: ignore[union-attr]
        po.check()
        return [torch.equal(one, other) for one, other in zip(*gradients, strict=True)]


def test_a_compiled_step(backend: str) -> None:
    for equal in in_processes(compiled_program, 2, backend, timeout=120):
        assert equal == [True] * 3


# ---- memory --------------------------------------------------------------------------------------------------------


def heap_program(backend: str, steps: int) -> list[str]:
    """Train where the heap has room for one result of each table, but not for two."""
    problems = []
    rows, dim = 8192, 256
    with world_of(backend, heap_size=24 << 20) as world:
        module = wrapped(Tables(rows, dim, dim))
        nbytes = rows * dim * 4
        everything = torch.arange(rows, device=po.device())
        for step in range(steps):
            module(everything, scale=step + 1.0).backward()
            for table in module.module.tables:
                values = table.weight.grad._values()
                if not 0 <= values.data_ptr() - world.backend.heap_base <= (24 << 20) - nbytes:
                    problems.append(f"step {step}: the gradient was copied out of the heap")
                if not bool((values == step + 1.0).all()):
                    problems.append(f"step {step}: wrong values")
            del values
            module.zero_grad()
        po.check()
        held = sum(slot.nbytes for slots in world.outputs._slots.values() for slot in slots if not slot.is_idle())
        if held:
            problems.append(f"{held} bytes of results are held after zero_grad()")
    return problems


def test_gradients_are_results_themselves_and_are_let_go(backend: str) -> None:
    assert in_processes(heap_program, 2, backend, 6, timeout=120) == [[]] * 2


# ---- without a world or a group ------------------------------------------------------------------------------------


def alone_program(backend: str) -> list[str]:
    class Bucket:
        def buffer(self) -> torch.Tensor:
            return torch.ones(3)

    said = [message_of(RuntimeError, lambda: ddp_sparse_hook(None, Bucket()))]  # type: ignore[arg-type]
    po.init(backend)
    try:
        return [*said, message_of(RuntimeError, lambda: ddp_sparse_hook(None, Bucket()))]  # type: ignore[arg-type]
    finally:
        po.finalize()


def test_what_is_missing_is_named(backend: str) -> None:
    without_world, without_group = in_processes(alone_program, 1, backend, timeout=120)[0]
    assert "persistent_ops is not initialized" in without_world
    assert "torch.distributed has no default process group" in without_group

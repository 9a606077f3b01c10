"""Features that a ShardedEmbeddingBagCollection shares with torch's: DDP, checkpointed regions, initial rows."""

from __future__ import annotations

import gc
import itertools
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from kept_pes import in_processes
from sharded_embedding_cases import PlainCollection, one_each as _lookups, one_table as _module
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from worlds import error_of, in_world, world_of

import persistent_ops as po
from persistent_ops.nn import TablePlacement, sharded_table

_PLACEMENTS = ("table_wise", "replicated")


# ---- under DistributedDataParallel -----------------------------------------------------------------------------------


class _Scored(torch.nn.Module):
    """A model whose tables lie on one PE, on both in slices, and on each."""

    def __init__(self) -> None:
        super().__init__()
        placement = {"a": TablePlacement("column_wise", 2), "b": "replicated"}
        tables = [("a", 13, 8, ["x"]), ("b", 11, 8, ["y"]), ("c", 13, 8, ["z"])]
        self.sparse = po.nn.ShardedEmbeddingBagCollection(tables, max_batch=8, placement=placement, lr=0.5)
        self.dense = torch.nn.Linear(24, 2)

    def forward(self, values: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        return self.dense(self.sparse(values, lengths))  # type: ignore[no-any-return]


def _under_ddp(is_told: bool, compiles: bool) -> list[Any]:
    """Wrap a model with or without `ignore_sharded_tables`; return its tables before and after, and a gradient."""
    with world_of("host", "gloo"):
        model = _Scored()
        tables = {table.name: table.weight for table in model.sparse.embedding_bags.children()}
        with torch.no_grad():
            tables["b"].fill_(po.rank())
        before = {name: weight.clone() for name, weight in tables.items()}
        if is_told:
            po.nn.ignore_sharded_tables(model)
        wrapped = DistributedDataParallel(torch.compile(model, backend="eager") if compiles else model)
        after = {name: weight.clone() for name, weight in tables.items()}
        wrapped(*_lookups(po.rank(), 5, 7)).sum().backward()
        gradient = model.dense.weight.grad
    return [before, after, gradient]


@pytest.mark.parametrize(("is_told", "compiles"), [(False, False), (False, True), (True, False), (True, True)])
def test_ddp_leaves_tables_alone(is_told: bool, compiles: bool) -> None:
    results = in_processes(_under_ddp, 2, is_told, compiles, timeout=200)
    for before, after, gradient in results:
        assert torch.equal(before["a"], after["a"]) and torch.equal(before["c"], after["c"])
        assert not after["b"].any()  # replicas begin with equal rows
        assert torch.equal(gradient, results[0][2]) and gradient.any()
    (before, *_), (other, *_) = results
    assert not torch.equal(before["a"], other["a"]) and before["c"].shape != other["c"].shape


# ---- checkpointed regions --------------------------------------------------------------------------------------------


def _gradient_of_towers(module: Callable[..., torch.Tensor], checkpointed: tuple[bool, bool], reentrant: bool) -> Any:
    """Return the gradient of a layer after two calls of a module, each in a region that is recomputed or not."""
    top = torch.nn.Linear(8, 4, bias=False)
    torch.nn.init.constant_(top.weight, 0.25)
    results = []
    for is_checkpointed, values in zip(checkpointed, ((3, 1, 3), (3, 0, 4)), strict=True):

        def tower(given: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
            return top(module(given, lengths)).tanh()  # type: ignore[no-any-return]

        given, lengths = _lookups(*values)
        if is_checkpointed:
            results.append(checkpoint(tower, given, lengths, use_reentrant=reentrant))
        else:
            results.append(tower(given, lengths))
    (results[0] * results[1]).sum().backward()
    assert top.weight.grad is not None
    return top.weight.grad


def _in_checkpointed_regions(placement: str) -> list[Any]:
    found: list[Any] = []
    for checkpointed in ((False, False), (False, True)):
        module = _module(placement)
        found.append(_gradient_of_towers(module, checkpointed, False))
        found[-1] += _gradient_of_towers(module, checkpointed, False)  # another step
    found.append(error_of(lambda: _gradient_of_towers(_module(placement), (True, True), False))[:2])
    return found


@pytest.mark.parametrize("placement", _PLACEMENTS)
def test_rows_that_were_updated_are_not_read_anew(placement: str) -> None:
    for plain, last, (kind, text) in in_world(_in_checkpointed_regions, 1, "host", placement):
        assert torch.equal(plain, last)
        assert kind == "RuntimeError" and "Checkpoint only the last call of this module" in text


def _alone_in_a_region(placement: str, is_split: bool, is_reentrant: bool) -> list[bool]:
    """Return whether a step with its only call in such a region equals a step without regions."""
    rows = []
    for is_checkpointed in (False, True, True):
        module, factor = _module(placement), torch.full((8,), 0.5, requires_grad=True)
        given = _lookups(3, 1, 3)
        options = {"batch_per_rank": [3] * po.world_size()} if is_split else {}

        def region(
            values: torch.Tensor,
            lengths: torch.Tensor,
            factor: torch.Tensor,
            module: Any = module,
            options: Any = options,
        ) -> torch.Tensor:
            return (module(values, lengths, **options) * factor).tanh()  # type: ignore[no-any-return]

        for _ in range(2):
            if is_checkpointed:
                result = checkpoint(region, *given, factor, use_reentrant=is_reentrant)
            else:
                result = region(*given, factor)
            result.sum().backward()
        rows.append([each.clone() for each in module.parameters()] + [factor.grad])
    return [all(map(torch.equal, rows[0], others)) for others in rows[1:]]


@pytest.mark.parametrize("is_reentrant", [False, True])
@pytest.mark.parametrize("is_split", [False, True])
@pytest.mark.parametrize("placement", _PLACEMENTS)
def test_a_call_alone_in_a_region_that_is_made_anew(placement: str, is_split: bool, is_reentrant: bool) -> None:
    assert in_world(_alone_in_a_region, 2, "host", placement, is_split, is_reentrant) == [[True, True]] * 2


# ---- rows of a collection --------------------------------------------------------------------------------------------


def _from_own_rows() -> list[torch.Tensor]:
    """Make a module of a collection that this PE has drawn alone; return rows of its two tables."""
    torch.manual_seed(po.rank())
    made = po.nn.ShardedEmbeddingBagCollection.from_collection(
        collection := PlainCollection(),
        max_batch=4,
        placement={"a": "replicated", "b": po.nn.TablePlacement(ranks=(1,))},
    )
    own = [made.embedding_bags[name].weight.clone() for name in "ab"]  # type: ignore[operator, union-attr]
    return [*own, *(collection.embedding_bags[name].weight.detach() for name in "ab")]  # type: ignore[list-item]


def test_replicas_of_a_collection_are_those_of_one_pe() -> None:
    (first, _, wanted, _), (second, of_owner, _, whole) = in_world(_from_own_rows, 2, "host")
    assert torch.equal(first, wanted) and torch.equal(second, wanted) and torch.equal(of_owner, whole)


def _from_own_generators(begin: str) -> list[torch.Tensor]:
    """Let each PE draw its rows; return a replica's rows before and after they are made equal."""
    names = {"a": torch.float32, "b": torch.bfloat16, "c": torch.float32}
    module = po.nn.ShardedEmbeddingBagCollection(
        [po.nn.TableConfig(name, 13, 8, [f"of {name}"], data_type=dtype) for name, dtype in names.items()],
        max_batch=4,
        placement={"a": "replicated", "b": "replicated", "c": po.nn.TablePlacement(ranks=(1,))},
    )
    torch.manual_seed(po.rank())
    rows = list(module.parameters())
    for each in rows:
        torch.nn.init.normal_(each)
    rows[0].view(-1)[0] = -0.0
    before = [each.clone() for each in rows]
    if begin == "module":
        module.sync_replicas()
    else:
        po.nn.ignore_sharded_tables(torch.nn.Sequential(torch.nn.Linear(8, 8), module))
    return [*before, *(each.clone() for each in rows)]


@pytest.mark.parametrize("begin", ["module", "parallel"])
def test_replicas_begin_as_those_of_pe_0(begin: str) -> None:
    first, second = in_world(_from_own_generators, 2, "host", begin)
    for number in (0, 1):
        assert not torch.equal(first[number], second[number])
        for pe in (first, second):
            assert torch.equal(pe[3 + number].view(torch.int16), first[number].view(torch.int16))
    assert torch.equal(second[5], second[2])  # of an owner


def _from_meta() -> list[bool]:
    config = [po.nn.TableConfig(name, 13, 8, [f"of {name}"]) for name in "ab"]
    drawn = po.nn.ShardedEmbeddingBagCollection(config, max_batch=4)
    with torch.device("meta"):
        collection = PlainCollection()
    made = po.nn.ShardedEmbeddingBagCollection.from_collection(collection, max_batch=4)
    return list(map(torch.equal, made.parameters(), drawn.parameters()))


def test_rows_of_a_collection_without_memory_are_drawn() -> None:
    assert in_world(_from_meta, 1, "host") == [[True, True]]


def _first_rows(placement: Any) -> torch.Tensor:
    """Return the first rows of a table, this PE's slices side by side."""
    config = po.nn.TableConfig("a", 100, 8, ["x"])
    module = po.nn.ShardedEmbeddingBagCollection([config], max_batch=4, placement={"a": placement}, seed=5)
    return torch.cat([block for _, block in module.state_dict()["embedding_bags.a.weight"].shards], dim=1)


def test_first_rows_that_are_drawn_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same for any placement; each part has a generator of its own, the first one the table's."""
    (at_once,) = in_world(_first_rows, 1, "host", TablePlacement())
    monkeypatch.setattr(sharded_table, "_DRAWN_ROWS_BYTES", 7 * 8 * 4)  # of PEs that are threads
    whole, sliced = (
        torch.cat(in_world(_first_rows, world, "host", placement), dim=1)
        for world, placement in ((1, TablePlacement()), (2, TablePlacement("column_wise", 2, (0, 1))))
    )
    assert torch.equal(whole, sliced)
    parts = whole.split(7)
    assert len(parts) == 15 and len(parts[-1]) == 2 and len({tuple(part[0].tolist()) for part in parts}) == 15
    assert torch.equal(at_once[:7], parts[0]) and not torch.equal(at_once[7:14], parts[1])
    bound = 100**-0.5
    assert float(whole.abs().max()) <= bound and abs(float(whole.mean())) < bound / 10


def _initial_rows(placement: Any, seed: int) -> list[tuple[int, torch.Tensor]]:
    def fill(weight: torch.Tensor) -> None:
        assert weight.shape == (13, 8) and weight.dtype == torch.float32
        torch.nn.init.normal_(weight, std=3.0)

    config = po.nn.TableConfig("a", 13, 8, ["x"], data_type=torch.bfloat16, init_fn=fill)
    module = po.nn.ShardedEmbeddingBagCollection([config], max_batch=4, placement={"a": placement}, seed=seed)
    return [(offsets[1], block) for shards in module.state_dict().values() for offsets, block in shards.shards]


@pytest.mark.parametrize("placement", ["replicated", po.nn.TablePlacement("column_wise", 2)])
@pytest.mark.parametrize("seed", [7, -3, 1_764_000_000_123_456_789])
def test_a_tables_own_init_fn(placement: Any, seed: int) -> None:
    number = (seed * 1_000_003 + 1) % 2**64
    wanted = torch.randn(13, 8, generator=torch.Generator().manual_seed(number)).mul_(3.0).bfloat16()
    for column, block in itertools.chain(*in_world(_initial_rows, 2, "host", placement, seed)):
        assert torch.equal(block, wanted[:, column : column + block.shape[1]])


def _generator_is_kept() -> bool:
    before = torch.get_rng_state()
    _initial_rows("replicated", 7)
    return torch.equal(torch.get_rng_state(), before)


def test_an_init_fn_leaves_the_generator_as_it_was() -> None:
    assert in_world(_generator_is_kept, 1, "host") == [True]


# ---- memory ----------------------------------------------------------------------------------------------------------


def _freed() -> list[bool]:
    """Return whether tables and states are freed with their collection, at once, though a state dict is kept."""
    gc.collect()
    gc.disable()
    try:
        module = po.nn.ShardedEmbeddingBagCollection([("a", 5, 4, ["x"])], max_batch=4, optimizer="rowwise_adagrad")
        module(*_lookups(3)).sum().backward()
        optimizer, table = weakref.ref(module.optimizer), weakref.ref(module.embedding_bags["a"])
        state = module.state_dict()
        del module
        return [optimizer() is None, table() is None, len(state) == 1]
    finally:
        gc.enable()


def test_tables_are_freed_with_their_collection() -> None:
    assert in_processes(_in_a_world, 1, timeout=200) == [[True] * 3]


def _in_a_world() -> list[bool]:
    po.init("host", heap_size=64 << 20)
    found = _freed()
    po.finalize()
    return found

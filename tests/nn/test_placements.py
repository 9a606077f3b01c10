"""Placements of embedding tables: choices by measured costs, TorchRec's plans, and how placements are shown."""

from __future__ import annotations

import io
import itertools
import re
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from rich.console import Console
from worlds import in_world

import persistent_ops as po
from persistent_ops.nn import TableConfig, TablePlacement, automatic_placement
from persistent_ops.nn.automatic_placement import decided
from persistent_ops.nn.embedding_tables import table_configs
from persistent_ops.nn.placement_costs import Rates, Workload, _seconds, measured_rates
from persistent_ops.nn.table_layout import Layout, place
from persistent_ops.nn.table_owners import Cost, bytes_read, first_room
from persistent_ops.nn.table_placements import placements_of
from persistent_ops.nn.table_rounding import drawn_of
from persistent_ops.runtime import world as po_world
from persistent_ops.testing.dlrm_batch import DLRM_POOLING, DLRM_ROWS

# ---- what is chosen --------------------------------------------------------------------------------------------------

_RATES = Rates(memory=4e12, link=3e11, launch=5e-6)
_SLOW_LINKS = replace(_RATES, link=5e10)


def _chosen(
    tables: dict[str, tuple[int, int, float]],
    world: int,
    optimizer: str = "adagrad",
    rates: Rates = _RATES,
    given: Any = "auto",
    dtype: torch.dtype = torch.float32,
    batch: int = 4096,
    rounding: str = "nearest",
) -> tuple[dict[str, TablePlacement], Layout]:
    """Place tables of (rows, columns, lookups per sample) for some samples of every PE."""
    configs = [TableConfig(name, rows, dim, [name], "sum", dtype) for name, (rows, dim, _) in tables.items()]
    workload = Workload(rates, world, batch, _lookups(tables), optimizer)
    placements = decided(configs, placements_of(configs, given), workload, rounding)
    return dict(zip(tables, placements, strict=True)), place(
        configs, placements, workload.costs(configs, placements), workload.lookups_per_sample, world
    )


def test_what_exceeds_a_share_is_sliced() -> None:
    tables = {"hot": (10_000_000, 128, 100.0), **{f"t{n}": (10_000_000, 128, 10.0) for n in range(6)}}
    chosen, layout = _chosen(tables, 4)
    assert chosen["hot"].kind == "column_wise" and chosen["hot"].num_slices == 4
    assert all(chosen[f"t{n}"] == TablePlacement() for n in range(6))
    whole = place(layout.configs, [TablePlacement()] * 7, _costs(layout.configs, tables, 4), _lookups(tables), 4)
    assert max(layout.loads) < 0.6 * max(whole.loads)
    by_rows, _ = _chosen(tables, 4, "rowwise_adagrad")
    assert set(by_rows.values()) == {TablePlacement()}
    alone, _ = _chosen(tables, 1)
    assert set(alone.values()) == {TablePlacement()}


def _costs(configs: Any, tables: dict[str, tuple[int, int, float]], world: int) -> Any:
    workload = Workload(_RATES, world, 4096, _lookups(tables), "adagrad")
    return workload.costs(configs, [TablePlacement()] * len(configs))


def _lookups(tables: dict[str, tuple[int, int, float]]) -> dict[str, float]:
    return {name: lookups for name, (_, _, lookups) in tables.items()}


def _mlperf() -> dict[str, tuple[int, int, float]]:
    """Return MLPerf's tables: five have 40 million rows, and one of them half of the lookups."""
    pairs = zip(DLRM_ROWS, DLRM_POOLING, strict=True)
    return {f"t{n}": (rows, 128, float(lookups)) for n, (rows, lookups) in enumerate(pairs)}


@pytest.mark.parametrize("rates", [_RATES, Rates(memory=2.7e12, link=3.5e11, launch=3e-5)])
def test_the_hot_table_is_cut_in_few_slices_and_others_for_memory(rates: Rates) -> None:
    chosen, layout = _chosen(_mlperf(), 4, rates=rates, batch=16384)
    assert chosen["t20"] == TablePlacement("column_wise", 2)
    least = sum(sum(cost[0][0] + cost[1][0] for cost in _slices(layout, pe)) for pe in range(4)) / 4
    assert layout.time < 1.4 * least, "of what memory would take with equal shares"
    for slices in (1, 4):
        given = {"t20": TablePlacement("column_wise", slices)} if slices > 1 else "table_wise"
        _, other = _chosen(_mlperf(), 4, rates=rates, batch=16384, given=given)
        room = first_room(other.table_bytes)
        assert layout.time * max(1, max(layout.table_bytes) / room) < other.time * max(1, max(other.table_bytes) / room)


def test_little_time_is_worth_no_cut() -> None:
    """The formula has about this accuracy."""
    equal = {f"t{n}": (1_000_000, 128, 10.0) for n in range(27)}
    assert set(_chosen(equal, 4)[0].values()) == {TablePlacement()}, "7 tables of the PE with the most, 6.75 on average"
    kinds = [each.kind for each in _chosen({name: equal[name] for name in list(equal)[:5]}, 4)[0].values()]
    assert "column_wise" in kinds, "2 and 1.25"


def _slices(layout: Layout, pe: int) -> list[Cost]:
    return [cost for table, cost in enumerate(layout.costs.of_slices) for _ in layout.slices_of(table, pe)]


def test_a_search_ends_however_many_tables_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    made = itertools.count()
    monkeypatch.setattr(automatic_placement, "place", lambda *arguments: (next(made), place(*arguments))[1])
    tables = {f"t{n}": (100_000 * (n % 7 + 1), 128, float(1 + n % 50)) for n in range(300)}
    _chosen(tables, 64)
    assert next(made) <= 4
    tables = {f"t{n}": (100_000, 1024, 1.0) for n in range(10)}
    made = itertools.count()
    _chosen(tables, 16, given=dict.fromkeys(list(tables)[1:], TablePlacement("column_wise", 64)) | {"t0": "auto"})
    assert next(made) <= 4


def test_pes_compare_what_was_decided_and_not_why() -> None:
    """Costs are sums of one PE's measurements. A difference in their last bits is no reason to refuse a layout."""
    _, layout = _chosen(_mlperf(), 4)
    other = replace(layout, costs=layout.costs._replace(unit="other"), loads=(0.0,) * 4, time=0.0)
    assert repr(other) == repr(layout) and other == layout


def test_replicas_keep_the_order_of_the_tables() -> None:
    """Their order determines the random bits."""
    configs = [TableConfig(name, 100, 8, [name]) for name in "abc"]
    lookups = {"a": 1.0, "b": 3.0, "c": 2.0}
    placements = placements_of(configs, "replicated")
    layout = place(configs, placements, bytes_read(configs, placements, lookups, 2), lookups, 2)
    assert [slot.table for slot in layout.replicated[0].columns] == [0, 1, 2]
    assert drawn_of(layout, 0) == [[("a", "b", "c")]]


def test_a_pe_has_its_tables_in_the_order_of_their_lookups() -> None:
    tables = {"a": (100, 8, 1.0), "b": (100, 8, 5.0), "c": (100, 8, 3.0), "d": (100, 8, 5.0)}
    _, layout = _chosen(tables, 1, given="table_wise")
    assert [slot.table for slot in layout.groups[0].columns] == [1, 3, 2, 0]
    assert layout.begins[0] == (8, 24, 16, 0) and layout.names == ("a", "b", "c", "d")
    configs = [TableConfig("a", 100, 8, ["few", "many"]), TableConfig("b", 100, 8, ["some"])]
    lookups = {"few": 1.0, "many": 9.0, "some": 5.0}
    placements = placements_of(configs, "table_wise")
    layout = place(configs, placements, bytes_read(configs, placements, lookups, 1), lookups, 1)
    assert [(slot.table, slot.feature) for slot in layout.groups[0].columns] == [(0, 1), (1, 2), (0, 0)]


def test_memory_is_shared_where_that_costs_little() -> None:
    _, layout = _chosen(_mlperf(), 4, batch=16384)
    least, nbytes = _by_cost_alone(layout)
    share = sum(nbytes) / 4
    assert max(nbytes) > 1.5 * share, "nothing to share"
    assert max(layout.table_bytes) < 1.25 * share + 2**30 and layout.time < 1.1 * least
    assert sum(layout.table_bytes) == sum(nbytes)


def _by_lookups(tables: dict[str, tuple[int, float]], world: int, fixed: dict[str, int]) -> Layout:
    """Place tables of 128 floats and (rows, lookups), some of which have an owner, by the bytes they make it read."""
    configs = [TableConfig(name, rows, 128, [name]) for name, (rows, _) in tables.items()]
    placements = [TablePlacement(ranks=(fixed[name],) if name in fixed else None) for name in tables]
    lookups = {name: each for name, (_, each) in tables.items()}
    return place(configs, placements, bytes_read(configs, placements, lookups, world), lookups, world)


def test_memory_is_shared_whatever_the_order_of_tables() -> None:
    large, small = 200_000_000, 10_000_000
    tables = {"cold": (large, 1.0), "warm": (large, 5.0), "hot": (large, 10.0), "small": (small, 10.0)}
    for order in itertools.permutations(tables):
        layout = _by_lookups({name: tables[name] for name in order}, 3, {})
        assert sorted(layout.table_bytes) == [102_400_000_000, 102_400_000_000, 107_520_000_000]
        assert sorted(load / 512 for load in layout.loads) == [5.0, 10.0, 11.0]


def test_tables_without_lookups_are_shared_too() -> None:
    layout = _by_lookups({"a": (200_000_000, 0.0), "b": (200_000_000, 1.0), "c": (1000, 5.0)}, 2, {})
    assert max(layout.table_bytes) < 103e9 and sorted(load / 512 for load in layout.loads) == [1.0, 5.0]
    layout = _by_lookups(dict.fromkeys("abcd", (1000, 0.0)), 2, {})
    assert layout.table_bytes == (2 * 512_000,) * 2


@pytest.mark.parametrize("fixed", [{}, {"big": 0}])
def test_others_share_memory_where_one_has_most_of_it(fixed: dict[str, int]) -> None:
    """The owner of the big table. The load of the other PEs does not matter."""
    tables = {"big": (200_000_000, 100.0), "hot0": (1000, 100.0), "hot1": (1000, 100.0)}
    tables |= {f"cold{n}": (10_000_000, 1.0) for n in range(16)}
    layout = _by_lookups(tables, 4, fixed)
    big, *others = sorted(layout.table_bytes, reverse=True)
    assert big < 103e9 and max(others) < 1.25 * sum(layout.table_bytes) / 4 + 2**30
    assert max(layout.loads) <= 110 * 512


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(
    world=st.integers(1, 8),
    tables=st.lists(
        st.tuples(st.integers(1, 80_000_000), st.sampled_from([32, 128]), st.sampled_from([1.0, 10.0, 100.0])),
        min_size=1,
        max_size=20,
    ),
)
def test_memory_is_never_more_than_by_costs_alone(world: int, tables: list[tuple[int, int, float]]) -> None:
    _, layout = _chosen({f"t{n}": each for n, each in enumerate(tables)}, world)
    least, nbytes = _by_cost_alone(layout)
    assert max(layout.table_bytes) <= max(nbytes) and layout.time <= 1.1 * least * (1 + 1e-9)
    if max(nbytes) <= 1.25 * sum(nbytes) / world + 2**30:
        assert layout.table_bytes == tuple(nbytes)


def _by_cost_alone(layout: Layout) -> tuple[float, list[int]]:
    """Return the time of a step, and the bytes they hold, with the costliest slice first and no look at memory."""
    world = len(layout.loads)
    used, nbytes = [layout.costs.nothing] * world, [0] * world
    parts = []
    tables = zip(layout.costs.of_slices, layout.configs, layout.placements, strict=True)
    for cost, config, placement in tables:
        size = config.num_embeddings * config.embedding_dim // placement.num_slices * config.data_type.itemsize
        if placement.kind == "replicated":
            used = [_sum(each, cost) for each in used]
            nbytes = [each + size for each in nbytes]
        else:
            parts += [(cost, size)] * placement.num_slices
    for cost, size in sorted(parts, key=lambda part: -_load(part[0])):
        ways = [[*used[:pe], _sum(used[pe], cost), *used[pe + 1 :]] for pe in range(world)]
        pe = min(range(world), key=lambda pe: (_step_time(ways[pe]), _load(ways[pe][pe]), nbytes[pe]))
        used, nbytes[pe] = ways[pe], nbytes[pe] + size
    return _step_time(used), nbytes


def _sum(used: Cost, cost: Cost) -> Cost:
    """Return the sums of what phases use of their resources."""
    return tuple(tuple(map(sum, zip(*phase, strict=True))) for phase in zip(used, cost, strict=True))


def _step_time(costs: Sequence[Cost]) -> float:
    """Return the time of a step: each phase takes as long as it takes the PE that has the most to do in it."""
    return sum(max(max(cost[phase]) for cost in costs) for phase in range(len(costs[0])))


def _load(cost: Cost) -> float:
    """Return the time of two phases that run one after the other."""
    return sum(max(phase) for phase in cost)


@pytest.mark.parametrize("dim", [16, 36])
def test_rows_that_are_narrow_or_would_not_be_aligned_stay_whole(dim: int) -> None:
    chosen, _ = _chosen({"hot": (10_000_000, dim, 100.0), "other": (10_000_000, dim, 1.0)}, 2)
    assert set(chosen.values()) == {TablePlacement()}
    chosen, _ = _chosen({"hot": (10_000_000, 48, 100.0), "other": (10_000_000, 48, 1.0)}, 2)
    assert chosen["hot"] == TablePlacement("column_wise", 2)


def test_small_tables_are_replicated_where_that_pays() -> None:
    tables = {"large": (10_000_000, 128, 5.0), **{f"s{n}": (200 * n + 3, 128, 1.0) for n in range(12)}}
    kinds = {placement.kind for placement in _chosen(tables, 4)[0].values()}
    assert "replicated" not in kinds, "results would be copied to stand side by side"
    chosen, layout = _chosen(tables, 4, rates=_SLOW_LINKS)
    assert all((placement.kind == "replicated") is (name != "large") for name, placement in chosen.items())
    assert layout.replicated[0].dim_per_rank == (12 * 128,) and layout.owners[1] == ()
    of_dtypes = {
        dtype: _chosen(tables, 4, rates=_SLOW_LINKS, dtype=dtype, batch=16384)[0]["s0"].kind
        for dtype in (torch.float16, torch.bfloat16)
    }
    assert of_dtypes == {torch.float16: "table_wise", torch.bfloat16: "replicated"}
    slow = replace(_SLOW_LINKS, launch=1.0)  # launches cost more than they save
    assert set(_chosen(tables, 4, "rowwise_adagrad", slow)[0].values()) == {TablePlacement()}
    assert set(_chosen(tables, 1)[0].values()) == {TablePlacement()}


def test_what_draws_random_bits_is_neither_cut_nor_replicated() -> None:
    """Cuts and replicas decide which random bits a row gets, and another run may measure other costs."""
    tables = {"hot": (10_000_000, 128, 100.0), **{f"s{n}": (200 * n + 3, 128, 1.0) for n in range(12)}}
    kinds = {
        (dtype, rounding): {
            each.kind
            for each in _chosen(tables, 4, rates=_SLOW_LINKS, dtype=dtype, batch=16384, rounding=rounding)[0].values()
        }
        for dtype in (torch.bfloat16, torch.float16, torch.float32)
        for rounding in ("nearest", "stochastic")
    }
    spread, all_kinds = {"table_wise"}, {"column_wise", "replicated"}
    assert kinds[torch.bfloat16, "nearest"] == kinds[torch.float32, "stochastic"] == all_kinds
    assert kinds[torch.float16, "nearest"] == {"column_wise", "table_wise"}
    assert kinds[torch.bfloat16, "stochastic"] == kinds[torch.float16, "stochastic"] == spread
    given = {"hot": TablePlacement("column_wise", 2), "s0": "replicated"}  # what is asked for is done
    chosen, _ = _chosen(tables, 4, given=given, dtype=torch.bfloat16, rounding="stochastic")
    assert {chosen[name].kind for name in given} == {"column_wise", "replicated"}


def test_how_large_a_replica_may_be() -> None:
    """Decided by its rows' sums against the rows that travel otherwise, and at most 8 MiB."""
    tables = {"large": (10_000_000, 128, 1.0), "middle": (11_000, 128, 1.0), "most": (17_000, 128, 1.0)}
    kinds = {
        batch: [each.kind for each in _chosen(tables, 4, "rowwise_adagrad", _SLOW_LINKS, batch=batch)[0].values()]
        for batch in (4096, 65536)
    }
    assert kinds == {4096: ["table_wise"] * 3, 65536: ["table_wise", "replicated", "table_wise"]}


def test_what_is_given_counts() -> None:
    tables = dict.fromkeys("abcd", (10000000, 64, 10.0))
    given = {"a": TablePlacement(ranks=(1,)), "b": TablePlacement(ranks=(1,)), "c": "auto", "d": "auto"}
    chosen, layout = _chosen(tables, 2, given=given)
    assert chosen["a"] == given["a"] and layout.owners == ((1,), (1,), (0,), (0,))


def test_costs_are_those_of_the_formula() -> None:
    config = TableConfig("t", 1000, 32, ["x", "y"])
    rates = Rates(memory=1.0, link=1.0, launch=0.0)
    workload = Workload(rates, 4, 10, {"x": 2.0, "y": 3.0}, "adam")
    lookups, pooled = 40 * 5, 40 * 2 * 64
    touched = lookups * 1000 / (lookups + 1000)
    (forward, sent), (backward, received) = workload.cost(config, TablePlacement("column_wise", 2))
    assert forward == lookups * (64 + 32 + 64) + pooled
    assert backward == pytest.approx(lookups * 192 + 2 * pooled + 2 * touched * (3 * (64 + 32)))
    assert (sent, received) == (0.75 * (pooled + 4 * lookups), 0.75 * pooled)
    halved = replace(workload, wire_dtype=torch.bfloat16).cost(config, TablePlacement("column_wise", 2))
    assert halved[0] == (forward - pooled / 2, sent - 0.75 * pooled / 2)
    assert halved[1] == (pytest.approx(backward - pooled), received / 2)
    replica = workload.cost(config, TablePlacement("replicated"))
    own, sums = 10 * 2 * 128, 16 * 32_000
    assert replica[0] == (50 * (128 + 32 + 64) + own, 0)
    assert replica[1][0] == pytest.approx(50 * 192 + 2 * own + 2 * touched * (3 * (128 + 32)) + sums)
    assert replica[1][1] == 2 * 0.75 * 4 * 32_000


# ---- in a world ------------------------------------------------------------------------------------------------------


def _measured_on_a_busy_machine() -> float:
    calls = itertools.count()

    def action() -> None:
        time.sleep(0.05 if next(calls) < 20 else 0.001)

    return _seconds(po_world.current(), action)


def test_what_else_the_machine_does_is_not_measured() -> None:
    assert in_world(_measured_on_a_busy_machine, 1, "host")[0] < 0.04


_TABLES = [TableConfig("a", 40, 32, ["x"]), TableConfig("b", 70_000, 16, ["y"]), TableConfig("c", 5, 8, ["z"])]


def _decided_together() -> tuple[Any, ...]:
    world = po_world.current()
    rates = measured_rates(world)
    assert measured_rates(world) is rates
    lookups = {"x": 40.0, "y": 2.0, "z": 1.0}
    module = po.nn.ShardedEmbeddingBagCollection(
        _TABLES, max_batch=64, lookups_per_sample=lookups, placement="auto", optimizer="adagrad", lr=0.5
    )
    again = po.nn.ShardedEmbeddingBagCollection(
        _TABLES,
        max_batch=64,
        lookups_per_sample=lookups,
        placement=module.placements(),
    )
    assert again.placements() == module.placements() and again.layout.owners == module.layout.owners
    console = Console(width=120, file=io.StringIO(), record=True)
    console.print(module.placement_table(), again.placement_table())
    return rates, module.layout.placements, module.layout.owners, module.layout.loads, console.export_text()


@pytest.mark.parametrize("world", [1, 3])
def test_all_pes_decide_the_same(backend: str, world: int) -> None:
    told = in_world(_decided_together, world, backend)
    assert all(each == told[0] for each in told)
    rates, placements, _, loads, text = told[0]
    assert 1e6 < rates.memory < 1e14 and 0 < rates.launch < 10 and rates.link > 1e4
    assert len(placements) == 3 and len(loads) == world and min(loads) >= 0 and max(loads) > 0
    for part in ("us per step", "bytes per sample", "70000", f"PE {world - 1}"):
        assert part in text, text


# ---- TorchRec's own plans --------------------------------------------------------------------------------------------


def test_plans_of_torchrec() -> None:
    modules = pytest.importorskip("torchrec.modules.embedding_configs")
    collections = pytest.importorskip("torchrec.modules.embedding_modules")
    plans = pytest.importorskip("torchrec.distributed.sharding_plan")
    types = pytest.importorskip("torchrec.distributed.types")
    shapes = {"a": (100, 8), "b": (50, 16), "c": (7, 4)}
    configs = [
        modules.EmbeddingBagConfig(name=name, num_embeddings=rows, embedding_dim=dim, feature_names=[f"f_{name}"])
        for name, (rows, dim) in shapes.items()
    ]
    collection = collections.EmbeddingBagCollection(tables=configs, device=torch.device("meta"))

    def planned(**chosen: Any) -> Any:
        made = plans.construct_module_sharding_plan(
            collection,
            {"a": plans.table_wise(rank=1), "b": plans.column_wise(ranks=[1, 0]), "c": plans.data_parallel(), **chosen},
            local_size=2,
            world_size=2,
            device_type="cuda",
        )
        return types.ShardingPlan({"sparse.ebc": made, "other": {}})

    found = placements_of(table_configs(configs), planned())
    assert found == (
        TablePlacement("table_wise", 1, (1,)),
        TablePlacement("column_wise", 2, (1, 0)),
        TablePlacement("replicated"),
    )
    assert placements_of(table_configs(configs), planned().plan["sparse.ebc"]) == found
    refused = {
        "row_wise": plans.row_wise(),
        "table_row_wise": plans.table_row_wise(host_index=0),
        "fused_uvm": plans.table_wise(rank=0, compute_kernel="fused_uvm"),
        "[4, 12] columns": plans.column_wise(size_per_rank=[4, 12]),
    }
    for told, sharding in refused.items():
        with pytest.raises(NotImplementedError, match=re.escape(told)):
            placements_of(table_configs(configs), planned(b=sharding))

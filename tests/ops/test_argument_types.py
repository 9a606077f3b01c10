"""Arguments of types that no function accepts. Each error names the argument, and no internal error appears."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from worlds import error_of, in_world

import persistent_ops as po

MATRIX, VECTOR = torch.ones(8, 16), torch.ones(16)
LOOKUPS = (torch.arange(6), torch.arange(0, 7, 2))
TABLE = ("t", 10, 16, ["f"])


def _embed(**options: Any) -> Any:
    return po.embedding_all_to_all([torch.ones(10, 16)], *LOOKUPS, **options)


def _optimizer(**options: Any) -> Any:
    return po.EmbeddingOptimizer([torch.ones(10, 16)], "sgd", lr=0.1, **options)


def _inputs(slots: Any = (((0, 10),),), **options: Any) -> Any:
    return po.EmbeddingInputs(slots, num_features=1, max_batch=4, **{"lookups_per_sample": 1.0, **options})


def _capacity(capacity: Any) -> Any:
    return _inputs(lookups_per_sample=None, capacity=capacity)


def _collection(table: Any = TABLE, **options: Any) -> Any:
    return po.nn.ShardedEmbeddingBagCollection([table], max_batch=4, **options)


def _set(**values: Any) -> None:
    for name, value in values.items():
        setattr(_optimizer(), name, value)


def _traced(capacity: Any) -> None:
    with po.trace(capacity=capacity):
        pass


def _norm(**options: Any) -> Any:
    return po.all_reduce_rms_norm(MATRIX, VECTOR, **options)


def _scattered(**options: Any) -> Any:
    return po.gemm_reduce_scatter(MATRIX.bfloat16(), MATRIX.t().bfloat16(), **options)


def _row(*args: Any, **options: Any) -> Any:
    return po.nn.RowParallelLinear(*args, **options)


WRONG: dict[str, tuple[Callable[[], Any], str]] = {
    "a list as pooling": (
        lambda: _embed(pooling=["sum"]),
        "ValueError; pooling: expected one of 'sum', 'mean', got ['sum']",
    ),
    "a word as seed of a table": (lambda: _optimizer(seed=["1"]), "TypeError; seed: expected whole numbers, got ['1']"),
    "a huge eps": (lambda: _norm(eps=10**400), "ValueError; eps: "),
    "a list as prefetch_weight": (
        lambda: po.gemv(MATRIX, VECTOR, prefetch_weight=[True]),
        "TypeError; prefetch_weight: expected True or False, got [True]",
    ),
    "a list as wire_dtype": (
        lambda: po.gemv_all_reduce(MATRIX, VECTOR, wire_dtype=[torch.float32]),
        "ValueError; wire_dtype: expected None, torch.float32 or ",
    ),
    "a list as algorithm": (
        lambda: po.gemv_all_reduce(MATRIX, VECTOR, algorithm=["auto"]),
        "ValueError; algorithm: expected one of ",
    ),
    "a list as op": (lambda: _scattered(op=["sum"]), "ValueError; op: expected one of 'sum', 'mean', got ['sum']"),
    "a word as scatter_dim": (
        lambda: _scattered(scatter_dim="1"),
        "ValueError; scatter_dim: expected 0 or 1, got '1'",
    ),
    "a fraction as scatter_dim": (
        lambda: _scattered(scatter_dim=1.0),
        "ValueError; scatter_dim: expected 0 or 1, got 1.0",
    ),
    "a list as wire_dtype of products": (
        lambda: _scattered(wire_dtype=[torch.float32]),
        "TypeError; wire_dtype: expected torch.bfloat16 or torch.float32, got [torch.float32]",
    ),
    "a number as algorithm": (lambda: _scattered(algorithm=1), "ValueError; algorithm: expected one of 'auto', "),
    "a word as capacity of traces": (lambda: _traced("1"), "TypeError; capacity: expected a whole number of bytes"),
    "slots that are no list": (lambda: _inputs(3), "TypeError; slots: expected pairs (feature, rows) of whole "),
    "slots of three numbers": (lambda: _inputs([[(0, 10, 1)]]), "TypeError; slots: expected pairs"),
    "half a row": (lambda: _inputs([[(0, 1.5)]]), "TypeError; slots: expected pairs"),
    "a number as slot_order": (
        lambda: _inputs(slot_order=3),
        "TypeError; slot_order: expected a list of whole numbers",
    ),
    "a half in slot_order": (lambda: _inputs(slot_order=[[0.5]]), "TypeError; slot_order: expected a list of whole"),
    "a number as capacity": (lambda: _capacity(3), "TypeError; capacity: expected a list of whole numbers for each PE"),
    "a word of one letter as lookups_per_sample": (
        lambda: _inputs(lookups_per_sample="1"),
        "TypeError; lookups_per_sample: expected a number, or one for each feature, got '1'",
    ),
    "too many lookups_per_sample": (lambda: _inputs(lookups_per_sample=[10**400]), "ValueError; lookups_per_sample: "),
    "a number as tables": (
        lambda: po.nn.ShardedEmbeddingBagCollection(3, max_batch=4),  # type: ignore[arg-type]
        "TypeError; tables: expected a sequence of configs or tuples, got int",
    ),
    "a short tuple": (lambda: _collection(("t",)), "TypeError; tables[0]: expected a TableConfig, "),
    "a table without a name": (lambda: _collection((3, 10, 16, ["f"])), "TypeError; tables[0]: expected a name, got 3"),
    "a feature without a name": (lambda: _collection(("t", 10, 16, [3])), "TypeError; tables[0]: expected names of "),
    "a word as max_gradient": (lambda: _collection(max_gradient="1"), "TypeError; max_gradient: expected a number"),
    "half a rank": (
        lambda: _collection(placement=po.nn.TablePlacement(ranks=(0.5,))),  # type: ignore[arg-type]
        "TypeError; placement: t: expected a rank for each slice, got (0.5,)",
    ),
    "half a slice": (
        lambda: _collection(placement=po.nn.TablePlacement("column_wise", 0.5)),  # type: ignore[arg-type]
        "TypeError; placement: t: expected a number of slices, got 0.5",
    ),
    "a list of lookups": (
        lambda: _collection(lookups_per_sample=[3]),
        "TypeError; lookups_per_sample of 'f': expected",
    ),
    "a scale beyond float32": (lambda: _set(gradient_scale=1e39), "ValueError; gradient_scale: expected a number of "),
    "a number as table": (lambda: _optimizer().state(3), "TypeError; weight: expected a tensor, got int"),
    "two rates": (lambda: _set(lr=torch.ones(2)), "ValueError; lr: expected one element, got shape [2]"),
    "a decay beyond float32": (
        lambda: po.EmbeddingOptimizer([torch.ones(10, 16)], "adam", lr=0.1, weight_decay=1e39),
        "ValueError; weight_decay: expected a number of at least 0 and below infinity, also in float32, got 1e+39",
    ),
    "a word as in_features": (lambda: _row("16", 8), "TypeError; in_features: expected a whole number, got '16'"),
    "a half as out_features": (lambda: _row(16, 8.5), "TypeError; out_features: expected a whole number, got 8.5"),
    "fewer than no features": (lambda: _row(-16, 8), "ValueError; in_features, out_features: expected at least 0"),
    "a number as splits": (lambda: _row(16, 8, splits=16), "TypeError; splits: expected whole numbers, got 16"),
}


def _told() -> dict[str, str]:
    return {name: "; ".join(error_of(action)[:2]) for name, (action, _) in WRONG.items()}


@pytest.fixture(scope="module")
def told() -> dict[str, str]:
    return dict(in_world(_told, 1, "host")[0])


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_type_is_named(told: dict[str, str], name: str) -> None:
    assert told[name].startswith(WRONG[name][1])


def test_options_of_the_host_are_a_dict() -> None:
    with pytest.raises(TypeError, match="host_options: expected a dict, got 1"):
        po.init("host", host_options=1)  # type: ignore[arg-type]

"""All wrong calls of the package: the exception, the argument that it names, the expected and the actual value.

Operators are called in a world of one PE unless several PEs matter. No check may launch or hang.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from arguments import Arguments, ArgumentSuite, Function, Outcome, Wrong, outcome_of
from worlds import error_of, run_pes

import persistent_ops as po
from persistent_ops.runtime.tensor_specs import TensorSpec, TensorSpecs

MB = 1 << 20
ROWS, TABLES, BATCH, DIM = 10, 2, 3, 8


def good() -> dict[str, Any]:
    """Arguments of a call that works, on the world's device."""
    return {
        "weights": [torch.full((ROWS, DIM), float(t + 1), device=po.device()) for t in range(TABLES)],
        "indices": torch.arange(TABLES * BATCH * 2, device=po.device()) % ROWS,
        "offsets": torch.arange(0, TABLES * BATCH * 2 + 1, 2, device=po.device()),
        "per_sample_weights": None,
    }


def call(**changes: Any) -> torch.Tensor:
    return po.embedding_all_to_all(**{**good(), **changes})


def changed(name: str, change: Callable[[Any], Any]) -> Callable[[], dict[str, Any]]:
    return lambda: {name: change(good()[name])}


def factors(**options: Any) -> torch.Tensor:
    return torch.ones(TABLES * BATCH * 2, **{"device": po.device(), **options})


def nothing(dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return torch.zeros(0, dtype=dtype, device=po.device())


def in_heap(shape: tuple[int, ...]) -> torch.Tensor:
    return po.to_symmetric(torch.ones(shape, device=po.device()))


def no_bags() -> torch.Tensor:
    return torch.zeros(1, dtype=torch.int64, device=po.device())


# name -> (arguments that differ from the good ones, exception, text in its message)
_WRONG: dict[str, tuple[Callable[[], dict[str, Any]], type[Exception], str]] = {
    # weights
    "float64 tables": (
        changed("weights", lambda ws: [w.double() for w in ws]),
        TypeError,
        r"dtype: expected float32, float16 or bfloat16, got torch\.float64",
    ),
    "tables of two dtypes": (
        changed("weights", lambda ws: [ws[0], ws[1].half()]),
        TypeError,
        r"weights\[1\]: all tables need the dtype torch\.float32, got torch\.float16",
    ),
    "dtype= of none of the tables": (
        lambda: {"dtype": torch.bfloat16},
        TypeError,
        r"weights\[0\]: all tables need the dtype torch\.bfloat16, got torch\.float32",
    ),
    "dtype= that is no dtype": (
        lambda: {"dtype": "float32"},
        TypeError,
        "dtype: expected float32, float16 or bfloat16, got 'float32'|got float32",
    ),
    "wire_dtype= of neither the tables nor bfloat16": (
        lambda: {"wire_dtype": torch.float16},
        TypeError,
        r"wire_dtype: expected the tables' torch\.float32, or torch\.bfloat16 where .*, got torch\.float16",
    ),
    "wire_dtype= wider than the tables'": (
        lambda: {"weights": [w.bfloat16() for w in good()["weights"]], "wire_dtype": torch.float32},
        TypeError,
        r"wire_dtype: expected the tables' torch\.bfloat16, or .*, got torch\.float32",
    ),
    "wire_dtype= another of 16 bits": (
        lambda: {"weights": [w.half() for w in good()["weights"]], "wire_dtype": torch.bfloat16},
        TypeError,
        r"wire_dtype: expected the tables' torch\.float16, or .*, got torch\.bfloat16",
    ),
    "wire_dtype= that is no dtype": (lambda: {"wire_dtype": "bfloat16"}, TypeError, "wire_dtype: .*got '?bfloat16"),
    "tables on another device": (
        changed("weights", lambda ws: [w.to("meta") for w in ws]),
        ValueError,
        r"weights\[0\]: expected a tensor on (cpu|cuda:0), got one on meta",
    ),
    "one-dimensional table": (
        changed("weights", lambda ws: [ws[0], ws[1][0]]),
        ValueError,
        r"weights\[1\]: expected a contiguous \[R, D\] tensor, got shape \[8\]",
    ),
    "transposed table": (
        changed("weights", lambda ws: [ws[0], ws[1].t().contiguous().t()]),
        ValueError,
        r"weights\[1\]: expected a contiguous \[R, D\] tensor, got shape \[10, 8\]",
    ),
    "one tensor in place of a list": (
        changed("weights", lambda ws: torch.stack(ws)),
        TypeError,
        "weights: expected a sequence of tensors, got a Tensor|weights: expected a sequence of tensors, got Tensor",
    ),
    "a number among the tables": (
        changed("weights", lambda ws: [ws[0], 3]),
        TypeError,
        r"weights\[1\]: expected a tensor, got int",
    ),
    # indices and offsets
    "offsets that the tables do not divide": (
        changed("offsets", lambda o: o[:-1]),
        ValueError,
        r"offsets: expected T \* B \+ 1 elements for T = 2 tables, got 6",
    ),
    "offsets of another batch": (
        lambda: {"batch_per_rank": [BATCH + 1]},
        ValueError,
        r"offsets: expected T \* B \+ 1 = 2 \* 4 \+ 1 = 9 elements, got 7",
    ),
    # per_sample_weights
    "factors of a mean": (
        lambda: {"per_sample_weights": factors(), "pooling": "mean"},
        ValueError,
        "per_sample_weights: only pooling='sum' takes them, got pooling='mean'",
    ),
    # choices
    "pooling": (lambda: {"pooling": "max"}, ValueError, "pooling: expected one of 'sum', 'mean', got 'max'"),
    "bounds": (lambda: {"bounds": "clamp"}, ValueError, "bounds: expected one of 'fatal', 'ignore', got 'clamp'"),
    "schedule": (
        lambda: {"schedule": "random"},
        ValueError,
        "schedule: expected one of 'communication_aware', 'oblivious', got 'random'",
    ),
    # batch_per_rank and dim_per_rank
    "batches of too many PEs": (
        lambda: {"batch_per_rank": [1, 2]},
        ValueError,
        r"batch_per_rank: expected 1 numbers of at least 0, one per PE, got \[1, 2\]",
    ),
    "negative batch": (
        lambda: {"batch_per_rank": [-3]},
        ValueError,
        r"batch_per_rank: expected 1 numbers of at least 0, one per PE, got \[-3\]",
    ),
    "batch that is no whole number": (lambda: {"batch_per_rank": [3.0]}, TypeError, r"batch_per_rank: .*3\.0"),
    "widths of too many PEs": (
        lambda: {"dim_per_rank": [16, 1]},
        ValueError,
        r"dim_per_rank: expected 1 numbers of at least 0, one per PE, got \[16, 1\]",
    ),
    "width that is no whole number": (lambda: {"dim_per_rank": [16.0]}, TypeError, r"dim_per_rank: .*16\.0"),
    "widths of other tables": (
        lambda: {"dim_per_rank": [15]},
        ValueError,
        "dim_per_rank: entry 0 is 15, but this PE's tables have 16 columns in all",
    ),
    # no tables
    "no tables and no batch": (
        lambda: {"weights": [], "indices": nothing(), "offsets": no_bags()},
        ValueError,
        "batch_per_rank: a PE without tables cannot derive the batch from offsets; pass batch_per_rank",
    ),
    "no tables, but offsets of some": (
        lambda: {"weights": [], "indices": nothing(), "batch_per_rank": [3]},
        ValueError,
        r"offsets: expected T \* B \+ 1 = 0 \* 3 \+ 1 = 1 elements, got 7",
    ),
    # out
    "out of another shape": (
        lambda: {"out": torch.empty(BATCH + 1, 16, device=po.device())},
        ValueError,
        r"out: expected a contiguous torch\.float32 tensor of shape \[3, 16\], got torch\.float32 \[4, 16\]",
    ),
    "out of another dtype": (
        lambda: {"out": torch.empty(BATCH, 16, dtype=torch.float16, device=po.device())},
        ValueError,
        r"out: expected a contiguous torch\.float32 tensor of shape \[3, 16\], got torch\.float16 \[3, 16\]",
    ),
    "out of the tables' dtype, but not the wire's": (
        lambda: {"out": po.empty(BATCH, 16), "wire_dtype": torch.bfloat16},
        ValueError,
        r"out: expected a contiguous torch\.bfloat16 tensor of shape \[3, 16\], got torch\.float32 \[3, 16\]",
    ),
    "out with gaps": (
        lambda: {"out": torch.empty(16, BATCH, device=po.device()).t()},
        ValueError,
        "out: expected a contiguous",
    ),
    "ordinary out": (
        lambda: {"out": torch.empty(BATCH, 16, device=po.device())},
        po.NotSymmetricError,
        "out: expected a tensor in the symmetric heap, got an ordinary one on (cpu|cuda:0); make it with po.empty",
    ),
    "out that begins between two vectors": (
        lambda: {"out": po.empty(BATCH * TABLES * DIM + 1)[1:].view(BATCH, TABLES * DIM)},
        ValueError,
        "out: expected a tensor that begins at a multiple of 16 bytes, .* that begins 4 bytes after one",
    ),
    "out that is a table": (
        lambda: {"weights": [w := in_heap((ROWS, DIM)), good()["weights"][1]], "out": w.view(-1)[:48].view(BATCH, 16)},
        ValueError,
        r"out: expected memory apart from weights\[0\], got a tensor that overlaps it",
    ),
    "out that is no tensor": (lambda: {"out": [0.0]}, TypeError, "out: expected a tensor, got list"),
}


_INDEX_TYPES = (torch.int32, torch.int64)
_LOOKUPS = TensorSpecs(
    TensorSpec("indices", "n", _INDEX_TYPES),
    TensorSpec("offsets", "num_offsets", _INDEX_TYPES),
    TensorSpec("per_sample_weights", "n", (torch.float32,)),
)


def _is_right(given: Arguments, result: torch.Tensor) -> bool:
    return bool((result[:, :DIM] == 2).all()) and bool((result[:, DIM:] == 4).all())


def _wrong_of(name: str) -> Wrong:
    make, error, text = _WRONG[name]
    return Wrong("plain", lambda given: make(), error, text)


class TestArguments(ArgumentSuite):
    functions: ClassVar = {
        "plain": Function(po.embedding_all_to_all, good, _is_right),
        "weighted": Function(
            po.embedding_all_to_all,
            lambda: {**good(), "per_sample_weights": factors()},
            _is_right,
            _LOOKUPS,
            ("indices",),
        ),
    }
    wrong: ClassVar = {name: _wrong_of(name) for name in _WRONG}


def one_pe(program: Callable[..., Any], backend: str, *args: Any) -> Any:
    return run_pes(program, 1, backend, *args, timeout=200)[0]


def _no_tables(backend: str) -> list[tuple[Any, ...]]:
    po.init(backend, operator_timeout=20.0, heap_size=16 * MB)
    arguments = {"weights": [], "indices": nothing(), "offsets": no_bags(), "batch_per_rank": [5]}
    results = [po.embedding_all_to_all(**arguments)]  # without peers, a PE knows that there is no column
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        results.append(po.embedding_all_to_all(**arguments, dim_per_rank=[0], dtype=dtype))
    results.append(po.embedding_all_to_all(**arguments, dim_per_rank=[0], wire_dtype=torch.bfloat16))
    found = [(tuple(result.shape), result.dtype) for result in results]
    po.finalize()
    return found


def test_no_tables(backend: str) -> None:
    dtypes = (torch.float32, torch.float32, torch.float16, torch.bfloat16, torch.bfloat16)
    assert one_pe(_no_tables, backend) == [((5, 0), dtype) for dtype in dtypes]


def _parameter_list(backend: str) -> bool:
    po.init(backend, operator_timeout=20.0, heap_size=16 * MB)
    parameters = torch.nn.ParameterList([torch.nn.Parameter(w) for w in good()["weights"]])
    with torch.no_grad():
        same = [
            torch.equal(call(weights=parameters, pooling=pooling), call(pooling=pooling)) for pooling in ("sum", "mean")
        ]
    result = call(weights=parameters)  # recorded
    po.finalize()
    return all(same) and result.grad_fn is not None


def test_parameter_lists(backend: str) -> None:
    assert one_pe(_parameter_list, backend)


def _of_other_types(backend: str) -> list[str]:
    po.init(backend, operator_timeout=20.0, heap_size=16 * MB)
    tables = good()["weights"]
    optimizer = po.EmbeddingOptimizer(tables, "sgd", lr=0.1)
    wrong: list[dict[str, Any]] = [
        *({name: 5} for name in ("dim_per_rank", "batch_per_rank", "columns")),
        {"optimizer": "sgd"},
        {"weights": None, "optimizer": optimizer},
        {"weights": [tables[0], None], "optimizer": optimizer},
    ]
    errors = [error_of(functools.partial(call, **changes))[:2] for changes in wrong]
    with torch.no_grad():  # where tables are not asked whether they require gradients
        errors += [error_of(functools.partial(call, weights=[tables[0], other]))[:2] for other in (3, None)]
    po.finalize()
    return ["; ".join(error) for error in errors]


def test_arguments_of_other_types(backend: str) -> None:
    numbers = [f"{name}: expected a sequence of whole numbers, got 5" for name in ("dim_per_rank", "batch_per_rank")]
    numbers.append("columns: expected a sequence of whole numbers, got 5")
    expected = [
        *numbers,
        "optimizer: expected a po.EmbeddingOptimizer, got 'sgd'",
        "weights: expected a sequence of tensors, got NoneType",
        "weights[1]: expected a tensor, got NoneType",
        "weights[1]: expected a tensor, got int",
        "weights[1]: expected a tensor, got NoneType",
    ]
    assert one_pe(_of_other_types, backend) == [f"TypeError; {text}" for text in expected]


def _widths_unknown(backend: str) -> str:
    po.init(backend, operator_timeout=10.0, heap_size=16 * MB)
    weights = good()["weights"] if po.rank() else []
    offsets = good()["offsets"] if po.rank() else no_bags()
    message = ""
    if po.rank() == 0:
        try:
            po.embedding_all_to_all(weights, nothing(), offsets, batch_per_rank=[2, 1])
        except ValueError as error:
            message = str(error)
    # With the widths passed it works, and the PE without tables receives the other PE's rows.
    indices = good()["indices"] if po.rank() else nothing()
    result = po.embedding_all_to_all(weights, indices, offsets, batch_per_rank=[2, 1], dim_per_rank=[0, 16])
    assert result.shape == (2 - po.rank(), 16) and bool((result[:, :DIM] == 2).all())
    po.finalize()
    return message


def test_a_pe_without_tables_must_be_told_the_widths(backend: str) -> None:
    results = run_pes(_widths_unknown, 2, backend, timeout=60)
    assert (
        results[0].startswith("dim_per_rank: a PE without tables cannot notice") and "pass dim_per_rank" in results[0]
    )


WRONG_EMPTY: dict[str, tuple[tuple[Any, ...], dict[str, Any], type[Exception], str]] = {
    "negative": ((-1,), {}, ValueError, r"size: expected numbers of at least 0, got .*-1"),
    "fraction": ((2.5,), {}, TypeError, r"size: expected whole numbers, got .*2\.5"),
    "truth": ((True,), {}, TypeError, r"size: expected whole numbers, got \[True\]"),
    "no dtype": ((2,), {"dtype": "float32"}, TypeError, r"dtype: expected a torch\.dtype, got .*float32"),
    "too large": (
        (1 << 40,),
        {},
        po.SymmetricHeapError,
        r"heap of PE 0 has no room for 4398046511104 bytes \(heap_size 16777216 bytes.*pass heap_size >= 4398[0-9]+ to",
    ),
}


NO_TENSORS: dict[str, tuple[Callable[[torch.Tensor], Any], str]] = {
    "list to symmetric": (lambda mine: po.to_symmetric([1]), "tensor: expected a tensor, got list"),
    "meta to symmetric": (
        lambda mine: po.to_symmetric(mine.to("meta")),
        "tensor: expected a tensor with memory, got one on meta",
    ),
    "size of a truth in a tensor": (lambda mine: po.empty(torch.tensor(True)), "size: expected whole numbers, got"),
    "view of PE True": (lambda mine: po.peer_view(mine, True), "rank: expected a whole number, got True"),
    "view of a list": (lambda mine: po.peer_view([1], 0), "tensor: expected a tensor, got list"),
    "free of a list": (lambda mine: po.free([1]), "tensor: expected a tensor, got list"),
}


def _wrong_sizes(backend: str) -> dict[str, Outcome]:
    po.init(backend, operator_timeout=20.0, heap_size=16 * MB)
    free_list = po.runtime.world.current().heap.free_list
    before = free_list.free_bytes
    outcomes = {
        name: outcome_of(lambda a=arguments, o=options: po.empty(*a, **o))
        for name, (arguments, options, _, _) in WRONG_EMPTY.items()
    }
    assert free_list.free_bytes == before
    mine = po.empty(4)
    for rank in (-1, 1):
        outcomes[f"view of PE {rank}"] = outcome_of(lambda r=rank: po.peer_view(mine, r))
    for name, (action, _) in NO_TENSORS.items():
        outcomes[name] = outcome_of(lambda a=action: a(mine))
    assert po.empty(torch.tensor(2), 3).shape == (2, 3) and po.peer_view(mine, torch.tensor(0)).shape == (4,)
    assert not po.to_symmetric(torch.ones(2, requires_grad=True)).requires_grad
    outcomes["second init"] = outcome_of(lambda: po.init(backend))
    assert po.is_initialized() and po.world_size() == 1
    po.finalize()
    assert not po.is_initialized()
    outcomes["after finalize"] = outcome_of(po.rank)
    po.finalize()
    return outcomes


def test_wrong_arguments_of_the_functions_around_the_operators(backend: str) -> None:
    outcomes = one_pe(_wrong_sizes, backend)
    for name, (_, _, error, text) in WRONG_EMPTY.items():
        assert error.__name__ in outcomes[name][0] and re.search(text, outcomes[name][1]), outcomes[name]
    for rank in (-1, 1):
        assert outcomes[f"view of PE {rank}"][0][0] == "ValueError"
        assert outcomes[f"view of PE {rank}"][1] == f"rank: expected 0 to 0, got {rank}"
    for name, (_, text) in NO_TENSORS.items():
        assert outcomes[name][0][0] == "TypeError" and re.search(text, outcomes[name][1]), outcomes[name]
    assert outcomes["second init"][0][0] == "RuntimeError"
    assert "already initialized here: call persistent_ops.finalize() first" in outcomes["second init"][1]
    assert "not initialized in this process: call persistent_ops.init() first" in outcomes["after finalize"][1]

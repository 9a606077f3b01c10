"""Every way to call gemv_all_reduce wrongly: which exception, which argument it names, what was expected, what came.

Calls run in a world of one PE; no check may launch or hang, and none may leave the world changed.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from worlds import run_pes

import persistent_ops as po

MB = 1 << 20
ROWS, COLUMNS, VECTORS = 6, 8, 3


def good(vectors: int | None = VECTORS) -> dict[str, Any]:
    """Arguments of a call that works, on the world's device."""
    shape = () if vectors is None else (vectors,)
    device = po.device()
    return {
        "weight": torch.arange(ROWS * COLUMNS, device=device).view(ROWS, COLUMNS).float(),
        "x": torch.ones(*shape, COLUMNS, device=device),
        "bias": torch.ones(ROWS, device=device),
        "residual": torch.ones(*shape, ROWS, device=device),
    }


def changed(name: str, change: Callable[[Any], Any]) -> Callable[[], dict[str, Any]]:
    return lambda: {name: change(good()[name])}


def all_in(dtype: torch.dtype) -> Callable[[], dict[str, Any]]:
    return lambda: {name: tensor.to(dtype) for name, tensor in good().items()}


def out(*shape: int, **options: Any) -> Callable[[], dict[str, Any]]:
    return lambda: {"out": torch.empty(shape, **{"device": po.device(), **options})}


def spread(tensor: torch.Tensor) -> torch.Tensor:
    """Return the same values in every second element of memory."""
    return tensor.repeat_interleave(2, dim=-1)[..., ::2]


# name -> (arguments that differ from the good ones, exception, what its message must say)
WRONG: dict[str, tuple[Callable[[], dict[str, Any]], type[Exception], str]] = {
    # weight
    "list as weight": (changed("weight", torch.Tensor.tolist), TypeError, "weight: expected a tensor, got list"),
    "no weight": (lambda: {"weight": None}, TypeError, "weight: expected a tensor, got NoneType"),
    "float64": (all_in(torch.float64), TypeError, r"weight: expected float32, float16 or bfloat16, got torch\.float64"),
    "integers": (all_in(torch.int32), TypeError, r"weight: expected float32, float16 or bfloat16, got torch\.int32"),
    "float8": (
        all_in(torch.float8_e4m3fn),
        TypeError,
        r"weight: expected float32, float16 or bfloat16, got torch\.float8_e4m3fn",
    ),
    "one-dimensional weight": (
        changed("weight", lambda w: w[0]),
        ValueError,
        r"weight: expected .*\[M, K\].*, got \[8\]",
    ),
    "three-dimensional weight": (
        changed("weight", lambda w: w[None]),
        ValueError,
        r"weight: expected .*\[M, K\].*, got \[1, 6, 8\]",
    ),
    "transposed weight": (
        changed("weight", lambda w: w.t().contiguous().t()),
        ValueError,
        r"weight: expected a contiguous .*got strides? [\[(]1, 6",
    ),
    "weight with gaps": (
        changed("weight", spread),
        ValueError,
        r"weight: expected a contiguous .*got strides? [\[(]16, 2",
    ),
    "every second row of a weight": (
        changed("weight", lambda w: w.repeat_interleave(2, dim=0)[::2]),
        ValueError,
        r"weight: expected a contiguous .*got strides? [\[(]16, 1",
    ),
    "weight on another device": (
        changed("weight", lambda w: w.to("meta")),
        ValueError,
        r"weight: expected a tensor on (cpu|cuda:\d+), got one on meta",
    ),
    # x
    "list as x": (changed("x", torch.Tensor.tolist), TypeError, "x: expected a tensor, got list"),
    "no x": (lambda: {"x": None}, TypeError, "x: expected a tensor, got NoneType"),
    "x of another dtype": (
        changed("x", torch.Tensor.half),
        TypeError,
        r"x: expected weight's dtype torch\.float32, got torch\.float16",
    ),
    "x of another length": (
        changed("x", lambda x: x[:, 1:].contiguous()),
        ValueError,
        r"x: expected shape \[8\] or \[N, 8\], got \[3, 7\]",
    ),
    "x of the weight's rows": (
        lambda: {"x": torch.ones(ROWS, device=po.device())},
        ValueError,
        r"x: expected shape \[8\] or \[N, 8\], got \[6\]",
    ),
    "x as columns": (
        lambda: {"x": torch.ones(COLUMNS, VECTORS, device=po.device())},
        ValueError,
        r"x: expected shape \[8\] or \[N, 8\], got \[8, 3\]",
    ),
    "x without dimensions": (
        changed("x", lambda x: x[0, 0]),
        ValueError,
        r"x: expected shape \[8\] or \[N, 8\], got \[\]",
    ),
    "three-dimensional x": (
        changed("x", lambda x: x[None]),
        ValueError,
        r"x: expected shape \[8\] or \[N, 8\], got \[1, 3, 8\]",
    ),
    "17 vectors": (
        lambda: {**good(17), "bias": None},
        ValueError,
        r"x: expected 1 to 16 vectors, got 17.*bound.*linear.*all_reduce",
    ),
    "no vectors": (lambda: {**good(0), "bias": None}, ValueError, r"x: expected 1 to 16 vectors, got 0$"),
    "transposed x": (
        changed("x", lambda x: x.t().contiguous().t()),
        ValueError,
        r"x: expected a contiguous .*got strides? [\[(]1, 3",
    ),
    "x sparse": (
        changed("x", torch.Tensor.to_sparse),
        TypeError,
        "x: expected a plain dense tensor, got .*coo",
    ),
    "weight sparse": (
        changed("weight", torch.Tensor.to_sparse),
        TypeError,
        "weight: expected a plain dense tensor, got .*coo",
    ),
    "x with gaps": (changed("x", spread), ValueError, r"x: expected a contiguous .*got strides? [\[(]16, 2"),
    "one vector with gaps": (
        lambda: {**good(None), "x": spread(good(None)["x"])},
        ValueError,
        r"x: expected a contiguous .*got strides? [\[(]2",
    ),
    "x on another device": (
        changed("x", lambda x: x.to("meta")),
        ValueError,
        r"x: expected a tensor on (cpu|cuda:\d+), got one on meta",
    ),
    # bias
    "number as bias": (lambda: {"bias": 1.0}, TypeError, "bias: expected a tensor, got float"),
    "bias of another dtype": (
        changed("bias", torch.Tensor.bfloat16),
        TypeError,
        r"bias: expected weight's dtype torch\.float32, got torch\.bfloat16",
    ),
    "bias of another length": (
        changed("bias", lambda b: b[1:]),
        ValueError,
        r"bias: expected shape \[6\], got \[5\]",
    ),
    "bias of the columns": (
        lambda: {"bias": torch.ones(COLUMNS, device=po.device())},
        ValueError,
        r"bias: expected shape \[6\], got \[8\]",
    ),
    "bias per vector": (
        lambda: {"bias": good()["residual"]},
        ValueError,
        r"bias: expected shape \[6\], got \[3, 6\]",
    ),
    "bias with gaps": (changed("bias", spread), ValueError, r"bias: expected a contiguous .*got strides? [\[(]2"),
    "bias on another device": (
        changed("bias", lambda b: b.to("meta")),
        ValueError,
        r"bias: expected a tensor on (cpu|cuda:\d+), got one on meta",
    ),
    # residual
    "list as residual": (changed("residual", torch.Tensor.tolist), TypeError, "residual: expected a tensor, got list"),
    "residual of another dtype": (
        changed("residual", torch.Tensor.half),
        TypeError,
        r"residual: expected weight's dtype torch\.float32, got torch\.float16",
    ),
    "residual of one vector": (
        changed("residual", lambda r: r[0]),
        ValueError,
        r"residual: expected shape \[3, 6\], got \[6\]",
    ),
    "residual of too few vectors": (
        changed("residual", lambda r: r[:2]),
        ValueError,
        r"residual: expected shape \[3, 6\], got \[2, 6\]",
    ),
    "residual of a vector with a dimension more": (
        lambda: {**good(None), "residual": good(1)["residual"]},
        ValueError,
        r"residual: expected shape \[6\], got \[1, 6\]",
    ),
    "expanded residual": (
        changed("residual", lambda r: r[:1].expand(3, 6)),
        ValueError,
        r"residual: expected a contiguous .*got strides? [\[(]0, 1",
    ),
    "residual with gaps": (
        changed("residual", spread),
        ValueError,
        r"residual: expected a contiguous .*got strides? [\[(]12, 2",
    ),
    "residual on another device": (
        changed("residual", lambda r: r.to("meta")),
        ValueError,
        r"residual: expected a tensor on (cpu|cuda:\d+), got one on meta",
    ),
    # out
    "list as out": (lambda: {"out": [0.0]}, TypeError, "out: expected a tensor, got list"),
    "out of another shape": (out(3, 7), ValueError, r"out: expected shape \[3, 6\], got \[3, 7\]"),
    "out of one vector": (out(6), ValueError, r"out: expected shape \[3, 6\], got \[6\]"),
    "transposed shape of out": (out(6, 3), ValueError, r"out: expected shape \[3, 6\], got \[6, 3\]"),
    "out of another dtype": (
        out(3, 6, dtype=torch.float16),
        TypeError,
        r"out: expected weight's dtype torch\.float32, got torch\.float16",
    ),
    "out with gaps": (
        lambda: {"out": torch.empty(3, 12, device=po.device())[:, ::2]},
        ValueError,
        r"out: expected a contiguous .*got strides? [\[(]12, 2",
    ),
    "transposed out": (
        lambda: {"out": torch.empty(6, 3, device=po.device()).t()},
        ValueError,
        r"out: expected a contiguous .*got strides? [\[(]1, 3",
    ),
    "out in the weight": (
        lambda: {"weight": (w := good()["weight"]), "out": w.view(-1)[3:21].view(3, 6)},
        ValueError,
        "out: expected memory apart from weight, got a tensor that overlaps it",
    ),
    "out in x": (
        lambda: {"x": (x := good()["x"]), "out": x.view(-1)[6:].view(3, 6)},
        ValueError,
        "out: expected memory apart from x, got",
    ),
    "out is bias": (
        lambda: {"x": good(None)["x"], "residual": None, "bias": (b := good()["bias"]), "out": b},
        ValueError,
        "out: expected memory apart from bias, got",
    ),
    "out a row behind residual": (
        lambda: {"residual": (m := torch.ones(4, 6, device=po.device()))[:3], "out": m[1:]},
        ValueError,
        "out: expected residual itself or memory apart from residual, got",
    ),
    "out on another device": (
        out(3, 6, device="meta"),
        ValueError,
        r"out: expected a tensor on (cpu|cuda:\d+), got one on meta",
    ),
    # choices
    "algorithm": (
        lambda: {"algorithm": "ring"},
        ValueError,
        "algorithm: expected one of 'auto', 'one_shot', 'two_shot', got 'ring'",
    ),
    "algorithm that is no text": (
        lambda: {"algorithm": None},
        ValueError,
        "algorithm: expected one of 'auto', 'one_shot', 'two_shot', got None",
    ),
    "wire_dtype of neither": (
        lambda: {"wire_dtype": torch.bfloat16},
        ValueError,
        r"wire_dtype: expected None, torch\.float32 or the weight's dtype torch\.float32, got torch\.bfloat16",
    ),
    "wire_dtype of another half": (
        lambda: {**all_in(torch.bfloat16)(), "wire_dtype": torch.float16},
        ValueError,
        r"wire_dtype: expected None, torch\.float32 or the weight's dtype torch\.bfloat16, got torch\.float16",
    ),
    "wire_dtype float64": (
        lambda: {"wire_dtype": torch.float64},
        ValueError,
        r"wire_dtype: expected None, torch\.float32 or the weight's dtype torch\.float32, got torch\.float64",
    ),
    "wire_dtype that is no dtype": (
        lambda: {"wire_dtype": "float32"},
        ValueError,
        r"wire_dtype: expected None, torch\.float32 or the weight's dtype torch\.float32, got '?float32",
    ),
}


def outcome_of(action: Callable[[], Any]) -> tuple[list[str], str]:
    """Return the names of an exception's classes, and its text."""
    try:
        action()
    except Exception as error:
        return [cls.__name__ for cls in type(error).__mro__], str(error)
    return [], "no error"


def _wrong_calls(backend: str) -> dict[str, list[tuple[list[str], str]]]:
    po.init(backend, operator_timeout=20.0, heap_size=16 * MB)
    outcomes = {}
    for name, (make, _, _) in WRONG.items():
        arguments = {**good(), **make()}
        outcomes[name] = [outcome_of(lambda a=arguments: po.gemv_all_reduce(**a))]
        # The second call must not find a plan that the first one left behind, nor one of a right call.
        for vectors in (VECTORS, None):
            po.gemv_all_reduce(**good(vectors))
        outcomes[name].append(outcome_of(lambda a=arguments: po.gemv_all_reduce(**a)))
    result = po.gemv_all_reduce(**good())
    po.check()
    want = torch.arange(ROWS * COLUMNS).view(ROWS, COLUMNS).sum(1).float() + 2
    assert all(torch.equal(row.cpu(), want) for row in result), "the world has suffered"
    po.finalize()
    return outcomes


@functools.cache
def _outcomes(backend: str) -> dict[str, list[tuple[list[str], str]]]:
    return run_pes(_wrong_calls, 1, backend, timeout=200)[0]  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", WRONG)
def test_wrong_argument(backend: str, name: str) -> None:
    _, error, text = WRONG[name]
    for attempt, (classes, message) in enumerate(_outcomes(backend)[name]):
        assert error.__name__ in classes, f"attempt {attempt}: {classes} {message}"
        assert re.search(text, message), f"attempt {attempt}: {message}"


def _right_calls(backend: str) -> list[str]:
    """Calls that look wrong and are not."""
    po.init(backend, operator_timeout=20.0, heap_size=16 * MB)
    device = po.device()
    want = torch.arange(ROWS * COLUMNS).view(ROWS, COLUMNS).sum(1).float()
    weight, x = good(None)["weight"], good(None)["x"]
    calls: dict[str, Callable[[], torch.Tensor]] = {
        "bias and residual None": lambda: po.gemv_all_reduce(weight, x, bias=None, residual=None, out=None),
        "out is residual": lambda: po.gemv_all_reduce(weight, x, residual=(r := want.to(device) * 0), out=r),
        "symmetric out": lambda: po.gemv_all_reduce(weight, x, out=po.empty(ROWS)),
        "symmetric weight and x": lambda: po.gemv_all_reduce(po.to_symmetric(weight), po.to_symmetric(x)),
        "one row of a batch as x": lambda: po.gemv_all_reduce(weight, x.expand(3, COLUMNS).contiguous()[1]),
        "rows of a larger weight": lambda: po.gemv_all_reduce(torch.cat([weight, weight])[ROWS:], x),
        "stride of a dimension of one": lambda: po.gemv_all_reduce(weight, x.as_strided((1, COLUMNS), (77, 1)))[0],
        "wire_dtype float32": lambda: po.gemv_all_reduce(weight, x, wire_dtype=torch.float32),
        "16 vectors": lambda: po.gemv_all_reduce(weight, x.expand(16, COLUMNS).contiguous())[15],
    }
    problems = [name for name, call in calls.items() if not torch.equal(call().cpu(), want)]
    for columns, rows in ((0, ROWS), (COLUMNS, 0), (0, 0)):
        empty = po.gemv_all_reduce(torch.ones(rows, columns, device=device), torch.ones(2, columns, device=device))
        if not torch.equal(empty.cpu(), torch.full((2, rows), float(columns))):
            problems.append(f"{rows} rows, {columns} columns: {empty.tolist()}")
    po.check()
    po.finalize()
    return problems


def test_right_arguments(backend: str) -> None:
    assert run_pes(_right_calls, 1, backend, timeout=200) == [[]]


def test_use_before_init() -> None:
    assert not po.is_initialized()
    with pytest.raises(RuntimeError, match=r"not initialized in this process: call persistent_ops\.init\(\) first"):
        po.gemv_all_reduce(torch.ones(3, 4), torch.ones(4))


def test_arguments_after_x_are_keywords() -> None:
    with pytest.raises(TypeError, match="positional"):
        po.gemv_all_reduce(torch.ones(3, 4), torch.ones(4), torch.ones(3))  # type: ignore[misc]


def _full_heap(backend: str) -> tuple[list[str], str]:
    po.init(backend, operator_timeout=20.0, heap_size=2 * MB)
    # Two blocks, since what remains of the heap behind its flags is not known here.
    taken = [po.empty(MB, dtype=torch.uint8)]
    free_list = po.runtime.world.current().heap.free_list
    # In turn for no packets at all, and for some of them only.
    for left in (free_list.size // 16 * 5 // 2, 4096):
        taken.append(po.empty(free_list.free_bytes - left, dtype=torch.uint8))
        outcome = outcome_of(lambda: po.gemv_all_reduce(**good()))
        if free_list.free_bytes != left:
            return [], f"{left - free_list.free_bytes} bytes were not given back"
    for tensor in taken:
        po.free(tensor)
    po.gemv_all_reduce(**good())
    po.check()
    po.finalize()
    return outcome


def test_a_heap_without_room_for_packets(backend: str) -> None:
    for classes, text in run_pes(_full_heap, 2, backend, timeout=60):
        assert "SymmetricHeapError" in classes and "pass a larger heap_size to po.init()" in text, (classes, text)

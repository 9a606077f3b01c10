"""Operators without a backward pass in torch: opcheck, schemas, autograd, fake tensors, torch.compile."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch_checks import assert_schemas, opcheck_problems
from worlds import error_of, in_world

import persistent_ops as po
from persistent_ops.ops.all_reduce_plan import FLOAT8

ROWS, COLUMNS = 21, 24
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
Tensors = dict[str, torch.Tensor]


class Operator(NamedTuple):
    """An operator and its function.

    Attributes:
        tensors: names and shapes, in the order of the operator's schema; "N" is vectors, or absent.
        required: number of tensors that a call needs.
        choices: the other arguments of the schema.
        outputs: names.
        variants: options of the function that change no bit.
        wrong: calls of the function that fake calls refuse too, with texts.
        compiler: of torch.compile.
    """

    tensors: dict[str, str]
    required: int
    choices: tuple[Any, ...]
    outputs: tuple[str, ...]
    variants: Sequence[dict[str, Any]]
    wrong: Sequence[tuple[dict[str, Any], str]]
    compiler: str


_PRODUCT = {"weight": "M K", "x": "N K", "bias": "M", "residual": "N M"}
_RING = ({"algorithm": "ring"}, "algorithm: expected")
OPERATORS = {
    "gemv": Operator(_PRODUCT, 2, (False,), ("out",), [{"prefetch_weight": True}], [], "aot_eager"),
    "gemv_all_reduce": Operator(
        _PRODUCT,
        2,
        ("auto", None, False),
        ("out",),
        [{"prefetch_weight": True}, {"algorithm": "two_shot"}, {"wire_dtype": torch.float32}],
        [_RING, ({"wire_dtype": torch.float64}, "wire_dtype: expected")],
        "aot_eager",
    ),
    "all_reduce": Operator(
        {"x": "N K", "residual": "N K", "bias": "K"},
        1,
        ("auto",),
        ("out",),
        [{"algorithm": "slices"}],
        [_RING],
        "aot_eager",
    ),
    "all_reduce_rms_norm": Operator(
        {"x": "N K", "weight": "K", "residual": "N K", "bias": "K"},
        2,
        (None, "auto", 1e-6, 0.0),
        ("out", "norm_out"),
        [{"algorithm": "slices"}],
        [_RING],
        "inductor",
    ),
}
each_operator = pytest.mark.parametrize("name", OPERATORS)


def _given(name: str, vectors: int = 3, dtype: torch.dtype = torch.float32, *, is_whole: bool = True) -> Tensors:
    """Return this PE's tensors, all or the required ones. What is added to the sum is equal on all PEs."""
    operator, found = OPERATORS[name], {}
    sizes = {"M": ROWS, "K": COLUMNS, "N": vectors}
    for number, (each, names) in enumerate(operator.tensors.items()):
        seed = number if each in ("bias", "residual") else 10 + number + po.rank()
        shape = [sizes[size] for size in names.split() if size != "N" or vectors]
        if number < operator.required or is_whole:
            found[each] = torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(po.device(), dtype)
    return found


def _call(name: str, given: Tensors, **options: Any) -> tuple[torch.Tensor, ...]:
    required = OPERATORS[name].required
    positional, rest = list(given.values())[:required], dict(list(given.items())[required:])
    results = getattr(po, name)(*positional, **rest, **options)
    return results if isinstance(results, tuple) else (results,)


def _arguments(name: str, given: Tensors) -> tuple[Any, ...]:
    """Return the arguments of the operator in torch.ops."""
    return *(given.get(each) for each in OPERATORS[name].tensors), *OPERATORS[name].choices


def _outputs(name: str, results: Sequence[torch.Tensor]) -> Tensors:
    return {each: torch.full_like(result, 7.0) for each, result in zip(OPERATORS[name].outputs, results, strict=True)}


def _same(found: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor]) -> bool:
    return len(found) == len(wanted) and all(map(torch.equal, found, wanted))


# ---- the operator in torch.ops ---------------------------------------------------------------------------------------


def _opcheck(name: str) -> list[str]:
    operators, calls = torch.ops.persistent_ops, {}
    for vectors, dtype, is_whole in ((0, torch.float32, False), (3, torch.bfloat16, True)):
        given = _given(name, vectors, dtype, is_whole=is_whole)
        arguments, written = _arguments(name, given), _outputs(name, _call(name, given))
        calls[f"{dtype}"] = (getattr(operators, name), arguments, {})
        calls[f"{dtype}, out"] = (getattr(operators, f"{name}_out"), arguments, written)
    if name == "all_reduce_rms_norm":
        scale = torch.ones(1, device=po.device())
        given = (*_given(name, is_whole=False).values(), None, None, scale, "one_shot", 1e-6, 1.0)
        calls["float8"] = (operators.all_reduce_rms_norm, given, {})
    return opcheck_problems(calls)


@each_operator
def test_opcheck(backend: str, name: str) -> None:
    assert in_world(_opcheck, 1, backend, name) == [[]]


@each_operator
def test_the_schemas_declare_what_is_written(name: str) -> None:
    assert_schemas(name, *OPERATORS[name].outputs, is_collective=name != "gemv")


def _results(name: str, given: Tensors, want: tuple[torch.Tensor, ...]) -> dict[str, tuple[torch.Tensor, ...]]:
    """Return the results of all ways to call it."""
    of_operator = getattr(torch.ops.persistent_ops, name)(*_arguments(name, given))
    found = {"operator": of_operator if isinstance(of_operator, tuple) else (of_operator,)}
    written = _outputs(name, want)
    nothing = getattr(torch.ops.persistent_ops, f"{name}_out")(*_arguments(name, given), **written)
    assert nothing is None
    found["the operator's out"] = tuple(written.values())
    written = _outputs(name, want)
    versions = [tensor._version for tensor in written.values()]
    found["out"] = _call(name, given, **written)
    assert all(a is b for a, b in zip(found["out"], written.values(), strict=True))
    assert [tensor._version for tensor in written.values()] == [version + 1 for version in versions]
    for options in OPERATORS[name].variants:
        found[f"{options}"] = _call(name, given, **options)
    with torch.no_grad():
        found["parameter"] = _call(name, {key: torch.nn.Parameter(each) for key, each in given.items()})
    with torch.inference_mode():
        found["inference mode"] = tuple(each.clone() for each in _call(name, given))
    if "residual" in given:
        residual = given["residual"].clone()
        found["in place"] = _call(name, {**given, "residual": residual}, out=residual)
        assert found["in place"][0] is residual
    return found


def _operator_and_function(name: str) -> list[str]:
    problems, backend = [], po.runtime.world.current().backend
    for dtype in DTYPES:
        for vectors, is_whole in ((0, False), (1, True), (5, True)):
            given = _given(name, vectors, dtype, is_whole=is_whole)
            copies = {key: tensor.clone() for key, tensor in given.items()}
            want = _call(name, given)
            found = _results(name, given, want)
            po.check()
            where = f"{dtype}, {vectors} vectors"
            for way, results in found.items():
                if not _same(results, want) or any(each.requires_grad for each in results):
                    problems.append(f"{where}, {way}: differs from the function")
            problems += [f"{where}: {key} was changed" for key in given if not torch.equal(given[key], copies[key])]
            if any(0 <= each.data_ptr() - backend.heap_base < backend.heap_bytes for each in want):
                problems.append(f"{where}: the result is in the symmetric heap")
    return problems


@each_operator
def test_the_operator_and_the_function_are_the_same(backend: str, name: str) -> None:
    assert in_world(_operator_and_function, 2, backend, name) == [[], []]


# ---- autograd --------------------------------------------------------------------------------------------------------


def _autograd(name: str) -> list[str]:
    given, problems = _given(name), []
    want = _call(name, given)
    for key, tensor in given.items():
        results = _call(name, {**given, key: tensor.clone().requires_grad_()})
        if not _same(results, want) or not all(each.requires_grad for each in results):
            problems.append(f"{key}: forward")
        for result in results:
            kind, text, _ = error_of(lambda result=result: result.sum().backward())
            if kind != "NotImplementedError" or f"{name} is forward only" not in text or "torch.no_grad()" not in text:
                problems.append(f"{key}: {kind} {text}")
    recorded = {**given, "x": given["x"].clone().requires_grad_()}
    for key, out in _outputs(name, want).items():
        for tensors, written in ((recorded, out), (given, out.clone().requires_grad_())):
            kind, text, _ = error_of(lambda t=tensors, k=key, w=written: _call(name, t, **{k: w}))
            if kind != "NotImplementedError" or not text.startswith(f"{key}: "):
                problems.append(f"{key}: {kind} {text}")
        with torch.no_grad():
            _call(name, recorded, **{key: out})
        if out.requires_grad or not torch.equal(out, want[OPERATORS[name].outputs.index(key)]):
            problems.append(f"{key}: without recording")
        loss = (torch.ones_like(out, requires_grad=True) * out).sum()
        _call(name, given, **{key: out})
        if "modified by an inplace operation" not in (text := error_of(loss.backward)[1]):
            problems.append(f"{key}: a gradient that needs it does not notice: {text}")
    return problems


@each_operator
def test_autograd_runs_forward_and_refuses_backward(backend: str, name: str) -> None:
    assert in_world(_autograd, 1, backend, name) == [[]]


# ---- fake tensors, torch.compile -------------------------------------------------------------------------------------


def _fake_tensors(name: str) -> list[str]:
    problems, operator = [], OPERATORS[name]
    for dtype in DTYPES:
        for vectors in (0, 16):
            given = _given(name, vectors, dtype)
            want = _call(name, given)
            with FakeTensorMode() as mode:
                fakes = {key: mode.from_tensor(tensor) for key, tensor in given.items()}
                for options in ({}, *operator.variants):
                    for fake, real in zip(_call(name, fakes, **options), want, strict=True):
                        if (type(fake), fake.shape, fake.dtype, fake.device) != (FakeTensor, *_kind(real)):
                            problems.append(f"{dtype}, {vectors} vectors, {options}: {fake}")
                outs = _outputs(name, [mode.from_tensor(each) for each in want])
                if any(a is not b for a, b in zip(_call(name, fakes, **outs), outs.values(), strict=True)):
                    problems.append(f"{dtype}: outputs were not returned")
                wrong_bias = mode.from_tensor(torch.ones(2, 3, dtype=dtype, device=po.device()))
                wrong = [({"bias": wrong_bias}, "bias: expected shape"), *operator.wrong]
                told = [error_of(lambda o=options, f=fakes: _call(name, {**f, **o}))[:2] for options, _ in wrong]
                for (_, text), (kind, found) in zip(wrong, told, strict=True):
                    problems += [] if kind == "ValueError" and found.startswith(text) else [f"{text}: {kind} {found}"]
                double = error_of(lambda f=fakes: _call(name, {**f, "x": f["x"].double()}))[:2]
                if double[0] != "TypeError" or not double[1].startswith("x: expected"):
                    problems.append(f"double: {double}")
    return problems


def _kind(tensor: torch.Tensor) -> tuple[torch.Size, torch.dtype, torch.device]:
    return tensor.shape, tensor.dtype, tensor.device


@each_operator
def test_fake_tensors(backend: str, name: str) -> None:
    assert in_world(_fake_tensors, 1, backend, name) == [[]]


def _special_fakes() -> list[Any]:
    """Too many vectors; a norm of float8; a norm with only its output given."""
    x, weight = torch.ones(17, COLUMNS), torch.ones(COLUMNS)
    with FakeTensorMode() as mode:
        fake, fake_weight = mode.from_tensor(x), mode.from_tensor(weight)
        of_both = [error_of(lambda call=call: call(fake, fake)) for call in (po.gemv, po.gemv_all_reduce)]
        norms = po.all_reduce_rms_norm(fake, fake_weight, scale=mode.from_tensor(torch.ones(1)))
        own = torch.empty_like(fake)
        total, norm = po.all_reduce_rms_norm(fake, fake_weight, norm_out=own)
        seen = [[each.dtype for each in norms], norm is own, type(total) is FakeTensor and total.shape == x.shape]
    own = torch.empty_like(x)
    total, norm = po.all_reduce_rms_norm(x, weight, norm_out=own)
    return [[error[1][:32] for error in of_both], *seen, norm is own and torch.equal(total, x)]


def test_fake_tensors_of_special_calls() -> None:
    text = "x: expected 1 to 16 vectors, got"
    assert in_world(_special_fakes, 1, "host") == [[[text] * 2, [torch.float32, FLOAT8], True, True, True]]


def _block(name: str) -> Callable[..., torch.Tensor]:
    """Return a program with both forms of the operator, between torch operators."""
    function = getattr(po, name)

    def block(x: torch.Tensor, residual: torch.Tensor, bias: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
        tensors = (weights[0], torch.relu(x)) if name.startswith("gemv") else (torch.relu(x), *weights)
        found = function(*tensors, bias=bias, residual=residual)
        hidden = found[-1] if isinstance(found, tuple) else found
        out = torch.empty_like(hidden)
        function(*tensors, residual=hidden, out=out)
        return 2 * out + hidden

    return block


def _compiled(name: str, counts: Sequence[int]) -> list[bool]:
    compiled, found = torch.compile(_block(name), fullgraph=True, backend=OPERATORS[name].compiler), []
    with torch.no_grad():
        for vectors in counts:
            given = _given(name, vectors)
            weights = [given["weight"]] if "weight" in given else []
            tensors = given["x"], given["residual"], given["bias"], *weights
            found.append(torch.allclose(compiled(*tensors), _block(name)(*tensors), atol=1e-3, rtol=1e-4))
    return found


@pytest.mark.parametrize(("world", "counts"), [(1, [2, 5]), pytest.param(2, [2, 5, 16, 0], marks=pytest.mark.gpu)])
@each_operator
def test_compiled_function_is_one_graph(backend: str, name: str, world: int, counts: list[int]) -> None:
    # On a busy machine, compile times of the PEs differ by more than the time-out in tests.
    found = in_world(_compiled, world, backend, name, counts, operator_timeout=120.0)
    assert found == [[True] * len(counts)] * world

"""embedding_all_to_all in torch: opcheck, fake tensors, autograd, torch.compile; effects of the import."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from kept_pes import in_processes
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch_checks import assert_schemas, opcheck_problems
from worlds import in_world

import persistent_ops as po

MB = 1 << 20
ROWS, DIM, TABLES, BATCH = 40, 8, 2, 6
Lookups = tuple[torch.Tensor, torch.Tensor]


def tables(dtype: torch.dtype = torch.float32, **options: Any) -> list[torch.Tensor]:
    rng = torch.Generator().manual_seed(po.rank())
    weights = [torch.randn(ROWS, DIM, generator=rng).to(po.device(), dtype) for _ in range(TABLES)]
    return [weight.requires_grad_(**options) for weight in weights] if options else weights


def lookups(num_indices: int, batch: int = BATCH, seed: int = 0) -> Lookups:
    """Return indices and offsets of bags of random lengths."""
    rng = torch.Generator().manual_seed(1000 * seed + po.rank())
    inner = torch.randint(0, num_indices + 1, (TABLES * batch - 1,), generator=rng).sort().values
    offsets = torch.cat([torch.tensor([0]), inner, torch.tensor([num_indices])])
    return torch.randint(0, ROWS, (num_indices,), generator=rng).to(po.device()), offsets.to(po.device())


def operator_arguments(
    weights: list[torch.Tensor],
    found: Lookups,
    factors: torch.Tensor | None = None,
    pooling: str = "sum",
    wire: torch.dtype | None = None,
) -> tuple[Any, ...]:
    batch = (found[1].numel() - 1) // TABLES
    dtypes = (weights[0].dtype, wire or weights[0].dtype)
    return (weights, *found, factors, [TABLES * DIM], [batch], *dtypes, pooling, "fatal", "communication_aware", None)


def one_pe(program: Callable[..., Any], backend: str, *args: Any) -> Any:
    return in_world(program, 1, backend, *args)[0]


# ---- the operator in torch.ops ---------------------------------------------------------------------------------------


def _opcheck(kind: str) -> list[str]:
    pooling = "mean" if kind == "mean" else "sum"
    factors = torch.rand(23, device=po.device()) if kind == "weighted" else None
    # Tables that require a gradient are left to the tests below: test_aot_dispatch_dynamic runs their backward pass,
    # and the backward pass of the operator in torch.ops raises.
    wire = torch.bfloat16 if kind == "wire" else None
    arguments = operator_arguments(tables(), lookups(23), factors, pooling, wire)
    operators, out = torch.ops.persistent_ops, po.empty(BATCH, TABLES * DIM, dtype=wire or torch.float32)
    problems = opcheck_problems({"plain": (operators.embedding_all_to_all, arguments, {})})
    # The others are left out: they call the operator with clones of `out` outside of the symmetric heap, where it must
    # write. The tests below check that it writes to `out` and nothing else, and check its fake kernel.
    with_out = {"out": (operators.embedding_all_to_all_out, arguments, {"out": out})}
    return problems + opcheck_problems(with_out, ["test_autograd_registration"])


@pytest.mark.parametrize("kind", ["sum", "mean", "weighted", "wire"])
def test_opcheck(backend: str, kind: str) -> None:
    assert one_pe(_opcheck, backend, kind) == []


def _operator_and_function() -> list[str]:
    problems = []
    operators = torch.ops.persistent_ops
    for dtype, kinds in ((torch.float32, "sum mean weighted wire"), (torch.float16, "sum"), (torch.bfloat16, "sum")):
        for iteration, kind in enumerate(kinds.split()):
            pooling, weighted = "mean" if kind == "mean" else "sum", kind == "weighted"
            weights, found = tables(dtype), lookups(30 + iteration, seed=iteration)
            factors = torch.rand(30 + iteration, device=po.device()) if weighted else None
            copies = [x.clone() for x in (*weights, *found)]
            wire = torch.bfloat16 if kind == "wire" else dtype
            arguments = operator_arguments(weights, found, factors, pooling, wire)
            function = po.embedding_all_to_all(weights, *found, factors, pooling=pooling, wire_dtype=wire)
            operator = operators.embedding_all_to_all(*arguments)
            out = po.empty(BATCH, TABLES * DIM, dtype=wire)
            out.fill_(float("nan"))
            nothing = operators.embedding_all_to_all_out(*arguments, out=out)
            po.check()
            where = f"{dtype}, {kind}"
            if nothing is not None or not (torch.equal(function, operator) and torch.equal(function, out)):
                problems.append(f"{where}: function, operator and out= differ")
            if any(not torch.equal(x, copy) for x, copy in zip((*weights, *found), copies, strict=True)):
                problems.append(f"{where}: an input was changed")
            po.free(out)
    return problems


def test_the_operator_and_the_function_are_the_same(backend: str) -> None:
    assert one_pe(_operator_and_function, backend) == []


def test_the_schemas_declare_what_is_written() -> None:
    assert_schemas("embedding_all_to_all", "out")


# ---- autograd ------------------------------------------------------------------------------------------------------


def _autograd() -> dict[str, Any]:
    found = lookups(23)
    plain = po.embedding_all_to_all(tables(), *found)
    weights = tables(requires_grad=True)
    seen: dict[str, Any] = {}
    result = po.embedding_all_to_all(weights, *found)
    seen["forward"] = result.requires_grad and torch.equal(result, plain)
    seen["saved by the backward of others"] = bool((result * result).sum().isfinite())
    result.sum().backward()
    seen["tables"] = all(weight.grad is not None and weight.grad.is_sparse for weight in weights)
    factors = torch.rand(23, device=po.device(), requires_grad=True)
    weighted = po.embedding_all_to_all(tables(), *found, factors)
    seen["factors require a gradient"] = weighted.requires_grad
    weighted.sum().backward()
    seen["factors"] = factors.grad is not None and bool(factors.grad.any())
    of_torch = torch.ops.persistent_ops.embedding_all_to_all
    for name, of_tables, of_factors in (("torch.ops", weights, None), ("torch.ops, factors", tables(), factors)):
        called = of_torch(*operator_arguments(of_tables, found, of_factors))
        with pytest.raises(NotImplementedError) as caught:
            called.sum().backward()
        seen[name] = str(caught.value)
    out = po.empty(BATCH, TABLES * DIM)
    with pytest.raises(NotImplementedError) as caught:
        po.embedding_all_to_all(weights, *found, out=out)
    seen["out"] = str(caught.value)
    with pytest.raises(NotImplementedError, match="^out: "):
        po.embedding_all_to_all([weight.detach() for weight in weights], *found, out=out.detach().requires_grad_())
    with torch.no_grad():
        version = out._version
        unrecorded = po.embedding_all_to_all(weights, *found, out=out)
    seen["out was written"] = out._version > version  # otherwise a gradient that needs its old values would be wrong
    seen["no_grad"] = not unrecorded.requires_grad and torch.equal(unrecorded, plain)
    with torch.inference_mode():
        seen["inference_mode"] = torch.equal(po.embedding_all_to_all(weights, *found), plain)
    return seen


def test_autograd_gives_plain_calls_gradients(backend: str) -> None:
    seen = one_pe(_autograd, backend)
    for name in ("torch.ops", "torch.ops, factors"):
        text = seen.pop(name)
        assert (
            "torch.compile" in text
            and "po.EmbeddingOptimizer" in text
            and "torch.no_grad()" in text
            and "embedding_bag" in text
        )
    assert seen.pop("out").startswith("out: ")
    assert all(value is True for value in seen.values()), seen


# ---- fake tensors --------------------------------------------------------------------------------------------------


def _fake_tensors() -> list[str]:
    problems = []
    with FakeTensorMode() as mode:
        for dtype in (torch.float32, torch.bfloat16):
            weights = [mode.from_tensor(weight) for weight in tables(dtype)]
            found = [mode.from_tensor(x) for x in lookups(23)]
            for options in ({}, {"dim_per_rank": [TABLES * DIM]}, {"pooling": "mean"}, {"schedule": "oblivious"}):
                result = po.embedding_all_to_all(weights, *found, **options)  # type: ignore[arg-type]
                shape = (BATCH, TABLES * DIM)
                kind = (type(result), tuple(result.shape), result.dtype, result.device)
                if kind != (FakeTensor, shape, dtype, po.device()):
                    problems.append(f"{dtype}, {options}: {kind}")
            out = mode.from_tensor(torch.empty(BATCH, TABLES * DIM, dtype=dtype, device=po.device()))
            if po.embedding_all_to_all(weights, *found, out=out) is not out:
                problems.append(f"{dtype}: out= was not returned")
        for options, text in (({"pooling": "max"}, "pooling: expected"), ({"schedule": "x"}, "schedule")):
            with pytest.raises(ValueError, match=text):
                po.embedding_all_to_all(weights, *found, **options)  # type: ignore[arg-type]
    return problems


def test_fake_tensors(backend: str) -> None:
    assert one_pe(_fake_tensors, backend) == []


# ---- torch.compile -------------------------------------------------------------------------------------------------


class Interaction(torch.nn.Module):
    """The exchange in a model: tables, exchange, pairwise products of the features."""

    def __init__(self, pooling: str = "sum", wire: torch.dtype | None = None) -> None:
        super().__init__()
        self.tables = torch.nn.ParameterList([torch.nn.Parameter(w, requires_grad=False) for w in tables()])
        self.pooling, self.wire = pooling, wire

    def forward(self, indices: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        rows = po.embedding_all_to_all(list(self.tables), indices, offsets, pooling=self.pooling, wire_dtype=self.wire)
        features = rows.float().view(rows.shape[0], -1, DIM)
        return torch.bmm(features, features.transpose(1, 2))


# (batch, number of lookups on each PE): lookups that change on one PE only, which recompiles alone; batches that
# two PEs share evenly and unevenly.
_CALLS = [(6, (23, 23)), (6, (30, 23)), (8, (40, 50)), (7, (33, 50)), (6, (23, 2)), (7, (1, 0))]


def _compiled(backend: str) -> list[str]:
    po.init(backend, operator_timeout=200.0, heap_size=32 * MB)  # a PE may compile for longer than the other
    problems = []
    for pooling, wire in (("sum", None), ("mean", torch.bfloat16)):
        model = Interaction(pooling, wire)
        compiled = torch.compile(model, fullgraph=True)
        for number, (batch, sizes) in enumerate(_CALLS if pooling == "sum" else _CALLS[:2]):
            found = lookups(sizes[po.rank()], batch, seed=number)
            rows = compiled(*found)
            if not torch.equal(rows, model(*found)):
                problems.append(f"{pooling}, {wire}, call {number}: differs from eager")
    po.check()
    po.finalize()
    return problems


@pytest.mark.parametrize("world", [1, 2])
def test_compiled_model_has_the_same_bits(backend: str, world: int) -> None:
    assert in_processes(_compiled, world, backend, timeout=250) == [[]] * world


# ---- import --------------------------------------------------------------------------------------------------------

_IMPORT = """
import os, sys
before = dict(os.environ)
import torch
loaded = set(sys.modules)
import persistent_ops
new = set(sys.modules) - loaded
print(dict(os.environ) == before)
print(torch.cuda.is_initialized())
heavy = ("nvshmem", "cuda", "triton", "torch._dynamo", "torch._inductor")
print(sorted(name for name in new if name.startswith(heavy)))
print(persistent_ops.is_initialized())
"""


def test_import_touches_nothing(tmp_path: Path) -> None:
    root = Path(po.__file__).resolve().parents[1]
    done = subprocess.run(
        [sys.executable, "-c", _IMPORT], cwd=root, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["True", "False", "[]", "False"]

"""Collective calls in torch.compile: each runs once on every PE, in program order, whether or not results are used."""

from __future__ import annotations

import functools
import os
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from kept_pes import in_processes
from torch.utils.checkpoint import checkpoint

import persistent_ops as po
import persistent_ops.nn as po_nn
from persistent_ops.runtime.world import current

ROWS, SIZE = 6, 16
Tensors = dict[str, torch.Tensor]
Program = Callable[[int, Tensors], torch.Tensor]


def _given(iteration: int) -> Tensors:
    """Return what a program gets on this PE: its own numbers, and `same`, which is equal on both PEs."""
    rng = torch.Generator().manual_seed(10 * iteration + po.rank())
    made = {name: torch.randn(ROWS, SIZE, generator=rng) for name in ("x", "y", "h")}
    made |= {"weight": torch.randn(SIZE, SIZE, generator=rng), "norm": torch.rand(SIZE, generator=rng)}
    made |= {"rows": torch.randint(0, 9, (ROWS,), generator=rng), "bags": torch.arange(ROWS + 1)}
    made["same"] = torch.full((ROWS, SIZE), 1.0 + iteration)
    made = {name: tensor.to(po.device()) for name, tensor in made.items()}
    made["trained"] = made["weight"].clone().requires_grad_()
    return made


class Table(torch.nn.Module):
    """A table that is a parameter of a model. CUDA graphs of torch.compile use it at its address."""

    def __init__(self) -> None:
        super().__init__()
        rows = torch.randn(9, SIZE, generator=torch.Generator().manual_seed(po.rank()))
        self.weight = torch.nn.Parameter(rows.to(po.device()), requires_grad=False)

    def forward(self, rows: torch.Tensor, bags: torch.Tensor) -> torch.Tensor:
        return po.embedding_all_to_all([self.weight], rows, bags, dim_per_rank=[SIZE, SIZE])


def _only_rank_0_looks(call: Callable[[Tensors], torch.Tensor]) -> Program:
    def program(rank: int, given: Tensors) -> torch.Tensor:
        result = call(given)
        return (result if rank == 0 else given["x"]).sum() * 2

    return program


def _into_nowhere(given: Tensors) -> torch.Tensor:
    out = torch.empty_like(given["x"])
    po.all_reduce(given["x"], out=out)
    return out


def _multiplied(name: str, **options: Any) -> Program:
    return _only_rank_0_looks(
        lambda given: getattr(po, name)(given["x"].bfloat16(), given["weight"].bfloat16().t(), **options).float()
    )


def _trained_behind_exchanges(rank: int, given: Tensors) -> torch.Tensor:
    """Call in a training graph, whose backward pass exchanges rows. Each PE uses its results in another way."""
    x, trained = given["x"].bfloat16(), given["trained"]
    first = po.gemm_reduce_scatter(x, trained.bfloat16(), op="mean").float()
    second = po.gemm_all_to_all(x, trained.bfloat16().t())
    third = po.gemm_all_reduce(second, trained.bfloat16()).float()
    return third.sum() + (first * first).sum() if rank == 0 else first.sum() - 2 * third.sum()


def _equal_arguments(rank: int, given: Tensors) -> torch.Tensor:
    """Sum twice in a training graph; on PE 1 the two calls have equal arguments."""
    hidden = given["h"] @ given["trained"]
    first, second = po.all_reduce(given["same"]), po.all_reduce(given["x"] if rank == 0 else given["same"])
    return (hidden * first + second).sum()


def _mixed(rank: int, given: Tensors) -> torch.Tensor:
    """Mix forms and operators. Each PE uses other ones."""
    out = torch.empty_like(given["x"])
    total = po.all_reduce(given["x"], residual=given["same"])
    po.all_reduce(given["y"], out=out)
    both = po.all_reduce_rms_norm(given["x"], given["norm"])
    po.all_reduce(total if rank else given["y"], out=total)
    product = po.gemv_all_reduce(given["weight"], given["x"])
    return out.sum() + both[0].sum() if rank else total.sum() + both[1].sum() + product.sum()


def _in_order(rank: int, given: Tensors) -> torch.Tensor:
    """Call in an order that no result demands: what PE 1 needs first comes last."""
    first, second = po.all_reduce(given["x"]), po.all_reduce(given["y"])
    return (first - 2 * second).sum() if rank == 0 else torch.relu(second).sum() + first[0].sum()


def _checkpointed(rank: int, given: Tensors) -> torch.Tensor:
    """Recompute regions in the backward pass. PE 0 needs both regions, PE 1 the first."""

    def region(x: torch.Tensor, weight: torch.Tensor, summed: torch.Tensor) -> torch.Tensor:
        return torch.sin(x @ weight * po.all_reduce(summed))

    first = checkpoint(region, given["h"], given["trained"], given["x"], use_reentrant=False)
    second = checkpoint(region, given["h"], given["trained"], given["y"], use_reentrant=False)
    return first.sum() + 2 * second.sum() if rank == 0 else first.sum()


def _sampled_on_rank_0(rank: int, given: Tensors) -> torch.Tensor:
    with torch.no_grad():
        logits = _LAYERS["row"](given["x"])
    return logits.argmax(-1).sum() * 1.0 if rank == 0 else given["y"].sum()


_LAYERS: dict[str, torch.nn.Module] = {}
PROGRAMS: dict[str, Program] = {
    "all_reduce": _only_rank_0_looks(lambda given: po.all_reduce(given["x"])),
    "all_reduce, out": _only_rank_0_looks(_into_nowhere),
    "all_reduce_rms_norm": _only_rank_0_looks(lambda given: po.all_reduce_rms_norm(given["x"], given["norm"])[1]),
    "gemv_all_reduce": _only_rank_0_looks(lambda given: po.gemv_all_reduce(given["weight"], given["x"])),
    "gemm_all_to_all": _multiplied("gemm_all_to_all"),
    "gemm_reduce_scatter": _multiplied("gemm_reduce_scatter", scatter_dim=0, op="mean"),
    "gemm_all_reduce": _multiplied("gemm_all_reduce", algorithm="unfused"),
    "trained behind exchanges": _trained_behind_exchanges,
    "embedding_all_to_all": _only_rank_0_looks(lambda given: _LAYERS["table"](given["rows"], given["bags"])),
    "equal arguments": _equal_arguments,
    "mixed": _mixed,
    "in order": _in_order,
    "checkpointed": _checkpointed,
    "RowParallelLinear": _sampled_on_rank_0,
}


def _all(rank: int, given: Tensors) -> torch.Tensor:
    return torch.stack([program(rank, given) for program in PROGRAMS.values()]).sum()


def _run(program: Program, given: Tensors) -> tuple[torch.Tensor, torch.Tensor | None]:
    result = program(po.rank(), given)
    if result.requires_grad:
        result.backward()
    return result.detach(), given["trained"].grad


def _eagerly(program: Program, given: Tensors) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Run a program without recomputation. In eager mode autograd recomputes what its own PE needs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(_checkpointed.__globals__, "checkpoint", lambda region, *args, use_reentrant: region(*args))
        return _run(program, given)


def _collectives_first(launched: list[Any]) -> list[Any]:
    """Return launches in order, products of this PE alone last: a compiler may make those earlier or later."""
    local = [id(kernel) for (request, _), kernel in current()._kernels.items() if request.name == "gemm"]
    return sorted(launched, key=lambda made: (id(made[0]), made[1]) if id(made[0]) in local else (0, 0))


def _compiled(backend: str, names: list[str], options: dict[str, str]) -> list[str]:
    po.init(backend, operator_timeout=100.0, heap_size=64 << 20)
    workspace, problems = current().workspace, []
    _LAYERS.update(row=po_nn.RowParallelLinear(2 * SIZE, SIZE), table=Table())
    launched: list[Any] = []  # kernels and numbers of WGs
    launch = workspace.launch
    try:
        for name in names:
            torch.compiler.reset()
            program = PROGRAMS.get(name, _all)
            compiled = torch.compile(program, fullgraph=True, **options)  # type: ignore[call-overload]
            for iteration in range(4):
                if iteration == 0:
                    _eagerly(program, _given(iteration))  # makes the plans, which needs all PEs
                results, calls = [], []
                for run in (functools.partial(_eagerly, program), functools.partial(_run, compiled)):
                    workspace.launch = lambda kernel, grid, plan, *call, **how: [  # type: ignore[assignment,misc]
                        launched.append((kernel, grid)),
                        launch(kernel, grid, plan, *call, **how),
                    ][1]
                    results.append(run(_given(iteration)))
                    workspace.launch = launch  # type: ignore[method-assign]
                    po.check()
                    calls.append(launched.copy())
                    launched.clear()
                is_replay = backend == "cuda" and iteration > 1 and options.get("mode") == "reduce-overhead"
                eager, other = (_collectives_first(made) for made in calls)
                if not eager or other != ([] if is_replay else eager):
                    problems.append(f"{name}, {iteration}: {len(other)} launches for {len(eager)}, or another order")
                for wanted, found in zip(*results, strict=True):
                    is_right = found is None if wanted is None else torch.allclose(wanted, found, rtol=1e-3)
                    problems += [] if is_right else [f"{name}, {iteration}: {found} for {wanted}"]
    finally:
        workspace.launch = launch  # type: ignore[method-assign]
        po.finalize()
    return problems


@pytest.mark.parametrize("name", PROGRAMS)
def test_calls_are_made_once_and_in_order(backend: str, name: str) -> None:
    assert in_processes(_compiled, 2, backend, [name], {"backend": "aot_eager"}, timeout=250) == [[]] * 2


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [{"backend": "inductor"}, {"mode": "reduce-overhead"}], ids=lambda o: "".join(o.values())
)
def test_calls_of_kernels_that_inductor_makes(backend: str, options: dict[str, str]) -> None:
    assert in_processes(_compiled, 2, backend, ["all"], options, timeout=280) == [[]] * 2


def _without_the_function(backend: str) -> str:
    po.init(backend, heap_size=64 << 20)
    call = torch.compile(lambda x: torch.ops.persistent_ops.all_reduce(x, None, None, "auto"), fullgraph=True)
    with pytest.raises(Exception) as caught:
        call(torch.ones(3, device=po.device()))
    po.finalize()
    return "".join(traceback.format_exception(caught.value))


def test_what_nothing_orders_is_refused(backend: str) -> None:
    (text,) = in_processes(_without_the_function, 1, backend, timeout=100)
    assert "NotImplementedError: all_reduce: torch.compile may drop, merge or move this call" in text


def _trained(backend: str, compiler: str | None) -> list[torch.Tensor]:
    """Return this PE's table after steps whose forward passes are compiled, with an optimizer for the table."""
    po.init(backend, operator_timeout=120.0, heap_size=32 << 20)
    first = torch.arange(9.0 * SIZE).view(9, SIZE).to(po.device()) * (1 + po.rank()) / 100
    table = first.clone()
    optimizer = po.EmbeddingOptimizer([table], "adagrad", lr=0.5)

    def loss(rows: torch.Tensor, bags: torch.Tensor) -> torch.Tensor:
        pooled = po.embedding_all_to_all([table], rows % 8, bags, dim_per_rank=[SIZE, SIZE], optimizer=optimizer)
        return (pooled * pooled).sum() * 2

    step = torch.compile(loss, backend=compiler) if compiler else loss
    for iteration in range(3):
        given = _given(iteration)
        step(given["rows"], given["bags"]).backward()
    po.check()
    result = [first.cpu(), table.cpu()]
    po.finalize()
    return result


@pytest.mark.parametrize("compiler", ["eager", "aot_eager"])
def test_a_call_with_an_optimizer_breaks_the_graph(backend: str, compiler: str) -> None:
    plain, compiled = (in_processes(_trained, 2, backend, how, timeout=250) for how in (None, compiler))
    for (first, wanted), (_, found) in zip(plain, compiled, strict=True):
        assert torch.equal(found, wanted) and not torch.equal(wanted, first)


def _from_one_cache(backend: str, folder: str) -> tuple[int, int]:
    """Return the actual and the expected number of samples. Each PE compiles after the previous one."""
    po.init(backend, operator_timeout=200.0, heap_size=64 << 20)
    batches = [2, 3]
    table, indices = torch.ones(ROWS, 4), torch.zeros(sum(batches), dtype=torch.int64)
    eager = functools.partial(po.embedding_all_to_all, batch_per_rank=batches, dim_per_rank=[4, 4])
    compiled = torch.compile(eager, fullgraph=True)
    with torch.no_grad(), mock.patch.dict(os.environ, {"TORCHINDUCTOR_CACHE_DIR": folder}):
        for last in range(po.world_size()):
            torch.compiler.reset()
            call = compiled if po.rank() <= last else eager
            result = call([table], indices, torch.arange(sum(batches) + 1))
    shapes = result.shape[0], batches[po.rank()]
    po.finalize()
    return shapes


@pytest.mark.slow
@pytest.mark.host
def test_a_graph_on_disk_is_of_one_rank(tmp_path: Path) -> None:
    """PEs of one machine share the compiler's cache, and have different numbers of samples."""
    assert in_processes(_from_one_cache, 2, "host", str(tmp_path), timeout=280) == [(2, 2), (3, 3)]

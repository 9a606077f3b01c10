"""The tensor-parallel linear layers against whole layers in fp64, over worlds, splits, dtypes and vector counts."""

from __future__ import annotations

import copy
import functools
import itertools
import pickle
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from bits import UNIT
from hypothesis import given, strategies as st
from kept_pes import in_processes
from torch.nn import functional as F
from worlds import message_of, run_pes, world_of

import persistent_ops as po
import persistent_ops.nn as po_nn

WORLDS = (1, 2, 3, 4)


@dataclass(frozen=True)
class Case:
    """One layer.

    Attributes:
        splits: of a row-parallel layer's input, for a world; None for even ones.
    """

    name: str
    inputs: int = 96
    outputs: int = 40
    dtype: torch.dtype = torch.float32
    splits: Callable[[int], tuple[int, ...] | None] = lambda world: None
    has_bias: bool = True
    options: tuple[tuple[str, Any], ...] = ()


CASES = [
    Case("plain"),
    Case("bf16", dtype=torch.bfloat16),
    Case("fp16, no bias", dtype=torch.float16, has_bias=False),
    Case("uneven", inputs=45, outputs=33, splits=lambda world: po_nn.balanced_splits(45, world)),
    Case(
        "one PE without inputs, bf16",
        inputs=24,
        dtype=torch.bfloat16,
        splits=lambda world: ((24,), (24, 0), (8, 0, 16), (1, 0, 20, 3))[world - 1],
    ),
    Case("sums in bf16", dtype=torch.bfloat16, options=(("wire_dtype", torch.bfloat16),)),
    Case("M is no multiple of 8, bf16", outputs=36, dtype=torch.bfloat16),
    Case("one shot", options=(("algorithm", "one_shot"),)),
    Case("two shots, prefetched", options=(("algorithm", "two_shot"), ("prefetch_weight", True))),
    Case("sequence, bf16", dtype=torch.bfloat16, options=(("sequence_parallel", True),)),
    Case(
        "sequence, fp16, no bias, sums in fp32",
        dtype=torch.float16,
        has_bias=False,
        options=(("sequence_parallel", True), ("wire_dtype", torch.float32)),
    ),
    Case("sequence, M is no multiple of 8", outputs=36, dtype=torch.bfloat16, options=(("sequence_parallel", True),)),
]
LEADINGS = [(), (1,), (5,), (16,), (2, 3), (17,), (3, 2, 7), (128,), (0,)]


def values(case: Case, name: str, *shape: int) -> torch.Tensor:
    """Return the same numbers on every PE."""
    generator = torch.Generator().manual_seed(zlib.crc32(f"{case.name} {name} {shape}".encode()))
    return torch.randn(shape, generator=generator).to(case.dtype)


def whole_layer(case: Case) -> torch.nn.Linear:
    linear = torch.nn.Linear(case.inputs, case.outputs, bias=case.has_bias, dtype=case.dtype)
    with torch.no_grad():
        linear.weight.copy_(values(case, "weight", case.outputs, case.inputs))
        if case.has_bias:
            linear.bias.copy_(values(case, "bias", case.outputs))
    return linear


def path_of(layer: po_nn.RowParallelLinear, num_vectors: int) -> str:
    """Return the path that a call with little data takes."""
    dtype, sums_in = layer.weight.dtype, layer.wire_dtype or torch.float32
    if layer.sequence_parallel:
        return "gemm_reduce_scatter"
    if 1 <= num_vectors <= 16:
        return "fused"
    is_suited = dtype != torch.float32 and len(set(layer.splits)) == 1 and layer.out_features % 8 == 0
    if num_vectors and is_suited and sums_in == torch.float32:
        return "gemm_all_reduce"
    return "all_reduce" if num_vectors and sums_in == dtype else "unfused"


def own_part(layer: po_nn.RowParallelLinear, whole: torch.Tensor) -> torch.Tensor:
    """Return what this PE gets of a whole layer's result."""
    return whole.chunk(po.world_size())[po.rank()] if layer.sequence_parallel else whole


def row_problem(case: Case, layer: po_nn.RowParallelLinear, leading: tuple[int, ...], *, has_residual: bool) -> str:
    """Run the layer once; return what is wrong, or nothing."""
    world, device = po.world_size(), po.device()
    where = f"{list(leading)}, {'a' if has_residual else 'no'} residual"
    x = values(case, "x", *leading, case.inputs)
    residual = values(case, "residual", *leading, case.outputs) if has_residual else None
    first, last = layer.shard_range
    own = x[..., first:last].to(device)  # not contiguous where there are several PEs
    result = layer(own, residual=None if residual is None else own_part(layer, residual).to(device))
    po.check()
    num_vectors = x[..., 0].numel()
    path = path_of(layer, num_vectors)
    if layer.last_path != path or layer.path(num_vectors) != path:
        return f"{where}: took the {layer.last_path} path instead of the {path} one"
    linear = whole_layer(case).double()
    exact = linear(x.double())
    size = F.linear(x.double().abs(), linear.weight.abs()) + (linear.bias.abs() if case.has_bias else 0.0)
    if residual is not None:
        exact, size = exact + residual.double(), size + residual.double().abs()
    exact, size = own_part(layer, exact), own_part(layer, size)
    if result.dtype != case.dtype or result.shape != exact.shape or result.device != device:
        return f"{where}: got {result.dtype} {list(result.shape)} on {result.device}"
    sums_in = layer.wire_dtype or (case.dtype if layer.sequence_parallel else torch.float32)
    # fp32 sums in any order; sums under way rounded to wire_dtype, and again by each addition; one rounding at the end.
    bound = case.inputs * 2.0**-23 * size + 2 * world * UNIT[sums_in] * size + 2 * UNIT[case.dtype] * exact.abs()
    error = (result.cpu().double() - exact).abs()
    if bool((error > bound + 1e-7).any()):
        return f"{where}: off by {float(error.max())}"
    return ""


@torch.no_grad()
def row_program(backend: str) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    with world_of(backend) as world:
        for case in CASES:
            splits = case.splits(world.size)
            layer = po_nn.RowParallelLinear.from_linear(whole_layer(case), splits=splits, **dict(case.options))
            leadings = LEADINGS
            if layer.sequence_parallel:
                leadings = [(world.size * leading[0], *leading[1:]) for leading in LEADINGS if leading]
            problems = [
                row_problem(case, layer, leading, has_residual=has_residual)
                for leading, has_residual in itertools.product(leadings, (False, True))
            ]
            if layer.splits != (splits or (case.inputs // world.size,) * world.size):
                problems.append(f"splits: {layer.splits}")
            if any(parameter.requires_grad for parameter in layer.parameters()):
                problems.append("a parameter wants a gradient")
            found[case.name] = [problem for problem in problems if problem]
    return found


@functools.cache
def row_results(backend: str, world: int) -> list[dict[str, list[str]]]:
    # Processes: the unfused path needs torch.distributed's default group, of which a process has one.
    return in_processes(row_program, world, backend, timeout=250)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("world", WORLDS)
def test_row_parallel_is_the_whole_layer(backend: str, world: int, case: Case) -> None:
    assert [results[case.name] for results in row_results(backend, world)] == [[]] * world


# ---- without a process group ---------------------------------------------------------------------------------------


def paths_program(backend: str) -> list[list[str]]:
    with world_of(backend, has_group=False):
        half, double = {"dtype": torch.bfloat16}, {"dtype": torch.float64}
        layers = [
            po_nn.RowParallelLinear(8, 1 << 16, **half, wire_dtype=torch.bfloat16),
            po_nn.RowParallelLinear(8, 1 << 16, **half),
            po_nn.RowParallelLinear(8, 1 << 16, **half, splits=(5, 3), wire_dtype=torch.bfloat16),
            po_nn.RowParallelLinear(8, 1 << 16, **half, splits=(5, 3)),
            po_nn.RowParallelLinear(8, (1 << 16) + 4, **half),
            po_nn.RowParallelLinear(8, 1 << 16),
            po_nn.RowParallelLinear(8, 1 << 16, **double, wire_dtype=torch.float64),
            po_nn.RowParallelLinear(8, 1 << 16, **half, sequence_parallel=True),
        ]
        return [[layer.path(count) for count in (0, 1, 16, 17, 64, 65, 128, 129, 256, 257)] for layer in layers]


def test_paths_depend_on_vectors_and_on_what_sums_travel_in(backend: str) -> None:
    few, fused, reduced, unfused = ["unfused", "fused", "fused"], "gemm_all_reduce", "all_reduce", "unfused"
    expected = [
        [*few, *[reduced] * 2, *[fused] * 5],  # 8 MiB, then more
        [*few, *[fused] * 7],
        [*few, *[reduced] * 6, unfused],  # 32 MiB, then more
        [*few, *[unfused] * 7],
        [*few, *[unfused] * 7],
        [*few, *[reduced] * 4, *[unfused] * 3],
        [*few, *[unfused] * 7],
        ["gemm_reduce_scatter"] * 10,
    ]
    assert launched(paths_program, 2, backend) == [expected] * 2


def launched(program: Callable[..., Any], world: int, backend: str, *args: Any) -> list[Any]:
    return run_pes(program, world, backend, *args, timeout=120)


@torch.no_grad()
def column_program(backend: str) -> list[str]:
    problems = []
    with world_of(backend, has_group=False) as world:
        for case in (*CASES[:4], Case("double", dtype=torch.float64)):
            for splits in (None, po_nn.balanced_splits(case.outputs, world.size)):
                if splits is None and case.outputs % world.size:
                    continue
                layer = po_nn.ColumnParallelLinear.from_linear(whole_layer(case), splits=splits)
                for leading in ((), (1,), (16,), (2, 3), (17,), (2, 19), (0,)):
                    problem = column_problem(case, layer, leading)
                    if problem:
                        problems.append(f"{case.name}, {list(leading)}: {problem}")
    return problems


def column_problem(case: Case, layer: po_nn.ColumnParallelLinear, leading: tuple[int, ...]) -> str:
    x = values(case, "x", *leading, case.inputs)
    first, last = layer.shard_range
    exact = whole_layer(case).double()(x.double())[..., first:last]
    result = layer(x.to(po.device())).cpu()
    size = F.linear(x.double().abs(), whole_layer(case).double().weight.abs())[..., first:last]
    bound = case.inputs * 2.0**-23 * size + 2 * UNIT.get(case.dtype, 0.0) * (exact.abs() + 4)
    # The kernel does not support float64.
    path = "gemv" if 1 <= x[..., 0].numel() <= 16 and case.dtype != torch.float64 else "linear"
    if layer.last_path != path or layer.path(x[..., 0].numel()) != path:
        return f"took the {layer.last_path} path"
    if result.dtype != case.dtype or result.shape != exact.shape:
        return f"got {result.dtype} {list(result.shape)}"
    if bool(((result.double() - exact).abs() > bound).any()):
        return f"off by {float((result.double() - exact).abs().max())}"
    return ""


@pytest.mark.parametrize("world", WORLDS)
def test_column_parallel_is_a_part_of_the_whole_layer(backend: str, world: int) -> None:
    assert launched(column_program, world, backend) == [[]] * world


@torch.no_grad()
def wide_program(backend: str) -> list[list[str]]:
    with world_of(backend, has_group=False):
        found = []
        for columns, dtype in ((4096, torch.bfloat16), (8192, torch.bfloat16), (8193, torch.bfloat16), (8192, None)):
            layer = po_nn.ColumnParallelLinear(columns, 3, dtype=dtype)
            paths = []
            for count in (1, 2, 8, 9, 16):
                layer(torch.ones(count, columns, device=po.device(), dtype=dtype))
                paths.append(f"{count} {layer.last_path}")
            found.append([path for path in paths if path.endswith("gemv")])
        return found


def test_vectors_that_find_no_room_take_the_library_s_product(backend: str) -> None:
    narrow, wide, wider, fp32 = launched(wide_program, 1, backend)[0]
    assert narrow == ["1 gemv", "2 gemv", "8 gemv", "9 gemv", "16 gemv"] and wide == ["1 gemv", "2 gemv", "8 gemv"]
    assert wider == fp32 == ["1 gemv"]


def column_library_program(backend: str) -> list[object]:
    with world_of(backend, has_group=False):
        layer = po_nn.ColumnParallelLinear.from_linear(whole_layer(CASES[0]))
        x = values(CASES[0], "x", 3, CASES[0].inputs).to(po.device())
        recorded = x.clone().requires_grad_()
        layer(recorded).sum().backward()
        paths = [layer.last_path]
        with torch.no_grad():
            layer(recorded)
        paths.append(layer.last_path)
        with torch.autocast(po.device().type, torch.bfloat16):
            results = [layer(torch.cat([x] * count)).dtype for count in (1, 7)]
        paths.append(f"{layer.last_path} {results}")
        layer.weight.requires_grad_()
        layer(x).sum().backward()
        is_summed = torch.allclose(layer.weight.grad, x.sum(0).expand(layer.weight.shape), atol=1e-5)
        paths.append(f"{layer.last_path} {is_summed}")
        layer.weight.requires_grad_(False)
        layer(x)
        paths.append(layer.last_path)
        expected = layer.weight.sum(0).expand(3, -1)
        layer.to("meta")(x.to("meta"))
        return [*paths, layer.last_path, torch.allclose(recorded.grad, expected, atol=1e-5)]


def test_column_parallel_takes_the_library_s_product_where_it_must(backend: str) -> None:
    [[recorded, unrecorded, autocast, weight, plain, meta, is_right]] = launched(column_library_program, 1, backend)
    assert (recorded, unrecorded, plain, meta) == ("linear", "gemv", "gemv", "linear") and is_right
    assert autocast == f"linear {[torch.bfloat16] * 2}" and weight == "linear True"


@torch.no_grad()
def autocast_program(backend: str) -> list[str]:
    problems = []
    with world_of(backend):
        for dtype, wire_dtype, path in (
            (torch.float32, None, "all_reduce"),
            (torch.bfloat16, torch.bfloat16, "all_reduce"),
            (torch.bfloat16, None, "gemm_all_reduce"),
            (torch.bfloat16, None, "unfused"),
            (torch.bfloat16, None, "gemm_reduce_scatter"),
        ):
            case = Case(f"autocast {path}", outputs=36 if path == "unfused" else 40, dtype=dtype)
            is_sequence = path == "gemm_reduce_scatter"
            layer = po_nn.RowParallelLinear.from_linear(
                whole_layer(case), wire_dtype=wire_dtype, sequence_parallel=is_sequence
            )
            first, last = layer.shard_range
            for count, taken in ((4, path if is_sequence else "fused"), (20, path)):
                x = values(case, "x", count, case.inputs)[:, first:last].to(po.device())
                want = layer(x)
                with torch.autocast(po.device().type, torch.float16 if dtype == torch.bfloat16 else torch.bfloat16):
                    result = layer(x)
                if layer.last_path != taken or not torch.equal(result, want):
                    problems.append(f"{dtype}, {wire_dtype}, {count} vectors: {layer.last_path}, {result - want}")
    return problems


@torch.no_grad()
def pair_program(backend: str) -> list[Any]:
    """Return dtypes of a pair of layers under autocast, and whether the result is theirs of what lies between."""
    with world_of(backend, has_group=False) as world:
        features = 8 * world.size
        up, down = po_nn.ColumnParallelLinear(features, features), po_nn.RowParallelLinear(features, features)
        found: list[Any] = []
        for count in (4, 20):
            x = torch.ones(count, features, device=po.device())
            with torch.autocast(po.device().type, torch.bfloat16):
                between = torch.nn.functional.silu(up(x))
                result = down(between, residual=x.bfloat16())
            want = down(between.float(), residual=x)
            found.append([between.dtype, result.dtype, torch.equal(result, want)])
        return found


@pytest.mark.parametrize("world", [1, 2])
def test_a_pair_of_layers_under_autocast(backend: str, world: int) -> None:
    assert (
        in_processes(pair_program, world, backend, timeout=120) == [[[torch.bfloat16, torch.float32, True]] * 2] * world
    )


@pytest.mark.parametrize("world", [1, 2])
def test_row_parallel_rounds_no_product_for_autocast(backend: str, world: int) -> None:
    assert in_processes(autocast_program, world, backend, timeout=120) == [[]] * world


# ---- gradients -----------------------------------------------------------------------------------------------------

LEARNT = [
    Case("learnt, bf16", dtype=torch.bfloat16),
    Case("learnt, fp16, sums in fp16", dtype=torch.float16, options=(("wire_dtype", torch.float16),)),
    Case("learnt, fp16, no bias", dtype=torch.float16, has_bias=False),
    Case("learnt, sequence, bf16", dtype=torch.bfloat16, options=(("sequence_parallel", True),)),
    Case(
        "learnt, sequence, M is no multiple of 8, sums in fp32",
        outputs=36,
        dtype=torch.float16,
        options=(("sequence_parallel", True), ("wire_dtype", torch.float32)),
    ),
]
_Tensors = dict[str, torch.Tensor]


def whole_numbers(case: Case, leading: tuple[int, ...]) -> _Tensors:
    """Return operands of a whole layer, and what a loss multiplies its result by. Sums of their products are exact."""
    shapes = {
        "x": (*leading, case.inputs),
        "weight": (case.outputs, case.inputs),
        "bias": (case.outputs,),
        "residual": (*leading, case.outputs),
        "factor": (*leading, case.outputs),
    }
    generator = torch.Generator().manual_seed(5)
    return {name: torch.randint(-2, 3, shape, generator=generator).to(case.dtype) for name, shape in shapes.items()}


def whole_gradients(given: _Tensors) -> _Tensors:
    """Return the gradients of a whole layer, in fp64."""
    leaves = {name: each.double().requires_grad_() for name, each in given.items()}
    result = F.linear(leaves["x"], leaves["weight"], leaves["bias"]) + leaves["residual"]
    (result * leaves.pop("factor").detach()).sum().backward()
    return {name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}


def gradient_problems(case: Case, leading: tuple[int, ...], needed: set[str], given_dtype: torch.dtype) -> list[str]:
    """Run both passes; `needed`: whose gradients are recorded; `given_dtype`: of x and the residual."""
    layer = po_nn.RowParallelLinear(
        case.inputs, case.outputs, bias=case.has_bias, dtype=case.dtype, **dict(case.options)
    )
    given = whole_numbers(case, leading)
    if not case.has_bias:
        given["bias"].zero_()
    layer.load_state_dict({name: given[name] for name in layer.state_dict()})
    first, last = layer.shard_range
    leaves = {
        "x": given["x"][..., first:last].to(po.device(), given_dtype, copy=True),
        "residual": own_part(layer, given["residual"]).to(po.device(), given_dtype, copy=True),
        **dict(layer.named_parameters()),
    }
    for name in needed:
        leaves[name].requires_grad_()
    with torch.autocast(po.device().type, case.dtype, enabled=given_dtype != case.dtype):
        result = layer(leaves["x"], residual=leaves["residual"])
        if layer.last_path != ("gemm_reduce_scatter" if layer.sequence_parallel else "gemm_all_reduce"):
            return [f"took the {layer.last_path} path"]
        (result * own_part(layer, given["factor"]).to(po.device())).sum().backward()
    wants, problems = whole_gradients(given), []
    for name, leaf in leaves.items():
        if name not in needed:
            problems += [] if leaf.grad is None else [f"a gradient of {name}"]
            continue
        want, found = wants[name], leaf.grad
        if name in ("x", "weight"):
            want = want[..., first:last]
        elif name == "residual":
            want = own_part(layer, want)
        elif layer.sequence_parallel:  # the bias: that of the PE's part
            mine = own_part(layer, given["factor"]).double().flatten(0, -2).sum(0)
            if not torch.equal(found.cpu(), mine.to(case.dtype)):
                problems.append("another gradient of the bias for this PE's part")
            found = po.all_reduce(found)
        if found.dtype != leaf.dtype or not torch.equal(found.cpu(), want.to(leaf.dtype)):
            problems.append(f"another gradient of {name}")
    with torch.no_grad():  # which again takes the path that `path` says
        layer(leaves["x"].detach().to(case.dtype), residual=leaves["residual"].detach().to(case.dtype))
    if layer.last_path != path_of(layer, leaves["x"][..., 0].numel()):
        problems.append(f"took the {layer.last_path} path without gradients")
    return problems


def gradients_program(backend: str) -> list[str]:
    problems = []
    with world_of(backend) as world:
        for case in LEARNT:
            names = {"x", "weight", "residual", *(["bias"] if case.has_bias else [])}
            runs: list[tuple[tuple[int, ...], set[str], torch.dtype]] = [
                *(((3, 7), {name}, case.dtype) for name in sorted(names)),
                *((leading, names, case.dtype) for leading in ((2,), (20,), (2, 3, 2), (0,), (2, 0))),
                ((2, 9), names, torch.float32),  # under autocast
            ]
            for leading, needed, given_dtype in runs:
                leading = (leading[0] * world.size, *leading[1:])
                found = gradient_problems(case, leading, needed, given_dtype)
                problems += [f"{case.name}, {list(leading)}, {sorted(needed)}: {problem}" for problem in found]
        po.check()
    return problems


@pytest.mark.parametrize("world", [1, 2, 3])
def test_gradients_of_a_row_parallel_layer_are_those_of_the_whole_one(backend: str, world: int) -> None:
    assert in_processes(gradients_program, world, backend, timeout=280) == [[]] * world


class Pair(torch.nn.Module):
    """A tensor-parallel block, or the whole one."""

    def __init__(self, make: Callable[[str, int, int], torch.nn.Module]) -> None:
        super().__init__()
        self.up, self.down = make("up", 32, 48), make("down", 48, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if isinstance(self.up, po_nn.ColumnParallelLinear):
            x = x.view_as(x)
            x.register_hook(po.all_reduce)  # the PEs' features have parts of this gradient
        result: torch.Tensor = self.down(F.silu(self.up(x)))
        return result


def trained(model: Pair, x: torch.Tensor, loss_of: Callable[[torch.Tensor], torch.Tensor]) -> list[float]:
    """Make some steps of SGD; return the losses."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    losses = []
    for _ in range(4):
        optimizer.zero_grad()
        loss = loss_of(model(x))
        loss.backward()
        if getattr(model.down, "sequence_parallel", False):
            po.all_reduce(model.down.bias.grad, out=model.down.bias.grad)
        optimizer.step()
        losses.append(loss.item())
    return losses


def training_program(backend: str, is_sequence: bool) -> list[str]:
    """Train a pair of layers, and the whole ones in fp64."""
    problems = []
    with world_of(backend, has_group=False):
        generator = torch.Generator().manual_seed(7)
        whole = Pair(lambda _, inputs, outputs: torch.nn.Linear(inputs, outputs)).double()
        with torch.no_grad():
            for parameter in whole.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
        first = copy.deepcopy(whole.state_dict())
        x, target = (torch.randn(8, 6, 32, generator=generator) for _ in range(2))
        make = {
            "up": po_nn.ColumnParallelLinear,
            "down": functools.partial(po_nn.RowParallelLinear, sequence_parallel=is_sequence),
        }
        part = Pair(lambda name, inputs, outputs: make[name](inputs, outputs, dtype=torch.float16))
        part.load_state_dict(first)
        part.requires_grad_()
        own_x = x.half().to(po.device()).requires_grad_()
        wanted = own_part(part.down, target).to(po.device())
        losses = trained(part, own_x, lambda result: (result.float() - wanted).square().sum() / 64)
        exact_x = x.double().requires_grad_()
        exact_losses = trained(whole, exact_x, lambda result: (result - target).square().sum() / 64)
        if is_sequence:
            losses = po.all_reduce(torch.tensor(losses, device=po.device())).tolist()
        for loss, exact_loss in zip(losses, exact_losses, strict=True):
            if abs(loss - exact_loss) > 0.01 * exact_loss:
                problems.append(f"losses {losses} instead of {exact_losses}")
                break
        if not exact_losses[-1] < 0.7 * exact_losses[0]:
            problems.append(f"nothing was learnt: {exact_losses}")
        if part.down.last_path != ("gemm_reduce_scatter" if is_sequence else "gemm_all_reduce"):
            problems.append(f"took the {part.down.last_path} path")
        error = float((own_x.grad.cpu() - exact_x.grad).abs().max())
        if error > 0.02 * float(exact_x.grad.abs().max()):
            problems.append(f"the gradient of x is off by {error}")
        for name, layer in part.named_children():
            for key, parameter in layer.named_parameters():
                exact = layer.shard_of(key, getattr(whole, name).get_parameter(key).detach())
                moved = float((exact - layer.shard_of(key, first[f"{name}.{key}"])).abs().max())
                error = float((parameter.detach().cpu() - exact).abs().max())
                if error > 0.05 * moved:
                    problems.append(f"{name}.{key} moved by up to {moved}, and is off by {error}")
        po.check()
    return problems


@pytest.mark.parametrize("is_sequence", [False, True], ids=["whole", "sequence"])
@pytest.mark.parametrize("world", [1, 2, 4])
def test_a_pair_of_layers_learns_what_whole_ones_do(backend: str, world: int, is_sequence: bool) -> None:
    assert launched(training_program, world, backend, is_sequence) == [[]] * world


class Block(torch.nn.Module):
    """A gated block as models have it: two column-parallel layers, then a row-parallel one."""

    def __init__(self, make: Callable[..., Any]) -> None:
        super().__init__()
        self.gate, self.up = make("column", 32, 30), make("column", 32, 30)
        self.down = make("row", 30, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


@torch.no_grad()
def block_program(backend: str) -> list[str]:
    problems = []
    with world_of(backend, has_group=False) as world:
        whole = Block(lambda kind, inputs, outputs: torch.nn.Linear(inputs, outputs))
        generator = torch.Generator().manual_seed(3)  # the PEs may be threads, which share torch's own
        for parameter in whole.parameters():
            parameter.normal_(0.0, 0.2, generator=generator)
        splits = po_nn.balanced_splits(30, world.size)
        kinds = {"row": po_nn.RowParallelLinear, "column": po_nn.ColumnParallelLinear}
        x = torch.randn(7, 32, generator=generator)
        exact = whole.double()(x.double())
        state = whole.float().state_dict()
        before = {name: tensor.clone() for name, tensor in state.items()}
        for is_assigned in (False, True):
            device = "meta" if is_assigned else None
            part = Block(lambda kind, i, o, device=device: kinds[kind](i, o, splits=splits, device=device))
            strided = {name: tensor.to(po.device()).t().contiguous().t() for name, tensor in state.items()}
            given = strided if is_assigned else state  # which an assignment would keep as they lie
            missing = part.load_state_dict(given, assign=is_assigned)
            if missing.missing_keys or missing.unexpected_keys:
                problems.append(f"assign={is_assigned}: {missing}")
            if not all(parameter.is_contiguous() for parameter in part.parameters()):
                problems.append(f"assign={is_assigned}: a parameter is not contiguous")
            if any(parameter.requires_grad for parameter in part.parameters()):
                problems.append(f"assign={is_assigned}: a parameter wants a gradient")
            error = float((part(x.to(po.device())).cpu().double() - exact).abs().max())
            if error > 1e-5:
                problems.append(f"assign={is_assigned}: off by {error}")
            again = Block(lambda kind, i, o: kinds[kind](i, o, splits=splits))
            again.load_state_dict(part.state_dict())  # a shard loads as it is
            if not torch.equal(again(x.to(po.device())), part(x.to(po.device()))):
                problems.append(f"assign={is_assigned}: the shard's own state dict gives another layer")
        if not all(torch.equal(tensor, before[name]) for name, tensor in state.items()):
            problems.append("the state dict was changed")
    return problems


@pytest.mark.parametrize("world", [1, 2, 4])
def test_a_block_loads_the_state_dict_of_whole_layers(backend: str, world: int) -> None:
    assert launched(block_program, world, backend) == [[]] * world


def conversion_program(backend: str) -> list[str]:
    problems = []
    with world_of(backend, has_group=False):
        torch.manual_seed(0)
        linear = torch.nn.Linear(8, 6)
        state = torch.random.get_rng_state()
        for kind in (po_nn.RowParallelLinear, po_nn.ColumnParallelLinear):
            layer = kind.from_linear(linear, dtype=torch.bfloat16)
            if layer.weight.dtype != torch.bfloat16 or layer.weight.device != po.device():
                problems.append(f"{kind.__name__}: {layer.weight.dtype} on {layer.weight.device}")
            if not torch.equal(layer.weight.cpu(), linear.weight.bfloat16()):
                problems.append(f"{kind.__name__}: other weights")
            layer.weight.fill_(0.0)
            if not bool(linear.weight.any()):
                problems.append(f"{kind.__name__}: shares its weight with the whole layer")
            if "out_features=6" not in repr(layer) or "splits=(8,)" not in repr(layer).replace("(6,)", "(8,)"):
                problems.append(repr(layer))
        if not torch.equal(torch.random.get_rng_state(), state):
            problems.append("from_linear drew random numbers")
        for is_sequence in (False, True):
            layer = po_nn.RowParallelLinear(8, 6, sequence_parallel=is_sequence)
            if f"sequence_parallel={is_sequence}" not in repr(layer):
                problems.append(repr(layer))
        drawn = po_nn.RowParallelLinear(400, 300)
        bound = 400**-0.5
        if not 0.95 * bound < float(drawn.weight.abs().max()) <= bound or bool(drawn.bias.any()):
            problems.append("reset_parameters: another range")
    return problems


def test_from_linear_copies_and_converts(backend: str) -> None:
    assert launched(conversion_program, 1, backend) == [[]]


# ---- errors --------------------------------------------------------------------------------------------------------


def errors_program(backend: str) -> list[str]:
    """Return the errors that are missing or wrong."""
    Row, Column = po_nn.RowParallelLinear, po_nn.ColumnParallelLinear
    with world_of(backend, has_group=False):
        device = po.device()
        row, column = Row(8, 4), Column(8, 4)
        x = torch.ones(3, 4, device=device)
        big = torch.ones(17, 4, device=device)
        absent = torch.ones(17, 8, device="meta")
        rounded = Row(8, 4, dtype=torch.float16, wire_dtype=torch.bfloat16)
        shares = "splits: expected 2 shares of at least 0 that sum to"
        other_dtype = "expected weight's dtype torch.float32, got torch.float16"
        with torch.enable_grad():
            result = row(x.clone().requires_grad_())
        small = {"weight": torch.ones(4, 7), "bias": torch.ones(4)}
        wire = "expected None, torch.float32 or the weight's dtype torch.float16, got torch.bfloat16"
        on, elsewhere, one_of = f"on {device}", "got one on meta", "expected one of 'auto', 'one_shot',"
        tried: list[tuple[type[Exception], Callable[[], object], str]] = [
            (ValueError, lambda: Row(9, 4), "in_features: 9 do not divide by 2 PEs; pass splits, such as (5, 4)"),
            (ValueError, lambda: Column(8, 5), "out_features: 5 do not divide by 2 PEs; pass splits, such as (3, 2)"),
            (ValueError, lambda: Row(8, 4, splits=(4, 3)), f"{shares} in_features = 8, got (4, 3)"),
            (ValueError, lambda: Row(8, 4, splits=(8,)), f"{shares} in_features = 8, got (8,)"),
            (ValueError, lambda: Column(8, 4, splits=(5, -1)), f"{shares} out_features = 4, got (5, -1)"),
            (ValueError, lambda: row(x.repeat(1, 2)), "x: expected [..., 4], this PE's features, got [3, 8]"),
            (ValueError, lambda: column(x), "x: expected [..., 8], this PE's features, got [3, 4]"),
            (ValueError, lambda: row(x[0, 0]), "x: expected [..., 4], this PE's features, got []"),
            (TypeError, lambda: row(x.half()), f"x: {other_dtype}"),
            (TypeError, lambda: row([1.0] * 4), "x: expected a tensor, got list"),
            (TypeError, lambda: row(x, residual=[1.0] * 4), "residual: expected a tensor, got list"),
            (ValueError, lambda: row(x, residual=x[0]), "residual: expected the result's shape [3, 4], got [4]"),
            (TypeError, lambda: row(x, residual=x.half()), f"residual: {other_dtype}"),
            (
                ValueError,
                lambda: row(x, residual=x.to("meta")),
                f"residual: expected a tensor {on}, as x is, {elsewhere}",
            ),
            (TypeError, lambda: Column(8, 4, device="meta")(absent.half()), f"x: {other_dtype}"),
            (ValueError, lambda: Row(8, 4, device="meta")(absent[:, :4]), f"x: expected a tensor {on}, {elsewhere}"),
            (ValueError, lambda: Row(8, 4, algorithm="ring"), f"algorithm: {one_of} 'two_shot', got 'ring'"),
            (RuntimeError, lambda: Row(8, 4, dtype=torch.float16)(big.half()), "Use po.process_group() on every PE"),
            (
                NotImplementedError,
                lambda: row(big.clone().requires_grad_()),
                "the layer is forward only",
            ),
            (ValueError, lambda: rounded(big.half()), f"wire_dtype: {wire}"),
            (RuntimeError, lambda: row.load_state_dict(small), "size mismatch for weight"),
            (NotImplementedError, lambda: result.sum().backward(), "forward only"),
        ]
        found = [(message_of(kind, call), text) for kind, call, text in tried]
        po.check()
    found.append((message_of(RuntimeError, lambda: Row(8, 4)), "call persistent_ops.init() first"))
    return [f"{said!r} instead of {text!r}" for said, text in found if text not in said]


def gradient_errors_program(backend: str) -> list[str]:
    """Return the errors that are missing or wrong, of gradients and of parts of the first dimension."""
    Row, splits = po_nn.RowParallelLinear, (5, 3)
    with world_of(backend, has_group=False):
        x = torch.ones(3, 4, device=po.device())
        half, big = x.half(), torch.ones(17, 4, device=po.device())
        uneven = torch.ones(17, splits[po.rank()], device=po.device(), dtype=torch.float16)
        sequence = Row(8, 4, dtype=torch.float16, sequence_parallel=True)
        several = "expected [S, ..., 4] with S a multiple of 2, the number of PEs"
        tried: list[tuple[type[Exception], Callable[[], object], str]] = [
            (
                NotImplementedError,
                lambda: Row(8, 4, dtype=torch.float16)(big.half().requires_grad_()),  # which 8 does not divide
                "the layer is forward only",
            ),
            (
                NotImplementedError,
                lambda: Row(8, 16, splits=(4, 4))(big.clone().requires_grad_()),  # of float32
                "use equal shares, out_features that 8 divides, and a weight in float16 or bfloat16",
            ),
            (
                NotImplementedError,
                lambda: Row(8, 16, splits=splits, dtype=torch.float16)(uneven.clone().requires_grad_()),
                "the layer is forward only",
            ),
            (
                ValueError,
                lambda: Row(8, 4, splits=(5, 3), sequence_parallel=True),
                "sequence_parallel: expected equal shares of in_features, got splits (5, 3)",
            ),
            (
                TypeError,
                lambda: Row(8, 4, sequence_parallel=True)(x),
                "sequence_parallel: expected a weight in float16 or bfloat16, got one in torch.float32",
            ),
            (ValueError, lambda: sequence(half), f"x: {several}, got [3, 4]"),
            (ValueError, lambda: sequence(half[0]), f"x: {several}, got [4]"),
            (ValueError, lambda: sequence(half[:2], residual=half[:2]), "the result's shape [1, 4], got [2, 4]"),
            (TypeError, lambda: sequence(half[:2], residual=x[:1]), "residual: expected weight's dtype torch.float16"),
            (
                TypeError,
                lambda: Row(8, 4, dtype=torch.float16, wire_dtype=torch.bfloat16, sequence_parallel=True)(half[:2]),
                "wire_dtype: expected torch.float16 or torch.float32, got torch.bfloat16",
            ),
        ]
        found = [(message_of(kind, call), text) for kind, call, text in tried]
        po.check()
    return [f"{said!r} instead of {text!r}" for said, text in found if text not in said]


@pytest.mark.parametrize("program", [errors_program, gradient_errors_program])
def test_what_does_not_fit_is_refused(backend: str, program: Callable[[str], list[str]]) -> None:
    assert launched(program, 2, backend) == [[], []]


@torch.no_grad()
def groups_program(backend: str) -> list[Any]:
    """The errors of a layer whose group has other ranks, and copies of a layer whose group has all ranks."""
    with world_of(backend) as world:
        mine = [torch.distributed.new_group([rank]) for rank in range(world.size)][world.rank]
        group = torch.distributed.new_group(list(range(world.size)))
        alone, layer = (po_nn.RowParallelLinear(8, 4, group=each, dtype=torch.float16) for each in (mine, group))
        x = torch.ones(17, 4, device=po.device(), dtype=torch.float16)
        said = message_of(ValueError, lambda: alone(x))
        copied = copy.deepcopy(layer)
        is_equal = torch.equal(copied(x), layer(x)) and copied.weight is not layer.weight
        return [said, is_equal and copies(), message_of(TypeError, lambda: pickle.dumps(layer))]


def copies() -> bool:
    """Return whether copies of a layer that gives parts and learns do so too."""
    layer = po_nn.RowParallelLinear(8, 4, dtype=torch.float16, sequence_parallel=True).requires_grad_()
    loaded = po_nn.RowParallelLinear(8, 4, dtype=torch.float16, sequence_parallel=True)
    loaded.load_state_dict(layer.state_dict())
    copied, pickled = copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))
    learns = [all(parameter.requires_grad for parameter in each.parameters()) for each in (copied, pickled, loaded)]
    x = torch.randn(4, 4, device=po.device(), dtype=torch.float16)
    want = layer(x)
    return (
        learns == [True, True, False]
        and want.shape == (2, 4)
        and sorted(layer.state_dict()) == ["bias", "weight"]
        and all(torch.equal(each(x), want) and each.weight is not layer.weight for each in (copied, pickled, loaded))
    )


def test_a_layer_with_a_group_wants_all_pes_and_is_copied_and_not_pickled(backend: str) -> None:
    for rank, (said, is_equal, text) in enumerate(in_processes(groups_program, 2, backend, timeout=120)):
        assert said == f"group: expected the PEs as its ranks, {rank} of 2 here, got 0 of 1"
        assert is_equal and "process group cannot be pickled" in text and "save its state_dict()" in text


def saved_program(backend: str) -> bytes:
    with world_of(backend, has_group=False):
        layers = [
            layer.from_linear(whole_layer(CASES[0])) for layer in (po_nn.RowParallelLinear, po_nn.ColumnParallelLinear)
        ]
        return pickle.dumps([layer.cpu() for layer in layers])


@torch.no_grad()
def loaded_program(backend: str, saved: list[bytes]) -> list[str]:
    """The error of each layer for an input that fits the other one."""
    with world_of(backend, has_group=False):
        said = []
        for layer in pickle.loads(saved[min(po.rank(), len(saved) - 1)]):
            features = layer.weight.shape[1]
            call = functools.partial(layer.to(po.device()), torch.ones(3, features, device=po.device()))
            said.append(message_of(RuntimeError, call))
        po.check()
        return said


def test_a_layer_of_another_pe_or_world_is_refused(backend: str) -> None:
    saved = launched(saved_program, 2, backend)
    assert launched(loaded_program, 2, backend, saved) == [["nothing was raised"] * 2] * 2
    (alone,) = launched(loaded_program, 1, backend, saved)
    swapped = launched(loaded_program, 2, backend, saved[::-1])
    for texts, owner, here in ((alone, 0, "PE 0 of 1"), (swapped[0], 1, "PE 0 of 2"), (swapped[1], 0, "PE 1 of 2")):
        for kind, text in zip(("Row", "Column"), texts, strict=True):
            assert text.startswith(
                f"{kind}ParallelLinear: this layer was made for PE {owner} of 2, but this is {here}. "
            )


# ---- torch.compile -------------------------------------------------------------------------------------------------


COMPILED = [
    CASES[0],
    Case("compiled, bf16", dtype=torch.bfloat16),
    Case("compiled, sequence", dtype=torch.bfloat16, options=(("sequence_parallel", True),)),
]


def compile_program(backend: str) -> list[str]:
    problems = []
    with world_of(backend, has_group=False):
        for case in COMPILED:
            torch.compiler.reset()
            layer = po_nn.RowParallelLinear.from_linear(whole_layer(case), **dict(case.options))
            first, last = layer.shard_range
            compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
            for number, (count, learns) in enumerate(
                [(3, False)] * 3 + [(20, False)] * 2 + [(3, True), (20, True)] * (case.dtype != torch.float32)
            ):
                results = []
                layer.requires_grad_(learns)
                for call in (compiled, layer):
                    x = values(case, f"x {number}", 2, count, case.inputs)[..., first:last].to(po.device())
                    residual = own_part(layer, values(case, f"residual {number}", 2, count, case.outputs))
                    residual = residual.to(po.device())
                    found = [call(x.requires_grad_(learns), residual=residual.requires_grad_(learns))]
                    if learns:
                        found[0].float().square().sum().backward()
                        leaves = [x, residual, *layer.parameters()]
                        found += [leaf.grad for leaf in leaves]
                        layer.zero_grad()
                    results.append(found)
                is_whole = learns and not layer.sequence_parallel
                if layer.last_path != ("gemm_all_reduce" if is_whole else path_of(layer, 2 * count)):
                    problems.append(f"{case.name}, call {number}: took the {layer.last_path} path")
                for which, pair in enumerate(zip(*results, strict=True)):
                    if not torch.equal(*pair):
                        problems.append(f"{case.name}, call {number}: other bits of {which}")
        po.check()
    return problems


@torch.no_grad()
def compile_column_program(backend: str) -> list[str]:
    problems = []
    with world_of(backend, has_group=False):
        column = po_nn.ColumnParallelLinear.from_linear(whole_layer(CASES[0]))
        compiled = torch.compile(column, fullgraph=True, backend="aot_eager")
        for number in range(3):
            whole = values(CASES[0], f"x {number}", 2, 3, CASES[0].inputs).to(po.device())
            if not torch.equal(compiled(whole), column(whole)) or column.last_path != "gemv":
                problems.append(f"call {number}: other bits")
        po.check()
    return problems


@pytest.mark.parametrize("program", [compile_program, compile_column_program])
def test_compiles_without_a_break(backend: str, program: Callable[[str], list[str]]) -> None:
    assert in_processes(program, 2, backend, timeout=250) == [[], []]


# ---- splits --------------------------------------------------------------------------------------------------------


@given(st.integers(0, 500), st.integers(1, 70), st.integers(1, 16))
def test_balanced_splits_differ_by_one_unit(units: int, world_size: int, multiple: int) -> None:
    splits = po_nn.balanced_splits(units * multiple, world_size, multiple=multiple)
    assert len(splits) == world_size and sum(splits) == units * multiple
    assert all(share % multiple == 0 for share in splits)
    assert max(splits) - min(splits) in (0, multiple)
    assert list(splits) == sorted(splits, reverse=True)


def test_balanced_splits_refuses_broken_units() -> None:
    with pytest.raises(ValueError, match="features: expected a multiple of 8, got 12"):
        po_nn.balanced_splits(12, 2, multiple=8)
    with pytest.raises(ValueError, match="world_size and multiple at least 1; got 8, 0, 1"):
        po_nn.balanced_splits(8, 0)


@pytest.mark.parametrize(
    ("arguments", "name"), [((10, 3.0), "world_size"), (("a", 4), "features"), ((True, 1), "features")]
)
def test_balanced_splits_refuses_what_is_no_number(arguments: tuple[Any, Any], name: str) -> None:
    with pytest.raises(TypeError, match=rf"{name}: expected a whole number, got"):
        po_nn.balanced_splits(*arguments)

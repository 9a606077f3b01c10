"""all_gather_matmul: exact bits, gradients, protocol, graphs, ThreadSanitizer, arguments, torch, benchmark."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from bits import BitsSuite, CaseWorld, Outcome, Trial, difference
from graphs import NUM_INPUTS, Call, GraphSuite
from kept_pes import in_processes
from mutations import OVERTAKES, After, Drop
from protocol import Mismatch, ProtocolSuite, Work
from sanitizer import RACE, Build, Driver, Exit, Mutation, SanitizerSuite
from torch_checks import opcheck_problems
from typer.testing import CliRunner
from worlds import error_of, in_world

import persistent_ops as po
from persistent_ops.cli import app
from persistent_ops.ops.all_gather_matmul import OPERATOR, Tuning


@dataclass(frozen=True)
class Case:
    """Shapes, the same on every PE.

    Attributes:
        shape: of a.
        columns: of the other factor.
        is_shifted: a begins one element after an aligned address, on every second PE.
    """

    name: str
    shape: tuple[int, int]
    columns: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    is_shifted: bool = False

    def numbers(self, iteration: int) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Return what the PEs pass, one under the other, and what PE r multiplies with, times r + 1."""
        rng = torch.Generator().manual_seed(iteration)
        a = torch.randn((po.world_size() * self.shape[0], self.shape[1]), generator=rng).to(self.dtype)
        return a, [torch.randn((self.shape[1], columns), generator=rng).to(self.dtype) for columns in self.columns]


CASES = [
    Case("no rows", (0, 3), (4,)),
    Case("an element, bf16", (1, 1), (8,), torch.bfloat16),
    Case("two products, fp16", (5, 16), (8, 72), torch.float16),
    Case("three", (21, 37), (32, 4, 68)),
    Case("shifted, bf16", (18, 40), (64, 8), torch.bfloat16, is_shifted=True),
]


def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return a @ b, added up in fp32 in the order of the columns of a, without fused operations."""
    total = torch.zeros(a.shape[0], b.shape[1])
    for column, row in zip(a.float().t(), b.float(), strict=True):
        total = total + column[:, None] * row
    return total.to(a.dtype)


def given(case: Case, iteration: int) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Return what this PE passes, on its device."""
    whole, bs = case.numbers(iteration)
    a = whole.view(po.world_size(), *case.shape)[po.rank()]
    first = int(case.is_shifted and po.rank() % 2 == 0)
    room = torch.empty(first + a.numel(), dtype=a.dtype, device=po.device())
    return room[first:].view(a.shape).copy_(a), [(b * (po.rank() + 1)).to(po.device()) for b in bs]


def expected(case: Case, iteration: int) -> list[torch.Tensor]:
    whole, bs = case.numbers(iteration)
    return [whole, *(product(whole, b * (po.rank() + 1)) for b in bs)]


def called(a: torch.Tensor, bs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    gathered, products = po.all_gather_matmul(a, bs)
    return [gathered, *products]


def problem(results: Sequence[torch.Tensor], wants: Sequence[torch.Tensor]) -> str | None:
    return next(filter(None, map(difference, results, wants)), None)


# ---- bits ------------------------------------------------------------------------------------------------------------


class GatherAndMultiply(Trial):
    def __init__(self, case: Case) -> None:
        self._case = case

    def ways(self, turn: int) -> tuple[str]:
        return ("plain",)

    def call(self, turn: int, iteration: int, way: str) -> Outcome:
        results = called(*given(self._case, iteration))
        return Outcome(results, problem(results, expected(self._case, iteration)))


class TestBits(BitsSuite):
    trial = GatherAndMultiply
    is_the_same_on_all_pes = False  # each multiplies with matrices of its own
    halved_by = torch.float32
    worlds: ClassVar = {
        "1": CaseWorld(1, CASES),
        "2": CaseWorld(2, CASES),
        "3": CaseWorld(3, CASES),
        "5": CaseWorld(5, CASES),
        "3-staged": CaseWorld(3, CASES, {"transport": "staged"}),
        "2-wg3": CaseWorld(2, CASES, {"host_options": {"wg_size": 3}}, {"work_groups": 6}),
    }

    @classmethod
    def tune(cls, **tuning: Any) -> None:
        OPERATOR.tune(po.runtime.world.current(), Tuning(**tuning))


# ---- protocol --------------------------------------------------------------------------------------------------------

_CASE = Case("protocol", (30, 11), (8, 20))


def _other(case: Case) -> Mismatch:
    return Mismatch(lambda: called(*given(case, 0)))


class TestProtocol(ProtocolSuite):
    operator = "all_gather_matmul"
    ways = ("plain",)
    absences = (("plain", "auto"), ("plain", "staged"))
    mismatches: ClassVar = {
        "shape": _other(Case("another shape", (11, 30), (8, 20))),
        "dtype": _other(Case("another dtype", (30, 11), (8, 24), torch.float16)),
        "operator": Mismatch(po.barrier, ["barrier()"]),
    }
    first_call = "all_gather_matmul"
    deaths = (("killed", "plain"),)
    deaths_on_gpus = (("stopped", "plain"),)

    @classmethod
    def work(cls, iteration: int, way: str) -> Work:
        a, bs = given(_CASE, iteration)
        results: list[torch.Tensor] = []

        def is_right() -> bool:
            return problem(results, expected(_CASE, iteration)) is None

        return Work(lambda: results.extend(called(a, bs)), is_right)

    @classmethod
    def meet(cls) -> object:
        return called(*given(_CASE, 0))


# ---- graphs ----------------------------------------------------------------------------------------------------------


class TestGraphs(GraphSuite):
    operator = "all_gather_matmul"
    cases = (Case("a row", (1, 64), (4,)), Case("two", (7, 33), (40, 8)), Case("fp16", (5, 8), (8,), torch.float16))
    ways = ("plain",)
    growing = (Case("small", (8, 1), (4,)), Case("large", (400, 20), (4,)), Case("medium", (80, 10), (4,)))

    @classmethod
    def call(cls, case: Case, way: str) -> Call:
        buffers = [given(case, turn) for turn in range(NUM_INPUTS)]
        wants = [expected(case, turn) for turn in range(NUM_INPUTS)]
        return Call(case.name, way, lambda a, *bs, way: called(a, bs), [[a, *bs] for a, bs in buffers], wants)


# ---- the protocol under ThreadSanitizer ------------------------------------------------------------------------------

_DRIVER = r"""
#include "platform/platform.cuh"
template <>
inline constexpr int po::kClusterSize<> = 2;
template <>
inline constexpr int po::kArenaAlignment<> = 1024;

#include "driver.h"
#include "kernels/all_gather_matmul.cuh"

namespace {

using namespace po::all_gather_matmul;
using AllGatherMatmul = Kernel<Config{.scalar = po::DType::kFloat32, .vector_bytes = 16}>;
constexpr uint64_t kReadyStride = 16;

driver::Options options({{"--rows", "5"}, {"--columns", "36"}}, {driver::kLaunches, driver::kWorld, driver::kTroubles});

class Pe final : public driver::BasePe<Plan> {
 public:
  Pe(driver::World& world_in, int rank_in) : BasePe(world_in, rank_in, kReadyStride) {
    plan.rows = options.number("--rows");
    plan.depth = kDepth;
    plan.part_bytes = plan.rows * kDepth * 4;
    plan.num_products = 1;
    plan.columns[0] = options.number("--columns");
    output_offset = take(static_cast<uint64_t>(size * plan.part_bytes));
    allocate_heap();
    product.resize(static_cast<size_t>(size * plan.rows * plan.columns[0]));
    for (int64_t i = 0; i < kDepth * plan.columns[0]; ++i) b.push_back(static_cast<float>(i % 7 - 3));
  }

 private:
  static constexpr int64_t kDepth = 20;  // two tiles

  const float* output() const { return reinterpret_cast<const float*>(heap + output_offset); }

  // Element i of all that the PEs pass.
  static float value(int64_t i, int64_t launch) { return static_cast<float>((launch * 31 + i * 17) % 101 - 50); }

  void run_kernel(int64_t launch) override {
    const int64_t part = plan.rows * kDepth;
    std::vector<float> a;
    for (int64_t i = 0; i < part; ++i) a.push_back(value(rank * part + i, launch));
    Call call{};
    call.a = reinterpret_cast<const uint8_t*>(a.data());
    call.output_offset = output_offset;
    call.products[0] = reinterpret_cast<uint8_t*>(product.data());
    const int64_t row_bytes = 4 * plan.columns[0];
    const po::HostTensorMap matrix{reinterpret_cast<const uint8_t*>(b.data()),
                                   kDepth, row_bytes, row_bytes, kBoxRows, kTileRowBytes, 4, kTileRowBytes};
    std::memcpy(&call.matrices[0], &matrix, sizeof(matrix));
    launch_on_host<AllGatherMatmul>(plan_of(launch), call);
  }

  void check(int64_t launch) override {
    const int64_t columns = plan.columns[0];
    for (int64_t row = 0; row < size * plan.rows; ++row) {
      for (int64_t i = row * kDepth; i < (row + 1) * kDepth; ++i) {
        if (output()[i] != value(i, launch)) driver::fail(driver::kWrongOutput, "PE %d, launch %ld", rank, launch);
      }
      for (int64_t column = 0; column < columns; ++column) {
        float wanted = 0;
        for (int64_t k = 0; k < kDepth; ++k) {
          wanted += value(row * kDepth + k, launch) * b[static_cast<size_t>(k * columns + column)];
        }
        const float found = product[static_cast<size_t>(row * columns + column)];
        if (found == wanted) continue;
        driver::fail(driver::kWrongOutput, "PE %d, launch %ld: %f, not %f", rank, launch, found, wanted);
      }
    }
  }

  void check_given_up(int64_t launch) override {
    const int64_t part = plan.rows * kDepth;
    for (int64_t i = rank * part; i < (rank + 1) * part; ++i) {  // which nobody else writes
      if (output()[i] != output()[i]) continue;
      driver::fail(driver::kWrongOutput, "PE %d, launch %ld: not poisoned", rank, launch);
    }
    for (const float found : product) {
      if (found != found) continue;
      driver::fail(driver::kWrongOutput, "PE %d, launch %ld: a product is not poisoned", rank, launch);
    }
  }

  std::vector<float> b, product;
  uint64_t output_offset;
};

}  // namespace

int main(int argc, char** argv) { return driver::run<Pe>(argc, argv, options); }
"""
_LATE = "--pes=2 --slow-pe=1"
_STAGED = "--pes=3 --staged=1 --delay-us=300"
_TROUBLE = "--pes=3 --threads=3 --stop-pe=1 --trouble-at=3 --queued=3 --epochs=6 --timeout-ms=1500"
_CASES = {
    "alone": "--pes=1",
    "several": "--pes=3 --wgs=4 --threads=2",
    "late": _LATE,
    "epoch_passes_2^32": "--pes=2 --first-epoch=4294967293",
    "staged": _STAGED,
    "some_are_near": f"{_STAGED} --pes=4 --node=2",
    "behind_an_aborted_launch": _TROUBLE,
    "behind_an_aborted_launch_staged": f"{_TROUBLE} --staged=1 --delay-us=100",
    "another_contract": "--pes=3 --other-pe=1 --trouble-at=3 --epochs=6",
}
# The WGs meet still, or their tiles would get into the wrong rounds, but no longer before they bring one.
_LATE_MEETING = (Drop("tile-free"), After("tile-landed", "cluster_.sync();"))
WRONG = frozenset({Exit.WRONG_OUTPUT})
_MUTATIONS = {
    "credits_are_not_awaited": Mutation((Drop("piece-credits"),), _LATE, RACE, may_crash=True),
    "stores_before_all_credits_are_there": Mutation(
        (Drop("piece-credits-sync"),), f"{_LATE} --threads=3", RACE, may_crash=True
    ),
    "signals_before_all_have_stored": Mutation((Drop("piece-stored"),), "--pes=2 --threads=3", RACE),
    "pieces_are_not_awaited": Mutation((Drop("piece-await"),), _LATE, RACE),
    "multiplies_with_a_tile_that_has_not_come": Mutation((Drop("tile-landed"),), "--pes=1", RACE),
    "brings_a_tile_over_one_in_use": Mutation(_LATE_MEETING, "--pes=1", RACE),
    "leaves_products_of_an_aborted_launch": Mutation((Drop("products-poison"),), _TROUBLE, WRONG),
    "signals_overtake_their_puts": Mutation((OVERTAKES,), _STAGED, RACE),
    "leaves_with_puts_under_way": Mutation((Drop("last-quiet"),), _STAGED, RACE),
}


class TestSanitizer(SanitizerSuite):
    driver: ClassVar = Driver(_DRIVER, {"plain": Build()}, {"plain": _CASES}, _MUTATIONS, "plain")


# ---- arguments and torch ---------------------------------------------------------------------------------------------


def _ones(*shape: int, **options: Any) -> torch.Tensor:
    return torch.ones(shape, device=po.device(), **options)


REFUSED: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "no tensor": (lambda: ([1.0], [_ones(3, 4)]), TypeError, "a: expected a tensor, got list"),
    "no list": (lambda: (_ones(2, 3), 5), TypeError, "bs: expected a sequence of tensors, got int"),
    "no tensor in it": (lambda: (_ones(2, 3), [5]), TypeError, "bs[0]: expected a tensor, got int"),
    "dtype": (lambda: (_ones(2, 3, dtype=torch.int64), [_ones(3, 4)]), TypeError, "a: expected float32, float16"),
    "dtypes": (lambda: (_ones(2, 3), [_ones(3, 8).half()]), TypeError, "bs[0]: expected torch.float32 as a has"),
    "shape": (lambda: (_ones(6), [_ones(6, 4)]), ValueError, "a: expected [M, K]"),
    "number": (lambda: (_ones(2, 3), []), ValueError, "bs: expected 1 to 7 matrices, got 0"),
    "shapes": (lambda: (_ones(2, 3), [_ones(3, 4), _ones(2, 4)]), ValueError, "bs[1]: expected [3, N], got [2, 4]"),
    "rows": (lambda: (_ones(2, 3), [_ones(3, 5)]), ValueError, "bs[0]: expected rows that begin at multiples of 16"),
    "layout": (lambda: (_ones(3, 2).t(), [_ones(3, 4)]), ValueError, "a: expected a contiguous tensor"),
    "device": (lambda: (_ones(2, 3), [torch.ones(3, 4, device="meta")]), ValueError, "bs[0]: expected a tensor on"),
    "room": (lambda: (_ones(1 << 20, 32), [_ones(32, 4)]), po.SymmetricHeapError, "no room for"),
}


def _wrong_calls() -> dict[str, tuple[str, str, float]]:
    errors = {name: error_of(lambda make=make: po.all_gather_matmul(*make())) for name, (make, _, _) in REFUSED.items()}
    assert bool((po.all_gather_matmul(_ones(2, 3), [_ones(3, 4)])[1][0] == 3).all()), "the world has suffered"
    return errors


def test_wrong_arguments(backend: str) -> None:
    (errors,) = in_world(_wrong_calls, 1, backend)
    for name, (_, kind, text) in REFUSED.items():
        assert errors[name][0] == kind.__name__ and text in errors[name][1], errors[name]


def _loss(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    """PEs use different results, and one call whose results nobody uses is made like all others."""
    po.all_gather_matmul(a, [b])
    gathered, products = po.all_gather_matmul(a, [b, c])
    return _used(gathered, products, po.rank())


def _used(gathered: torch.Tensor, products: Sequence[torch.Tensor], rank: int) -> torch.Tensor:
    return products[1].square().sum() if rank else (2 * gathered).sum() + products[0].square().sum()


def _gradients(compiler: str | None) -> list[str | None]:
    """Whole numbers, of which all sums are exact."""
    rng, world, rank = torch.Generator().manual_seed(1), po.world_size(), po.rank()
    numbers = [torch.randint(-3, 4, shape, generator=rng).float() for shape in ((world * 3, 8), (8, 4), (8, 12))]
    whole, *bs = (tensor.clone().requires_grad_() for tensor in numbers)
    torch.stack([_used(whole, [whole @ b for b in bs], pe) for pe in range(world)]).sum().backward()
    want_a = whole.grad.view(world, 3, 8)[rank]  # type: ignore[union-attr]
    own = [tensor.clone().requires_grad_() for tensor in numbers[1:]]
    _used(numbers[0], [numbers[0] @ b for b in own], rank).backward()
    given = [numbers[0].view(world, 3, 8)[rank], *numbers[1:]]
    tensors = [tensor.to(po.device(), copy=True).requires_grad_() for tensor in given]
    torch._dynamo.reset()
    function = torch.compile(_loss, fullgraph=True, backend=compiler) if compiler else _loss
    function(*tensors).backward()
    po.check()
    wants = [want_a, *(torch.zeros_like(b) if b.grad is None else b.grad for b in own)]
    return [difference(tensor.grad, want) for tensor, want in zip(tensors, wants, strict=True)]


@pytest.mark.parametrize("compiler", [None, "aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_gradients(compiler: str | None, backend: str) -> None:
    for found in in_processes(_in_world, 2, backend, _gradients, compiler, timeout=280):
        assert found == [None] * 3


def _in_world(backend: str, program: Callable[..., Any], *given: Any) -> Any:
    po.init(backend, operator_timeout=200.0, heap_size=64 << 20)  # a peer may compile meanwhile
    try:
        return program(*given)
    finally:
        po.finalize()


def _opcheck() -> list[str]:
    a, b, c = (torch.randn(shape, device=po.device()) for shape in ((3, 8), (8, 4), (8, 12)))
    operator = SimpleNamespace(default=torch.ops.persistent_ops.all_gather_matmul.results_3)
    recorded = [tensor.clone().requires_grad_() for tensor in (a, b, c)]
    calls = {"plain": (operator, (a, [b, c], 1), {}), "recorded": (operator, (recorded[0], recorded[1:], 1), {})}
    return opcheck_problems(calls)


def test_opcheck(backend: str) -> None:
    assert in_world(_opcheck, 1, backend) == [[]]


# ---- benchmark -------------------------------------------------------------------------------------------------------


@pytest.mark.host
@pytest.mark.parametrize(("command", "kind", "pes"), [("bench", "time", 2), ("trace", "timeline", 1)])
def test_benchmark(command: str, kind: str, pes: int, tmp_path: Path) -> None:
    options = ["--backend", "host", "--pes", str(pes), "--rounds", "1", "--out", str(tmp_path)]
    done = CliRunner().invoke(app, [command, "all_gather_matmul", *options])
    assert done.exit_code == 0, done.output
    (record,) = tmp_path.glob("*.jsonl")
    lines = [json.loads(line) for line in record.read_text().splitlines()]
    assert "fused" in {line["method"] for line in lines if line["kind"] == kind}

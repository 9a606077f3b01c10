"""all_gather: exact bits, protocol, graphs, ThreadSanitizer, arguments, torch, nvcc, benchmark."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from bits import BitsSuite, CaseWorld, Outcome, Trial, difference
from graphs import NUM_INPUTS, Call, GraphSuite
from mutations import Drop
from protocol import Mismatch, ProtocolSuite, Work
from sanitizer import RACE, Build, Driver, Mutation, SanitizerSuite
from typer.testing import CliRunner
from worlds import error_of, in_world

import persistent_ops as po
from persistent_ops.cli import app
from persistent_ops.ops.all_gather import OPERATOR, Tuning, kernel_request
from persistent_ops.runtime.compile.jit import compile_cuda
from persistent_ops.runtime.compile.toolchain import find_nvcc
from persistent_ops.runtime.errors import CompileError


@dataclass(frozen=True)
class Case:
    """A shape, the same on every PE.

    Attributes:
        is_shifted: x begins one element behind an aligned address, on every second PE.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    is_shifted: bool = False


CASES = [
    Case("no element", (0, 3)),
    Case("a scalar, bf16", (), torch.bfloat16),
    Case("a vector", (4,)),
    Case("matrix, fp16", (13, 72), torch.float16),
    Case("ragged", (11, 77)),
    Case("shifted, bf16", (5, 64), torch.bfloat16, is_shifted=True),
]


def expected(case: Case, iteration: int) -> torch.Tensor:
    """Return what all PEs must get; row r is what PE r passes."""
    rng = torch.Generator().manual_seed(iteration)
    return torch.randn((po.world_size(), *case.shape), generator=rng).to(case.dtype)


def own(case: Case, iteration: int) -> torch.Tensor:
    """Return what this PE passes, on its device."""
    x = expected(case, iteration)[po.rank()]
    first = int(case.is_shifted and po.rank() % 2 == 0)
    room = torch.empty(first + x.numel(), dtype=x.dtype, device=po.device())
    return room[first:].view(x.shape).copy_(x)


# ---- bits ------------------------------------------------------------------------------------------------------------


class Gather(Trial):
    def __init__(self, case: Case) -> None:
        self._case = case

    def ways(self, turn: int) -> tuple[str]:
        return ("plain",)

    def call(self, turn: int, iteration: int, way: str) -> Outcome:
        result = po.all_gather(own(self._case, iteration))
        return Outcome([result], difference(result, expected(self._case, iteration)))


class TestBits(BitsSuite):
    trial = Gather
    halved_by = torch.float32
    worlds: ClassVar = {
        "1": CaseWorld(1, CASES),
        "2": CaseWorld(2, CASES),
        "4": CaseWorld(4, CASES),
        "8": CaseWorld(8, CASES),
        "3-staged": CaseWorld(3, CASES, {"transport": "staged"}),
        "2-wg3": CaseWorld(2, CASES, {"host_options": {"wg_size": 3}}, {"work_groups": 5}),
    }

    @classmethod
    def tune(cls, **tuning: Any) -> None:
        OPERATOR.tune(po.runtime.world.current(), Tuning(**tuning))


# ---- protocol --------------------------------------------------------------------------------------------------------

_CASE = Case("protocol", (30, 11))


def _other(case: Case) -> Mismatch:
    return Mismatch(lambda: po.all_gather(own(case, 0)))


class TestProtocol(ProtocolSuite):
    operator = "all_gather(world_size=3, "
    ways = ("plain",)
    absences = (("plain", "auto"), ("plain", "staged"))
    mismatches: ClassVar = {
        "shape": _other(Case("another shape", (11, 30))),
        "dtype": _other(Case("another dtype", (30, 11), torch.float16)),
        "operator": Mismatch(po.barrier, ["barrier(world_size=3)"]),
    }
    first_call = "all_gather"
    deaths = (("killed", "plain"),)
    deaths_on_gpus = (("stopped", "plain"),)

    @classmethod
    def work(cls, iteration: int, way: str) -> Work:
        x = own(_CASE, iteration)
        results: list[torch.Tensor] = []

        def is_right() -> bool:
            return difference(results[0], expected(_CASE, iteration)) is None

        return Work(lambda: results.append(po.all_gather(x)), is_right)

    @classmethod
    def meet(cls) -> object:
        return po.all_gather(own(_CASE, 0))


# ---- graphs ----------------------------------------------------------------------------------------------------------


class TestGraphs(GraphSuite):
    operator = "all_gather"
    cases = (Case("a row", (1, 64)), Case("a matrix", (7, 33)), Case("fp16", (5, 8), torch.float16))
    ways = ("plain",)
    growing = (Case("small", (8,)), Case("large", (8000,)), Case("medium", (800,)))

    @classmethod
    def call(cls, case: Case, way: str) -> Call:
        wants = [expected(case, turn) for turn in range(NUM_INPUTS)]
        given = [[want[po.rank()]] for want in wants]
        return Call(case.name, way, lambda x, *, way: po.all_gather(x), given, [[want] for want in wants])


# ---- the protocol under ThreadSanitizer ------------------------------------------------------------------------------

_DRIVER = r"""
#include "driver.h"
#include "kernels/all_gather.cuh"

namespace {

using namespace po::all_gather;
using AllGather = Kernel<Config{.vector_bytes = 16}>;
constexpr uint64_t kReadyStride = 16;

driver::Options options({{"--vectors", "7"}}, {driver::kLaunches, driver::kWorld, driver::kTroubles});

class Pe final : public driver::BasePe<Plan> {
 public:
  Pe(driver::World& world_in, int rank_in) : BasePe(world_in, rank_in, kReadyStride) {
    plan.part_bytes = 16 * options.number("--vectors");
    output_offset = take(static_cast<uint64_t>(size * plan.part_bytes));
    allocate_heap();
  }

 private:
  int64_t words() const { return plan.part_bytes / 4; }
  const uint32_t* output() const { return reinterpret_cast<const uint32_t*>(heap + output_offset); }

  static uint32_t value(int pe, int64_t i, int64_t launch) {
    return static_cast<uint32_t>(launch * 10007 + pe * 1009 + i);
  }

  void run_kernel(int64_t launch) override {
    std::vector<uint32_t> x;
    for (int64_t i = 0; i < words(); ++i) x.push_back(value(rank, i, launch));
    launch_on_host<AllGather>(plan_of(launch), {reinterpret_cast<const uint8_t*>(x.data()), output_offset});
  }

  void check(int64_t launch) override {
    for (int64_t i = 0; i < size * words(); ++i) {
      const uint32_t wanted = value(static_cast<int>(i / words()), i % words(), launch);
      if (output()[i] == wanted) continue;
      driver::fail(driver::kWrongOutput, "PE %d, launch %ld: %u, not %u", rank, launch, output()[i], wanted);
    }
  }

  void check_given_up(int64_t launch) override {
    for (int64_t i = 0; i < words(); ++i) {  // of the part that nobody else writes
      if (output()[rank * words() + i] == 0xffffffffu) continue;
      driver::fail(driver::kWrongOutput, "PE %d, launch %ld: not poisoned", rank, launch);
    }
  }

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
    "several": "--pes=3 --wgs=3 --threads=2",
    "late": _LATE,
    "epoch_passes_2^32": "--pes=2 --first-epoch=4294967293",
    "staged": _STAGED,
    "some_are_near": f"{_STAGED} --pes=4 --node=2",
    "behind_an_aborted_launch": _TROUBLE,
    "behind_an_aborted_launch_staged": f"{_TROUBLE} --staged=1 --delay-us=100",
    "another_contract": "--pes=3 --other-pe=1 --trouble-at=3 --epochs=6",
}
_MUTATIONS = {
    "credits_are_not_awaited": Mutation((Drop("piece-credits"),), _LATE, RACE, may_crash=True),
    "stores_before_all_credits_are_there": Mutation((Drop("piece-credits-sync"),), f"{_LATE} --threads=3", RACE),
    "signals_before_all_have_stored": Mutation((Drop("piece-stored"),), "--pes=2 --threads=3", RACE),
    "pieces_are_not_awaited": Mutation((Drop("piece-await"),), _LATE, RACE),
    "no_fence_behind_a_put": Mutation((Drop("piece-fence"),), _STAGED, RACE),
    "leaves_with_puts_under_way": Mutation((Drop("piece-quiet"),), _STAGED, RACE),
}


class TestSanitizer(SanitizerSuite):
    driver: ClassVar = Driver(_DRIVER, {"plain": Build()}, {"plain": _CASES}, _MUTATIONS, "plain")


# ---- arguments and torch ---------------------------------------------------------------------------------------------

WRONG: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "no tensor": (lambda: [1.0], TypeError, "x: expected a tensor, got list"),
    "dtype": (lambda: torch.ones(3, dtype=torch.int64, device=po.device()), TypeError, "x: expected float32, float16"),
    "layout": (lambda: torch.ones(3, 4, device=po.device()).t(), ValueError, "x: expected a contiguous tensor"),
    "device": (lambda: torch.ones(3, device="meta"), ValueError, "x: expected a tensor on"),
    "room": (lambda: torch.ones(1 << 25, device=po.device()), po.SymmetricHeapError, "no room for an output"),
    "gradient": (lambda: torch.ones(3, device=po.device()).requires_grad_(), NotImplementedError, "is forward only"),
}


def _wrong_calls() -> dict[str, tuple[str, str, float]]:
    def act(x: torch.Tensor) -> None:
        po.all_gather(x).sum().backward()

    errors = {name: error_of(lambda make=make: act(make())) for name, (make, _, _) in WRONG.items()}
    assert bool((po.all_gather(torch.ones(3, device=po.device())) == 1).all()), "the world has suffered"
    return errors


def test_wrong_arguments(backend: str) -> None:
    (errors,) = in_world(_wrong_calls, 1, backend)
    for name, (_, kind, text) in WRONG.items():
        assert errors[name][0] == kind.__name__ and text in errors[name][1], errors[name]


def _result_of_meta() -> torch.Tensor:
    return torch.ops.persistent_ops.all_gather(torch.empty(3, 4, dtype=torch.float16, device="meta"))


def test_torch_knows_the_result_without_a_launch(backend: str) -> None:
    for result in in_world(_result_of_meta, 2, backend):
        assert (result.shape, result.dtype) == ((2, 3, 4), torch.float16)


# ---- compilers and benchmark -----------------------------------------------------------------------------------------


@pytest.mark.host
def test_compiles_for_gpus_without_spills() -> None:
    try:
        find_nvcc()
    except CompileError as error:
        pytest.skip(f"needs the CUDA compiler: {error}")
    request = kernel_request(is_aligned=True)
    used = compile_cuda(request.source(), arch="sm_90").kernels[request.name]
    assert used.registers > 16 and used.spill_store_bytes == used.spill_load_bytes == 0


@pytest.mark.host
@pytest.mark.parametrize(("command", "kind", "pes"), [("bench", "time", 2), ("trace", "timeline", 1)])
def test_benchmark(command: str, kind: str, pes: int, tmp_path: Path) -> None:
    options = ["--backend", "host", "--pes", str(pes), "--rounds", "1", "--out", str(tmp_path)]
    done = CliRunner().invoke(app, [command, "all_gather", *options])
    assert done.exit_code == 0, done.output
    (record,) = tmp_path.glob("*.jsonl")
    lines = [json.loads(line) for line in record.read_text().splitlines()]
    assert "fused" in {line["method"] for line in lines if line["kind"] == kind}

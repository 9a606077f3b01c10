"""What the layer below the operators carries, shown with a small operator of the suite's own, which nobody else knows.

Its call has a member of 128 bytes and is passed by value, it has two outputs of its own kinds, a configuration, several
launches in a row under contracts of their own, a wait and a kind of bad input that only it can put into words.
"""

from __future__ import annotations

import shutil
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from host_driver.build import CUDA

import persistent_ops as po
from persistent_ops.runtime import jit
from persistent_ops.runtime.backend import KernelRequest
from persistent_ops.runtime.contract import Field
from persistent_ops.runtime.operator import Operator
from persistent_ops.runtime.world import current, upload

pytestmark = pytest.mark.host

HEADER = """
// Every PE adds a number from its call to its input, and passes its rank on to the next PE.
#pragma once

#include "comm/launch.cuh"
#include "platform/entry.cuh"

namespace po::suite_probe {

inline constexpr Phase kPhaseNeighbour = make_phase(kFirstPhase, 4);  // half the time-out
PO_CONSTANT(kPhaseNeighbour)
enum InputErrorKind : uint64_t { kOddWord = 1 };
PO_CONSTANT(kOddWord)

struct Config {
  int factor = 1;
  bool negates = false;
};

struct alignas(128) Descriptor {
  uint64_t words[16];
};
PO_DESCRIBE(Descriptor, words)

struct Plan {
  Team team;
  int64_t count;
};
PO_DESCRIBE(Plan, team, count)

struct Call {
  const float* x;
  Descriptor descriptor;
  float* sums;
  int64_t* epoch_seen;
  int32_t is_silent;
};
PO_DESCRIBE(Call, x, descriptor, sums, epoch_seen, is_silent)

struct Shared {
  Plan plan;
  uint64_t is_last;
};

template <Config kConfig>
struct Kernel {
  using Plan = suite_probe::Plan;
  using Call = suite_probe::Call;
  using Shared = suite_probe::Shared;
  static constexpr int kThreads = 64;
  static constexpr int kBlocksPerSm = 1;

  static PO_FN void run(const WorkGroup& wg, Shared& shared, const Call& call) {
    Team& team = shared.plan.team;
    begin_launch(team, wg);
    if (wg.index() == 0) grant_credit(team, wg, 0);
    if (wg.index() == 0) await_all_credits(team, wg);
    if (wg.index() == 0 && wg.rank() == 0) {
      const int next = (team.rank + 1) % team.size;
      const int previous = (team.rank + team.size - 1) % team.size;
      if (next != team.rank) {
        if (call.is_silent == 0) signal(team, next, ready_word_offset(team, team.rank, 0), launch_flag(team));
        await_epoch(team, local_word(team, ready_word_offset(team, previous, 0)), kPhaseNeighbour, previous, 5);
      }
      uint64_t added = 0;
      for (const uint64_t word : call.descriptor.words) added += word;
      if (added % 2 != 0) {
        report_input_error(team, kOddWord, 3, 4, static_cast<int64_t>(added), 2);
      }
      for (int64_t i = 0; i < shared.plan.count; ++i) {
        const float sum = call.x[i] * kConfig.factor + static_cast<float>(added);
        call.sums[i] = kConfig.negates ? -sum : sum;
      }
      *call.epoch_seen = static_cast<int64_t>(team.epoch);
    }
    leave_launch(team, wg, &shared.is_last, 0, 0);
  }
};

}  // namespace po::suite_probe
"""

PROBE = Operator(
    "suite_probe",
    ("world_size", Field.flag("negates"), "count"),
    phases={"kPhaseNeighbour": "the word of its neighbour (number {index})"},
    input_errors={"kOddWord": lambda record: ValueError(f"words: {record.value} at {record.outer}/{record.inner}")},
)


@pytest.fixture(autouse=True)
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels' sources with the operator's file beside the others."""
    shutil.copytree(CUDA, tmp_path / "cuda")
    (tmp_path / "cuda/kernels/suite_probe.cuh").write_text(HEADER)
    monkeypatch.setattr(jit, "kernel_source_root", lambda: tmp_path / "cuda")


class Launch:
    """One launch of the operator: its kernel, plan and call, with the outputs."""

    def __init__(self, x: torch.Tensor, *, factor: int, negates: bool, contract_count: int | None = None) -> None:
        world = current()
        structs = PROBE.begin_plan(world).structs
        config = (("factor", str(factor)), ("negates", str(negates).lower()))
        self._kernel = world.load(KernelRequest(PROBE.name, config, 64))
        contract = PROBE.contract(world.size, negates, x.numel() if contract_count is None else contract_count)
        self._plan = upload(world.backend, bytes(structs["Plan"](team=world.workspace.team(contract), count=x.numel())))
        self.sums, self.epoch = torch.zeros_like(x), torch.zeros(1, dtype=torch.int64)
        self.call: Any = structs["Call"](
            x=x.data_ptr(), sums=self.sums.data_ptr(), epoch_seen=self.epoch.data_ptr(), is_silent=0
        )
        self._x = x

    def __call__(self, words: range) -> None:
        for place, word in enumerate(words):
            self.call.descriptor.words[place] = word
        current().workspace.launch(self._kernel, 1, self._plan.data_ptr(), self.call)


def _run(program: Any, world: int = 2, **options: Any) -> list[Any]:
    def in_world() -> Any:
        po.init("host", heap_size=8 << 20, **options)
        result = program()
        po.finalize()
        return result

    return po.launch(in_world, world, threads=True, timeout=200)


@pytest.mark.parametrize("transport", ["auto", "staged"])
def test_several_launches_with_large_calls_and_two_outputs(transport: str) -> None:
    def program() -> list[Any]:
        x = torch.arange(5.0) + po.rank()
        first, second = Launch(x, factor=2, negates=False), Launch(x, factor=3, negates=True)
        found = []
        for words in (range(16), range(2, 34, 2)):
            first(words)
            second(words)
            found.append((first.sums - 2 * x - sum(words), second.sums + 3 * x + sum(words)))
        epochs = [int(first.epoch), int(second.epoch)]
        po.check()
        return [bool((a == 0).all() and (b == 0).all()) for a, b in found] + [epochs[1] - epochs[0]]

    assert _run(program, transport=transport) == [[True, True, 1]] * 2


def test_the_member_of_128_bytes_lies_where_the_kernel_has_it() -> None:
    call = PROBE.description.structs["Call"]
    assert (call.descriptor.offset, call.descriptor.size, call.sums.offset) == (128, 128, 256)


def test_bad_input_is_told_in_the_operators_words() -> None:
    def program() -> str:
        launch = Launch(torch.ones(3), factor=1, negates=False)
        with pytest.raises(ValueError, match="words: 7 at 3/4") as caught:
            launch(range(7, 8))
        launch(range(8, 9))  # and the world goes on
        po.check()
        return str(caught.value)

    assert _run(program) == ["words: 7 at 3/4"] * 2


def test_a_wait_is_told_in_the_operators_words_and_has_its_share_of_the_time_out() -> None:
    def program() -> list[Any]:
        launch = Launch(torch.ones(3), factor=1, negates=False)
        po.barrier()
        launch.call.is_silent = int(po.rank() == 1)
        began, told = time.monotonic(), ""
        try:
            launch(range(4))  # the silent one itself has all that it waits for
        except po.PeerTimeoutError as error:
            told = str(error)
        waited = time.monotonic() - began
        po.recover()
        launch.call.is_silent = 0
        launch(range(4))
        return [told, waited, float(launch.sums[0])]

    (first, waited, after), (_, _, after_too) = _run(program, operator_timeout=6.0)
    assert "waited 3.0" in first
    assert "for PE 1: the word of its neighbour (number 5)" in first
    assert 2.9 < waited < 60
    assert after == after_too == 1 + 6


def test_a_mismatch_names_the_operators_fields() -> None:
    def program() -> str:
        launch = Launch(torch.ones(3), factor=1, negates=po.rank() == 1)
        with pytest.raises(po.ContractMismatchError) as caught:
            launch(range(4))
        return str(caught.value)

    for told in _run(program):
        assert "negates is " in told
        assert "suite_probe(world_size=2, negates=" in told


def test_it_stands_on_the_shared_headers_alone() -> None:
    included = {line.split('"')[1] for line in HEADER.splitlines() if line.startswith("#include")}
    assert included == {"comm/launch.cuh", "platform/entry.cuh"}

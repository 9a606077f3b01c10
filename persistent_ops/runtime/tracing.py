"""Timelines of launches: what kernels write to a TraceSink."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, NamedTuple

from .backend import Backend, Kernel
from .compile.description import COMM, describe
from .contract import kind_of, team_of

__all__ = ["HEADER", "Launch", "Span", "Tasks", "Tracer"]

HEADER = "platform/trace.cuh"


class Span(NamedTuple):
    """Something that a warp did; times in nanoseconds.

    Attributes:
        kind: "wait" or "send".
        what: what it waited for, in words; "" for a signal.
        peer: for whom, or to whom; the PE itself where a WG waits for another one.
    """

    kind: str
    what: str
    peer: int
    warp: int
    begin: float
    end: float


class Tasks(NamedTuple):
    """A WG's work on its own part of the result, or on other WGs' parts: how many pieces, from when to when.

    Attributes:
        total: nanoseconds that its warps spent on it, together, without waits in between.
    """

    number: int
    begin: float
    end: float
    total: float


class Launch(NamedTuple):
    """One WG in one launch.

    Attributes:
        operator: its name.
        team: who launched: WORLD or ALONE of runtime/team.py, which count epochs of their own.
        waited: nanoseconds, of all its warps; a warp that waits for several PEs at once counts for each.
        own, others: of its tasks; None where there were none.
        lost: spans that found no room.
    """

    operator: str
    team: int
    epoch: int
    team_size: int
    wg: int
    num_wgs: int
    num_warps: int
    begin: float
    end: float
    waited: float
    own: Tasks | None
    others: Tasks | None
    spans: list[Span]
    lost: int


class Tracer:
    """Room for the timelines of this PE's launches. Kernels that are loaded while a world has it trace.

    Args:
        backend: of this PE.
        nbytes: of room.
    """

    def __init__(self, backend: Backend, nbytes: int) -> None:
        description = describe(HEADER)
        self._constants = description.constants
        self._phase_mask = (1 << describe(COMM).constants["kCodeBits"]) - 1
        self._block: type[ctypes.Structure] = description.structs["TraceBlock"]
        self._words_of_block = ctypes.sizeof(self._block) // 8
        self._num_blocks = max(nbytes // ctypes.sizeof(self._block), 1)
        self._memory = backend.private_words(_HEAD_WORDS + self._num_blocks * self._words_of_block)
        address = self._memory.data_ptr()
        self._sink = description.structs["TraceSink"](
            used=address, blocks=address + 8 * _HEAD_WORDS, num_blocks=self._num_blocks
        )

    def adopt(self, kernel: Kernel) -> None:
        """Have a kernel's launches leave their timelines here."""
        kernel.trace_into(self._sink, self._memory)

    def clear(self) -> tuple[int, int]:
        """Take launches from now on in the room of those so far; return of how many WGs these were, and how many lost.

        No launch may be in flight.
        """
        used = int(self._memory[0])
        self._memory[0] = 0
        return used, max(used - self._num_blocks, 0)

    def close(self) -> None:
        """Take no more: a CUDA graph that was captured meanwhile may still launch such kernels."""
        self._memory[0] = self._num_blocks

    def read(self) -> tuple[list[Launch], int]:
        """Return what launches have left: of all WGs in the order of their begins, and how many found no room.

        Times are by this PE's clock. No launch may be in flight.
        """
        used = int(self._memory[0])
        count = min(used, self._num_blocks)
        words = self._memory[_HEAD_WORDS : _HEAD_WORDS + count * self._words_of_block].cpu()
        blocks = (self._block * count).from_address(words.data_ptr())
        whole = [block for block in blocks if block.operator_id]
        tick = _nanoseconds_of_a_tick(whole)
        launches = sorted((self._launch(block, tick) for block in whole), key=lambda launch: launch.begin)
        return launches, used - len(whole)

    def _launch(self, block: Any, tick: float) -> Launch:
        operator = kind_of(block.operator_id)
        assert operator is not None
        number, size = team_of(block.team)

        totals = block.totals

        def time(ticks: int) -> float:
            return float(totals.begin_ns + (ticks - totals.begin) * tick)

        def tasks(which: int) -> Tasks | None:
            if not totals.tasks[which]:
                return None
            begin, end = (
                time(totals.begin + units[which] * totals.unit) for units in (totals.first_begin, totals.last_end)
            )
            return Tasks(totals.tasks[which], begin, end, totals.worked[which] * tick)

        kept = min(totals.num_spans, self._constants["kTraceSpans"])
        spans = []
        for span in block.spans[:kept]:
            is_wait = span.kind == self._constants["kTraceWait"]
            what = ""
            if is_wait:
                phase = span.phase & self._phase_mask
                what = operator.waited_for(phase, span.index) if phase else _OTHER_WG
            kind = "wait" if is_wait else "send"
            spans.append(Span(kind, what, span.peer, span.warp, time(span.begin), time(span.end)))
        return Launch(
            operator.name,
            number,
            block.epoch,
            size,
            totals.wg,
            totals.num_wgs,
            totals.num_warps,
            time(totals.begin),
            time(block.end),
            totals.waited * tick,
            tasks(0),
            tasks(1),
            spans,
            totals.num_spans - kept,
        )


_HEAD_WORDS = 16  # the count stands on a cache line of its own
_OTHER_WG = "another work-group"


def _nanoseconds_of_a_tick(blocks: Sequence[Any]) -> float:
    """Return the clock's rate from all WGs together; it ticks in nanoseconds on the host."""
    ticks = sum(block.end - block.totals.begin for block in blocks)
    return sum(block.end_ns - block.totals.begin_ns for block in blocks) / ticks if ticks else 1.0

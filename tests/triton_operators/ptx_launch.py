"""A launch of compiled code on PE 1 of 3, whose peers a test plays."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ptx import read
from ptx_work_group import Event, Memory, WorkGroup

from persistent_ops.runtime.compile.description import COMM, describe
from persistent_ops.runtime.tracing import HEADER

__all__ = ["EPOCH", "FLAG", "PEER", "RANK", "SIZE", "Launch", "flag_of"]

_COMM, _TRACE = describe(COMM), describe(HEADER)
SIZE, RANK, PEER, EPOCH, _HASH = 3, 1, 2, 5, 0x1234
TIMEOUT_NS = 100_000


def flag_of(epoch: int, low_bits: int = _HASH) -> int:
    return epoch << _COMM.constants["kEpochShift"] | low_bits


FLAG = flag_of(EPOCH)


class Launch:
    """Memory of the launch: credit of all peers has come, and their words too, unless a test says otherwise.

    Attributes:
        memory: whose `answers` a test gives.
        out, x: two arrays of zeros in this PE's heap, of 2048 bytes.
        came: a word for what a kernel tells.
        error: address of the ErrorRecord.
        events: what the work-group has done.
    """

    def __init__(self) -> None:
        self.memory = Memory()
        self._heaps = [self.memory.place(bytes(1 << 14)) for _ in range(SIZE)]
        self.out, self.x = self._heaps[RANK] + (1 << 13), self._heaps[RANK] + (3 << 12)
        self._local = self._struct(_COMM, "LocalState", epoch=EPOCH - 1)
        self._host_says = self.memory.place(bytes(8 * SIZE))
        self.error, self.came = self._struct(_COMM, "ErrorRecord"), self.memory.place(bytes(8))
        self._team = _COMM.structs["Team"](
            rank=RANK,
            size=SIZE,
            heap=self._heaps[RANK],
            peer_heaps=self.memory.place(b"".join(heap.to_bytes(8, "little") for heap in self._heaps)),
            ready_offset=1 << 11,
            abort_offset=1 << 12,
            ready_stride=8,
            local=self._local,
            host_says=self._host_says,
            error=self.error,
            input_error=self._struct(_COMM, "InputErrorRecord"),
            timeout_ns=TIMEOUT_NS,
            contract_hash=_HASH,
        )
        for pe in range(SIZE):
            self.set(self.grant(RANK, pe), FLAG)
            self.set(self.grant(RANK, pe) + 8, self.out - self._heaps[RANK])
            for index in range(8):
                self.set(self.ready(RANK, pe, index), FLAG)

    def _struct(self, description: Any, name: str, **fields: int) -> int:
        return self.memory.place(bytes(description.structs[name](**fields)))

    def set(self, address: int, value: int) -> None:
        self.memory.fill(address, value.to_bytes(8, "little", signed=True))

    # ---- words -------------------------------------------------------------------------------------------------------

    def grant(self, owner: int, receiver: int) -> int:
        """Return the address of the flag in a Grant."""
        return self._heaps[owner] + receiver * len(bytes(_COMM.structs["Grant"]()))

    def ready(self, receiver: int, sender: int, index: int) -> int:
        return self._heaps[receiver] + self._team.ready_offset + (sender * self._team.ready_stride + index) * 8

    def abort(self, owner: int, accuser: int) -> int:
        return self._heaps[owner] + self._team.abort_offset + accuser * 8

    def host_says(self, pe: int) -> int:
        return self._host_says + pe * 8

    def local(self, field: str) -> int:
        return self._local + getattr(_COMM.structs["LocalState"], field).offset

    def input_error(self) -> int:
        return int(self._team.input_error)

    def output_of(self, pe: int) -> range:
        """Return the addresses of a PE's output."""
        return self._of_peer(self.out, pe)

    def x_of(self, pe: int) -> range:
        """Return the addresses of a PE's array `x`."""
        return self._of_peer(self.x, pe)

    def _of_peer(self, address: int, pe: int) -> range:
        first = self._heaps[pe] + address - self._heaps[RANK]
        return range(first, first + 2048)

    def kind_of_error(self) -> str:
        """Return the name of the reported error's kind."""
        kinds = ("kTimeout", "kContractMismatch", "kPeerLost", "kReportedByPeer")
        return {_COMM.constants[name]: name for name in kinds}[self.memory.word(self.error + 8)]

    # ---- runs --------------------------------------------------------------------------------------------------------

    def run(self, kernel: Any, arguments: Mapping[str, int], *, is_traced: bool = False) -> list[Event]:
        """Run a compiled kernel whose first arguments are `team` and `out`; return what it has done.

        Args:
            kernel: Triton's CompiledKernel.
            arguments: others, by name, in the kernel's order.
            is_traced: it leaves a timeline.
        """
        sink = b""
        if is_traced:
            blocks = self._struct(_TRACE, "TraceBlock")
            sink = bytes(_TRACE.structs["TraceSink"](blocks=blocks, num_blocks=1, used=self.memory.place(bytes(8))))
        team = self.memory.place(bytes(self._team) + bytes(8) + sink)
        scratch = [0, 0]
        self.events = WorkGroup(
            read(kernel.asm["ptx"]),
            self.memory,
            [team, self.out, *arguments.values(), *scratch],
            threads=32 * kernel.metadata.num_warps,
            shared_bytes=kernel.metadata.shared,
        ).events
        return self.events

"""One work-group that runs PTX on the CPU: what each of its threads reads and writes, and in which order.

Threads go through the code together, so a branch that not all of them take is an error, as are accesses to shared
memory that no barrier orders. A test plays the peers: it gives each access to a word its own answer.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from ptx import Code, Instruction

__all__ = ["Event", "Memory", "WorkGroup", "answers"]

_WARP = 32
_BASE = 1 << 20  # of the addresses of global memory
_MOST_STEPS = 50_000
_STEP_NS, _JITTER_NS = 20_000, 40_000

Words = Any  # [threads], int64; what is shorter has its sign extended

_COMPARE = {name[:2]: getattr(operator, name[:2]) for name in ("eq", "ne", "lt", "le", "gt", "ge")}
_COMPUTE: dict[str, Callable[[Any, Any], Any]] = {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "and": operator.and_,
    "or": operator.or_,
    "xor": operator.xor,
    "shl": operator.lshift,
    "shr": operator.rshift,
    "min": np.minimum,
    "max": np.maximum,
    "rem": np.fmod,
    "div": lambda a, b: (a - np.fmod(a, b)) // b,
}


class Event(NamedTuple):
    """An access to global memory, a barrier or a fence.

    Attributes:
        op: the instruction's.
        threads: which threads take part.
        addresses: for each of them; nothing for barriers and fences.
        nbytes: of a thread.
    """

    op: str
    threads: tuple[int, ...]
    addresses: tuple[int, ...] = ()
    nbytes: int = 0


class Memory:
    """Global memory.

    Attributes:
        answers: by address, what the next load of a 64-bit word finds in place of what is there.
    """

    def __init__(self) -> None:
        self._bytes, self._end = np.zeros(1 << 18, np.uint8), 0
        self.answers: dict[int, Callable[[], int]] = {}

    def place(self, data: bytes) -> int:
        """Put data at a new address, a multiple of 256, and return it."""
        first = self._end
        self._end += -(-len(data) // 256) * 256
        self.fill(_BASE + first, data)
        return _BASE + first

    def fill(self, address: int, data: bytes) -> None:
        self._bytes[address - _BASE : address - _BASE + len(data)] = np.frombuffer(data, np.uint8)

    def word(self, address: int) -> int:
        return int(self._bytes[address - _BASE : address - _BASE + 8].view(np.int64)[0])

    def load(self, addresses: Words, nbytes: int) -> Any:
        """Return bytes, [threads, nbytes]."""
        found = self._bytes[(addresses - _BASE)[:, None] + np.arange(nbytes)]
        for row, address in zip(found, addresses.tolist(), strict=True):
            if nbytes == 8 and address in self.answers:
                row[:] = np.array([self.answers[address]()], np.int64).view(np.uint8)
        return found

    def store(self, addresses: Words, data: Any) -> None:
        self._bytes[(addresses - _BASE)[:, None] + np.arange(data.shape[1])] = data


def answers(first: int, then: int, *, after: int) -> Callable[[], int]:
    """Return what a word holds at each access: `first` for `after` accesses, then the other one."""
    count = iter(range(1 << 62))
    return lambda: first if next(count) < after else then


class _Shared:
    """Shared memory; accesses by two threads to one byte without a barrier between them, one a store, are an error."""

    def __init__(self, nbytes: int) -> None:
        self._bytes = np.zeros(nbytes, np.uint8)
        self.sync()

    def sync(self) -> None:
        self._writer = np.full(self._bytes.size, -1)
        self._reader = np.full(self._bytes.size, -1)  # -2: several

    def load(self, threads: Words, addresses: Words, nbytes: int) -> Any:
        at = addresses[:, None] + np.arange(nbytes)
        self._check(self._writer[at], threads, "load after another thread's store")
        before, reader = self._reader[at], threads[:, None]
        self._reader[at] = reader
        self._reader[at[((before != -1) & (before != reader)) | (self._reader[at] != reader)]] = -2
        return self._bytes[at]

    def store(self, threads: Words, addresses: Words, data: Any) -> None:
        at = addresses[:, None] + np.arange(data.shape[1])
        self._check(self._reader[at], threads, "store after another thread's load")
        self._check(self._writer[at], threads, "store after another thread's store")
        self._bytes[at] = data
        assert (self._bytes[at] == data).all(), "shared memory: threads store different values in one place"
        self._writer[at] = threads[:, None]

    @staticmethod
    def _check(others: Any, threads: Words, what: str) -> None:
        assert ((others == -1) | (others == threads[:, None])).all(), f"shared memory: {what}, without a barrier"


class WorkGroup:
    """Runs a kernel to its end.

    Args:
        code: the kernel's.
        memory: what its pointers point to.
        arguments: of the kernel.
        threads: of the work-group, which is the only one of the grid.
        shared_bytes: its shared memory.

    Attributes:
        events: what it has done.
    """

    def __init__(
        self, code: Code, memory: Memory, arguments: Sequence[int], *, threads: int, shared_bytes: int
    ) -> None:
        self.events: list[Event] = []
        self._code, self._memory, self._shared = code, memory, _Shared(max(shared_bytes, 16))
        self._arguments = dict(zip(code.parameters, arguments, strict=True))
        self._threads, self._time = np.arange(threads), 0
        self._random = np.random.default_rng(0)
        self._registers: dict[str, Any] = {}
        self._run()

    def _run(self) -> None:
        place = 0
        for _ in range(_MOST_STEPS):
            instruction = self._code.instructions[place]
            active = self._guard(instruction.guard)
            if instruction.op.startswith(("bra", "ret", "bar")):
                assert active.all() or not active.any(), f"threads part: {instruction}"
            place += 1
            if instruction.op.startswith("bra") and active.all():
                place = self._code.labels[instruction.operands[0]]
            elif instruction.op.startswith("ret") and active.all():
                return
            elif not instruction.op.startswith(("bra", "ret")):
                self._step(instruction, active)
        raise AssertionError("the kernel does not end")

    def _step(self, instruction: Instruction, active: Any) -> None:
        _, op, operands = instruction
        base, *parts = op.split(".")
        if base == "bar":
            self._shared.sync()
            self.events.append(Event(op, tuple(self._threads)))
        elif base == "fence":
            self.events.append(Event(op, tuple(self._threads[active])))
        elif base in ("ld", "st", "atom", "red"):
            self._access(base, parts, instruction, active)
        else:
            self._write(operands[0], self._computed(operands, base, parts), active, parts[-1])

    # ---- registers ---------------------------------------------------------------------------------------------------

    def _guard(self, text: str) -> Any:
        if not text:
            return np.ones_like(self._threads, bool)
        return self._registers[text[1:]] ^ True if text[0] == "!" else self._registers[text]

    def _value(self, text: str, kind: str = "b64") -> Any:
        """Return an operand: as numbers that compare, divide and shift as its type says."""
        if kind == "pred":
            return self._registers[text] if text in self._registers else np.full(self._threads.size, bool(int(text)))
        if text in self._registers:
            found = self._registers[text]
        elif text == "%globaltimer":  # another one in each thread
            self._time += _STEP_NS
            found = self._time + self._random.integers(0, _JITTER_NS, self._threads.size)
        else:
            known = {"%tid.x": self._threads, "%ctaid.x": 0, "%nctaid.x": 1, "%clock64": self._time, "global_smem": 0}
            found = known[text] if text in known else int(text, 0)
            found = np.zeros_like(self._threads) + found
        return _typed(found, kind)

    def _write(self, name: str, value: Any, active: Any, kind: str = "b64") -> None:
        if name.startswith("{"):  # the halves of a word
            bits = int(kind[1:]) // 2
            for number, part in enumerate(_names(name)):
                self._write(part, _typed(value >> number * bits, f"s{bits}"), active)
        elif name != "_":
            self._registers[name] = np.where(active, value, self._registers.get(name, np.zeros_like(value)))

    def _computed(self, operands: Sequence[str], base: str, parts: list[str]) -> Any:
        """Return the result of an instruction whose first operand takes it."""
        kind, (first, *others) = parts[-1], operands[1:]
        if base == "mov" and first.startswith("{"):
            bits = int(kind[1:]) // 2
            low, high = (self._value(each, f"u{bits}") for each in _names(first))
            return _typed(low | high << bits, f"s{kind[1:]}")
        if base == "setp":
            result = _COMPARE[parts[0]](self._value(first, kind), self._value(others[0], kind))
            return result & self._value(others[1], "pred") if parts[1] == "and" else result
        if base == "selp":
            return np.where(self._value(others[1], "pred"), self._value(first), self._value(others[0]))
        value = self._value(first, kind)
        if kind == "pred":
            return _COMPUTE[base](value, self._value(others[0], kind)) if others else value ^ (base == "not")
        if base == "shfl":
            lane = int(others[0], 0)
            result = value[{"bfly": self._threads ^ lane, "idx": self._threads // _WARP * _WARP + lane}[parts[1]]]
        elif base == "redux":
            warps = value.reshape(-1, _WARP)
            result = {"max": warps.max, "min": warps.min}[parts[1]](1).repeat(_WARP)
        elif base == "bfe":
            result = (value >> self._value(others[0])) & ((1 << self._value(others[1])) - 1)
        elif base == "mad":
            result = _typed(value * self._value(others[0], kind), "s64") + self._value(others[1])
        elif base in ("mov", "cvt", "not"):
            result = ~value if base == "not" else value
        else:
            result = _COMPUTE[base](value, self._value(others[0], kind).astype(value.dtype))
        bits = 64 if "wide" in parts else parts[0][1:] if base == "cvt" else kind[1:]
        return _typed(result, f"s{bits}")

    # ---- memory ------------------------------------------------------------------------------------------------------

    def _access(self, base: str, parts: list[str], instruction: Instruction, active: Any) -> None:
        op, operands = instruction.op, instruction.operands
        if "param" in parts:
            self._write(operands[0], np.zeros_like(self._threads) + self._arguments[operands[1].strip("[]")], active)
            return
        threads, is_global = self._threads[active], "global" in parts
        (addresses,) = (self._address(each)[active] for each in operands if each.startswith("["))
        names = [each for each in operands if not each.startswith("[")]
        registers, size = _names(names[0]), int(parts[-1][1:]) // 8
        nbytes = size * len(registers)
        if is_global:
            self.events.append(Event(op, tuple(threads), tuple(addresses.tolist()), nbytes))
        if base == "st":
            data = np.concatenate([_bytes(self._value(each)[active], size) for each in registers], axis=1)
            if is_global:
                self._memory.store(addresses, data)
            else:
                self._shared.store(threads, addresses, data)
        elif base == "ld":
            found = self._memory.load(addresses, nbytes) if is_global else self._shared.load(threads, addresses, nbytes)
            for number, register in enumerate(registers):
                self._write_some(register, found.view(f"i{size}")[:, number], active)
        else:
            operands_of = zip(addresses, self._value(names[-1])[active], strict=True)
            found = [self._replaced(parts, *each) for each in operands_of]
            if base == "atom":
                self._write_some(registers[0], found, active)

    def _replaced(self, parts: list[str], address: int, operand: int) -> int:
        """Do an atomic operation of one thread; return what was there."""
        old = int(self._memory.load(np.array([address]), 8).view(np.int64)[0, 0])
        new = {"add": old + operand, "exch": operand}[parts[-2]]
        self._memory.store(np.array([address]), _bytes(np.array([new]), 8))
        return old

    def _write_some(self, register: str, values: Any, active: Any) -> None:
        """Write what only the active threads have."""
        all_values = np.zeros_like(self._threads)
        all_values[active] = values
        self._write(register, all_values, active)

    def _address(self, text: str) -> Words:
        found = re.fullmatch(r"\[\s*([%\w]+)\s*(?:\+\s*(-?\w+))?\s*\]", text)
        assert found is not None, text
        return self._value(found.group(1)) + int(found.group(2) or "0", 0)


def _names(text: str) -> list[str]:
    """Return the registers of an operand: one, or those between braces."""
    return [each.strip() for each in text.strip("{} ").split(",")]


def _typed(value: Any, kind: str) -> Any:
    """Return numbers of a type: as int64, or uint64 for u64."""
    bits, value = int(kind[1:]), value.astype(np.int64)
    if bits == 64:
        return value.view(np.uint64) if kind == "u64" else value
    if kind[0] == "s":
        return value << (64 - bits) >> (64 - bits)
    return value & ((1 << bits) - 1)


def _bytes(values: Words, size: int) -> Any:
    return values.astype(np.int64)[:, None].view(np.uint8).reshape(len(values), 8)[:, :size]

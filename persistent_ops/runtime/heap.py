"""The symmetric heap: one block of memory per PE, addressed by offsets with the same meaning on every PE.

Two kinds of allocations share it. All PEs together make symmetric allocations (`po.empty`), which have the same offset
everywhere. Each PE alone manages the pool of the operators' outputs: with every launch's credit, a receiver sends its
senders the position of its output, so offsets need not agree. A buffer is used again only when no tensor refers to it.
"""

from __future__ import annotations

import bisect
import contextlib
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from .backend import Backend
from .bootstrap.connection import Bootstrap
from .errors import NotSymmetricError, SymmetricHeapError
from .stream_order import capture_of
from .torch_private import storage_use_count, without_dispatch_modes, without_functions

__all__ = ["OutputPool", "SymmetricHeap", "room_of", "whole_pages"]

_ALIGNMENT = 512  # of every allocation, in bytes: a GPU sector boundary and more than any vector
_PAGE_BYTES = 4096


def room_of(nbytes: int) -> int:
    """Return the bytes of the heap that an allocation takes."""
    return max(_ALIGNMENT, (nbytes + _ALIGNMENT - 1) // _ALIGNMENT * _ALIGNMENT)


def whole_pages(nbytes: int) -> int:
    """Return the size of a heap for which so many bytes are asked."""
    return -(-nbytes // _PAGE_BYTES) * _PAGE_BYTES


class _FreeList:
    """First-fit allocator over [0, size): symmetric blocks from the bottom, outputs from the top."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._free = [(0, size)]
        self._middle = 0  # in the gap between what is taken from the bottom and from the top, or at its place

    @property
    def free_bytes(self) -> int:
        return sum(length for _, length in self._free)

    def take(self, nbytes: int, *, from_top: bool) -> int | None:
        order = range(len(self._free) - 1, -1, -1) if from_top else range(len(self._free))
        for i in order:
            start, length = self._free[i]
            if length < nbytes:
                continue
            offset = start + length - nbytes if from_top else start
            rest = (
                []
                if length == nbytes
                else [(start, length - nbytes) if from_top else (start + nbytes, length - nbytes)]
            )
            self._free[i : i + 1] = rest
            if offset <= self._middle < offset + nbytes:
                self._middle = offset if from_top else offset + nbytes
            return offset
        return None

    def enough_for(self, nbytes: int) -> int:
        """Return the least size with which the gap in the middle has so many bytes, beside what is taken now."""
        gap = sum(length for start, length in self._free if start <= self._middle <= start + length)
        return whole_pages(self.size - gap + nbytes)

    def give(self, offset: int, nbytes: int) -> None:
        bisect.insort(self._free, (offset, nbytes))
        merged: list[tuple[int, int]] = []
        for start, length in self._free:
            if merged and sum(merged[-1]) == start:
                merged[-1] = (merged[-1][0], merged[-1][1] + length)
            else:
                merged.append((start, length))
        self._free = merged


class _Block(NamedTuple):
    """A tensor of `SymmetricHeap.empty`: its bytes, and its storage, which identifies it among tensors at its place."""

    nbytes: int
    storage: int


_NO_BLOCK = _Block(-1, 0)


class SymmetricHeap:
    """This PE's view of the heap and of its peers' heaps."""

    def __init__(self, backend: Backend, bootstrap: Bootstrap) -> None:
        self._backend = backend
        self._bootstrap = bootstrap
        self.free_list = _FreeList(backend.heap_bytes)
        self.reclaim: Callable[[], None] = lambda: None
        """Gives room back that is only kept for later; the output pool's, once there is one."""
        self._live: dict[int, _Block] = {}  # by offset
        self._freed: dict[int, int] = {}

    @torch.inference_mode(False)  # who writes to it need not be in the mode in which it is made
    def empty(self, size: tuple[int, ...], dtype: torch.dtype, *, further: int = 0) -> torch.Tensor:
        """Allocate a symmetric tensor; collective. `further`: room that the caller takes next, for errors."""
        nbytes = math.prod(size) * dtype.itemsize
        offset = self._take(nbytes)
        places = self._places(offset, size, dtype, further)
        if min(places) >= 0 and len(set(places)) > 1:  # by what one PE keeps for later, perhaps
            self._give(offset, nbytes)
            offset = self._take_of_all(nbytes)
            places = self._places(offset, size, dtype, further)
        if min(places) < 0 or len(set(places)) > 1:
            self._give(offset, nbytes)
            full = [str(pe) for pe, place in enumerate(places) if place < 0]
            if full:
                raise SymmetricHeapError(
                    f"the symmetric heap of PE {', '.join(full)} has no room for {nbytes} bytes "
                    f"(heap_size {self.free_list.size} bytes, {self.free_list.free_bytes} free on this PE): free "
                    f"tensors that are no longer needed, or pass heap_size >= {-min(places)} to po.init(), enough for "
                    "this and all that is held now"
                )
            raise SymmetricHeapError(
                f"the PEs' heaps are too full for {nbytes} bytes at one offset: drop results that are no longer "
                "needed, or pass a larger heap_size to po.init()"
            )
        assert offset is not None
        memory = self._backend.tensor_at(self._backend.heap_base + offset, nbytes)
        view = memory.view(dtype).view(size)
        if not nbytes:
            return view  # takes no room
        self._freed = {o: n for o, n in self._freed.items() if o + n <= offset or offset + nbytes <= o}
        self._live[offset] = _Block(nbytes, memory.untyped_storage()._cdata)
        return view

    def _places(self, offset: int | None, size: tuple[int, ...], dtype: torch.dtype, further: int) -> list[int]:
        """Return where each PE has found room; raise where PEs have asked for different tensors.

        Of a PE that has found none: the size that its heap would need, times -1.
        """
        if offset is None:
            offset = -self.free_list.enough_for(room_of(math.prod(size) * dtype.itemsize) + further)
        mine = f"{offset} {size} {dtype}"
        everyone = [raw.decode().split(" ", 1) for raw in self._bootstrap.exchange("empty", mine.encode())]
        if len({shape for _, shape in everyone}) > 1:
            self._give(None if offset < 0 else offset, math.prod(size) * dtype.itemsize)
            shapes = "; ".join(f"PE {pe}: {shape}" for pe, (_, shape) in enumerate(everyone))
            raise SymmetricHeapError(
                f"po.empty() needs the same call on every PE, in the same order, but the PEs asked for {shapes}"
            )
        return [int(place) for place, _ in everyone]

    def _take(self, nbytes: int) -> int | None:
        if not nbytes:
            return 0
        offset = self.free_list.take(room_of(nbytes), from_top=False)
        return self._take_of_all(nbytes) if offset is None else offset

    def _take_of_all(self, nbytes: int) -> int | None:
        """The same, of what is only kept for later, too."""
        self._backend.synchronize()  # peers may write at once to what kernels in flight still read
        self.reclaim()
        return self.free_list.take(room_of(nbytes), from_top=False)

    def _give(self, offset: int | None, nbytes: int) -> None:
        if offset is not None and nbytes:
            self.free_list.give(offset, room_of(nbytes))

    def free(self, tensor: torch.Tensor, meet: Callable[[], None]) -> None:
        """Give a tensor from `empty` back; collective. `meet`: called where nothing is wrong with this PE's tensor."""
        offset = self.offset_of(tensor, "tensor")
        storage, block = tensor.untyped_storage(), self._live.get(offset, _NO_BLOCK)
        is_whole = block.nbytes == tensor.nbytes if tensor.numel() else not storage.nbytes()
        if not is_whole:
            raise NotSymmetricError("tensor: expected a whole tensor as po.empty() returned it, got a part of one")
        if tensor.numel() and block.storage != storage._cdata:
            raise NotSymmetricError(
                "tensor: expected a tensor as po.empty() returned it, got one whose memory was given back with "
                "po.free() and belongs to another tensor now, or one that was made over that memory"
            )
        meet()
        offsets = self._bootstrap.exchange("free", str(offset).encode())
        if len(set(offsets)) > 1:
            raise SymmetricHeapError("po.free() needs the same tensor on every PE, but the PEs passed different ones")
        if not tensor.numel():
            return
        del self._live[offset]
        self._freed[offset] = block.nbytes
        self._give(offset, block.nbytes)

    @torch.inference_mode(False)
    def peer_view(self, tensor: torch.Tensor, peer: int) -> torch.Tensor:
        """Return a peer's copy of a symmetric tensor."""
        offset = self.offset_of(tensor, "tensor")
        if not 0 <= peer < len(self._backend.peer_heaps):
            raise ValueError(f"rank: expected 0 to {len(self._backend.peer_heaps) - 1}, got {peer}")
        if not tensor.numel():
            return torch.empty_like(tensor)
        base = self._backend.peer_heaps[peer]
        if base == 0:
            raise NotSymmetricError(f"PE {peer} is not load/store reachable from this PE, so it has no view here")
        if not tensor.is_contiguous():
            raise ValueError(f"tensor: expected a contiguous tensor, got strides {tensor.stride()}")
        view = self._backend.tensor_at(base + offset, tensor.numel() * tensor.element_size())
        return view.view(tensor.dtype).view(tensor.shape)

    def offset_of(self, tensor: torch.Tensor, name: str) -> int:
        """Return a symmetric tensor's offset; NotSymmetricError names the argument where it is none of this PE's."""
        address, base, size = tensor.data_ptr(), self._backend.heap_base, self._backend.heap_bytes
        if address - base in self._live:  # as of most
            return address - base
        if not tensor.numel() and tensor.device == self._backend.device:
            return 0  # nothing to read or write
        if base <= address < base + size:
            offset = address - base
            for start, (nbytes, _) in self._live.items():
                if start <= offset < start + max(nbytes, 1):
                    return offset
            for start, nbytes in self._freed.items():
                if start <= offset < start + max(nbytes, 1):
                    raise NotSymmetricError(f"{name}: this tensor was given back with po.free(); allocate a new one")
            raise NotSymmetricError(f"{name}: expected a tensor from po.empty(), got an output of an operator")
        for peer, peer_base in enumerate(self._backend.peer_heaps):
            if peer_base and peer_base <= address < peer_base + size:
                raise NotSymmetricError(
                    f"{name}: expected a tensor of this PE, got PE {peer}'s copy (from po.peer_view); pass the tensor "
                    "that the view was made from"
                )
        raise NotSymmetricError(
            f"{name}: expected a tensor in the symmetric heap, got an ordinary one on {tensor.device}; make it with "
            "po.empty() or po.to_symmetric()"
        )


@dataclass(eq=False)
class _Slot:
    """A buffer of the pool.

    Attributes:
        storage: of `base`; torch gives every caller this one object.
        storage_id, idle_uses: of an idle buffer, how many tensors share the storage.
        idle_holders: of an idle buffer, how many references there are to the object; such a holder is no use.
        stream: the handle of the one that writes it.
        rest: a part of it with a storage of its own; see `behind`.
        typed: all of it, by dtype.
        shaped: the last dtype and shape that were asked for, and all of it as such.
        readers: other streams that have waited for what was written, and may still read it.
    """

    offset: int
    nbytes: int
    base: torch.Tensor
    storage: torch.UntypedStorage
    storage_id: int
    idle_uses: int
    stream: int
    is_captured: bool = False
    idle_holders: int = 0
    rest: _Slot | None = None
    typed: dict[torch.dtype, torch.Tensor] = field(default_factory=dict)
    shaped: tuple[torch.dtype, tuple[int, ...], torch.Tensor] | None = None
    readers: set[torch.cuda.Stream] = field(default_factory=set)

    @classmethod
    def of(cls, base: torch.Tensor, offset: int, stream: int, *, is_captured: bool = False) -> _Slot:
        """Return the one over a tensor, which begins at an offset of the heap."""
        storage = base.untyped_storage()
        uses = storage_use_count(storage._cdata)
        slot = cls(offset, base.numel(), base, storage, storage._cdata, uses, stream, is_captured)
        del storage
        slot.idle_holders = sys.getrefcount(slot.storage)
        return slot

    def tensor(self, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
        """Return a new tensor over the buffer; the buffer is idle again when it and all its views are gone.

        For another dtype or shape than the last ones the buffer must be idle.
        """
        if torch.is_inference_mode_enabled():
            with torch.inference_mode(False):
                return self.tensor(dtype, shape)
        if self.shaped is None or self.shaped[0] != dtype or self.shaped[1] != shape:
            with _outside_of_modes():
                self.shaped = dtype, shape, self.as_dtype(dtype).view(shape)
            self.idle_uses = storage_use_count(self.storage_id)
        return self.shaped[2].detach()  # whose history is its own, and not of all that are made here

    def as_dtype(self, dtype: torch.dtype) -> torch.Tensor:
        """Return a tensor over the whole buffer, whose views are uses of it; it is no use itself.

        For a new dtype the buffer must be idle.
        """
        typed = self.typed.get(dtype)
        if typed is None:
            with _outside_of_modes():
                typed = self.typed[dtype] = self.base.view(dtype)
            self.idle_uses = storage_use_count(self.storage_id)
        return typed

    def behind(self, begin: int, backend: Backend, dtype: torch.dtype) -> torch.Tensor:
        """Return a tensor over the buffer from a byte on, with a storage of its own, as torch.save wants for a dtype.

        As with `as_dtype` its views are uses of the buffer, and it is none; the buffer must be idle.
        """
        offset = self.offset + begin
        if self.rest is None or self.rest.offset != offset:
            with _outside_of_modes():
                base = backend.tensor_at(backend.heap_base + offset, self.nbytes - begin)
                self.rest = _Slot.of(base, offset, self.stream)
        return self.rest.as_dtype(dtype)

    def is_idle(self) -> bool:
        if self.is_captured or storage_use_count(self.storage_id) != self.idle_uses:
            return False
        if sys.getrefcount(self.storage) != self.idle_holders:
            return False
        return self.rest is None or self.rest.is_idle()

    def is_in(self, backend: Backend) -> bool:
        """Return whether torch has left its storage in the heap; share_memory_() and queues of processes do not."""
        is_here = self.base.data_ptr() == backend.heap_base + self.offset
        return is_here and (self.rest is None or self.rest.is_in(backend))

    def can_await_readers(self, *, is_captured: bool) -> bool:
        """Return whether the current stream can wait for them: it and they are outside of CUDA graphs' captures."""
        return not (is_captured or any(capture_of(each.cuda_stream) for each in self.readers))


@contextlib.contextmanager
def _outside_of_modes() -> Iterator[None]:
    """Make tensors that are kept as a plain call makes them: no mode or subclass has a part in them.

    What is made in inference mode never takes part in a backward pass, and a buffer is handed out again after it.
    """
    with torch.inference_mode(False), without_functions(), without_dispatch_modes():
        yield


class OutputPool:
    """Buffers for results in this PE's heap. A buffer is idle if no tensor shares it and its storage has no holder."""

    def __init__(self, backend: Backend, heap: SymmetricHeap, bootstrap: Bootstrap) -> None:
        self._backend = backend
        self._bootstrap = bootstrap
        self._free_list = heap.free_list
        self._slots: dict[int, list[_Slot]] = {}
        heap.reclaim = self._evict_idle

    def take(self, nbytes: int, stream: int, *, is_captured: bool, further: int = 0) -> _Slot:
        """Return an idle buffer of exactly `nbytes` bytes, or make one.

        Args:
            nbytes: size.
            stream: that will write it, the current one. A buffer stays with the stream that it was made for, as in
                torch's allocator: what was queued there before may still read it. It waits for the other readers.
            is_captured: a CUDA graph will write this buffer at every replay, so it is never handed out again.
            further: room that the caller takes next, for errors.
        """
        for slot in self._slots.get(nbytes, ()):
            if slot.stream != stream or not slot.is_idle():
                continue
            if not slot.readers or slot.can_await_readers(is_captured=is_captured):
                if not slot.is_in(self._backend):
                    self._drop(slot)
                    return self.take(nbytes, stream, is_captured=is_captured, further=further)
                while slot.readers:
                    torch.cuda.current_stream(self._backend.device).wait_stream(slot.readers.pop())
                slot.is_captured = is_captured
                return slot
        offset = self._free_list.take(room_of(nbytes), from_top=True)
        if offset is None and not is_captured:
            self._backend.synchronize()  # kernels in flight may still read what is given up
            self._evict_idle()
            offset = self._free_list.take(room_of(nbytes), from_top=True)
        if offset is None:
            held = sum(slot.nbytes for slots in self._slots.values() for slot in slots)
            raise SymmetricHeapError(
                f"the symmetric heap has no room for {nbytes} bytes more (heap_size {self._free_list.size} "
                f"bytes, {self._free_list.free_bytes} free, {held} in results that are still held): drop results that "
                f"are no longer needed, or pass heap_size >= {self._free_list.enough_for(room_of(nbytes) + further)} "
                "to po.init(), enough for this and all that is held now"
            )
        with _outside_of_modes():
            base = self._backend.tensor_at(self._backend.heap_base + offset, nbytes)
            slot = _Slot.of(base, offset, stream, is_captured=is_captured)
        self._slots.setdefault(nbytes, []).append(slot)
        return slot

    def take_on_all_pes(self, sizes: Sequence[int], name: str) -> list[tuple[torch.Tensor, int]]:
        """Take buffers of zeros on every PE, or on none; collective, not in a CUDA-graph capture.

        Args:
            sizes: in bytes, of what this PE takes.
            name: of what it is for, in errors.

        Returns:
            Of each the bytes, and their offset.

        Raises:
            SymmetricHeapError: some PE has no room for all of its own.
        """
        slots: list[_Slot] = []
        taken, problem, enough = [], "", 0
        rooms = [room_of(nbytes) for nbytes in sizes]
        try:
            for nbytes in sizes:
                further = sum(rooms[len(slots) + 1 :])
                slots.append(self.take(nbytes, self._backend.stream(), is_captured=False, further=further))
                taken.append((slots[-1].tensor(torch.uint8, (nbytes,)), slots[-1].offset))
                taken[-1][0].zero_()
        except SymmetricHeapError as error:
            problem, enough = str(error), self._free_list.enough_for(sum(rooms[len(slots) :]))
        self._backend.synchronize()  # no peer writes to them before they are zero
        told = self._bootstrap.exchange("room-on-all-pes", f"{enough} {problem}".encode())
        refusals = [raw.decode().split(" ", 1) for raw in told]
        refused = max(range(len(told)), key=lambda pe: int(refusals[pe][0]))  # the one that needs the largest heap
        if refusals[refused][1]:
            taken.clear()
            for slot in slots:
                self._drop(slot)
            raise SymmetricHeapError(f"{name} on PE {refused}: {refusals[refused][1]}")
        return taken

    def _evict_idle(self) -> None:
        for slot in [slot for slots in self._slots.values() for slot in slots if slot.is_idle()]:
            self._drop(slot)

    def _drop(self, slot: _Slot) -> None:
        """Free a buffer that no kernel reads or writes any more."""
        self._slots[slot.nbytes].remove(slot)
        self._free_list.give(slot.offset, room_of(slot.nbytes))

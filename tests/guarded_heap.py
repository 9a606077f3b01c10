"""The operators' tests with kernels under AddressSanitizer. Only allocated parts of a heap may be accessed.

`make test-memory` runs this file: pytest, with the sanitizer's runtime in the process. It checks the accesses of
kernels and of torch's copies and fills. An access outside of a tensor, of a WG's own memory, or of a heap allocation
is reported and ends the process. Each PE maps the heap of every PE. The free parts of a heap are closed in all mappings
of this process. A PE that is a process leaves its peers' heaps open, since it does not know their allocations.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import threading
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
from jit_workshop import CXX_FLAGS
from worlds import python_path

from persistent_ops.runtime import heap, host
from persistent_ops.runtime.compile.toolchain import find_cxx

__all__ = ["environment", "guard"]


def environment() -> dict[str, str]:
    """Return the variables that load the sanitizer into a process and compile kernels with its checks."""
    compiler = find_cxx()
    libraries = []
    for name in ("libasan.so", "libstdc++.so"):  # which must be loaded before the sanitizer looks for C++'s exceptions
        command = [*compiler.command, f"-print-file-name={name}"]
        path = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
        assert os.path.isabs(path), f"{compiler.path} has no {name}"
        libraries.append(path)
    return {
        **os.environ,
        "ASAN_OPTIONS": "detect_leaks=0:verify_asan_link_order=0:quarantine_size_mb=32",  # what Python keeps is no leak
        "LD_PRELOAD": " ".join(libraries),
        "PERSISTENT_OPS_CXX": f"{compiler.path} {CXX_FLAGS} -fsanitize=address -fno-omit-frame-pointer",
        "PYTHONMALLOC": "malloc",
        "PYTHONPATH": python_path(),
    }


class _Heap:
    """One PE's heap: its mappings in this process, and its allocations, as bytes by offset."""

    def __init__(self) -> None:
        self.mappings: dict[int, int] = {}  # bytes by address
        self.held: dict[int, int] = {}


class _Guard:
    """Close and open parts of heaps as they are mapped, allocated and freed."""

    def __init__(self) -> None:
        process = ctypes.CDLL(None)
        self._close, self._open = (process[f"__asan_{what}_memory_region"] for what in ("poison", "unpoison"))
        for function in (self._close, self._open):
            function.argtypes, function.restype = [ctypes.c_void_p, ctypes.c_size_t], None
        self._lock = threading.RLock()
        self._heaps: dict[int, _Heap] = {}  # by inode

    def made(self, descriptor: int) -> None:
        """Register the heap of a PE of this process."""
        with self._lock:
            self._heaps[os.fstat(descriptor).st_ino] = _Heap()

    def mapped(self, segment: Any, descriptor: int, nbytes: int) -> None:
        number, address = os.fstat(descriptor).st_ino, segment.address
        with self._lock:
            if (found := self._heaps.get(number)) is None:
                return  # a heap of another process
            found.mappings[address] = nbytes
            self._close(address, nbytes)
            for offset, length in found.held.items():
                self._open(address + offset, length)
        weakref.finalize(segment.map, self._unmapped, number, address)

    def _unmapped(self, number: int, address: int) -> None:
        with self._lock:
            found = self._heaps[number]
            self._open(address, found.mappings.pop(address))
            if not found.mappings:
                del self._heaps[number]

    def heap_at(self, address: int) -> tuple[_Heap, int] | None:
        """Return the heap that contains this part, and the distance from its begin."""
        with self._lock:
            for each in list(self._heaps.values()):  # a garbage collection meanwhile may unmap one
                for begin in list(each.mappings):
                    if begin <= address < begin + each.mappings.get(begin, 0):
                        return each, address - begin
        return None

    def handed_out(self, address: int, nbytes: int) -> None:
        with self._lock:
            if nbytes and (place := self.heap_at(address)):
                of, offset = place
                of.held[offset] = max(nbytes, of.held.get(offset, 0))
                for begin in list(of.mappings):
                    self._open(begin + offset, nbytes)

    def given_back(self, of: _Heap, offset: int, nbytes: int) -> None:
        with self._lock:
            of.held = {at: length for at, length in of.held.items() if not offset <= at < offset + nbytes}
            for begin in list(of.mappings):
                self._close(begin + offset, nbytes)


def guard() -> None:
    """Guard the heaps of the worlds that this process opens from now on. The sanitizer's runtime must be loaded."""
    guards = _Guard()

    def memfd_create(name: str, flags: int) -> int:
        descriptor = os.memfd_create(name, flags)
        guards.made(descriptor)
        return descriptor

    class Segment(host._Segment):
        def __init__(self, fd: int, nbytes: int) -> None:
            super().__init__(fd, nbytes)
            guards.mapped(self, fd, nbytes)

    tensor_at, init, give = host.HostBackend.tensor_at, heap.SymmetricHeap.__init__, heap._FreeList.give

    def guarded_tensor_at(self: Any, address: int, nbytes: int) -> Any:
        guards.handed_out(address, nbytes)
        return tensor_at(self, address, nbytes)

    def guarded_init(self: Any, backend: Any, bootstrap: Any) -> None:
        init(self, backend, bootstrap)
        self.free_list.guarded = guards.heap_at(backend.heap_base)

    def guarded_give(self: Any, offset: int, nbytes: int) -> None:
        if guarded := getattr(self, "guarded", None):
            guards.given_back(guarded[0], offset, nbytes)
        give(self, offset, nbytes)

    patched: Any = host
    patched.os = SimpleNamespace(**{**vars(os), "memfd_create": memfd_create})
    patched._Segment = Segment
    patched.HostBackend.tensor_at = guarded_tensor_at
    of_heap: Any = heap
    of_heap.SymmetricHeap.__init__ = guarded_init
    of_heap._FreeList.give = guarded_give


def pytest_configure() -> None:
    guard()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip tests that run no operators, and tests that need untouched zero pages."""
    large = "test_embedding_backward_large"
    others = [item for item in items if "backend" not in getattr(item, "fixturenames", ()) or item.path.stem == large]
    config.hook.pytest_deselected(items=others)
    items[:] = [item for item in items if item not in others]


if __name__ == "__main__":
    # The sanitizer reports a crash better than pytest's plugin.
    pytest_call = ["-m", "pytest", "-p", "guarded_heap", "-p", "no:faulthandler", "-m", "not gpu", *sys.argv[1:]]
    os.execve(sys.executable, [sys.executable, *pytest_call], environment())

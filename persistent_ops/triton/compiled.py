"""Kernels on GPUs: Triton compiles them, and this package loads and launches them."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from ..runtime.backend import LaunchShape
from ..runtime.compile.description import describe
from ..runtime.tensor_map import TENSOR_MAP

__all__ = ["Compiled", "CompiledKernel", "compiled_kernel", "problem_of"]

_WARP = 32
_C_TYPES: dict[str, Any] = {
    "i1": ctypes.c_int8,
    **{f"i{bits}": getattr(ctypes, f"c_int{bits}") for bits in (8, 16, 32, 64)},
    **{f"u{bits}": getattr(ctypes, f"c_uint{bits}") for bits in (8, 16, 32, 64)},
    "fp32": ctypes.c_float,
    "fp64": ctypes.c_double,
}
_SWIZZLES = {0: 0, 1: 32, 2: 64, 3: 128}  # bytes, by Triton's number


class Parameter(NamedTuple):
    """What the code takes of an argument.

    Attributes:
        kinds: C types.
        fill: makes their values of the argument and a backend.
    """

    kinds: tuple[Any, ...]
    fill: Callable[[Any, Any], tuple[Any, ...]]


def parameter_of(kind: str, descriptor: Mapping[str, Any] | None) -> Parameter:
    """Return the parameters for an argument of a type of Triton's.

    Args:
        kind: the type.
        descriptor: what Triton says of a tensor descriptor.
    """
    if kind == "constexpr":
        return Parameter((), lambda value, backend: ())
    if kind.startswith("*"):
        return Parameter((ctypes.c_uint64,), lambda value, backend: (value.data_ptr(),))
    if kind.startswith("tensordesc"):
        if descriptor is None:
            raise NotImplementedError("tensor descriptors need a GPU with TMA (sm_90)")
        box, swizzle = tuple(descriptor["block_size"]), _SWIZZLES[descriptor["swizzle"]]

        def fill(value: Any, backend: Any) -> tuple[Any, ...]:
            matrix = value.base.as_strided(value.shape, value.strides)
            return (backend.tensor_map(matrix, box, swizzle), *value.shape, *value.strides)

        return Parameter(
            (describe(TENSOR_MAP).structs["TensorMap"], *[ctypes.c_int32] * 2, *[ctypes.c_int64] * 2), fill
        )
    if kind not in _C_TYPES:
        raise NotImplementedError(f"arguments of Triton's type {kind} are not supported")
    return Parameter((_C_TYPES[kind],), lambda value, backend: (value,))


class Compiled:
    """What Triton has made of a kernel for one set of dtypes, alignments and meta.

    Attributes:
        ptx: its code.

    Args:
        kernel: Triton's CompiledKernel.

    Raises:
        NotImplementedError: see `problem_of`, or Triton passes parameters in an unknown way.
    """

    def __init__(self, kernel: Any) -> None:
        if problem := problem_of(kernel.asm, kernel.metadata):
            raise NotImplementedError(f"{kernel.metadata.name}: {problem}")
        self.ptx: str = kernel.asm["ptx"]
        self._kernel, metadata = kernel, kernel.metadata
        self._name = metadata.name
        self._shape = LaunchShape(_WARP * metadata.num_warps, arena_bytes=metadata.shared)
        descriptors = iter(metadata.tensordesc_meta or ())
        self.parameters = [
            parameter_of(kind, next(descriptors, None) if kind.startswith("tensordesc") else None)
            for kind in kernel.src.signature.values()
        ]
        kinds = [kind for parameter in self.parameters for kind in parameter.kinds]
        kinds += [ctypes.c_uint64] * 2  # two scratch memories, which are empty
        expected, sizes = [ctypes.sizeof(kind) for kind in kinds], parameter_bytes(self.ptx, self._name)
        if expected != sizes:
            raise NotImplementedError(f"{self._name}: this Triton passes parameters of {sizes} bytes, not {expected}")
        fields = [(f"p{number}", kind) for number, kind in enumerate(kinds)]
        self.call: type[ctypes.Structure] = type("Call", (ctypes.Structure,), {"_fields_": fields})

    def loaded(self, backend: Any) -> CompiledKernel:
        """Load the code on a GPU."""
        return CompiledKernel(
            self, backend, backend.load_cubin(self._kernel.asm["cubin"], self._name, self._shape, self.call)
        )


class CompiledKernel:
    """See `Kernel` of runtime/backend.py."""

    def __init__(self, compiled: Compiled, backend: Any, kernel: Any) -> None:
        self._compiled, self._backend, self._kernel = compiled, backend, kernel
        self._sink: ctypes.Structure | None = None
        self.admitted_grid = 0
        self.footprint, self.launch = kernel.footprint, kernel.launch
        self.resident_work_groups = kernel.resident_work_groups

    def trace_into(self, sink: ctypes.Structure, memory: object) -> None:
        self._sink, self._memory = sink, memory

    def sink_bytes(self) -> bytes:
        """Return what follows the Team in a plan."""
        return b"" if self._sink is None else bytes(self._sink)

    def call(self, team: torch.Tensor, out: torch.Tensor, values: Sequence[Any]) -> ctypes.Structure:
        """Return what a launch takes."""
        words: list[Any] = []
        for parameter, value in zip(self._compiled.parameters, (team, out, *values), strict=False):
            words += parameter.fill(value, self._backend)
        return self._compiled.call(*words)


def compiled_kernel(
    kernel: Any, team: torch.Tensor, out: torch.Tensor, values: Sequence[Any], meta: Mapping[str, Any]
) -> Compiled:
    """Have Triton compile a kernel for its arguments on this PE's GPU; nothing is launched."""
    return Compiled(kernel.warmup(team, out, *values, grid=(1,), **meta))


def problem_of(asm: Mapping[str, Any], metadata: Any) -> str:
    """Return why the order of a kernel's stores and signals is not known, or an empty text."""
    if metadata.num_ctas > 1:
        return "num_ctas above 1 is not supported: a signal would cover the stores of one CTA of the cluster"
    if "ttg.warp_specialize" in asm["ttgir"]:
        return "warp_specialize is not supported: a signal would cover the stores of one partition"
    if "tt.call" in asm["ttgir"]:
        return "noinline functions are not supported: Triton gives them shared memory that their caller uses"
    if metadata.global_scratch_size or metadata.profile_scratch_size:
        return "scratch memory (of device-side tensor descriptors) is not supported: pass host-side descriptors"
    if "cp.async.bulk.wait_group.read" in asm["ptx"]:
        return (
            "it stores by a tensor descriptor, which a signal does not cover without a full wait "
            "(cp.async.bulk.wait_group 0): use tl.store or put_block"
        )
    return ""


def parameter_bytes(ptx: str, name: str) -> list[int]:
    """Return the sizes of a kernel's parameters, as its code has them."""
    head = re.search(rf"\.entry {re.escape(name)}\((.*?)\)", ptx, re.DOTALL)
    assert head is not None
    sizes = []
    for line in head.group(1).split(","):
        kind = re.search(r"\.param (?:\.align \d+ )?\.[a-z](\d+)", line)
        assert kind is not None, line
        array = re.search(r"\[(\d+)\]", line)
        sizes.append(int(kind.group(1)) // 8 * (int(array.group(1)) if array else 1))
    return sizes

"""Triton kernels as operators of this package: launched through the world's workspace, under a contract."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import inspect
import math
import string
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from triton.tools.tensor_descriptor import TensorDescriptor

from ..runtime import world as _world
from ..runtime.arguments import as_whole_number, as_whole_numbers
from ..runtime.backend import check_resident
from ..runtime.contract import Field
from ..runtime.dtypes import SCALARS
from ..runtime.operator import Operator
from ..runtime.plain_call import require_plain
from ..runtime.plans import Plan
from ..runtime.team import Team
from ..runtime.uncompiled import uncompiled
from ..runtime.world import World, upload
from .compiled import Compiled, compiled_kernel
from .device import NO_SUCH_WORD
from .interpreted import InterpretedKernel, is_interpreted, refuse_threads

__all__ = ["TritonOperator", "operator", "tune"]

_MOST_FIELDS = 8
_RESERVED = ("out_shape", "out_dtype", "out", "meta", "sm_margin", "work_groups")


def operator(
    *, contract: Sequence[str] = (), phases: Mapping[int, str] | None = None
) -> Callable[[Any], TritonOperator]:
    """Make an operator of a Triton kernel: the decorator over `triton.jit`.

    The kernel's first two arguments are `team` and `out`; the operator passes both. `out` is a pointer to this PE's
    output, in the symmetric heap. The kernel calls `begin` first and `leave` last (docs/triton.md).

    Args:
        contract: at most 8 of the kernel's arguments, all of them whole numbers: those that all PEs pass alike. A PE
            that passes another number gets `ContractMismatchError`, with both numbers, instead of a wrong result.
            Besides, the shape of the output, the dtypes, the work-groups and the kernel's source always are a part of
            the contract.
        phases: by a number from 16 to 65535, what a `wait` with it is for, as "PE 0 waited for PE 1: ..." continues;
            "{index}" is the index of the wait.

    Raises:
        TypeError: it is not over `triton.jit`, or the kernel has other arguments than these.
        ValueError: a name in `contract`, or a number or text in `phases`, is none of these.
    """
    return lambda kernel: TritonOperator(kernel, tuple(contract), phases or {})


class _Key(NamedTuple):
    """What distinguishes plans.

    Attributes:
        operator: the kernel's.
        team: the PEs that launch.
        specs: of each argument, what it is compiled for.
        numbers: of the contract.
        out_shape, out_dtype: of the output.
        meta: constexpr arguments and options, sorted by name.
        sm_margin, work_groups: see `TritonOperator`.
    """

    operator: TritonOperator
    team: Team
    specs: tuple[Any, ...]
    numbers: tuple[int, ...]
    out_shape: tuple[int, ...]
    out_dtype: torch.dtype
    meta: tuple[tuple[str, Any], ...]
    sm_margin: int
    work_groups: int | None


class TritonOperator:
    """A Triton kernel that communicates; `operator` makes it, and it is called as a function.

        result = op(*arguments, **arguments, out_shape=..., meta=...)

    Args:
        arguments: the kernel's arguments after `team` and `out` that are no constexpr, by position or name: plain
            tensors of this PE's device, whole numbers, floats, and host-side tensor descriptors of two dimensions.
        out_shape: shape of the output, the same on all PEs.
        out_dtype: of the output; the first tensor's dtype by default.
        out: in place of both: a contiguous tensor of `po.empty` that is written.
        meta: constexpr arguments and Triton's options (num_warps, num_stages, maxnreg); what `tune` has chosen by
            default.
        sm_margin: SMs that the launch leaves free.
        work_groups: of the grid; as many as the GPU holds at once by default, 1 in the interpreter.

    Returns:
        The output, in the symmetric heap; its memory is used again after the tensor was dropped.

    Raises:
        ValueError, TypeError: an argument; more work-groups than the GPU holds at once.
        NotImplementedError: a gradient is asked for; PEs that do not reach each other's memory; code whose order is not
            known: `num_ctas` above 1, `warp_specialize`, `noinline`, bulk stores without a full wait; no interpreter on
            the host.
        RuntimeError: a CUDA-graph capture meets arguments that were not called before.
        SymmetricHeapError: no room for the output.
        IndexError: `signal` or `wait` with an index that is too large, or for a PE that there is not; from the next
            call, or `po.check()`.
        PeerTimeoutError, PeerLostError, ContractMismatchError: as of every operator; the output is NaN.

    Collective, on the current stream. The first call with arguments of new dtypes, alignments or contract compiles;
    after it, calls may be captured in a CUDA graph. No gradients. torch.compile breaks the graph here.

    Attributes:
        meta: by default, or None.
        compiled: all variants so far; `explain` shows them.
    """

    def __init__(self, kernel: Any, contract: tuple[str, ...], phases: Mapping[int, str]) -> None:
        function = getattr(kernel, "fn", None)
        if not callable(function):
            raise TypeError("operator: expected a kernel of triton.jit; put @operator(...) over @triton.jit")
        functools.update_wrapper(self, function)
        parameters = list(inspect.signature(function).parameters.values())
        if [each.name for each in parameters[:2]] != ["team", "out"]:
            raise TypeError(f"{function.__name__}: expected (team, out, ...), got {[p.name for p in parameters]}")
        self._names = [p.name for p in parameters[2:] if "constexpr" not in str(p.annotation)]
        self._constants = {p.name for p in parameters[2:]}.difference(self._names)
        if clash := {p.name for p in parameters[2:]}.intersection(_RESERVED):
            raise TypeError(f"{function.__name__}: {sorted(clash)} are arguments of the operator; rename the kernel's")
        if unknown := [name for name in contract if name not in self._names]:
            raise ValueError(f"contract: expected arguments of the kernel, of {self._names}, got {unknown}")
        if len(contract) > _MOST_FIELDS:
            raise ValueError(f"contract: expected at most {_MOST_FIELDS} names, got {len(contract)}")
        if wrong := [phase for phase in phases if not (isinstance(phase, int) and 16 <= phase < 1 << 16)]:
            raise ValueError(f"phases: expected numbers from 16 to 65535, got {wrong}")
        for text in phases.values():
            if {field for _, field, _, _ in string.Formatter().parse(text)} - {None, "index"}:
                raise ValueError(f"phases: expected no field but {{index}}, got {text!r}")
        self.kernel, self._contract = kernel, contract
        self.meta: dict[str, Any] | None = None
        self.compiled: list[tuple[dict[str, Any], Compiled]] = []
        self._launches = Operator(
            f"triton.{function.__name__}",
            (
                *contract,
                Field.numbers("out_shape"),
                Field("source", show="{:014x}".format, argument="the hash of source, meta and dtypes"),
                Field.internal("work_groups"),
            ),
            phases=dict(phases.items()),
            input_errors={NO_SUCH_WORD.value: _no_such_word},
            has_kernel=False,
        )

    @uncompiled
    def __call__(self, *arguments: Any, **options: Any) -> torch.Tensor:
        return self._call(_world.for_call(), None, arguments, options)

    def __reduce__(self) -> str:
        return str(self.__qualname__)  # type: ignore[attr-defined]  # pickled by name, as a function is

    def __repr__(self) -> str:
        return f"<Triton operator {self.__name__}>"  # type: ignore[attr-defined]

    def _call(
        self, world: World, team: Team | None, arguments: tuple[Any, ...], options: Mapping[str, Any]
    ) -> torch.Tensor:
        """Check, find or make the plan, launch it, return the output. `team`: the world's by default."""
        given = {name: options[name] for name in _RESERVED if name in options}
        named = {name: value for name, value in options.items() if name not in _RESERVED}
        values = self._bound(arguments, named)
        out_shape, out_dtype = self._output(world, values, given)
        meta = given.get("meta") or self.meta or {}
        team = team or world.team
        numbers = tuple(_number(name, values[name]) for name in self._contract)
        specs = tuple(
            value if name in self._contract else _spec(name, value, world.backend.device)
            for name, value in values.items()
        )
        sm_margin = _at_least(0, "sm_margin", given.get("sm_margin", 0))
        work_groups = None if given.get("work_groups") is None else _at_least(1, "work_groups", given["work_groups"])
        key = _Key(
            self, team, specs, numbers, out_shape, out_dtype, tuple(sorted(meta.items())), sm_margin, work_groups
        )
        out = given.get("out")
        if out is None:
            out = _from_pool(world, out_shape, out_dtype)
        else:
            torch.autograd.graph.increment_version(out)
        plans = self._launches.state(world).plans
        plan: _Plan = plans.get(key, lambda: _Plan(world, key, list(values.values()), out))
        plan.launch(out, list(values.values()))
        return out

    def _bound(self, arguments: tuple[Any, ...], named: dict[str, Any]) -> dict[str, Any]:
        """Return the kernel's arguments by name, in its order."""
        name = self.__name__  # type: ignore[attr-defined]
        if len(arguments) > len(self._names):
            raise TypeError(f"{name}: expected {len(self._names)} arguments, got {len(arguments)}")
        given = dict(zip(self._names, arguments, strict=False))
        for each, value in named.items():
            if each in self._constants:
                raise TypeError(f"{name}: {each} is a constexpr; pass it in meta")
            if each in given or each not in self._names:
                raise TypeError(f"{name}: unexpected argument {each}; expected {self._names}")
            given[each] = value
        if missing := [each for each in self._names if each not in given]:
            raise TypeError(f"{name}: missing arguments {missing}")
        return {each: given[each] for each in self._names}

    def _output(
        self, world: World, values: Mapping[str, Any], given: Mapping[str, Any]
    ) -> tuple[tuple[int, ...], torch.dtype]:
        """Return shape and dtype of the output; raise for tensors that are not plain."""
        out = given.get("out")
        tensors = {
            name: value.base if isinstance(value, TensorDescriptor) else value
            for name, value in values.items()
            if isinstance(value, (torch.Tensor, TensorDescriptor))
        }
        require_plain(tensors if out is None else {**tensors, "out": out})
        if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors.values()):
            raise NotImplementedError(f"{self!r} is forward only: call it under torch.no_grad(), or detach its inputs")
        if out is not None:
            world.heap.offset_of(out, "out")
            if not out.is_contiguous() or out.data_ptr() % 16:
                raise ValueError(f"out: expected a contiguous tensor at a multiple of 16 bytes, got {out.stride()}")
            return tuple(out.shape), out.dtype
        if given.get("out_shape") is None:
            raise TypeError(f"{self!r}: missing argument out_shape")
        message = f"out_shape: expected whole numbers, got {given['out_shape']!r}"
        shape = as_whole_numbers(given["out_shape"], message)
        if min(shape, default=1) < 1:
            raise ValueError(f"out_shape: expected at least one element, got {list(shape)}")
        dtype = given.get("out_dtype") or next((tensor.dtype for tensor in tensors.values()), None)
        if dtype not in SCALARS:
            raise TypeError(f"out_dtype: expected one of {list(SCALARS)}, got {dtype}")
        return shape, dtype

    def words_of_source(self, key: _Key) -> int:
        """Return a number that differs where PEs would run different code."""
        own = getattr(self.kernel, "cache_key", None) or inspect.getsource(self.kernel.fn)
        dtypes = [spec[0] for spec in key.specs if isinstance(spec, tuple)]
        text = repr((own, key.meta, dtypes, key.out_dtype)).encode()
        return int.from_bytes(hashlib.blake2b(text, digest_size=7).digest(), "little")

    def contract_of(self, key: _Key, grid: int) -> Any:
        """Return the contract of a plan's launches."""
        return self._launches.contract(key.team, *key.numbers, key.out_shape, self.words_of_source(key), grid)


class _Plan(Plan):
    """One key's kernel and Team.

    Raises:
        NotImplementedError, ValueError: see `TritonOperator`.
    """

    def __init__(self, world: World, key: _Key, values: Sequence[Any], out: torch.Tensor) -> None:
        if not key.team.all_reachable:
            raise NotImplementedError(
                f"{key.operator!r} stores to peers directly, and some PEs do not reach each other's memory: start PEs "
                "that do (GPUs of one host, transport='auto')"
            )
        is_host, meta = world.backend.name == "host", dict(key.meta)
        if is_host != is_interpreted():
            raise NotImplementedError(
                "on the host backend Triton's interpreter runs kernels, and only there: "
                + ("set TRITON_INTERPRET=1 before triton is imported" if is_host else "do not set TRITON_INTERPRET")
            )
        self._workspace, tracer = world.workspace, world.tracer
        words = torch.zeros(1, dtype=torch.int64 if tracer is None else torch.int32, device=world.backend.device)
        with world.preparing():
            if is_host:
                refuse_threads(world)
                self._kernel: Any = InterpretedKernel(key.operator.kernel, meta)
            else:
                compiled = compiled_kernel(key.operator.kernel, words, out, values, meta)
                key.operator.compiled.append((meta, compiled))
                self._kernel = compiled.loaded(world.backend)
        if tracer is not None:
            tracer.adopt(self._kernel)
        per_sm = max(self._kernel.resident_work_groups() // world.backend.num_sms, 1)
        most = per_sm * max(world.backend.num_sms - key.sm_margin, 1)
        self._grid = key.work_groups or (1 if is_host else most)
        check_resident(self._kernel, self._grid)
        if self._grid > self._workspace.max_ready_words:
            raise ValueError(f"work_groups: expected at most {self._workspace.max_ready_words}, got {self._grid}")
        team = world.workspace.team(key.operator.contract_of(key, self._grid))
        self._words = upload(world.backend, team, bytes(8), self._kernel.sink_bytes())  # as device.py reads them
        self._team = self._words if tracer is None else self._words.view(torch.int32)

    def launch(self, out: torch.Tensor, values: Sequence[Any]) -> None:
        """Launch on the current stream."""
        call = self._kernel.call(self._team, out, values)
        self._workspace.launch(self._kernel, self._grid, self._words.data_ptr(), call)


def _from_pool(world: World, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    nbytes = math.prod(shape) * dtype.itemsize
    slot = world.outputs.take(nbytes, world.backend.stream(), is_captured=world.workspace.is_capturing())
    result: torch.Tensor = slot.tensor(dtype, shape)
    return result


def _number(name: str, value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not -(1 << 63) <= value < 1 << 63:
        raise TypeError(f"{name}: expected a whole number of 64 bits, as it is in the contract, got {value!r}")
    return value


def _at_least(least: int, name: str, value: Any) -> int:
    found = as_whole_number(value, f"{name}: expected a whole number, got {value!r}")
    if found < least:
        raise ValueError(f"{name}: expected at least {least}, got {found}")
    return found


def _spec(name: str, value: Any, device: torch.device) -> Any:
    """Return what Triton compiles an argument for: no more than dtype and alignment, but for tensor descriptors."""
    if isinstance(value, torch.Tensor):
        if value.device != device:
            raise ValueError(f"{name}: expected a tensor on {device}, got one on {value.device}")
        return str(value.dtype), value.data_ptr() % 16 == 0
    if isinstance(value, TensorDescriptor):
        if value.base.device != device:
            raise ValueError(f"{name}: expected a tensor on {device}, got one on {value.base.device}")
        if len(value.shape) != 2 or value.padding != "zero" or value.base.dtype not in SCALARS:
            raise NotImplementedError(
                f"{name}: expected a descriptor of two dimensions, padded with zeros, of {list(SCALARS)}"
            )
        return f"descriptor of {value.base.dtype}", tuple(value.block_shape), *map(_spec_of_int, value.shape)
    if isinstance(value, bool):
        return ("bool",)
    if isinstance(value, int):
        return _spec_of_int(_number(name, value))
    if isinstance(value, float):
        return ("float",)
    raise TypeError(f"{name}: expected a tensor, a number or a tensor descriptor, got {type(value).__name__}")


def _spec_of_int(value: int) -> tuple[str, bool, bool, bool]:
    return "int", value == 1, value % 16 == 0, -(1 << 31) <= value < 1 << 31


def _no_such_word(record: ctypes.Structure) -> Exception:
    if not 0 <= record.outer < record.inner:
        return IndexError(f"signal or wait for PE {record.outer}: expected 0 to {record.inner - 1}")
    return IndexError(
        f"signal or wait with index {record.value}, for PE {record.outer}: expected 0 to {record.limit - 1}, the words "
        "that a PE has for each peer"
    )


# ---- tuning ----------------------------------------------------------------------------------------------------------


def tune(
    op: TritonOperator, metas: Sequence[Mapping[str, Any]], *arguments: Any, rounds: int = 5, **options: Any
) -> dict[str, Any]:
    """Try configurations on PE 0, and let all PEs use the fastest one.

    PE 0 launches the kernel by itself, with a `size` of 1: peers would have to try the same ones at the same time, and
    might choose differently. What is compared is the work of a PE, without links.

    Args:
        op: the operator, whose `meta` is set.
        metas: configurations.
        arguments, options: of a call, without `meta`.
        rounds: calls of each, of which the median counts.

    Returns:
        The fastest configuration, the same on all PEs.

    Raises:
        RuntimeError: none of them could be compiled and launched.

    Collective; blocks. Not in a CUDA-graph capture.
    """
    world = _world.for_call()
    world.barrier()
    best, problem = -1, ""
    if world.rank == 0:
        times: dict[int, float] = {}
        with world.preparing():
            for number, meta in enumerate(metas):
                try:
                    times[number] = _time_of(world, op, arguments, {**options, "meta": dict(meta)}, rounds)
                except Exception as error:
                    problem = f"{type(error).__name__}: {error}"
        best = min(times, key=times.__getitem__, default=-1)
    told = world.bootstrap.exchange("triton-tune", f"{best} {problem}".encode(), timeout=_LONGEST_TUNING_S)[0].decode()
    chosen, _, problem = told.partition(" ")
    if int(chosen) < 0:
        raise RuntimeError(f"tune: no configuration of {op!r} can be launched: {problem}")
    op.meta = dict(metas[int(chosen)])
    return dict(op.meta)


_LONGEST_TUNING_S = 900.0


def _time_of(
    world: World, op: TritonOperator, arguments: tuple[Any, ...], options: Mapping[str, Any], rounds: int
) -> float:
    """Return the median of a launch's seconds, of this PE alone."""
    op._call(world, world.alone, arguments, options)
    times = []
    for _ in range(rounds):
        world.backend.synchronize()
        start = time.perf_counter()
        op._call(world, world.alone, arguments, options)
        world.backend.synchronize()
        times.append(time.perf_counter() - start)
    return sorted(times)[rounds // 2]

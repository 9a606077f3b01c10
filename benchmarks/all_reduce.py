"""Benchmark of all_reduce and all_reduce_rms_norm: persistent-ops bench all_reduce [OPTIONS].

See README.md beside it.
"""

from __future__ import annotations

import argparse
import functools
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import harness.experiment
import torch
import torch.distributed as dist
from harness.command import at_least, run_benchmark
from harness.experiment import Experiment, Trial
from harness.figures import figure
from harness.report import method_tables
from harness.timing import Subject
from harness.tuning import tuned

import persistent_ops as po
from persistent_ops.ops.all_reduce_plan import OPERATOR
from persistent_ops.runtime.world import World
from persistent_ops.testing.record import pes_text, select, unique
from persistent_ops.testing.symmetric_memory import one_shot, symmetric_buffer, two_shot

DTYPE = torch.bfloat16
WIDTH = 8192  # elements of a row: 16 KiB
SIZES = ("16K", "64K", "256K", "1M", "2M", "8M", "32M", "128M", "256M")
_UNITS = {"K": 1 << 10, "M": 1 << 20}
_HOST_SIZES = SIZES[:2]  # what CPUs are timed with, unless --sizes says more
ALGORITHMS = {"auto": "auto", "one_shot": "one_shot", "two_shot": "two_shot", "slices": "slices"}
# Sums alone; then the same with residual and norm.
LABELS = {
    **{name: f"all_reduce, {name}" for name in ALGORITHMS},
    "nccl": "{collective}",
    "symm_one_shot": "symm_mem one-shot",
    "symm_two_shot": "symm_mem two-shot",
    **{f"norm_{name}": f"all_reduce_rms_norm, {name}" for name in ALGORITHMS},
    "norm_nccl": "{collective} + fused add and norm",
    "norm_symm_one_shot": "symm_mem one-shot + fused add and norm",
    "norm_symm_two_shot": "symm_mem two-shot + fused add and norm",
}
METHODS = tuple(LABELS)


def is_own(method: str) -> bool:
    """Return whether a method is the operator's."""
    return method.removeprefix("norm_") in ALGORITHMS


def bytes_named(name: str) -> int:
    """Return the bytes of a size such as 64K or 2M, a multiple of a row's.

    Raises:
        ValueError: it is no such size.
    """
    found = re.fullmatch(r"([1-9]\d{0,4})([KM])", name)
    nbytes = int(found[1]) * _UNITS[found[2]] if found else 0
    if nbytes == 0 or nbytes % (WIDTH * DTYPE.itemsize):
        raise ValueError(f"--sizes: expected multiples of 16K such as {','.join(SIZES)}, got {name}")
    return nbytes


@dataclass(frozen=True)
class Options(harness.experiment.Options):
    """The options of a run; see the command line's help."""

    methods: tuple[str, ...] = METHODS
    calls: int = 20
    sizes: tuple[str, ...] | None = None  # None: the backend's sizes


class Sums(Trial):
    """One size's buffers, and the methods as functions of the call's number: calls take turns with the buffers.

    Each call takes what the one before it gave, as layers do, so that none begins before it could in a model. Libraries
    that sum in place, or in buffers of their own, find their input there; nothing is copied for them.
    """

    def __init__(self, world: World, options: Options, size: str, symmetric: Sequence[torch.Tensor]) -> None:
        nbytes = bytes_named(size)
        self.fields = {"size": size, "bytes": nbytes}
        # Each PE sends what it has of the others' shares, and its own share's sum to all.
        self.moved = (2 * nbytes, 2 * nbytes * (world.size - 1) / world.size)
        self._world = world
        self._num_calls = options.calls
        device, rows = world.backend.device, nbytes // (WIDTH * DTYPE.itemsize)
        generator = torch.Generator(device).manual_seed(77 + world.rank)
        shape = (rows, WIDTH)
        self.x = torch.empty(shape, dtype=DTYPE, device=device).uniform_(-1, 1, generator=generator)
        same = torch.Generator(device).manual_seed(5)
        self.weight = torch.empty(WIDTH, dtype=DTYPE, device=device).uniform_(0.5, 1.5, generator=same)
        self.residual = torch.empty(shape, dtype=DTYPE, device=device).uniform_(-1, 1, generator=same)
        self._sums = [torch.empty(shape, dtype=DTYPE, device=device) for _ in range(2)]
        self._norms = [torch.empty(shape, dtype=DTYPE, device=device) for _ in range(2)]
        self._symmetric = [buffer[: rows * WIDTH].view(shape) for buffer in symmetric]
        self._norm = _fused_add_and_norm if world.backend.name == "host" else torch.compile(_fused_add_and_norm)
        found = [name for name in options.methods if "symm" not in name or self._symmetric]
        self.methods = tuple(name for name in found if world.size > 1 or is_own(name))

    def calls(self, name: str) -> list[Callable[[], Any]]:
        """Return a chain of calls."""
        return [functools.partial(self.run, name, number) for number in range(self._num_calls)]

    def measured(self, name: str, calls: int) -> dict[str, Any]:
        return {"calls_per_graph": calls}

    def _poison(self) -> None:
        """Take away what methods before have left in any buffer; collective."""
        for buffer in (*self._sums, *self._norms, *self._symmetric):
            buffer.fill_(math.nan)
        self._world.barrier()  # peers may write into them as soon as they launch

    def prepare(self, name: str) -> None:
        """Lay the inputs where the first call of a chain finds them."""
        for buffer in self._buffers(name):
            buffer.copy_(self.x)

    def run(self, name: str, number: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Make call `number` of a chain on the current stream."""
        turn, plain = number % 2, name.removeprefix("norm_")
        x = self.x if number == 0 else self._sums[1 - turn]
        if name in ALGORITHMS:
            return po.all_reduce(x, out=self._sums[turn], algorithm=ALGORITHMS[name]), None
        if not name.startswith("norm_"):
            return self._unfused(name, self._buffers(name)[0]), None
        residual = self.residual if number == 0 else self._sums[1 - turn]
        if plain in ALGORITHMS:
            return po.all_reduce_rms_norm(
                self.x if number == 0 else self._norms[1 - turn],
                self.weight,
                residual=residual,
                out=self._sums[turn],
                norm_out=self._norms[turn],
                algorithm=ALGORITHMS[plain],
            )
        buffers = self._buffers(name)
        total = self._unfused(plain, buffers[turn])
        self._norm(total, residual, self.weight, self._sums[turn], buffers[1 - turn])
        return self._sums[turn], buffers[1 - turn]

    def check(self) -> dict[str, Any]:
        """Compare a first call of each method with fp64, and the operator's bits among each other; collective."""
        world, exact, magnitudes = self._world, self.x.double(), self.x.double().abs()
        if world.size > 1:
            dist.all_reduce(exact)
            dist.all_reduce(magnitudes)
        failures: list[str] = []
        bits: dict[bool, torch.Tensor] = {}
        for name in self.methods:
            norms = name.startswith("norm_")
            want = exact + self.residual.double() if norms else exact
            self._poison()
            self.prepare(name)
            total, norm = self.run(name, 0)
            world.check()
            # Other libraries may round wherever a PE's values, or the residual, are added to what they have.
            largest = magnitudes + self.residual.double().abs() if norms else magnitudes
            bound = 2.0**-8 * (want.abs() if is_own(name) else (world.size - 1 + norms) * largest) + 1e-5
            if not bool(((total.double() - want).abs() <= bound).all()):
                failures.append(f"{name}, farther from the fp64 sum than rounding explains")
            if norm is not None:
                rounded = total.double()
                factor = torch.rsqrt(rounded.square().mean(-1, keepdim=True) + 1e-6)
                right = rounded * factor * self.weight.double()
                # A compiled baseline norms the sum before it is rounded.
                bound = (1.0 if is_own(name) else 2.0) * 2.0**-8 * right.abs() + 1e-4
                if not bool(((norm.double() - right).abs() <= bound).all()):
                    failures.append(f"{name}, farther from the fp64 norm than rounding explains")
            if is_own(name):
                found = _bits(total, norm)
                if not torch.equal(bits.setdefault(norms, found), found):
                    failures.append(f"{name}, other bits than the algorithm before it")
        return {"failures": failures}

    def check_replays(self, subjects: Mapping[str, Subject]) -> list[str]:
        """Compare what the operator's chains leave with what their calls do, one by one."""
        failures: list[str] = []
        for name, subject in subjects.items():
            if not is_own(name):
                continue
            left = []
            for run_all in (subject.replay, lambda name=name: [call() for call in self.calls(name)]):
                self._poison()
                run_all()
                self._world.check()
                left.append(_bits(*(torch.stack(buffers) for buffers in (self._sums, self._norms))))
            if not torch.equal(*left):
                failures.append(f"{name}, a replay leaves other bits than its calls")
        return failures

    def check_tuned(self, name: str) -> list[str]:
        """Compare the bits with those under the default Tuning."""

        def found() -> torch.Tensor:
            self._poison()
            self.prepare(name)
            bits = _bits(*self.run(name, 0))
            self._world.check()
            return bits

        with tuned(self._world, OPERATOR, None):
            expected = found()
        return [] if torch.equal(found(), expected) else [f"{name}, other bits than the default's"]

    def _buffers(self, name: str) -> list[torch.Tensor]:
        """Return where another library finds what is to be summed, in turn."""
        if is_own(name):
            return []
        return self._symmetric if "symm" in name else self._norms

    def _unfused(self, name: str, x: torch.Tensor) -> torch.Tensor:
        """Sum by another library, in place where it can."""
        if name == "nccl":
            dist.all_reduce(x)
            return x
        return one_shot(x) if name == "symm_one_shot" else two_shot(x)


def _bits(total: torch.Tensor, norm: torch.Tensor | None) -> torch.Tensor:
    return torch.cat([t.reshape(-1).view(torch.int16).clone() for t in (total, norm) if t is not None])


def _fused_add_and_norm(
    total: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, norm: torch.Tensor
) -> None:
    summed = (total.float() + residual.float()).to(DTYPE)
    values = summed.float()
    factor = torch.rsqrt(values.square().mean(-1, keepdim=True) + 1e-6)
    norm.copy_((values * factor * weight.float()).to(DTYPE))
    out.copy_(summed)


class AllReduce(Experiment[str]):
    """Sums, and sums with residual and norm, by size."""

    name = "all_reduce"
    labels = LABELS
    case_field = "size"
    is_fresh = True
    operator = OPERATOR
    tuned_methods = ("auto",)
    tunable = tuple(name for name in METHODS if is_own(name))
    knobs: ClassVar = {"occupancy": ("work_groups", ())}
    note = "; bf16"

    @classmethod
    def add_options(cls, parser: argparse.ArgumentParser) -> None:
        parser.add_argument(
            "--sizes", help=f"comma-separated bytes of x (default: {','.join(SIZES)}; host {','.join(_HOST_SIZES)})"
        )
        parser.add_argument(
            "--calls", type=int, default=20, help="calls in a graph, chained by their data (default 20)"
        )

    @classmethod
    def read_options(cls, arguments: argparse.Namespace, worlds: Sequence[int], common: dict[str, Any]) -> Options:
        at_least("--calls", [arguments.calls])
        sizes = tuple(arguments.sizes.split(",")) if arguments.sizes else None
        for size in sizes or ():
            bytes_named(size)
        return Options(**common, sizes=sizes, calls=arguments.calls)

    def set_up(self) -> None:
        most = max(map(bytes_named, self.cases())) // DTYPE.itemsize
        made = [symmetric_buffer(most, DTYPE) for _ in range(2)]
        self._symmetric = [buffer for buffer, _ in made if buffer is not None]
        problem = made[0][1] or made[1][1]
        if problem is not None:
            self._symmetric = []
            self.write("left_out", what="torch symmetric memory", problem=problem)

    def cases(self) -> Sequence[str]:
        return self.options.sizes or (SIZES if self.backend == "cuda" else _HOST_SIZES)

    def prepare(self, case: str) -> Sums:
        return Sums(self.world, self.options, case, self._symmetric)

    @classmethod
    def tables(cls, lines: Sequence[dict[str, Any]]) -> Iterable[Any]:
        return method_tables(lines, "size", "size", f"bf16, rows of {WIDTH}", _baselines_of)

    @classmethod
    def draw(cls, lines: Sequence[dict[str, Any]], path: Path) -> None:
        """Draw the times over the size, sums on the left and norms on the right, for the largest world."""
        times = select(lines, "time", pes=max(unique(select(lines, "time"), "pes")))
        with figure(lines, path, size=(12, 4.5), columns=2) as (_, panels):
            for axes, norms in zip(panels, (False, True), strict=True):
                for method in unique(times, "method"):
                    rows = select(times, "time", method=method)
                    if _norms(method) == norms:
                        style, label = "-" if is_own(method) else "--", rows[0]["label"]
                        axes.plot([row["bytes"] for row in rows], [row["us"] for row in rows], style, label=label)
                title = f"{pes_text(times[0]['pes'])}, bf16"
                axes.set(xscale="log", yscale="log", xlabel="bytes of x", ylabel="us", title=title)
                if axes.lines:
                    axes.legend(fontsize=7)


def _baselines_of(row: dict[str, Any]) -> list[str]:
    """Return what a method of the operator is compared with: other libraries' of the same kind."""
    if not is_own(row["method"]):
        return []
    return [name for name in METHODS if not is_own(name) and _norms(name) == _norms(row["method"])]


def _norms(method: str) -> bool:
    return method.startswith("norm_")


main = functools.partial(run_benchmark, AllReduce)

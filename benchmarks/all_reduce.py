"""Benchmark of all_reduce: persistent-ops bench all_reduce [OPTIONS]. See README.md beside it."""

from __future__ import annotations

import argparse
import dataclasses
import gc
import re
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parent))

from gemv.methods import symmetric_buffer
from harness.ceilings import Ceilings, measure_ceilings
from harness.command import Benchmark, add_common, at_least, chosen_worlds, command_line, names, run_benchmark
from harness.pes import agree, gather
from harness.record import Recorder, describe_run, progress, select, unique, us_text
from harness.timing import Subject, quantile, record, time_interleaved
from harness.world import chosen_backend, joined_world
from rich.console import Console
from rich.table import Table

import persistent_ops as po
from persistent_ops.runtime.world import World

_NAME = "all_reduce"
DTYPE = torch.bfloat16
WIDTH = 8192  # elements of a row: 16 KiB
SIZES = ("16K", "64K", "256K", "1M", "2M", "8M", "32M", "128M", "256M")
_UNITS = {"K": 1 << 10, "M": 1 << 20}
_HOST_BYTES = 64 << 10  # the most that a size is on CPUs
_STORE_CEILING_BYTES = {"cuda": 256 << 20, "host": 1 << 20}
_READ_CEILING_BYTES = {"cuda": 4 << 30, "host": 4 << 20}
_HEAP_MARGIN = 256 << 20
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
class Options:
    """What a run was asked to do; see the command line's help."""

    backend: str = "auto"
    sizes: tuple[str, ...] = SIZES
    methods: tuple[str, ...] = METHODS
    rounds: int = 15
    calls: int = 20
    burst_ms: float = 3.0
    record_path: str | None = None
    command: str = ""
    timeout: float = 20.0
    tune: tuple[()] = ()


class Methods:
    """One size's buffers, and the methods as functions of the call's number: calls take turns with the buffers.

    Each call takes what the one before it gave, as layers do, so that none begins before it could in a model. Libraries
    that sum in place, or in buffers of their own, find their input there; nothing is copied for them.
    """

    def __init__(self, world: World, nbytes: int, symmetric: Sequence[torch.Tensor]) -> None:
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

    def available(self, world: World, chosen: Sequence[str]) -> tuple[str, ...]:
        """Return those of the chosen methods that this world can run."""
        found = [name for name in chosen if "symm" not in name or self._symmetric]
        return tuple(name for name in found if world.size > 1 or is_own(name))

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
        assert dist.group.WORLD is not None
        group = str(dist.group.WORLD.group_name)
        if name == "symm_one_shot":
            result: torch.Tensor = torch.ops.symm_mem.one_shot_all_reduce(x, "sum", group)
            return result
        torch.ops.symm_mem.two_shot_all_reduce_(x, "sum", group)
        return x


def _fused_add_and_norm(
    total: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, norm: torch.Tensor
) -> None:
    summed = (total.float() + residual.float()).to(DTYPE)
    values = summed.float()
    factor = torch.rsqrt(values.square().mean(-1, keepdim=True) + 1e-6)
    norm.copy_((values * factor * weight.float()).to(DTYPE))
    out.copy_(summed)


# ---- a PE's part -----------------------------------------------------------------------------------------------------


def run_pe(options: Options) -> bool:
    """Measure on this PE; collective. Rank 0 writes the record. Returns whether all checks passed, on every PE."""
    backend = chosen_backend(options.backend)
    sizes = {name: bytes_named(name) for name in options.sizes}
    if backend == "host":
        sizes = {name: min(nbytes, _HOST_BYTES) for name, nbytes in sizes.items()}
    heap = _STORE_CEILING_BYTES[backend] + _HEAP_MARGIN
    with joined_world(backend=backend, timeout=options.timeout, heap_bytes=heap) as world:
        recorder = Recorder(Path(options.record_path) if options.record_path and world.rank == 0 else None)
        about = describe_run(world.rank, command=options.command, backend=backend, device=world.backend.device)
        recorder.write("run", pes=world.size, options=dataclasses.asdict(options), **about)
        progress(world.rank, f"{world.size} PEs on {backend}: ceilings")
        source = torch.zeros(_READ_CEILING_BYTES[backend] // 4, dtype=torch.int32, device=world.backend.device)
        ceilings, ways = measure_ceilings(
            world,
            source,
            store_bytes=_STORE_CEILING_BYTES[backend],
            rounds=5,
            burst_seconds=options.burst_ms * 4e-3,
        )
        del source
        recorder.write("ceilings", pes=world.size, **ways)
        made = [symmetric_buffer(world, max(sizes.values()) // DTYPE.itemsize) for _ in range(2)]
        symmetric = [buffer for buffer, _ in made if buffer is not None]
        problem = made[0][1] or made[1][1]
        if problem is not None:
            symmetric = []
            recorder.write("left_out", pes=world.size, what="torch symmetric memory", problem=problem)
        passed = True
        for name, nbytes in sizes.items():
            passed &= _measure(world, options, recorder, name, Methods(world, nbytes, symmetric), ceilings)
            gc.collect()  # graphs hold memory, and NCCL's must be gone before its communicator
            progress(world.rank, f"  {name}")
        del symmetric, made
        gc.collect()
        return passed


def _measure(
    world: World, options: Options, recorder: Recorder, size: str, methods: Methods, ceilings: Ceilings
) -> bool:
    """Check and time one size; collective."""
    nbytes = methods.x.nbytes
    common = {"pes": world.size, "size": size, "bytes": nbytes}
    chosen = methods.available(world, options.methods)
    failures = _check(world, methods, chosen)
    subjects: dict[str, Subject] = {}
    for name in chosen:
        problem = None
        try:
            calls: list[Callable[[], object]] = [
                lambda name=name, number=number: methods.run(name, number)  # type: ignore[misc]
                for number in range(options.calls)
            ]
            subjects[name] = record(world, calls)
        except (RuntimeError, torch.OutOfMemoryError) as error:
            problem = f"{type(error).__name__}: {error}"
        problem = agree(world.bootstrap, problem)
        if problem is not None:
            subjects.pop(name, None)
            failures.append(f"{name}, could not be prepared: {problem}")
    recorder.write("check", **common, failures=failures)
    for failure in failures:
        progress(world.rank, f"  WRONG: {size}: {failure}")
    times = time_interleaved(world, subjects, rounds=options.rounds, burst_seconds=options.burst_ms * 1e-3)
    world.check()
    # Each PE sends what it has of the others' shares, and its own share's sum to all.
    sent = 2 * nbytes * (world.size - 1) / world.size
    limit, kind = ceilings.limit_seconds(read_bytes=2 * nbytes, sent_bytes=sent)
    for name, own in times.items():
        everyone = gather(world.bootstrap, own)
        recorder.write(
            "time",
            **common,
            method=name,
            label=LABELS[name].format(collective="NCCL" if world.backend.name == "cuda" else "gloo"),
            us=max(statistics.median(each) for each in everyone) * 1e6,
            us_p95=max(quantile(each, 0.95) for each in everyone) * 1e6,
            limit_us=limit * 1e6,
            limit_kind=kind,
            calls_per_graph=subjects[name].calls,
            seconds_by_pe_and_round=everyone,
        )
    return not failures


def _check(world: World, methods: Methods, chosen: Sequence[str]) -> list[str]:
    """Compare a first call of each method with fp64, and the operator's bits among each other; collective."""
    exact = methods.x.double()
    if world.size > 1:
        dist.all_reduce(exact)
    failures: list[str] = []
    bits: dict[bool, torch.Tensor] = {}
    for name in chosen:
        norms = name.startswith("norm_")
        want = exact + methods.residual.double() if norms else exact
        methods.prepare(name)
        total, norm = methods.run(name, 0)
        world.check()
        # A rounding of each PE's sum, where other libraries round on the way.
        bound = 2.0**-8 * (want.abs() if is_own(name) else world.size + 1.0) + 1e-5
        if not bool(((total.double() - want).abs() <= bound).all()):
            failures.append(f"{name}, farther from the fp64 sum than rounding explains")
        if norm is not None:
            rounded = total.double()
            factor = torch.rsqrt(rounded.square().mean(-1, keepdim=True) + 1e-6)
            right = rounded * factor * methods.weight.double()
            # A compiled peer norms the sum before it is rounded.
            bound = (1.0 if is_own(name) else 2.0) * 2.0**-8 * right.abs() + 1e-4
            if not bool(((norm.double() - right).abs() <= bound).all()):
                failures.append(f"{name}, farther from the fp64 norm than rounding explains")
        if is_own(name):
            found = torch.cat([t.reshape(-1).view(torch.int16).clone() for t in (total, norm) if t is not None])
            if not torch.equal(bits.setdefault(norms, found), found):
                failures.append(f"{name}, other bits than the algorithm before it")
    everyone = gather(world.bootstrap, failures)
    return [f"PE {pe}, {text}" for pe, texts in enumerate(everyone) for text in texts]


# ---- what is shown ---------------------------------------------------------------------------------------------------


def print_tables(lines: list[dict[str, Any]], console: Console) -> None:
    """Print the runs, what was found wrong, and the times of every world."""
    run = select(lines, "run")[-1]
    console.print(f"{run.get('gpu', run.get('processor'))}, torch {run['torch']}, commit {(run['commit'] or '?')[:9]}")
    failures = [
        f"{line['pes']} PEs, {line['size']}: {text}" for line in select(lines, "check") for text in line["failures"]
    ]
    console.print(f"WRONG: {len(failures)} checks failed; the first: {failures[0]}" if failures else "correct")
    if run["backend"] == "host":
        console.print("Host PEs share this machine's cores, and tensors are small: the times say nothing about GPUs.")
    for line in select(lines, "left_out"):
        console.print(f"left out, {line['pes']} PEs: {line['what']}: {line['problem']}", soft_wrap=True)
    for pes in unique(select(lines, "time"), "pes"):
        table = Table(title=f"{pes} PEs, bf16, rows of {WIDTH}", title_justify="left", pad_edge=False)
        table.add_column("size", no_wrap=True)
        table.add_column("method", no_wrap=True)
        for header in ("us", "p95", "limit", "x best other"):
            table.add_column(header, justify="right")
        for size in unique(select(lines, "time", pes=pes), "size"):
            rows = select(lines, "time", pes=pes, size=size)
            for number, row in enumerate(rows):
                norms = row["method"].startswith("norm_")
                same = [other for other in rows if other["method"].startswith("norm_") == norms]
                others = [other["us"] for other in same if not is_own(other["method"])]
                table.add_row(
                    size if number == 0 else "",
                    row["label"],
                    us_text(row["us"]),
                    us_text(row["us_p95"]),
                    us_text(row["limit_us"]),
                    f"{min(others) / row['us']:.2f}" if others and is_own(row["method"]) else "-",
                    end_section=number == len(rows) - 1,
                )
        console.print(table)


def draw_figure(lines: list[dict[str, Any]], path: Path) -> None:
    """Draw the times over the size, sums on the left and norms on the right, for the largest world."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    times = select(lines, "time")
    if not times:
        return
    times = [line for line in times if line["pes"] == max(line["pes"] for line in times)]
    figure, panels = pyplot.subplots(1, 2, figsize=(12, 4.5), layout="constrained")
    for axes, norms in zip(panels, (False, True), strict=True):
        for method in unique(times, "method"):
            rows = [line for line in times if line["method"] == method]
            if method.startswith("norm_") == norms:
                style = "-" if is_own(method) else "--"
                axes.plot([row["bytes"] for row in rows], [row["us"] for row in rows], style, label=rows[0]["label"])
        axes.set(xscale="log", yscale="log", xlabel="bytes of x", ylabel="us", title=f"{times[0]['pes']} PEs, bf16")
        if axes.lines:
            axes.legend(fontsize=7)
    if any(line["backend"] == "host" for line in select(lines, "run")):
        figure.suptitle("host backend, small tensors: says nothing about GPUs", color="red")
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


# ---- the command -----------------------------------------------------------------------------------------------------


def main(argv: list[str]) -> int:
    """Run the benchmark; see `run_benchmark`."""
    return run_benchmark(
        Benchmark(_NAME, __doc__, _add_options, _options, run_pe, draw_figure, print_tables, is_fresh=True), argv
    )


def _add_options(parser: argparse.ArgumentParser) -> None:
    add_common(parser, worlds="2,4,8 (default: one PE per GPU; host 2)", limit=900.0)
    parser.add_argument("--sizes", help=f"comma-separated bytes of x (default: {','.join(SIZES)})")
    parser.add_argument("--methods", help=f"comma-separated, of {','.join(METHODS)} (default: all)")
    parser.add_argument("--rounds", type=int, help="times each method is timed (default 15; quick 3)")
    parser.add_argument("--calls", type=int, default=20, help="calls in a graph, chained by their data (default 20)")
    parser.add_argument("--quick", action="store_true", help="a look: few rounds")


def _options(arguments: argparse.Namespace, argv: list[str]) -> tuple[Options, list[int]]:
    worlds = chosen_worlds(arguments)
    at_least("--rounds", [arguments.rounds])
    at_least("--calls", [arguments.calls])
    sizes = tuple(arguments.sizes.split(",")) if arguments.sizes else SIZES
    for size in sizes:
        bytes_named(size)
    options = Options(
        backend=arguments.backend,
        sizes=sizes,
        methods=names("--methods", arguments.methods, METHODS),
        rounds=arguments.rounds or (3 if arguments.quick else 15),
        calls=arguments.calls,
        command=command_line(_NAME, argv),
    )
    return options, worlds


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))

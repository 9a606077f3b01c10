"""Report what this machine has for the package, and the commands that install what is missing."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import importlib.metadata
import json
import math
import os
import platform
import re
import resource
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from .findings import Finding
from .ranks import compare, gather
from .rdma import examine_network
from .runtime.errors import PersistentOpsError
from .testing.machine import available_memory

__all__ = ["Finding", "Report", "examine", "run_doctor"]

_NVIDIA_SMI_TIMEOUT_S = 20.0
_MARKS = {"ok": "[green]ok[/]", "missing": "[bold red]missing[/]", "warning": "[yellow]check[/]", "info": ""}


@dataclasses.dataclass(frozen=True)
class Report:
    """All findings, and what follows from them."""

    findings: tuple[Finding, ...]
    auto: str  # the backend that backend="auto" takes

    def missing_for(self, backend: str) -> list[Finding]:
        """Return what keeps a backend from running."""
        return [finding for finding in self.findings if finding.status == "missing" and backend in finding.needed_by]

    def can_run(self, backend: str) -> bool:
        """Return whether nothing that a backend needs is missing."""
        return not self.missing_for(backend)

    def as_dict(self) -> dict[str, Any]:
        """Return the report as JSON takes it."""
        return {
            "findings": [dataclasses.asdict(finding) for finding in self.findings],
            "backends": {
                backend: {
                    "can_run": self.can_run(backend),
                    "missing": [finding.name for finding in self.missing_for(backend)],
                }
                for backend in ("cuda", "host")
            },
            "auto": self.auto,
        }


def examine() -> Report:
    """Look at everything; nothing that is missing or broken makes this fail.

    Returns:
        The findings. No NVSHMEM is started, no kernel is compiled and no peer is contacted.
    """
    findings: list[Finding] = []
    for section, probe in _PROBES:
        try:
            findings += probe()
        except Exception as error:  # a failing check must not end the report
            findings.append(
                Finding(section, "this check", "warning", f"it failed: {type(error).__name__}: {error}", "report it")
            )
    return Report(tuple(findings), "cuda" if _cuda_works() else "host")


def run_doctor(*, as_json: bool = False, of_ranks: bool = False, console: Console | None = None) -> int:
    """Print what was found.

    Args:
        as_json: print one JSON object instead of tables.
        of_ranks: meet the other ranks of a launcher's job, and add what they report; rank 0 prints. Collective.
        console: where it goes; standard output by default.

    Returns:
        0 where at least one backend can run, else 1. With `of_ranks` 1 also where ranks do not meet.
    """
    console = console or Console()
    compared: list[Finding] = []
    if of_ranks:
        try:
            seen, rank = gather()
        except (PersistentOpsError, ValueError) as error:
            text = json.dumps({"error": str(error)}) if as_json else f"error: {error}"
            console.print(text, markup=False, highlight=False, soft_wrap=True)
            return 1
        if rank != 0:
            return 0
        compared = compare(seen)
    report = examine()
    report = dataclasses.replace(report, findings=(*report.findings, *compared))
    if as_json:
        console.print(json.dumps(report.as_dict(), indent=2), markup=False, highlight=False, soft_wrap=True)
    else:
        _print(report, console)
    return 0 if report.can_run("cuda") or report.can_run("host") else 1


# ---------------------------------------------------------------------------------------------------------------------
# Probes: each returns the findings of one section
# ---------------------------------------------------------------------------------------------------------------------


def _pip(*packages: str) -> str:
    return f"{sys.executable} -m pip install " + " ".join(f"'{package}'" for package in packages)


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _requirement(package: str) -> str:
    """Return what this package asks of another one, as pip takes it; the name alone where this one is not installed."""
    try:
        required = importlib.metadata.requires("persistent-ops") or []
    except importlib.metadata.PackageNotFoundError:
        required = []
    for line in required:
        requirement = line.partition(";")[0].strip()
        if re.fullmatch(rf"{re.escape(package)}(?![\w.-]).*", requirement):
            return requirement
    return package


def _command(*words: str) -> str | None:
    """Return what a command prints, or None where it does not exist or fails."""
    if shutil.which(words[0]) is None:
        return None
    try:
        done = subprocess.run(
            words, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_NVIDIA_SMI_TIMEOUT_S
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


def _smi_gpus() -> list[str]:
    """Return the GPUs that the driver sees, whatever torch is installed: name, memory, capability, driver."""
    text = _command("nvidia-smi", "--query-gpu=name,memory.total,compute_cap,driver_version", "--format=csv,noheader")
    return [line.strip() for line in (text or "").splitlines() if line.strip()]


def _cuda_works() -> bool:
    try:
        import torch

        return bool(torch.cuda.is_available())
    except Exception:  # torch may be missing or broken: then there is no GPU to use
        return False


def _python() -> list[Finding]:
    section = "Python"
    own = _version("persistent-ops")
    findings = [
        Finding(section, "python", "ok", f"{platform.python_version()}, {sys.executable}"),
        Finding(
            section, "persistent-ops", "ok", f"{own or 'not installed, run from a checkout'}, {Path(__file__).parent}"
        ),
    ]
    try:
        import torch
    except Exception as error:
        return [*findings, Finding(section, "torch", "missing", str(error), _pip("torch"), ("cuda", "host"))]
    built = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "CPU build"
    findings.append(Finding(section, "torch", "ok", f"{torch.__version__}, {built}"))
    return findings


def _gpus() -> list[Finding]:
    section = "GPUs"
    seen = _smi_gpus()
    if not _cuda_works():
        if not seen:
            return [Finding(section, "GPU", "missing", "none that torch or nvidia-smi can see", "", ("cuda",))]
        found = [Finding(section, f"GPU {number}", "info", line) for number, line in enumerate(seen)]
        text = "the driver sees GPUs, but torch cannot use them"
        return [
            *found,
            Finding(section, "torch on the GPU", "missing", text, _pip("torch") + " --force-reinstall", ("cuda",)),
        ]
    import torch

    driver = seen[0].rsplit(",", 1)[-1].strip() if seen else "unknown"
    findings = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        text = (
            f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB, sm_{properties.major}{properties.minor}, "
            f"{properties.multi_processor_count} SMs, driver {driver}"
        )
        findings.append(Finding(section, f"GPU {index}", "ok", text))
    return findings + _links(torch.cuda.device_count(), torch.cuda.can_device_access_peer)


def _links(num_gpus: int, can_access: Callable[[int, int], bool]) -> list[Finding]:
    section = "Links"
    if num_gpus < 2:
        return [Finding(section, "pairs", "info", "one GPU: no peer")]
    findings = []
    for gpu in range(num_gpus):
        peers = [peer for peer in range(num_gpus) if peer != gpu]
        apart = [peer for peer in peers if not can_access(gpu, peer)]
        if apart:
            text = f"cannot store to GPU {', '.join(map(str, apart))}: exchanges take the path of puts and signals"
            findings.append(Finding(section, f"GPU {gpu} to the others", "warning", text, "nvidia-smi topo -m"))
        else:
            findings.append(Finding(section, f"GPU {gpu} to the others", "ok", "load/store reachable"))
    for gpu, links in _nvlinks(_command("nvidia-smi", "nvlink", "--status") or "").items():
        findings.append(
            Finding(section, f"GPU {gpu} NVLink", "info" if links else "warning", links or "no active link")
        )
    topology = _command("nvidia-smi", "topo", "-m")
    if topology:
        matrix = re.split(r"\n\s*\n", re.sub(r"\x1b\[[0-9;]*m", "", topology).strip("\n"))[0]
        findings.append(Finding(section, "topology", "info", matrix))
    return findings


def _nvlinks(status: str) -> dict[int, str]:
    """Summarize `nvidia-smi nvlink --status`: {GPU: "18 x 26.562 GB/s"}."""
    summary: dict[int, str] = {}
    for block in re.split(r"^(?=GPU \d+:)", status, flags=re.MULTILINE):
        head = re.match(r"GPU (\d+):", block)
        if head is None:
            continue
        speeds = re.findall(r"Link \d+: ([\d.]+ GB/s)", block)
        counts = {speed: speeds.count(speed) for speed in sorted(set(speeds))}
        summary[int(head.group(1))] = ", ".join(f"{count} x {speed}" for speed, count in counts.items())
    return summary


def _cuda_packages() -> list[Finding]:
    from .runtime.compile import toolchain

    section = "NVSHMEM and CUDA packages"
    has_gpu = _cuda_works() or bool(_smi_gpus())
    # Without a GPU they are not missing: nothing could use them, so nothing is to be installed either.
    absent = "missing" if has_gpu else "info"
    not_installed = "not installed" if has_gpu else "not installed; of use with a GPU only"

    def lacks(name: str, text: str, remedy: str) -> Finding:
        return Finding(section, name, absent, text, remedy if has_gpu else "", ("cuda",))

    findings = []
    try:
        found = toolchain.find_nvshmem()
    except Exception as error:
        findings.append(lacks("NVSHMEM", str(error), toolchain.nvshmem_remedy()))
    else:
        if found is None:
            findings.append(lacks("NVSHMEM", not_installed, toolchain.nvshmem_remedy()))
        else:
            agree = "they agree" if found.agrees else "THEY DISAGREE"
            text = f"library {found.version}, headers {found.header_version}: {agree}; {found.host_library.parent}"
            remedy = "" if found.agrees else f"{_pip('nvidia-nvshmem-cu13')} --force-reinstall --no-deps"
            findings.append(Finding(section, "NVSHMEM", "ok" if found.agrees else "warning", text, remedy))
    for package, brought_by in (
        ("nvshmem4py-cu13", "nvshmem4py-cu13"),
        ("cuda-core", "cuda-core"),
        ("cuda-bindings", "cuda-python"),
    ):
        version = _version(package)
        if version:
            findings.append(Finding(section, package, "ok", version))
        else:
            findings.append(lacks(package, not_installed, _pip(_requirement(brought_by))))
    return findings


def _compilers() -> list[Finding]:
    from .runtime.compile import toolchain
    from .runtime.errors import CompileError

    section = "Compilers"
    findings = []
    try:
        cxx = toolchain.find_cxx()
        findings.append(Finding(section, "C++", "ok", f"{cxx.version}, {cxx.path}"))
    except CompileError as error:
        remedy = _unset("PERSISTENT_OPS_CXX", "CXX") or "apt-get install g++"
        findings.append(Finding(section, "C++", "missing", str(error), remedy, ("host",)))
    try:
        nvcc = toolchain.find_nvcc()
        findings.append(Finding(section, "nvcc", "ok", f"{nvcc.version} ({nvcc.source}), {nvcc.path}"))
    except CompileError as error:
        if num_kernels := _shipped_kernels(error):
            findings.append(Finding(section, "nvcc", "info", f"none; kernels in the compile cache: {num_kernels}"))
            return findings
        has_gpu = _cuda_works() or bool(_smi_gpus())
        remedy = _unset("PERSISTENT_OPS_NVCC") or (toolchain.nvcc_remedy() if has_gpu else "")
        findings.append(Finding(section, "nvcc", "missing" if has_gpu else "info", str(error), remedy, ("cuda",)))
    return findings


def _shipped_kernels(error: Exception) -> int:
    """Return how many GPU kernels a cache has that serves without nvcc, where that is what is wrong."""
    from .runtime.compile import cache as compile_cache, toolchain

    with contextlib.suppress(PersistentOpsError, OSError):  # which another finding is about
        return compile_cache.count_shared(".cubin") if isinstance(error, toolchain.NoCompilerError) else 0
    return 0


def _unset(*variables: str) -> str:
    """Return advice about the first variable that is set, and so decides alone; "" where none is."""
    found = next((name for name in variables if os.environ.get(name)), None)
    return f"correct {found}, or unset it" if found else ""


def _timeouts() -> list[Finding]:
    from .runtime import timeouts
    from .runtime.compile import cache as compile_cache

    section, findings = "Time-outs", []
    limits = (
        ("joining", "PERSISTENT_OPS_TIMEOUT", lambda: timeouts.for_joining(None)),
        ("operators", "PERSISTENT_OPS_OPERATOR_TIMEOUT", lambda: timeouts.for_operators(None)),
        ("compilers", "PERSISTENT_OPS_COMPILE_TIMEOUT", compile_cache.timeout),
    )
    for name, variable, find in limits:
        try:
            findings.append(Finding(section, name, "ok", f"{find():g} s"))
        except (ValueError, PersistentOpsError) as error:
            remedy = f"set {variable} to seconds, or unset it"
            findings.append(Finding(section, name, "missing", str(error), remedy, ("cuda", "host")))
    return findings


def _launchers() -> list[Finding]:
    from .runtime.bootstrap import launchers
    from .runtime.errors import BootstrapError

    section = "Launchers"
    findings = []
    try:
        found = launchers.detect(os.environ)
        text = "none: a world of one PE, or persistent_ops.launch"
        if found.launcher != "single":
            text = f"{found.launcher}, rank {found.rank} of {found.world_size}"
        findings.append(Finding(section, "started by", "ok", text))
    except BootstrapError as error:
        remedy = "unset the variables of the launcher that did not start this process"
        findings.append(Finding(section, "started by", "missing", str(error), remedy, ("cuda", "host")))
    beside = Path(sys.executable).parent
    for name, remedy in (
        ("torchrun", ""),
        ("mpiexec.hydra", _pip("mpich")),
        ("nvshmrun", ""),
        ("mpirun", "apt-get install openmpi-bin"),
        ("srun", ""),
    ):
        path = _open_mpi() if name == "mpirun" else shutil.which(name) or shutil.which(name, path=str(beside))
        if path or remedy:
            findings.append(
                Finding(section, name, "ok" if path else "info", path or "not found", "" if path else remedy)
            )
    return findings


def _open_mpi() -> str | None:
    """Return Open MPI's mpirun; MPICH, with which Hydra comes, has one of the same name."""
    beside = str(Path(sys.executable).parent)
    for folder in (*os.environ.get("PATH", os.defpath).split(os.pathsep), beside):
        for name in ("mpirun", "mpirun.openmpi"):
            path = shutil.which(name, path=folder)
            if path and "(Open" in (_command(path, "--version") or ""):
                return path
    return None


def _heap() -> list[Finding]:
    from .runtime import joining

    section = "Heap"
    sizes = joining._DEFAULT_HEAP_BYTES
    findings = [
        Finding(section, f"default on {backend}", "info", f"{nbytes / 2**30:.3g} GiB on each PE (heap_size= of init)")
        for backend, nbytes in sizes.items()
    ]
    try:
        descriptor = os.memfd_create("persistent_ops-doctor")
        os.close(descriptor)
        findings.append(Finding(section, "shared memory", "ok", "memfd_create works"))
    except (AttributeError, OSError) as error:
        text = f"memfd_create failed: {error}"
        findings.append(Finding(section, "shared memory", "missing", text, "run on Linux 3.17 or newer", ("host",)))
    available = available_memory()
    if available is not None:
        # Pages that are never touched cost nothing, so little memory is no error.
        findings.append(Finding(section, "memory for host PEs", "info", f"{available / 2**30:.1f} GiB available"))
    return findings


def _network() -> list[Finding]:
    from .runtime import joining

    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    locked_bytes = math.inf if soft == resource.RLIM_INFINITY else soft
    return examine_network(joining._DEFAULT_HEAP_BYTES["cuda"], locked_bytes)


def _cache() -> list[Finding]:
    from .runtime.compile import cache as compile_cache, jit

    section = "Kernels"
    findings = []
    try:
        root = jit.kernel_source_root()
        findings.append(Finding(section, "sources", "ok", str(root)))
    except Exception as error:
        findings.append(Finding(section, "sources", "missing", str(error), _pip("persistent-ops"), ("cuda", "host")))
    remedy, entries = "set PERSISTENT_OPS_CACHE to a folder of your own", 0
    try:
        folder = compile_cache.cache_folder()
        entries = len(list(folder.glob("entries/*")))
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        if error.errno in (errno.EROFS, errno.EACCES) and entries:
            text = f"{folder} cannot be written: only the {entries} kernels in it can be used"
            return [*findings, Finding(section, "compile cache", "warning", text, remedy)]
        findings.append(Finding(section, "compile cache", "missing", str(error), remedy, ("cuda", "host")))
    except Exception as error:
        findings.append(Finding(section, "compile cache", "missing", str(error), remedy, ("cuda", "host")))
    else:
        if os.statvfs(folder).f_flag & os.ST_NOEXEC:  # "cuda" asks compiled headers for their layout
            text = f"{folder} is mounted noexec: what is compiled cannot be loaded from there"
            findings.append(Finding(section, "compile cache", "missing", text, remedy, ("cuda", "host")))
            return findings
        findings.append(Finding(section, "compile cache", "ok", f"{folder}, writable, {entries} kernels"))
    return findings


_PROBES: Sequence[tuple[str, Callable[[], list[Finding]]]] = (
    ("Python", _python),
    ("GPUs", _gpus),
    ("NVSHMEM and CUDA packages", _cuda_packages),
    ("Compilers", _compilers),
    ("Time-outs", _timeouts),
    ("Launchers", _launchers),
    ("Heap", _heap),
    ("Network of several hosts", _network),
    ("Kernels", _cache),
)


# ---------------------------------------------------------------------------------------------------------------------
# Output
# ---------------------------------------------------------------------------------------------------------------------


def _section_table() -> Table:
    table = Table(box=None, pad_edge=False, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(width=7)
    table.add_column(width=26)
    table.add_column(overflow="fold")
    return table


def _print(report: Report, console: Console) -> None:
    table, section = _section_table(), ""
    for finding in report.findings:
        if finding.section != section:
            section = finding.section
            console.print(table)
            table = _section_table()
            console.print(f"\n[bold cyan]{escape(section)}[/]")
        table.add_row(_MARKS[finding.status], escape(finding.name), escape(finding.value))
    console.print(table)
    console.print()
    for backend in ("cuda", "host"):
        missing = report.missing_for(backend)
        if not missing:
            console.print(f"[green]{backend}: can run[/]")
        else:
            names = ", ".join(finding.name for finding in missing)
            console.print(f"[yellow]{backend}: cannot run[/], missing: {escape(names)}", highlight=False)
    advice = "" if report.can_run(report.auto) else ", which cannot run here yet: see below"
    console.print(f'backend="auto" takes {report.auto}{advice}', highlight=False)
    remedies = [finding for finding in report.findings if finding.remedy]
    if remedies:
        console.print("\n[bold]What would help[/]")
        for finding in remedies:
            console.print(
                f"  {escape(finding.name)}: [cyan]{escape(finding.remedy)}[/]", highlight=False, soft_wrap=True
            )

"""Compile kernels at first use and keep the result in a cache on disk.

The key of a binary is the hash of everything that decides the compiler's output: sources, macros, flags, compilers,
NVSHMEM, architecture, this package's version. `cache` keeps the binaries. Environment variables are read at every
call.

Where a machine has no compiler, a binary that another compiler has made of the same sources is taken.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.metadata
import json
import os
import platform
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import CompileError
from .cache import Job, cache_folder, fetch, fetch_shared
from .toolchain import NoCompilerError, Nvshmem, find_cxx, find_nvcc, find_nvshmem, nvshmem_remedy

__all__ = [
    "CudaBinary",
    "KernelResources",
    "KernelSource",
    "cache_folder",
    "clear_memo",
    "compile_cuda",
    "compile_host",
    "kernel_source_root",
    "load_host",
]

_FORMAT = 2  # of the cache; part of every key
_PACKAGED_FOLDER = "_cuda"

# Variables that change the compilers' output and are not on the command line.
_COMPILER_VARIABLES = (
    "CPATH",
    "CPLUS_INCLUDE_PATH",
    "C_INCLUDE_PATH",
    "COMPILER_PATH",
    "GCC_EXEC_PREFIX",
    "LIBRARY_PATH",
    "NVCC_APPEND_FLAGS",
    "NVCC_CCBIN",
    "NVCC_PREPEND_FLAGS",
)
# Variables that decide which compiler and which cache folder are used.
_LOOKUP_VARIABLES = (
    "PERSISTENT_OPS_CACHE",
    "XDG_CACHE_HOME",
    "HOME",
    "PERSISTENT_OPS_CXX",
    "CXX",
    "PERSISTENT_OPS_NVCC",
    "CUDA_HOME",
    "PATH",
)


@dataclass(frozen=True)
class KernelSource:
    """A kernel file and the configuration that it is compiled with.

    Attributes:
        entry: path of the file, relative to the root, for example "kernels/barrier.cuh".
        defines: (name, value) pairs, each passed as -Dname=value; no name twice.
        root: folder that includes are relative to; None for the package's own kernel sources.
        head, tail: lines of C++ before and after the file: what instantiates its templates, for one.
    """

    entry: str
    defines: tuple[tuple[str, str], ...] = ()
    root: Path | None = None
    head: str = ""
    tail: str = ""

    @property
    def unit(self) -> str:
        """The input of the compiler."""
        return f'{self.head}#include "{self.entry}"\n{self.tail}'


@dataclass(frozen=True)
class KernelResources:
    """The resources of one kernel, as the assembler reports them.

    Attributes:
        name: symbol in the cubin.
        registers: per thread; of the linked kernel where it was linked with NVSHMEM.
        spill_store_bytes: register spills written by the kernel and the functions it calls, in bytes per thread; by the
            kernel alone where it was linked with NVSHMEM.
        spill_load_bytes: register spills read, likewise.
        stack_bytes: per thread, the functions it calls included.
        shared_bytes: static shared memory per block.
        barriers: named barriers per block.
    """

    name: str
    registers: int
    spill_store_bytes: int
    spill_load_bytes: int
    stack_bytes: int
    shared_bytes: int
    barriers: int


@dataclass(frozen=True)
class CudaBinary:
    """A compiled cubin.

    Attributes:
        path: the file.
        arch: the architecture asked for, for example "sm_90".
        kernels: what each kernel uses, by symbol.
        log: what the compiler printed, warnings included.
    """

    path: Path
    arch: str
    kernels: Mapping[str, KernelResources]
    log: str


_memo: dict[tuple[Any, ...], tuple[Path, Any]] = {}


def clear_memo() -> None:
    """Forget which binaries this process has asked for; the cache on disk stays."""
    _memo.clear()


def kernel_source_root() -> Path:
    """Return the folder with the kernel sources.

    Returns:
        persistent_ops/_cuda in an installed package, cuda/ beside the package in a checkout.

    Raises:
        CompileError: neither exists; the installation is damaged.
    """
    package = Path(__file__).resolve().parents[2]
    for folder in (package / _PACKAGED_FOLDER, package.parent / "cuda"):
        if folder.is_dir():
            return folder
    raise CompileError(
        f"the kernel sources are missing: neither {package / _PACKAGED_FOLDER} nor {package.parent / 'cuda'} exists. "
        "Install persistent_ops again."
    )


# ---------------------------------------------------------------------------------------------------------------------
# The key
# ---------------------------------------------------------------------------------------------------------------------

_INCLUDE = re.compile(r"^[ \t]*#[ \t]*include(?:_next)?[ \t]*(.*)$", re.MULTILINE)
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")


def _scan(root: Path, entry: str) -> dict[str, str]:
    """Return {path relative to root: sha256} of the entry and of every file below root that it can include.

    Conditions are not evaluated: a file counts even where the preprocessor would skip the line, which can only cost a
    needless compilation. Files that are found neither beside the includer nor below root belong to the compiler or to
    a library, whose versions are in the key.
    """
    root = root.resolve()
    digests: dict[str, str] = {}
    waiting = [(root / entry).resolve()]
    while waiting:
        path = waiting.pop()
        name = path.relative_to(root).as_posix()
        if name in digests:
            continue
        try:
            data = path.read_bytes()
        except OSError as error:
            raise CompileError(f"kernel source {path} cannot be read: {error}") from error
        digests[name] = hashlib.sha256(data).hexdigest()
        text = data.decode("utf-8", errors="replace").replace("\\\n", " ")
        for match in _INCLUDE.finditer(text):
            operand = match.group(1).strip()
            quoted = re.match(r'"([^"]+)"|<([^>]+)>', operand)
            if quoted is None:
                raise CompileError(
                    f"{path} includes {operand!r}, which is not the name of a file; write the file's name in the "
                    "#include, so that the compile cache sees when it changes."
                )
            target = quoted.group(1) or quoted.group(2)
            folders = (path.parent, root) if quoted.group(1) else (root,)
            for folder in folders:
                found = (folder / target).resolve()
                if not found.is_file():
                    continue
                if not found.is_relative_to(root):
                    raise CompileError(f"{path} includes {found}, which is outside the kernel sources in {root}.")
                waiting.append(found)
                break
    return digests


def _package_version() -> str:
    try:
        return importlib.metadata.version("persistent_ops")
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _resolve(source: KernelSource) -> Path:
    """Check a KernelSource and return its root."""
    root = kernel_source_root() if source.root is None else Path(source.root)
    parts = Path(source.entry).parts
    if not parts or Path(source.entry).is_absolute() or ".." in parts:
        raise ValueError(
            f"entry must be a path below the kernel sources, such as 'kernels/name.cuh'; got {source.entry!r}."
        )
    if not (root / source.entry).is_file():
        raise CompileError(f"kernel source {source.entry!r} does not exist in {root}.")
    seen = set()
    for name, value in source.defines:
        if not _NAME.match(name):
            raise ValueError(f"defines: {name!r} is no name of a macro (letters, digits, underscores).")
        if name in seen:
            raise ValueError(f"defines: {name!r} is given twice; give each macro one value.")
        if "\n" in value or "\0" in value:
            raise ValueError(f"defines: the value of {name!r} must be one line; got {value!r}.")
        seen.add(name)
    return root


def _define_flags(defines: Sequence[tuple[str, str]]) -> list[str]:
    return [f"-D{name}={value}" for name, value in sorted(defines)]


def _shared_key(source: KernelSource, sources: Mapping[str, str], **parts: object) -> str:
    """Return the hash of what is compiled; `parts`: for what."""
    content = {
        "format": _FORMAT,
        "package": _package_version(),
        "entry": source.entry,
        "sources": sources,
        "head": source.head,
        "tail": source.tail,
        "defines": sorted(source.defines),
        **parts,
    }
    return _hash(content)


def _key(shared_key: str, **parts: object) -> str:
    """Return the hash of the same and of how it is compiled."""
    variables = {name: os.environ[name] for name in _COMPILER_VARIABLES if name in os.environ}
    return _hash({"shared": shared_key, "variables": variables, **parts})


def _hash(content: Mapping[str, object]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:40]


def _memo_key(*parts: object) -> tuple[Any, ...]:
    environ = os.environ
    return (
        *parts,
        *[environ.get(name) for name in _LOOKUP_VARIABLES],
        *[environ.get(name) for name in _COMPILER_VARIABLES],
    )


# ---------------------------------------------------------------------------------------------------------------------
# The two compilers
# ---------------------------------------------------------------------------------------------------------------------

# What the assembler prints where it ignores setmaxnreg, or makes products of a warpgroup wait for each other.
_SLOW_PRODUCTS = re.compile(r"\(C75\d\d\).*")
_HOST_FLAGS = ("-std=c++20", "-fPIC", "-shared", "-fvisibility=hidden", "-pthread", "-Wall", "-Wextra")
# A sum must have the same bits on every machine: no fused multiply-add where the source has two operations.
_HOST_ARITHMETIC = ("-ffp-contract=off",)


def compile_host(source: KernelSource, *, is_portable: bool = False) -> Path:
    """Compile a kernel for this machine's processor.

    Sources are taken as constant for the life of the process: a second call with the same arguments and environment
    looks at the file system only to see that the library is still there.

    Args:
        source: the kernel.
        is_portable: True to build with -O0 for all processors of this kind.

    Returns:
        The shared library in the compile cache.

    Raises:
        CompileError: there is no compiler, the source does not compile, or the cache cannot be used.
        ValueError: an argument is malformed.
    """
    memo_key = _memo_key("host", source, is_portable)
    hit = _memo.get(memo_key)
    if hit is not None and hit[0].exists():
        return hit[0]
    root = _resolve(source)
    stem, sources = Path(source.entry).stem, _scan(root, source.entry)
    shared_key = _shared_key(source, sources, target=f"host {platform.machine()}") if is_portable else None
    try:
        compiler = find_cxx()
    except NoCompilerError:
        shared = None if shared_key is None else fetch_shared(shared_key, f"{stem}.so")
        if shared is None:
            raise
        _memo[memo_key] = (shared[0], None)
        return shared[0]
    # PERSISTENT_OPS_CXX may end with another level, which counts because it comes later.
    native = [*_HOST_ARITHMETIC, "-O3", *compiler.native_flags]
    flags = [*_HOST_FLAGS, *([] if is_portable else native), *compiler.flags, *["-O0"] * is_portable]
    key = _key(
        shared_key or _shared_key(source, sources, target="host"),
        flags=flags,
        compiler=compiler.identity,
        launcher=compiler.command[:-1],
    )
    command = (
        *compiler.command,
        *flags,
        *_define_flags(source.defines),
        f"-I{root.resolve()}",
        f"{stem}.cpp",
        "-o",
        f"{stem}.so",
    )
    job = Job(
        what=f"compiling {source.entry} for the host",
        key=key,
        artifact=f"{stem}.so",
        unit=(f"{stem}.cpp", source.unit),
        commands=(command,),
        unchanged=lambda: _scan(root, source.entry) == sources,
        shared_key=shared_key,
    )
    path, _ = fetch(job)
    _memo[memo_key] = (path, None)
    return path


def load_host(source: KernelSource, *, is_portable: bool = False) -> ctypes.CDLL:
    """Compile a kernel, see `compile_host`, and load it.

    Raises:
        CompileError, ValueError: see `compile_host`; CompileError too where the library cannot be loaded.
    """
    path = compile_host(source, is_portable=is_portable)
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise CompileError(
            f"{path} cannot be loaded: {error}. Is its filesystem mounted noexec? Set PERSISTENT_OPS_CACHE to a folder "
            "whose files may be executed."
        ) from error


def compile_cuda(
    source: KernelSource, *, arch: str = "sm_90", nvshmem: bool = False, extra_flags: Sequence[str] = ()
) -> CudaBinary:
    """Compile a kernel to a cubin for one GPU architecture.

    nvcc preprocesses with the C++ compiler that the host build uses; NVCC_CCBIN names another one. Sources are taken as
    constant for the life of the process, as in `compile_host`.

    Args:
        source: the kernel.
        arch: the architecture as nvcc spells it, such as "sm_80", "sm_90", "sm_90a" or "sm_100".
        nvshmem: True to link it with NVSHMEM's device library; the source then sees PO_WITH_NVSHMEM=1.
        extra_flags: more flags for nvcc, one string each; files that they name are not watched for changes.

    Returns:
        The cubin in the compile cache, with the resources of each kernel.

    Raises:
        CompileError: nvcc, the C++ compiler or NVSHMEM is missing, the source does not compile, or the cache cannot be
            used.
        TypeError: extra_flags is one string.
        ValueError: an argument is malformed.
    """
    if isinstance(extra_flags, str):
        raise TypeError(
            f"extra_flags must be a sequence of strings; got the string {extra_flags!r}. Put it in a tuple."
        )
    memo_key = _memo_key("cuda", source, arch, nvshmem, tuple(extra_flags))
    hit = _memo.get(memo_key)
    if hit is not None and hit[0].exists():
        binary: CudaBinary = hit[1]
        return binary
    architecture = re.match(r"sm_(\d{2,3}[af]?)\Z", arch)
    if architecture is None:
        raise ValueError(f"arch must be an architecture such as 'sm_90'; got {arch!r}.")
    library = _nvshmem_for(source) if nvshmem else None
    path, manifest = _fetch_cuda(source, arch, architecture.group(1), library, extra_flags)
    if slow := _SLOW_PRODUCTS.search(manifest["log"]):
        raise CompileError(f"compiling {source.entry} for {arch}: the tensor cores would wait: {slow.group(0)}")
    binary = CudaBinary(path, arch, _parse_resources(manifest["log"]), manifest["log"])
    _memo[memo_key] = (path, binary)
    return binary


def _fetch_cuda(
    source: KernelSource, arch: str, number: str, library: Nvshmem | None, extra_flags: Sequence[str]
) -> tuple[Path, dict[str, Any]]:
    """Return a cubin and its manifest; `number`: of the architecture."""
    root, stem = _resolve(source), Path(source.entry).stem
    unit, cubin = f"{stem}.cu", f"{stem}.cubin"
    sources = _scan(root, source.entry)
    linked_with = None if library is None else library.version
    shared_key = _shared_key(source, sources, target=arch, extra_flags=list(extra_flags), nvshmem=linked_with)
    try:
        compiler = find_nvcc()
    except NoCompilerError as error:
        shared = fetch_shared(shared_key, cubin)
        if shared is None:
            raise CompileError(
                f"{source.entry} for {arch} is not in the cache {cache_folder()}, and {error}"
            ) from error
        return shared
    # Named to nvcc explicitly, so that the compiler in the key is the one that preprocesses; nvcc knows no launchers.
    preprocessor = None if "NVCC_CCBIN" in os.environ else find_cxx()
    host = [] if preprocessor is None else ["-ccbin", str(preprocessor.path)]
    target = f"-gencode=arch=compute_{number},code=sm_{number}"
    flags = ["-std=c++20", "-O3", target, "-Xptxas=-v", *extra_flags]
    arguments = [*_define_flags(source.defines), *[f"-I{each}" for each in (root.resolve(), *compiler.include_dirs)]]
    nvcc = str(compiler.path)
    if library is None:
        commands = [(nvcc, *flags, *host, *arguments, "-cubin", unit, "-o", cubin)]
    else:
        arguments += ["-DPO_WITH_NVSHMEM=1", f"-I{library.include_dir}"]
        linked = [f"{stem}.o", str(library.device_library)]
        commands = [
            (nvcc, *flags, *host, "-rdc=true", *arguments, "-dc", unit, "-o", f"{stem}.o"),
            (nvcc, target, *host, "-dlink", "-cubin", "-Xnvlink=-v", *linked, "-o", cubin),
        ]
    key = _key(
        shared_key,
        flags=flags,
        compiler=compiler.identity,
        preprocessor=None if preprocessor is None else [str(preprocessor.path), preprocessor.version],
    )
    job = Job(
        what=f"compiling {source.entry} for {arch}",
        key=key,
        artifact=cubin,
        unit=(unit, source.unit),
        commands=tuple(commands),
        unchanged=lambda: _scan(root, source.entry) == sources,
        shared_key=shared_key,
    )
    return fetch(job)


def _nvshmem_for(source: KernelSource) -> Nvshmem:
    """Return the NVSHMEM that a kernel is linked with; raise if it cannot be linked."""
    library = find_nvshmem()
    if library is None:
        raise CompileError(f"compiling {source.entry} needs NVSHMEM, which is not installed. Run: {nvshmem_remedy()}")
    if not library.agrees:
        raise CompileError(
            f"NVSHMEM's headers in {library.include_dir} are version {library.header_version}, but its library is "
            f"{library.version}; two installations are mixed. Run: {nvshmem_remedy()} --force-reinstall --no-deps"
        )
    if any(name == "PO_WITH_NVSHMEM" for name, _ in source.defines):
        raise ValueError("defines: PO_WITH_NVSHMEM is set by nvshmem=True; do not give it.")
    return library


def _parse_resources(log: str) -> dict[str, KernelResources]:
    """Read what `ptxas -v` and `nvlink -v` print about each kernel."""
    kernels: dict[str, dict[str, int]] = {}
    # Compiled as a whole, the functions that a kernel calls and that were not inlined are listed after it. Compiled to
    # be linked, they are listed anywhere, NVSHMEM's among them, and cannot be distinguished.
    whole = "nvlink info" not in log
    kernel = function = linked = ""
    for line in log.splitlines():
        if found := re.search(r"ptxas info\s*: Compiling entry function '([^']+)'", line):
            kernel, linked = found.group(1), ""
            kernels[kernel] = dict.fromkeys(KernelResources.__dataclass_fields__.keys() - {"name"}, 0)
        elif found := re.search(r"nvlink info\s*: Function properties for '([^']+)'", line):
            linked = found.group(1)
        elif found := re.search(r"Function properties for (\S+)", line):
            function = found.group(1)
        elif found := re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", line):
            stack, stores, loads = map(int, found.groups())
            if function == kernel:
                kernels[kernel]["stack_bytes"] = stack
            if function == kernel or (whole and kernel):
                kernels[kernel]["spill_store_bytes"] += stores
                kernels[kernel]["spill_load_bytes"] += loads
        elif found := re.search(r"[Uu]sed (\d+) registers", line):
            name = linked or kernel
            if name in kernels:
                kernels[name]["registers"] = int(found.group(1))
                for field, pattern in (
                    ("barriers", r"used (\d+) barriers"),
                    ("stack_bytes", r"(\d+) bytes cumulative stack size|(\d+) stack"),
                    ("shared_bytes", r"(\d+) bytes smem"),
                ):
                    if number := re.search(pattern, line):
                        kernels[name][field] = int(next(group for group in number.groups() if group))
    return {name: KernelResources(name, **values) for name, values in kernels.items()}

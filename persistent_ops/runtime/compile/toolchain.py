"""Find the compilers and libraries for kernels.

Importing this module looks up, starts and loads nothing: every function reads the environment when it is called. The
report of a compiler about itself is cached per executable (path, size, modification time), so a second question starts
no second process.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from ..errors import CompileError

__all__ = ["Cxx", "NoCompilerError", "Nvcc", "Nvshmem", "find_cxx", "find_nvcc", "find_nvshmem"]

# The kernels' ld and st.relaxed.sys.b128. PTX ISA, "ld" and "st", PTX ISA Notes: "Support for .b128 type introduced in
# PTX ISA version 8.3. Support for .sys scope with .b128 type introduced in PTX ISA version 8.4." Its release history
# gives 8.4 to CUDA 12.4. (-std=c++20 alone would need 12.0.)
_MIN_NVCC = (12, 4)
_MIN_CPLUSPLUS = 201709  # what g++ 10, the oldest compiler with -std=c++20, reports for it
_PROBE_TIMEOUT_S = 60.0

# nvidia-cuda-nvcc requires nvidia-nvvm and nvidia-cuda-crt without a version: pip would take the newest, whose cicc
# writes PTX that an older ptxas refuses. So all five are pinned to one release.
_NVCC_WHEELS = ("nvidia-cuda-nvcc", "nvidia-nvvm", "nvidia-cuda-crt", "nvidia-cuda-runtime", "nvidia-cuda-cccl")
_NVSHMEM_WHEEL = "nvidia-nvshmem-cu13"


class NoCompilerError(CompileError):
    """There is no compiler on this machine, and no variable names one."""


@dataclass(frozen=True)
class Nvcc:
    """A CUDA compiler that was found.

    Attributes:
        path: the nvcc executable.
        version: release and build, for example "13.0.88".
        source: "system" for an installed toolkit, "wheel" for the nvidia-cuda-* packages of this Python environment.
        identity: text that differs between two compilers that may produce different code.
        include_dirs: folders that must be passed to nvcc with -I.
    """

    path: Path
    version: str
    source: str
    identity: str
    include_dirs: tuple[Path, ...] = ()

    @property
    def release(self) -> tuple[int, int]:
        """Return (major, minor) of the CUDA release."""
        major, minor = self.version.split(".")[:2]
        return int(major), int(minor)


@dataclass(frozen=True)
class Cxx:
    """A C++ compiler that accepts -std=c++20.

    Attributes:
        path: the compiler's executable.
        version: first line of its --version.
        identity: text that differs between two compilers, or two processors, that may produce different code.
        command: the words that start it, the executable last (a launcher such as ccache may come first).
        native_flags: those that tune for this machine's processor.
        flags: those that the variable has.
    """

    path: Path
    version: str
    identity: str
    command: tuple[str, ...]
    native_flags: tuple[str, ...] = ()
    flags: tuple[str, ...] = ()


@dataclass(frozen=True)
class Nvshmem:
    """NVSHMEM as its wheel installs it; nothing of it is loaded.

    Attributes:
        version: version of the library, from the wheel's metadata.
        header_version: version that the headers name; it must agree with `version`.
        include_dir: folder with nvshmem.h.
        device_library: libnvshmem_device.a, linked into kernels.
        host_library: libnvshmem_host.so.N, what a process loads.
    """

    version: str
    header_version: str
    include_dir: Path
    device_library: Path
    host_library: Path

    @property
    def agrees(self) -> bool:
        """Return whether headers and library are of the same version (first three numbers)."""
        return self.version.split(".")[:3] == self.header_version.split(".")[:3]


def _run(command: tuple[str, ...]) -> tuple[int, str]:
    """Run a short query and return its exit status and its output, both streams together."""
    try:
        done = subprocess.run(
            command,
            check=False,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_PROBE_TIMEOUT_S,
        )
    except subprocess.TimeoutExpired:
        return -1, f"no answer within {_PROBE_TIMEOUT_S:.0f} s"
    except OSError as error:
        return -1, str(error)
    return done.returncode, done.stdout + done.stderr


@functools.lru_cache(maxsize=32)
def _probe_nvcc(path: str, size: int, mtime_ns: int) -> tuple[str, str]:
    """Return (version, text); version is empty where the executable is no nvcc."""
    status, text = _run((path, "--version"))
    found = re.search(r"release [\d.]+, V([\d.]+)", text)
    return (found.group(1) if status == 0 and found else "", text.strip())


@functools.lru_cache(maxsize=32)
def _probe_cxx(
    command: tuple[str, ...], native_flags: tuple[str, ...], size: int, mtime_ns: int
) -> tuple[str, str, str]:
    """Return (problem, version, identity); problem is empty where the compiler can be used."""
    status, version_text = _run((*command, "--version"))
    if status != 0:
        return f"`{shlex.join(command)} --version` failed: {version_text.strip()[:400]}", "", ""
    # The predefined macros say which standard the compiler speaks and, with the native flags, which instructions it
    # believes that this processor has: code built on one node of a cluster must not be taken from a shared home
    # folder on a node that lacks them.
    status, macros = _run((*command, "-std=c++20", *native_flags, "-dM", "-E", "-x", "c++", os.devnull))
    if status != 0:
        return f"it refuses -std=c++20: {macros.strip()[:400]}", "", ""
    standard = re.search(r"#define __cplusplus (\d+)L", macros)
    if standard is None or int(standard.group(1)) < _MIN_CPLUSPLUS:
        return "it does not know C++20", "", ""
    digest = hashlib.sha256("\n".join(sorted(macros.splitlines())).encode()).hexdigest()
    version = version_text.strip().splitlines()[0] if version_text.strip() else "unknown"
    return "", version, f"{os.path.realpath(command[-1])}\n{version_text.strip()}\nmacros {digest}"


def _stat_key(path: str) -> tuple[int, int]:
    status = os.stat(path)
    return status.st_size, status.st_mtime_ns


def _is_executable(path: str | Path) -> bool:
    return os.path.isfile(path) and os.access(path, os.X_OK)


def _pip(*packages: str) -> str:
    return f"{shlex.quote(sys.executable)} -m pip install " + " ".join(f'"{package}"' for package in packages)


def nvcc_remedy(release: str = "13.0") -> str:
    """Return the command that installs a CUDA compiler of one release into this Python environment."""
    return _pip(*(f"{wheel}=={release}.*" for wheel in _NVCC_WHEELS))


def nvshmem_remedy() -> str:
    """Return the command that installs NVSHMEM into this Python environment."""
    return _pip(_NVSHMEM_WHEEL)


def _distribution(name: str) -> importlib.metadata.Distribution | None:
    try:
        return importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _wheel_file(distribution: importlib.metadata.Distribution, suffix: str) -> Path | None:
    """Return the installed file of a wheel whose path ends with `suffix`, or None."""
    for file in distribution.files or ():
        if file.as_posix().endswith(suffix):
            path = Path(str(distribution.locate_file(file)))
            if path.exists():
                return path
    return None


def _release_of(version: str) -> str:
    return ".".join(version.split(".")[:2])


def _wheel_nvcc() -> tuple[Path, tuple[Path, ...]] | None:
    """Find nvcc of the wheels: (executable, folders to add with -I), or None where it is not installed.

    All wheels unpack into one tree (nvidia/cu13/{bin,include,lib,nvvm}), in which nvcc finds cicc, libdevice and the
    headers through its own nvcc.profile. Only where pip spread them over two site-packages does it need help.
    """
    compiler = _distribution("nvidia-cuda-nvcc")
    path = _wheel_file(compiler, "/bin/nvcc") if compiler is not None else None
    if compiler is None or path is None:
        return None
    root = path.parent.parent
    release = _release_of(compiler.version)
    problems = []
    for name in ("nvidia-nvvm", "nvidia-cuda-crt"):
        part = _distribution(name)
        if part is None:
            problems.append(f"{name} is not installed")
        elif _release_of(part.version) != release:
            problems.append(f"{name} is {part.version}, but nvidia-cuda-nvcc is {compiler.version}")
    include_dirs: list[Path] = []
    for name, header in (
        ("nvidia-cuda-runtime", "include/cuda_runtime.h"),
        ("nvidia-cuda-cccl", "include/cccl/cuda/std/atomic"),
    ):
        if (root / header).is_file():
            continue
        part = _distribution(name)
        found = _wheel_file(part, f"/{header}") if part is not None else None
        if found is None:
            problems.append(f"{name} is not installed")
        else:
            include_dirs.append(Path(str(found)[: -len(header)]) / ("include/cccl" if "cccl" in header else "include"))
    if not problems and not (root / "nvvm" / "bin" / "cicc").is_file():
        problems.append(f"{root / 'nvvm' / 'bin' / 'cicc'} is missing")
    if problems:
        raise CompileError(
            f"the CUDA compiler at {path} cannot be used: {'; '.join(problems)}. Its packages must all be of one "
            f"release; install them with: {nvcc_remedy(release)}"
        )
    return path, tuple(include_dirs)


def _nvcc_at(path: Path, source: str, include_dirs: tuple[Path, ...] = ()) -> tuple[Nvcc | None, str]:
    """Ask an executable whether it is an nvcc that can be used: (compiler, "") or (None, why not)."""
    path = Path(os.path.abspath(path))  # it will be started from another folder
    version, text = _probe_nvcc(str(path), *_stat_key(str(path)))
    if not version:
        return None, f"{path} did not answer as nvcc: {text[:200]}"
    found = Nvcc(path, version, source, f"{os.path.realpath(path)}\n{text}", include_dirs)
    if found.release < _MIN_NVCC:
        return None, (
            f"{path} is release {version}, but the kernels need {_MIN_NVCC[0]}.{_MIN_NVCC[1]} or newer, for loads and "
            "stores of 128 bits with system scope (ld, st.relaxed.sys.b128: PTX ISA 8.4)"
        )
    return found, ""


def _toolkit_release(folder: Path) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", folder.name))


def find_nvcc() -> Nvcc:
    """Find the CUDA compiler.

    Order: PERSISTENT_OPS_NVCC (no other is tried where it is set), CUDA_HOME/bin, PATH, /usr/local/cuda*/bin (the
    plain name first, then the newest), and the wheels nvidia-cuda-nvcc, -runtime and -cccl of this Python environment.

    Returns:
        The first compiler of that order that works and is of release 12.4 or newer.

    Raises:
        CompileError: none was found, PERSISTENT_OPS_NVCC names none, or the wheels do not fit each other. The
            message says what was looked at and which command installs a compiler.
    """
    explicit = os.environ.get("PERSISTENT_OPS_NVCC")
    if explicit:
        resolved = shutil.which(explicit)
        found, problem = _nvcc_at(Path(resolved), "system") if resolved else (None, f"{explicit} is no executable file")
        if found is None:
            raise CompileError(f"PERSISTENT_OPS_NVCC names no usable CUDA compiler: {problem}. Correct it or unset it.")
        return found
    candidates: list[Path] = []
    home = os.environ.get("CUDA_HOME")
    if home:
        candidates.append(Path(home) / "bin" / "nvcc")
    on_path = shutil.which("nvcc")
    if on_path:
        candidates.append(Path(on_path))
    candidates += [folder / "bin" / "nvcc" for folder in _system_toolkits()]
    looked_at = []
    for candidate in candidates:
        if not _is_executable(candidate):
            looked_at.append(f"{candidate} does not exist")
            continue
        found, problem = _nvcc_at(candidate, "system")
        if found is not None:
            return found
        looked_at.append(problem)
    wheel = _wheel_nvcc()
    if wheel is not None:
        found, problem = _nvcc_at(wheel[0], "wheel", wheel[1])
        if found is not None:
            return found
        looked_at.append(problem)
    looked_at.append(
        "the wheel nvidia-cuda-nvcc is not usable" if wheel else "the wheel nvidia-cuda-nvcc is not installed"
    )
    raise NoCompilerError(
        "no CUDA compiler (nvcc) was found: neither PERSISTENT_OPS_NVCC nor CUDA_HOME names one, and there is none on "
        f"PATH or in /usr/local/cuda*/bin ({'; '.join(looked_at)}). Install one into this Python environment with: "
        f"{nvcc_remedy()}"
    )


def _system_toolkits() -> list[Path]:
    """Return the toolkit folders of the usual place: the default link first, then the newest release."""
    folders = sorted(Path("/usr/local").glob("cuda*"), key=_toolkit_release, reverse=True)
    return sorted(folders, key=lambda folder: folder.name != "cuda")


def _native_flags() -> tuple[str, ...]:
    machine = platform.machine().lower()
    if machine in ("x86_64", "amd64"):
        return ("-march=native",)
    if machine in ("aarch64", "arm64"):
        return ("-mcpu=native",)
    return ()


def _cxx_at(words: tuple[str, ...]) -> tuple[Cxx | None, str]:
    """Ask a command whether it is a C++20 compiler: (compiler, "") or (None, why not)."""
    num_programs = next((number for number, word in enumerate(words) if word.startswith("-")), len(words))
    resolved = [shutil.which(word) for word in words[:num_programs]]
    for word, path in zip(words, resolved, strict=False):
        if path is None:
            return None, f"{word} is no executable file"
    command = tuple(os.path.abspath(path) for path in resolved if path is not None)
    if not command:
        return None, f"{words[0]} is no executable file"
    native_flags, flags = _native_flags(), words[num_programs:]
    problem, version, identity = _probe_cxx(command, (*native_flags, *flags), *_stat_key(command[-1]))
    if problem:
        return None, f"{command[-1]} cannot be used: {problem}"
    return Cxx(Path(command[-1]), version, identity, command, native_flags, flags), ""


def find_cxx() -> Cxx:
    """Find the C++ compiler.

    Order: PERSISTENT_OPS_CXX, then CXX (either may begin with a launcher such as ccache, and end with flags; no other
    compiler is tried where one is set), then c++, g++ and clang++ on PATH.

    Returns:
        The first compiler of that order that accepts -std=c++20.

    Raises:
        CompileError: none was found, or the variable names one that cannot be used. The message says what was looked
            at and how to install one.
    """
    for variable in ("PERSISTENT_OPS_CXX", "CXX"):
        value = os.environ.get(variable)
        if value:
            try:
                words = (value,) if os.path.exists(value) else tuple(shlex.split(value))
            except ValueError as error:
                raise CompileError(
                    f"{variable}={value!r} cannot be read as a command: {error}. Correct or unset it."
                ) from None
            found, problem = _cxx_at(words) if words else (None, "it is blank")
            if found is None:
                raise CompileError(
                    f"{variable}={value!r} names no usable C++ compiler: {problem}. It must accept -std=c++20 (g++ 10 "
                    "or clang++ 10 and newer). Correct it or unset it."
                )
            return found
    looked_at = []
    for name in ("c++", "g++", "clang++"):
        found, problem = _cxx_at((name,))
        if found is not None:
            return found
        looked_at.append(problem)
    raise NoCompilerError(
        f"no C++20 compiler was found on PATH ({'; '.join(looked_at)}). Install one, for example with `apt-get install "
        "g++`, `dnf install gcc-c++` or `conda install -c conda-forge cxx-compiler`, or name one in PERSISTENT_OPS_CXX."
    )


def find_nvshmem() -> Nvshmem | None:
    """Find NVSHMEM's headers and libraries in the wheel nvidia-nvshmem-cu13.

    Returns:
        Where they are and their versions, or None where the wheel is not installed. Nothing is loaded.

    Raises:
        CompileError: the wheel is installed but a part of it is missing.
    """
    wheel = _distribution(_NVSHMEM_WHEEL)
    if wheel is None:
        return None
    header = _wheel_file(wheel, "/include/nvshmem.h")
    version_header = _wheel_file(wheel, "/non_abi/nvshmem_version.h")
    device = _wheel_file(wheel, "/lib/libnvshmem_device.a")
    host = None
    for file in wheel.files or ():
        if re.search(r"/lib/libnvshmem_host\.so\.\d+$", file.as_posix()):
            host = Path(str(wheel.locate_file(file)))
    if header is None or version_header is None or device is None or host is None or not host.exists():
        raise CompileError(
            f"the wheel {_NVSHMEM_WHEEL} {wheel.version} is installed, but its headers or libraries are missing. "
            f"Install it again with: {_pip(f'{_NVSHMEM_WHEEL}=={wheel.version}')} --force-reinstall --no-deps"
        )
    text = version_header.read_text(errors="replace")
    numbers = []
    for part in ("MAJOR", "MINOR", "PATCH"):
        found = re.search(rf"#\s*define\s+NVSHMEM_VENDOR_{part}_VERSION\s+(\d+)", text)
        if found is None:
            raise CompileError(
                f"{version_header} does not define NVSHMEM_VENDOR_{part}_VERSION; reinstall {_NVSHMEM_WHEEL}."
            )
        numbers.append(found.group(1))
    return Nvshmem(wheel.version, ".".join(numbers), header.parent, device, host)

"""Compiling kernels: what is in the key, what the compilers are passed, and what they report."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from jit_workshop import (
    BARE_PACKAGE,
    CXX_FLAGS,
    ENTRY,
    FAKE_NVCC,
    REAL_CXX,
    REPOSITORY,
    WRAPPER,
    Workshop,
    add_nvshmem,
    make_workshop,
    value_of,
    write_script,
)

from persistent_ops.runtime.compile import jit, toolchain
from persistent_ops.runtime.compile.jit import KernelSource, compile_cuda, compile_host
from persistent_ops.runtime.errors import CompileError


@pytest.fixture
def workshop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Workshop:
    return make_workshop(tmp_path, monkeypatch)


@pytest.fixture
def fake_nvcc(workshop: Workshop, monkeypatch: pytest.MonkeyPatch) -> Path:
    script = write_script(workshop.state / "nvcc", FAKE_NVCC.format(state=workshop.state, release="13.0"))
    monkeypatch.setenv("PERSISTENT_OPS_NVCC", str(script))
    return workshop.state / "nvcc_calls"


def test_library_computes_and_a_hit_does_not_compile(workshop: Workshop) -> None:
    first = workshop.build()
    assert value_of(first) == 7
    assert workshop.build() == first
    assert workshop.compilations == 1


def test_second_call_in_a_process_does_not_look_at_the_cache(
    workshop: Workshop, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = compile_host(workshop.source)

    def unexpected(*_: object) -> None:
        raise AssertionError("the remembered library was looked up again")

    monkeypatch.setattr(jit, "fetch", unexpected)
    monkeypatch.setattr(jit, "find_cxx", unexpected)
    assert compile_host(workshop.source) == first


def test_remembered_library_that_was_deleted_is_compiled_again(workshop: Workshop) -> None:
    first = compile_host(workshop.source)
    shutil.rmtree(workshop.cache)
    assert compile_host(workshop.source) == first
    assert value_of(first) == 7
    assert workshop.compilations == 2


def test_key_follows_transitively_included_headers(workshop: Workshop) -> None:
    first = workshop.build()
    header = workshop.root / "platform" / "deep.h"
    original = header.read_text()
    header.write_text(original.replace("7", "8"))
    second = workshop.build()
    assert second.parent != first.parent
    assert value_of(second) == 8
    header.write_text(original)
    assert workshop.build() == first
    assert workshop.compilations == 2


def test_key_ignores_files_that_are_not_included(workshop: Workshop) -> None:
    first = workshop.build()
    (workshop.root / "platform" / "unrelated.h").write_text("#define UNRELATED 2\n")
    assert workshop.build() == first


def test_key_does_not_depend_on_where_the_sources_are(workshop: Workshop, tmp_path: Path) -> None:
    first = workshop.build()
    moved = tmp_path / "moved"
    shutil.copytree(workshop.root, moved)
    assert compile_host(KernelSource(workshop.source.entry, (), moved)) == first


def test_key_follows_defines(workshop: Workshop) -> None:
    plain = workshop.build()
    one = compile_host(KernelSource(workshop.source.entry, (("BONUS", "1"),), workshop.root))
    two = compile_host(KernelSource(workshop.source.entry, (("BONUS", "2"),), workshop.root))
    assert [value_of(library) for library in (plain, one, two)] == [7, 8, 9]
    forward = compile_host(KernelSource(workshop.source.entry, (("A", "1"), ("B", "2")), workshop.root))
    assert compile_host(KernelSource(workshop.source.entry, (("B", "2"), ("A", "1")), workshop.root)) == forward


def test_kernels_are_optimized_as_far_as_the_variable_says(workshop: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
    workshop.on_compile(f'echo "$*" > {workshop.state}/command')

    def level() -> str:
        """Return the option that counts: the compiler takes the last one."""
        return [word for word in (workshop.state / "command").read_text().split() if word.startswith("-O")][-1]

    workshop.build()
    assert level() == "-O3"
    monkeypatch.setenv("PERSISTENT_OPS_CXX", f"{workshop.state / 'c++'} -O1")
    workshop.build()
    assert level() == "-O1"
    workshop.build(is_portable=True)
    assert level() == "-O0"


def test_key_follows_the_compiler_version_and_its_variables(
    workshop: Workshop, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = workshop.build()
    (workshop.state / "version").write_text("counting compiler 1.1\n")
    toolchain._probe_cxx.cache_clear()  # as in a new process
    second = workshop.build()
    monkeypatch.setenv("CPLUS_INCLUDE_PATH", str(workshop.state))
    third = workshop.build()
    assert len({first, second, third}) == 3
    monkeypatch.setenv("CPLUS_INCLUDE_PATH", str(workshop.root))
    assert compile_host(workshop.source) not in {first, second, third}


def test_key_follows_the_instructions_of_the_processor(workshop: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
    first = workshop.build()
    # Simulates another processor: the compiler predefines another macro for the same flags.
    write_script(
        workshop.state / "c++", WRAPPER.format(state=workshop.state, compiler=f"{REAL_CXX} -D__ANOTHER_EXTENSION__")
    )
    assert workshop.build() != first


def test_key_follows_the_package_version(workshop: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
    first = workshop.build()
    monkeypatch.setattr(jit, "_package_version", lambda: "another")
    assert workshop.build() != first


def test_environment_is_read_at_the_call(workshop: Workshop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compile_host(workshop.source)
    monkeypatch.setenv("PERSISTENT_OPS_CACHE", str(tmp_path / "other"))
    assert compile_host(workshop.source).is_relative_to(tmp_path / "other")
    monkeypatch.delenv("PERSISTENT_OPS_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert compile_host(workshop.source).is_relative_to(tmp_path / "xdg" / "persistent_ops")
    monkeypatch.setenv("XDG_CACHE_HOME", "relative/is/ignored")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert compile_host(workshop.source).is_relative_to(tmp_path / "home" / ".cache" / "persistent_ops")
    monkeypatch.setenv("HOME", "")
    jit.clear_memo()
    with pytest.raises(CompileError, match="there is no home folder"):
        compile_host(workshop.source)


def test_import_starts_and_writes_nothing() -> None:
    hook = """
import ctypes, importlib.metadata, subprocess
def hook(event, arguments):
    if event in ("subprocess.Popen", "os.mkdir", "os.exec", "os.fork", "ctypes.dlopen", "socket.__new__"):
        raise SystemExit(f"import did {event} {arguments}")
sys.addaudithook(hook)
import persistent_ops.runtime.compile.jit
"""
    command = [sys.executable, "-B", "-c", BARE_PACKAGE + hook, str(REPOSITORY)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_sums_keep_two_roundings(workshop: Workshop) -> None:
    library = ctypes.CDLL(str(workshop.build()))
    library.multiply_add.restype = ctypes.c_double
    library.multiply_add.argtypes = [ctypes.c_double] * 3
    a = 1.0 + 2.0**-30
    # A fused multiply-add keeps the 2**-60 of the product, which rounding the product drops.
    assert library.multiply_add(a, a, -(a * a)) == 0.0


def test_a_library_that_cannot_be_loaded_says_what_to_set(workshop: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
    library = workshop.build()
    library.write_bytes(library.read_bytes()[:64])  # as dlopen sees it: nothing to map
    monkeypatch.setattr(jit, "compile_host", lambda source, is_portable: library)
    with pytest.raises(CompileError, match=r"cannot be loaded: .*Set PERSISTENT_OPS_CACHE to a folder"):
        jit.load_host(workshop.source)


def test_scan_sees_every_spelling_and_survives_a_cycle(workshop: Workshop) -> None:
    kernels = workshop.root / "kernels"
    (kernels / "all.cuh").write_text('#include "near.h"\n#if 0\n  # include <platform/unrelated.h>\n#endif\n')
    (kernels / "near.h").write_text('#include \\\n "all.cuh"\n#include <platform/deep.h>//x\n#include <vector>\n')
    found = jit._scan(workshop.root, "kernels/all.cuh")
    assert set(found) == {"kernels/all.cuh", "kernels/near.h", "platform/unrelated.h", "platform/deep.h"}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("#include HEADER\n", "is not the name of a file"),
        ('#include "../../outside.h"\n', "outside the kernel sources"),
    ],
)
def test_include_that_cannot_be_tracked_is_refused(workshop: Workshop, line: str, message: str) -> None:
    (workshop.root.parent / "outside.h").write_text("#define OUTSIDE 1\n")
    (workshop.root / "kernels" / "scale.cuh").write_text(line + ENTRY)
    with pytest.raises(CompileError, match=message):
        workshop.build()


def test_sources_changed_while_compiling_are_not_kept(workshop: Workshop) -> None:
    workshop.on_compile(f"echo '#define LATE 1' >> {workshop.root}/platform/deep.h")
    with pytest.raises(CompileError, match="changed while they were compiled"):
        workshop.build()
    assert list((workshop.cache / "entries").iterdir()) == []


def test_compile_error_shows_command_and_last_lines(workshop: Workshop) -> None:
    # Undeclared names. The compiler reports each in a few lines; the last one must be visible.
    lines = "".join(f"int f{i}() {{ return missing_{i}; }}\n" for i in range(60))
    (workshop.root / "platform" / "deep.h").write_text(lines)
    with pytest.raises(CompileError) as caught:
        workshop.build()
    message = str(caught.value)
    assert "compiling kernels/scale.cuh for the host: the compiler failed with status 1" in message
    assert f"-I{workshop.root}" in message
    assert "-std=c++20" in message
    assert "scale.cpp" in message
    assert "output (last 60 of " in message
    assert "missing_0;" not in message
    assert len(message.partition("output (last")[2].splitlines()) == 61
    assert list((workshop.cache / "entries").iterdir()) == []
    assert list((workshop.cache / "tmp").iterdir()) == []


def test_warnings_stop_the_tests_but_no_user(workshop: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
    entry = workshop.root / "kernels" / "scale.cuh"
    entry.write_text(ENTRY + "static int unused() { return 1; }\n")
    assert value_of(workshop.build()) == 7
    monkeypatch.setenv("PERSISTENT_OPS_CXX", f"{workshop.state / 'c++'} {CXX_FLAGS}")
    with pytest.raises(CompileError, match="unused"):
        workshop.build()


def test_malformed_options_are_refused(workshop: Workshop) -> None:
    with pytest.raises(ValueError, match="arch must be an architecture"):
        compile_cuda(workshop.source, arch="90")
    with pytest.raises(TypeError, match="extra_flags must be a sequence"):
        compile_cuda(workshop.source, extra_flags="-lineinfo")
    with pytest.raises(CompileError, match=r"'kernels/absent\.cuh' does not exist"):
        compile_host(KernelSource("kernels/absent.cuh", (), workshop.root))


def test_cuda_key_follows_architecture_flags_and_nvcc(
    workshop: Workshop, fake_nvcc: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def build(arch: str = "sm_90", flags: tuple[str, ...] = ()) -> Path:
        jit.clear_memo()
        return compile_cuda(workshop.source, arch=arch, extra_flags=flags).path

    paths = [build(), build("sm_90a"), build(flags=("-lineinfo",))]
    assert "-gencode=arch=compute_90a,code=sm_90a" in fake_nvcc.read_text().splitlines()[1]
    write_script(workshop.state / "nvcc", FAKE_NVCC.format(state=workshop.state, release="13.1"))
    paths.append(build())
    monkeypatch.setenv("NVCC_APPEND_FLAGS", "-use_fast_math")
    paths.append(build())
    assert len(set(paths)) == 5
    assert build() == paths[-1]
    assert len(fake_nvcc.read_text().splitlines()) == 5


def test_nvshmem_links_its_device_library_and_is_in_the_key(
    workshop: Workshop, fake_nvcc: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = compile_cuda(workshop.source).path
    built = []
    for version in ("3.4.5", "3.8.0"):
        site = tmp_path / version
        add_nvshmem(site, version, version)
        with monkeypatch.context() as patch:
            patch.syspath_prepend(str(site))
            jit.clear_memo()
            built.append(compile_cuda(workshop.source, nvshmem=True).path)
    assert len({plain, *built}) == 3
    _, compiled, linked, *_ = fake_nvcc.read_text().splitlines()
    assert "-rdc=true" in compiled
    assert "-dc" in compiled.split()
    assert "-DPO_WITH_NVSHMEM=1" in compiled
    assert f"-I{tmp_path}/3.4.5/nvidia/nvshmem/include" in compiled
    assert "-dlink -cubin" in linked
    assert f"{tmp_path}/3.4.5/nvidia/nvshmem/lib/libnvshmem_device.a" in linked


def test_nvshmem_that_is_missing_or_mixed_is_refused(
    workshop: Workshop, fake_nvcc: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(toolchain, "_distribution", lambda name: None)
        with pytest.raises(CompileError, match=r'needs NVSHMEM.*pip install "nvidia-nvshmem-cu13"'):
            compile_cuda(workshop.source, nvshmem=True)
    add_nvshmem(tmp_path / "site", "3.8.0", "3.4.5")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    with pytest.raises(CompileError, match=r"are version 3\.4\.5, but its library is 3\.8\.0"):
        compile_cuda(workshop.source, nvshmem=True)


def _leave_no_compiler(monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
    """Let this process be on a machine that has none."""
    for variable in ("PERSISTENT_OPS_NVCC", "PERSISTENT_OPS_CXX"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("PATH", str(path))
    monkeypatch.setattr(toolchain, "_system_toolkits", list)
    monkeypatch.setattr(toolchain, "_distribution", lambda name: None)
    jit.clear_memo()


def test_a_shipped_cache_serves_without_compilers(
    workshop: Workshop, fake_nvcc: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NVCC_APPEND_FLAGS", "-lineinfo")
    cubin = compile_cuda(workshop.source, arch="sm_90a").path.read_bytes()
    description = value_of(workshop.build(is_portable=True))
    workshop.build()  # of this machine's processor
    shutil.copytree(workshop.cache, tmp_path / "shipped")
    shutil.copytree(workshop.root, tmp_path / "installed")
    _leave_no_compiler(monkeypatch, tmp_path)
    monkeypatch.delenv("NVCC_APPEND_FLAGS")
    monkeypatch.setenv("PERSISTENT_OPS_CACHE", str(tmp_path / "shipped"))
    shipped = KernelSource(workshop.source.entry, (), tmp_path / "installed")
    found = compile_cuda(shipped, arch="sm_90a")
    assert found.path.read_bytes() == cubin and found.path.is_relative_to(tmp_path / "shipped")
    assert value_of(compile_host(shipped, is_portable=True)) == description
    with pytest.raises(CompileError, match="no C\\+\\+20 compiler was found"):
        compile_host(shipped)  # its instructions may not be those of the processor
    for other in ({"arch": "sm_90"}, {"arch": "sm_90a", "extra_flags": ("-G",)}):
        with pytest.raises(
            CompileError, match=r"scale\.cuh for sm_90a? is not in the cache .*shipped, and no CUDA compiler"
        ):
            compile_cuda(shipped, **other)  # type: ignore[arg-type]
    (tmp_path / "installed" / "platform" / "deep.h").write_text("#define VALUE 8\n")
    jit.clear_memo()
    with pytest.raises(CompileError, match="is not in the cache"):
        compile_cuda(shipped, arch="sm_90a")


def test_a_shipped_cache_that_cannot_be_written_serves_beside_another_compiler(
    workshop: Workshop, fake_nvcc: Path
) -> None:
    shipped = compile_cuda(workshop.source).path
    write_script(workshop.state / "nvcc", FAKE_NVCC.format(state=workshop.state, release="13.1"))
    shutil.rmtree(workshop.cache / "locks")
    (workshop.cache / "locks").touch()  # permissions do not stop root
    jit.clear_memo()
    assert compile_cuda(workshop.source).path == shipped
    with pytest.raises(CompileError, match="cannot be written"):
        compile_cuda(workshop.source, arch="sm_80")


def test_a_damaged_entry_of_a_shipped_cache_is_none(
    workshop: Workshop, fake_nvcc: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compile_cuda(workshop.source).path.write_bytes(b"another")
    _leave_no_compiler(monkeypatch, tmp_path)
    with pytest.raises(CompileError, match="is not in the cache"):
        compile_cuda(workshop.source)


def test_a_compiler_that_a_variable_names_is_never_done_without(
    workshop: Workshop, fake_nvcc: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compile_cuda(workshop.source)
    monkeypatch.setenv("PERSISTENT_OPS_NVCC", "/nowhere/nvcc")
    with pytest.raises(CompileError, match="PERSISTENT_OPS_NVCC names no usable CUDA compiler"):
        compile_cuda(workshop.source)


def test_code_for_all_processors_is_not_tuned_for_this_one(workshop: Workshop) -> None:
    workshop.on_compile(f'echo "$*" > {workshop.state}/command')
    for is_portable in (False, True):
        workshop.build(is_portable=is_portable)
        words = (workshop.state / "command").read_text().split()
        assert any(word.endswith("=native") for word in words) != is_portable


def has_nvcc() -> bool:
    try:
        return bool(toolchain.find_nvcc())
    except CompileError:
        return False


needs_nvcc = pytest.mark.skipif(not has_nvcc(), reason="there is no CUDA compiler on this machine")


@needs_nvcc
@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100"])
def test_cubin_reports_registers_spills_and_shared_memory(workshop: Workshop, arch: str) -> None:
    binary = compile_cuda(workshop.source, arch=arch, extra_flags=("-maxrregcount=24",))
    assert binary.path.read_bytes()[:4] == b"\x7fELF"
    assert set(binary.kernels) == {"scale", "crowded", "crowded_callee"}
    scale, crowded = binary.kernels["scale"], binary.kernels["crowded"]
    assert 0 < scale.registers <= 24
    assert (scale.spill_store_bytes, scale.spill_load_bytes, scale.stack_bytes) == (0, 0, 0)
    assert (scale.shared_bytes, scale.barriers) == (1024, 1)
    # 64 live values do not fit into 24 registers.
    assert crowded.registers <= 24
    assert crowded.spill_store_bytes > 0
    assert crowded.spill_load_bytes > 0
    assert crowded.shared_bytes == 0
    # A function that was not inlined spills on its kernel's account.
    assert binary.kernels["crowded_callee"].spill_store_bytes > 100
    jit.clear_memo()
    assert compile_cuda(workshop.source, arch=arch, extra_flags=("-maxrregcount=24",)) == binary


@needs_nvcc
@pytest.mark.skipif(toolchain.find_nvshmem() is None, reason="the wheel nvidia-nvshmem-cu13 is not installed")
def test_cubin_links_with_nvshmem(workshop: Workshop) -> None:
    (workshop.root / "kernels" / "push.cuh").write_text(
        "#include <nvshmem.h>\n#include <nvshmemx.h>\n"
        "#if PO_WITH_NVSHMEM != 1\n#error PO_WITH_NVSHMEM is not set\n#endif\n"
        'extern "C" __global__ void push(float* to, const float* from, size_t bytes, uint64_t* flag, int pe) {\n'
        "    nvshmem_putmem_nbi(to, from, bytes, pe);\n    nvshmem_fence();\n"
        "    nvshmemx_signal_op(flag, 1, NVSHMEM_SIGNAL_SET, pe);\n}\n"
    )
    binary = compile_cuda(KernelSource("kernels/push.cuh", (), workshop.root), nvshmem=True)
    assert binary.path.read_bytes()[:4] == b"\x7fELF"
    assert binary.kernels["push"].registers > 0


@needs_nvcc
def test_cuda_compile_error_shows_command_and_output(workshop: Workshop) -> None:
    (workshop.root / "platform" / "deep.h").write_text("#error no value today\n")
    with pytest.raises(CompileError, match=r"for sm_90: the compiler failed(.|\n)*compute_90(.|\n)*no value today"):
        compile_cuda(workshop.source)


def test_kernel_sources_are_beside_the_package_or_inside_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert jit.kernel_source_root() == REPOSITORY / "cuda"
    module = tmp_path / "persistent_ops" / "runtime" / "compile" / "jit.py"
    monkeypatch.setattr(jit, "__file__", str(module))
    with pytest.raises(CompileError, match="kernel sources are missing"):
        jit.kernel_source_root()
    (tmp_path / "cuda").mkdir()
    assert jit.kernel_source_root() == tmp_path / "cuda"
    (tmp_path / "persistent_ops" / "_cuda").mkdir(parents=True)
    assert jit.kernel_source_root() == tmp_path / "persistent_ops" / "_cuda"


def test_kernel_sources_are_no_python_package() -> None:
    # The folder shares its name with the namespace package of cuda-python, which an __init__.py would hide.
    assert list((REPOSITORY / "cuda").rglob("__init__.py")) == []

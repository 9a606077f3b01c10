"""Finding compilers and libraries, and reporting what is missing."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from jit_workshop import (
    FAKE_NVCC,
    Workshop,
    add_nvshmem,
    add_wheel,
    make_workshop,
    value_of,
    write_script,
)

from persistent_ops.runtime.compile import toolchain
from persistent_ops.runtime.compile.jit import compile_cuda
from persistent_ops.runtime.errors import CompileError


@pytest.fixture
def workshop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Workshop:
    return make_workshop(tmp_path, monkeypatch)


def test_missing_cxx_compiler_names_the_remedy(
    workshop: Workshop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PERSISTENT_OPS_CXX")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(CompileError, match=r"no C\+\+20 compiler was found.*apt-get install g\+\+"):
        workshop.build()


@pytest.mark.parametrize("variable", ["PERSISTENT_OPS_CXX", "CXX"])
def test_cxx_that_is_named_is_the_only_one_tried(
    workshop: Workshop, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    monkeypatch.delenv("PERSISTENT_OPS_CXX")
    monkeypatch.setenv(variable, "/nowhere/c++")
    with pytest.raises(CompileError, match=f"{variable}='/nowhere/c\\+\\+' names no usable"):
        workshop.build()
    old = write_script(
        workshop.state / "old", "#!/bin/sh\ncase $* in *--version*) echo old 4.8; exit 0;; esac\nexit 1\n"
    )
    monkeypatch.setenv(variable, str(old))
    with pytest.raises(CompileError, match=r"refuses -std=c\+\+20"):
        workshop.build()


def test_cxx_may_begin_with_a_launcher(workshop: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
    launcher = write_script(workshop.state / "launcher", '#!/bin/sh\nexec "$@"\n')
    monkeypatch.setenv("PERSISTENT_OPS_CXX", f"{launcher} {workshop.state / 'c++'}")
    found = toolchain.find_cxx()
    assert found.path == workshop.state / "c++"
    assert value_of(workshop.build()) == 7
    assert workshop.compilations == 1


def test_cxx_may_end_with_flags(workshop: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PERSISTENT_OPS_CXX", f"{workshop.state / 'c++'} -DOTHER -fno-strict-aliasing")
    found = toolchain.find_cxx()
    assert found.command == (str(workshop.state / "c++"),) and found.flags == ("-DOTHER", "-fno-strict-aliasing")
    assert value_of(workshop.build()) == 7
    monkeypatch.setenv("PERSISTENT_OPS_CXX", str(workshop.state / "c++"))
    assert value_of(workshop.build()) == 7
    assert workshop.compilations == 2, "a library of other flags is another one"
    monkeypatch.setenv("PERSISTENT_OPS_CXX", "-O2")
    with pytest.raises(CompileError, match="-O2 is no executable file"):
        toolchain.find_cxx()


def no_nvcc(monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
    monkeypatch.delenv("PERSISTENT_OPS_NVCC", raising=False)
    monkeypatch.setenv("PATH", str(path))
    monkeypatch.setattr(toolchain, "_system_toolkits", list)


def test_missing_nvcc_names_the_remedy(workshop: Workshop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    no_nvcc(monkeypatch, tmp_path)
    monkeypatch.setattr(toolchain, "_distribution", lambda name: None)
    with pytest.raises(
        CompileError, match=r'no CUDA compiler.*pip install "nvidia-cuda-nvcc==13\.0\.\*" "nvidia-nvvm==13\.0'
    ):
        compile_cuda(workshop.source)


def test_nvcc_that_is_named_is_the_only_one_tried(workshop: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PERSISTENT_OPS_NVCC", "/nowhere/nvcc")
    with pytest.raises(CompileError, match=r"PERSISTENT_OPS_NVCC names no usable CUDA compiler.*/nowhere/nvcc"):
        compile_cuda(workshop.source)


@pytest.mark.parametrize(("release", "is_usable"), [("11.8", False), ("12.3", False), ("12.4", True), ("13.0", True)])
def test_nvcc_must_know_the_kernels_loads_and_stores(
    workshop: Workshop, monkeypatch: pytest.MonkeyPatch, release: str, is_usable: bool
) -> None:
    nvcc = write_script(workshop.state / "nvcc", FAKE_NVCC.format(state=workshop.state, release=release))
    monkeypatch.setenv("PERSISTENT_OPS_NVCC", str(nvcc))
    if is_usable:
        assert toolchain.find_nvcc().version.startswith(release)
    else:
        with pytest.raises(
            CompileError, match=rf"release {release}\.88, but the kernels need 12\.4 or newer, for.*b128.*PTX ISA 8\.4"
        ):
            compile_cuda(workshop.source)


def test_nvcc_order_is_cuda_home_then_path(workshop: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
    for place, release in (("home/bin", "12.8"), ("path", "12.9")):
        (workshop.state / place).mkdir(parents=True)
        write_script(workshop.state / place / "nvcc", FAKE_NVCC.format(state=workshop.state, release=release))
    monkeypatch.setenv("PATH", f"{workshop.state / 'path'}:{os.environ['PATH']}")
    assert toolchain.find_nvcc().release == (12, 9)
    monkeypatch.setenv("CUDA_HOME", str(workshop.state / "home"))
    assert toolchain.find_nvcc().release == (12, 8)


def install_nvcc_wheels(site: Path, state: Path, nvvm: str, cccl_site: Path | None = None) -> None:
    tree = "nvidia/cu13"
    add_wheel(site, "nvidia-cuda-nvcc", "13.0.88", {f"{tree}/bin/nvcc": FAKE_NVCC.format(state=state, release="13.0")})
    add_wheel(site, "nvidia-nvvm", nvvm, {f"{tree}/nvvm/bin/cicc": ""})
    add_wheel(site, "nvidia-cuda-crt", "13.0.88", {})
    add_wheel(site, "nvidia-cuda-runtime", "13.0.96", {f"{tree}/include/cuda_runtime.h": ""})
    add_wheel(cccl_site or site, "nvidia-cuda-cccl", "13.0.85", {f"{tree}/include/cccl/cuda/std/atomic": ""})


def test_nvcc_of_the_wheels_is_found(workshop: Workshop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install_nvcc_wheels(tmp_path / "site", workshop.state, "13.0.88", cccl_site=tmp_path / "user_site")
    no_nvcc(monkeypatch, tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path / "user_site"))
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    found = toolchain.find_nvcc()
    assert found.source == "wheel"
    assert found.version == "13.0.88"
    assert found.path == tmp_path / "site/nvidia/cu13/bin/nvcc"
    # A part that is installed elsewhere must be named. nvcc finds the others in its own folder.
    assert found.include_dirs == (tmp_path / "user_site/nvidia/cu13/include/cccl",)


def test_nvcc_wheels_of_two_releases_are_refused(
    workshop: Workshop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install_nvcc_wheels(tmp_path / "site", workshop.state, "13.5.37")
    no_nvcc(monkeypatch, tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    with pytest.raises(CompileError, match=r"nvidia-nvvm is 13\.5\.37, but nvidia-cuda-nvcc is 13\.0\.88.*pip install"):
        toolchain.find_nvcc()


def test_nvshmem_is_found_in_its_wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    add_nvshmem(tmp_path, "3.4.5", "3.4.5")
    monkeypatch.syspath_prepend(str(tmp_path))
    found = toolchain.find_nvshmem()
    assert found is not None
    assert (found.version, found.header_version, found.agrees) == ("3.4.5", "3.4.5", True)
    assert found.include_dir == tmp_path / "nvidia/nvshmem/include"
    assert found.device_library == tmp_path / "nvidia/nvshmem/lib/libnvshmem_device.a"
    assert found.host_library == tmp_path / "nvidia/nvshmem/lib/libnvshmem_host.so.3"
    found.device_library.unlink()
    with pytest.raises(CompileError, match=r"headers or libraries are missing.*nvidia-nvshmem-cu13==3\.4\.5"):
        toolchain.find_nvshmem()

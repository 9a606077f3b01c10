"""persistent-ops doctor: what it finds, and what it reports as missing. It never fails because of that."""

from __future__ import annotations

import errno
import importlib.metadata
import json
import os
import re
import sys
import tempfile
from pathlib import Path

import pytest
from rich.console import Console

from persistent_ops import doctor
from persistent_ops.runtime.bootstrap import launchers
from persistent_ops.runtime.compile import toolchain
from persistent_ops.runtime.errors import CompileError

SECTIONS = {section for section, _ in doctor._PROBES}


def console() -> Console:
    return Console(width=100, record=True, file=open("/dev/null", "w"))


def named(report: doctor.Report, name: str) -> doctor.Finding:
    (found,) = [finding for finding in report.findings if finding.name == name]
    return found


def parts(requirement: str) -> set[str]:
    """Return a requirement's name and bounds, which the metadata reorders."""
    return set(re.findall(r"^[\w.-]+(?:\[[\w,]+\])?|[<>=~!]+[^,<>=~!]+", requirement))


def declared() -> dict[str, set[str]]:
    """Return the requirements of pyproject.toml, by name."""
    text = (Path(doctor.__file__).parents[1] / "pyproject.toml").read_text()
    dependencies = text[text.index("\ndependencies = ") : text.index("\n[project.scripts]")]
    found = [parts(requirement) for requirement in re.findall(r'"([^"]+)"', dependencies)]
    return {next(part for part in one if part[0].isalpha()): one for one in found}


def test_every_package_that_a_remedy_names_is_declared_as_the_remedy_says() -> None:
    asked = declared()
    for requirement in re.findall(r'"([^"]+)"', toolchain.nvcc_remedy()):
        one = parts(requirement)
        assert one in asked.values(), requirement


def test_without_installed_metadata_a_remedy_has_no_version(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(name: str) -> list[str]:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "requires", none)
    assert doctor._requirement("cuda-core") == "cuda-core"


def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_cuda_works", lambda: False)
    monkeypatch.setattr(doctor, "_command", lambda *words: None)


def test_a_machine_without_a_gpu_runs_the_host_backend(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    no_gpu(monkeypatch)
    monkeypatch.setenv("PERSISTENT_OPS_CACHE", str(tmp_path / "cache"))
    report = doctor.examine()
    assert {finding.section for finding in report.findings} == SECTIONS
    assert report.can_run("host")
    assert not report.can_run("cuda")
    assert [finding.name for finding in report.missing_for("cuda")] == ["GPU"]  # what only a GPU needs is not missing
    assert report.auto == "host"
    assert named(report, "compile cache").value.startswith(str(tmp_path / "cache"))
    screen = console()
    assert doctor.run_doctor(console=screen) == 0
    text = screen.export_text()
    assert "host: can run" in text
    assert "cuda: cannot run, missing: GPU" in text
    assert 'backend="auto" takes host' in text


def test_a_shipped_cache_is_no_reason_to_install_nvcc(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def none() -> None:
        raise toolchain.NoCompilerError("no nvcc")

    monkeypatch.setattr(doctor, "_cuda_works", lambda: True)
    monkeypatch.setattr(toolchain, "find_nvcc", none)
    monkeypatch.setenv("PERSISTENT_OPS_CACHE", str(tmp_path))
    tmp_path.chmod(0o700)
    assert named(doctor.Report(tuple(doctor._compilers()), "host"), "nvcc").status == "missing"
    for key, artifact in (("a", "barrier.cubin"), ("b", "team.so")):
        (tmp_path / "entries" / key).mkdir(parents=True)
        (tmp_path / "entries" / key / artifact).touch()
        (tmp_path / "shared").mkdir(exist_ok=True)
        (tmp_path / "shared" / f"of {key}").write_text(key)
    found = named(doctor.Report(tuple(doctor._compilers()), "host"), "nvcc")
    assert (found.status, found.value) == ("info", "none; kernels in the compile cache: 1")


def test_json_says_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    no_gpu(monkeypatch)
    screen = console()
    assert doctor.run_doctor(as_json=True, console=screen) == 0
    answer = json.loads(screen.export_text())
    assert answer["backends"] == {
        "cuda": {"can_run": False, "missing": ["GPU"]},
        "host": {"can_run": True, "missing": []},
    }
    assert answer["auto"] == "host"
    assert {finding["section"] for finding in answer["findings"]} == SECTIONS
    python = next(finding for finding in answer["findings"] if finding["name"] == "python")
    assert sys.executable in python["value"]


def test_without_a_compiler_no_backend_runs_and_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    no_gpu(monkeypatch)

    def none() -> toolchain.Cxx:
        raise CompileError("no C++20 compiler was found on PATH")

    monkeypatch.setattr(toolchain, "find_cxx", none)
    monkeypatch.delenv("PERSISTENT_OPS_CXX", raising=False)
    screen = console()
    assert doctor.run_doctor(console=screen) == 1
    text = screen.export_text()
    assert "no C++20 compiler was found on PATH" in text
    assert "host: cannot run, missing: C++" in text
    assert "C++: apt-get install g++" in text


@pytest.mark.parametrize("variable", ["CXX", "PERSISTENT_OPS_CXX"])
def test_a_variable_that_names_no_compiler_is_to_be_corrected(monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    monkeypatch.delenv("PERSISTENT_OPS_CXX", raising=False)
    monkeypatch.setenv(variable, "/bin/false")
    (finding,) = (each for each in doctor.examine().findings if each.name == "C++")
    assert finding.status == "missing" and finding.remedy == f"correct {variable}, or unset it"


@pytest.mark.parametrize("name", ["TIMEOUT", "OPERATOR_TIMEOUT", "COMPILE_TIMEOUT"])
def test_a_time_out_that_is_none_stops_both_backends(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(f"PERSISTENT_OPS_{name}", "abc")
    report = doctor.examine()
    assert not report.can_run("host") and not report.can_run("cuda")
    (finding,) = (each for each in report.missing_for("host") if each.section == "Time-outs")
    assert "'abc'" in finding.value and finding.remedy == f"set PERSISTENT_OPS_{name} to seconds, or unset it"


def test_a_gpu_that_torch_cannot_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_cuda_works", lambda: False)
    monkeypatch.setattr(doctor, "_smi_gpus", lambda: ["NVIDIA H200, 143771 MiB, 9.0, 580.159.04"])
    monkeypatch.setattr(toolchain, "find_nvshmem", lambda: None)
    monkeypatch.setattr(doctor, "_version", lambda package: None)
    report = doctor.examine()
    missing = {finding.name: finding.remedy for finding in report.missing_for("cuda")}
    assert "torch on the GPU" in missing
    assert {"NVSHMEM", "nvshmem4py-cu13", "cuda-core", "cuda-bindings"} < set(missing)
    for package, asked in (("nvshmem4py-cu13",) * 2, ("cuda-core",) * 2, ("cuda-bindings", "cuda-python")):
        remedy = re.fullmatch(rf"{re.escape(sys.executable)} -m pip install '([^']+)'", missing[package])
        assert remedy, missing[package]
        assert parts(remedy[1]) == declared()[asked], "pip install -e . brings the metadata up to date"
    assert "580.159.04" in named(report, "GPU 0").value


@pytest.mark.parametrize(("headers", "status"), [("3.4.5", "ok"), ("3.8.0", "warning")])
def test_nvshmem_headers_and_library_must_agree(
    monkeypatch: pytest.MonkeyPatch, headers: str, status: str, tmp_path: Path
) -> None:
    found = toolchain.Nvshmem("3.4.5", headers, tmp_path, tmp_path / "device.a", tmp_path / "libnvshmem_host.so.3")
    monkeypatch.setattr(toolchain, "find_nvshmem", lambda: found)
    finding = named(doctor.examine(), "NVSHMEM")
    assert finding.status == status
    assert f"library 3.4.5, headers {headers}" in finding.value
    assert bool(finding.remedy) == (status == "warning")


def test_links_name_the_pairs_that_cannot_reach_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    nvlink = (
        "GPU 0: NVIDIA H200 (UUID: GPU-x)\n\t Link 0: 26.562 GB/s\n\t Link 1: 26.562 GB/s\n"
        "GPU 1: NVIDIA H200 (UUID: GPU-y)\n\t Link 0: <inactive>\n"
    )
    topology = "\x1b[4m\tGPU0\tGPU1\x1b[0m\nGPU0\t X \tNV18\nGPU1\tNV18\t X \n\nLegend:\n\n  X = Self\n"
    answers = {"nvlink": nvlink, "topo": topology}
    monkeypatch.setattr(doctor, "_command", lambda *words: answers[words[1]])
    found = {finding.name: finding for finding in doctor._links(3, lambda a, b: {a, b} != {0, 2})}
    assert found["GPU 0 to the others"].status == "warning"
    assert "cannot store to GPU 2" in found["GPU 0 to the others"].value
    assert found["GPU 1 to the others"].status == "ok"
    assert found["GPU 0 NVLink"].value == "2 x 26.562 GB/s"
    assert found["GPU 1 NVLink"].value == "no active link"
    assert found["topology"].value == "\tGPU0\tGPU1\nGPU0\t X \tNV18\nGPU1\tNV18\t X "


def test_a_cache_that_cannot_be_written_stops_both_backends(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    monkeypatch.setenv("PERSISTENT_OPS_CACHE", str(blocked / "cache"))
    report = doctor.examine()
    assert named(report, "compile cache").status == "missing"
    assert "PERSISTENT_OPS_CACHE" in named(report, "compile cache").remedy
    assert not report.can_run("host")
    assert not report.can_run("cuda")


@pytest.mark.parametrize("has_kernels", [True, False])
def test_a_cache_that_is_read_only_is_good_for_what_is_in_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, has_kernels: bool
) -> None:
    (tmp_path / "entries").mkdir()
    (tmp_path / "entries" / "a kernel").mkdir()
    if not has_kernels:
        (tmp_path / "entries" / "a kernel").rmdir()

    def refuse(**options: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(tmp_path))

    monkeypatch.setenv("PERSISTENT_OPS_CACHE", str(tmp_path))
    monkeypatch.setattr(tempfile, "TemporaryFile", refuse)
    report = doctor.examine()
    found = named(report, "compile cache")
    assert (found.status, report.can_run("host")) == (("warning", True) if has_kernels else ("missing", False))
    assert has_kernels == ("only the 1 kernels in it" in found.value)


def test_a_cache_from_which_nothing_can_be_loaded_stops_both_backends(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PERSISTENT_OPS_CACHE", str(tmp_path))
    assert named(doctor.examine(), "compile cache").status == "ok"
    found = os.statvfs(tmp_path)
    noexec = os.statvfs_result([*found[:8], found.f_flag | os.ST_NOEXEC, found.f_namemax])
    monkeypatch.setattr(os, "statvfs", lambda folder: noexec)
    report = doctor.examine()
    assert "noexec" in named(report, "compile cache").value
    assert not report.can_run("host")
    assert not report.can_run("cuda")


@pytest.mark.parametrize(("says", "is_found"), [("mpirun (Open MPI) 4.1.4", True), ("HYDRA build details:", False)])
def test_mpirun_is_that_of_open_mpi(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, says: str, is_found: bool) -> None:
    program = tmp_path / "mpirun"
    program.write_text(f"#!/bin/sh\necho '{says}'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    finding = next(each for each in doctor._launchers() if each.name == "mpirun")
    assert finding.status == ("ok" if is_found else "info")
    assert finding.value == (str(program) if is_found else "not found")
    assert is_found or "openmpi-bin" in finding.remedy


def test_a_contradictory_launcher_stops_both_backends(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in launchers.LAUNCHER_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("RANK", "0")
    report = doctor.examine()
    assert named(report, "started by").status == "missing"
    assert "WORLD_SIZE" in named(report, "started by").value
    assert not report.can_run("host")
    assert not report.can_run("cuda")


@pytest.mark.parametrize("number", range(len(doctor._PROBES)))
def test_a_check_that_breaks_is_a_finding(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    def broken() -> list[doctor.Finding]:
        raise RuntimeError("[bold]unforeseen[/wrong]")

    probes = list(doctor._PROBES)
    section = probes[number][0]
    probes[number] = (section, broken)
    monkeypatch.setattr(doctor, "_PROBES", probes)
    screen = console()
    assert doctor.run_doctor(console=screen) in (0, 1)
    assert "RuntimeError: [bold]unforeseen[/wrong]" in screen.export_text()


@pytest.mark.gpu
def test_a_gpu_machine_lists_its_gpus() -> None:
    import torch

    report = doctor.examine()
    assert report.auto == "cuda"
    for index in range(torch.cuda.device_count()):
        assert torch.cuda.get_device_name(index) in named(report, f"GPU {index}").value
    assert report.can_run("cuda"), [finding.name for finding in report.missing_for("cuda")]

"""`persistent-ops compile`: which kernels it compiles, for which GPU, and that a machine without nvcc finds them."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path

import pytest
import torch
from gpu_kernels import operator_modules
from jit_workshop import FAKE_NVCC, Workshop, make_workshop, write_script
from typer.testing import CliRunner

from persistent_ops import cli, precompile
from persistent_ops.precompile import NAMES, Program, wanted_by
from persistent_ops.runtime.backend import KernelRequest
from persistent_ops.runtime.compile import jit, toolchain
from persistent_ops.runtime.compile.jit import compile_cuda
from persistent_ops.runtime.errors import CompileError
from persistent_ops.runtime.paper import Gpu

SMALL = Program(torch.float16, in_features=512, out_features=512, tokens=32, tables=2, rows=100, dim=16, batch=8)


@pytest.fixture
def workshop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Workshop:
    workshop = make_workshop(tmp_path, monkeypatch)
    script = write_script(workshop.state / "nvcc", FAKE_NVCC.format(state=workshop.state, release="13.0"))
    monkeypatch.setenv("PERSISTENT_OPS_NVCC", str(script))
    return workshop


def run(*arguments: str) -> tuple[int, list[str]]:
    result = CliRunner().invoke(cli.app, ["compile", *arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.output.splitlines()


@functools.cache
def wanted(program: Program) -> tuple[tuple[KernelRequest, bool], ...]:
    return tuple(wanted_by(NAMES, program, Gpu()))


def test_all_names_together_want_every_kernel() -> None:
    operators = {m.OPERATOR.name for m in operator_modules() if hasattr(m, "OPERATOR") and m.OPERATOR.has_kernel}
    kernels = {*wanted(SMALL), *wanted(dataclasses.replace(SMALL, is_weighted=True))}
    assert {request.name for request, _ in kernels} == operators | {"barrier"}
    assert not any(links for _, links in kernels)


def test_what_is_wanted_follows_the_program() -> None:
    for changed in ({"dtype": torch.bfloat16}, {"in_features": 8192}, {"dim": 64}, {"optimizer": "adam"}):
        assert set(wanted(dataclasses.replace(SMALL, **changed))) != set(wanted(SMALL)), changed  # type: ignore[arg-type]


def test_kernels_of_several_hosts_are_linked_with_nvshmem() -> None:
    kernels = wanted_by(["gemv_all_reduce", "gemv"], dataclasses.replace(SMALL, nodes=2), Gpu())
    assert {links for request, links in kernels if request.name == "gemv_all_reduce"} == {True, False}


def test_a_shipped_cache_has_what_the_program_loads(
    workshop: Workshop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ["gemm", "ShardedEmbeddingBagCollection"]
    sizes = ["--rows", "100", "--dim", "16", "--batch", "8", "--in-features", "512", "--out-features", "512"]
    code, lines = run(*names, "--arch", "sm_90a", "--dtype", "fp16", "--tokens", "32", "--tables", "2", *sizes)
    assert code == 0
    kernels = wanted_by(names, SMALL, Gpu())
    assert lines[-1].startswith(f"{len(kernels)} kernels in ") and lines[-1].endswith(f" are in {workshop.cache}")
    assert any(" s  sm_90a  gemm scalar=kFloat16 " in line for line in lines)
    compiled = (workshop.state / "nvcc_calls").read_text().splitlines()
    assert len(compiled) == len(kernels)
    for variable in ("PERSISTENT_OPS_NVCC", "PERSISTENT_OPS_CXX"):
        monkeypatch.delenv(variable)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(toolchain, "_system_toolkits", list)
    monkeypatch.setattr(toolchain, "_distribution", lambda name: None)
    jit.clear_memo()
    for request, _ in kernels:
        assert compile_cuda(request.source(), arch=f"sm_90{request.shape.architecture_suffix}").path.exists()
    with pytest.raises(CompileError, match="is not in the cache"):
        compile_cuda(next(iter(kernels))[0].source(), arch="sm_100")


def test_wrong_arguments_exit_with_two(workshop: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert run("gemm") == (
        2,
        ["error: --arch: expected an architecture, since there is no GPU here: sm_80, sm_90, sm_100"],
    )
    for arguments, error in (
        (("gem", "--arch", "sm_90"), f"error: expected {', '.join((*NAMES, 'all'))}; got gem"),
        (("gemm", "--arch", "sm_70"), "error: --arch: expected one of sm_80, sm_90, sm_100, got 'sm_70'"),
        (("gemm", "--arch", "sm_90", "--dtype", "int8"), "error: --dtype: expected fp32, bf16, fp16; got int8"),
        (
            ("embedding_all_to_all", "--arch", "sm_90", "--optimizer", "lion"),
            "error: optimizer: expected one of 'sgd', 'adagrad', 'rowwise_adagrad', 'adam', got 'lion'",
        ),
    ):
        assert run(*arguments) == (2, [error])


def test_a_kernel_that_does_not_compile_exits_with_one_after_the_others(
    workshop: Workshop, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = []

    def compile_some(source: jit.KernelSource, *, arch: str, nvshmem: bool) -> None:
        if "barrier" in source.entry:
            raise CompileError("no barrier today")
        done.append(source.entry)

    monkeypatch.setattr(precompile, "compile_cuda", compile_some)
    code, lines = run("gemv", "--arch", "sm_90", "--in-features", "512", "--out-features", "512")
    assert code == 1 and lines[-1] == "error: no barrier today"
    assert done == ["kernels/gemv_all_reduce.cuh"] * 3

"""The headers' description of their structs matches the compiler's layout. An incomplete one does not compile."""

from __future__ import annotations

import ctypes
import dataclasses
import re
import shutil
from pathlib import Path

import pytest
from host_driver.build import CUDA

from persistent_ops.runtime import backend, contract
from persistent_ops.runtime.backend import KernelRequest, LaunchShape
from persistent_ops.runtime.compile import description
from persistent_ops.runtime.compile.description import COMM, Description, describe, description_of
from persistent_ops.runtime.compile.jit import KernelSource, _scan, compile_host
from persistent_ops.runtime.contract import LaunchKind
from persistent_ops.runtime.errors import CompileError

OPERATORS = [each for each in contract._kinds.values() if (CUDA / f"kernels/{each.name}.cuh").exists()]
KERNELS = sorted(path.stem for path in (CUDA / "kernels").glob("*.cuh"))
HEAD = "#include <cstddef>\n"


def _check(kernel: str, layout: str, root: Path = CUDA) -> Path:
    """Compile what every kernel is compiled with, and the kernel's header alone."""
    tail = f"namespace po::{kernel} {{ {layout} }}\n"
    return compile_host(KernelSource(f"kernels/{kernel}.cuh", head=HEAD, tail=tail, root=root), is_portable=True)


@pytest.mark.parametrize("kernel", KERNELS)
def test_every_struct_lies_as_the_compiler_lays_it(kernel: str) -> None:
    found = description_of(kernel)
    assert {"Plan", "Call", "Team"} <= set(found.structs)
    for name, struct in found.structs.items():
        fields = [field for field, *_ in struct._fields_ if not field.startswith("_pad")]
        for field in fields:
            assert f"offsetof({name}, {field}) == {getattr(struct, field).offset}" in found.layout
        assert found.layout.count(f"offsetof({name}, ") == len(fields)
    assert _check(kernel, found.layout).exists()


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_plan_that_lies_otherwise_does_not_compile(kernel: str) -> None:
    layout = description_of(kernel).layout
    plan = ctypes.sizeof(description_of(kernel).structs["Plan"])
    with pytest.raises(CompileError, match="another layout than the host's"):
        _check(kernel, layout.replace(f"sizeof(Plan) == {plan}", f"sizeof(Plan) == {plan + 8}"))
    with pytest.raises(CompileError, match="another layout than the host's"):
        _check(kernel, layout.replace("offsetof(Team, heap) == 8", "offsetof(Team, heap) == 16"))


def test_a_kernel_is_compiled_with_its_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    found = description_of("barrier")
    other = dataclasses.replace(found, layout=found.layout.replace("sizeof(Grant) == 128", "sizeof(Grant) == 64"))
    monkeypatch.setattr(backend, "description_of", lambda kernel: other)
    with pytest.raises(CompileError, match="another layout than the host's"):
        compile_host(KernelRequest("barrier", None, LaunchShape(64)).source())


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("  uint64_t abort_offset; ", "  uint64_t forgotten;\n  uint64_t abort_offset; "),
        ("  uint64_t epoch;  // of this launch", "  uint64_t forgotten;\n  uint64_t epoch;  // of this launch"),
        ("PO_DESCRIBE(Team, rank, size, heap,", "PO_DESCRIBE(Team, size, rank, heap,"),
        ("PO_DESCRIBE(Team, rank, size, heap,", "PO_DESCRIBE(Team, rank, size,"),
    ],
    ids=["field in the middle", "field at the end", "order", "left out"],
)
def test_a_struct_that_is_not_told_in_full_does_not_compile(tmp_path: Path, old: str, new: str) -> None:
    root = tmp_path / "cuda"
    shutil.copytree(CUDA, root)
    team = root / "comm/team.cuh"
    assert team.read_text().count(old) == 1
    team.write_text(team.read_text().replace(old, new))
    head = description._HEAD
    with pytest.raises(CompileError, match="Team: name every field, in order"):
        compile_host(KernelSource(COMM, head=head, root=root), is_portable=True)


def test_what_is_told_can_be_read_back() -> None:
    found = describe(COMM)
    record = found.structs["ErrorRecord"](peer=3)
    record.own_contract[2] = -5
    assert int.from_bytes(bytes(record)[24:32], "little") == record.peer == 3
    assert list(record.own_contract) == [0, 0, -5, *[0] * (found.constants["kContractWords"] - 3)]
    plan = description_of("gemv_all_reduce").structs["Plan"]()
    plan.team.size = 7
    plan.team.contract[13] = -5
    assert (plan.team.size, plan.team.contract[13]) == (7, -5)


def test_a_struct_of_several_headers_is_one_type() -> None:
    assert len({description_of(kernel).structs["Team"] for kernel in KERNELS}) == 1
    plans = [description_of(kernel).structs["Plan"] for kernel in KERNELS]
    layouts = {(ctypes.sizeof(plan), *plan._fields_) for plan in plans}
    assert len(set(plans)) == len(layouts) < len(plans)  # two kernels have the same


def test_what_is_put_as_one_block_has_no_padding() -> None:
    grant = describe(COMM).structs["Grant"]
    assert ctypes.sizeof(grant) == 128 == sum(ctypes.sizeof(kind) for _, kind in grant._fields_)
    assert (grant.flag.offset, grant.output_offset.offset) == (0, 8)


def test_words_that_many_wgs_update_share_no_line() -> None:
    state = describe(COMM).structs["LocalState"]
    lines = [getattr(state, name).offset // 128 for name in ("epoch", "ticket", "departed", "abort")]
    assert len(set(lines)) == len(lines)


def test_geometry_is_what_a_wg_of_the_gpu_divides() -> None:
    """By hand, for 8 warps: two teams of four; a step is 128 bytes of each of a tile's 8 rows and of each vector."""
    geometry = description_of("gemv_all_reduce").queries
    assert geometry["num_teams"](8) == 2
    assert geometry["ring_step_bytes"](8) == 8 * 8 * 128
    assert geometry["vectors_bytes"](8, 1000) == 8 * 8 * 128
    assert geometry["vectors_bytes"](1, 1024) == 8 * 128 + 16
    assert geometry["vector_ring_step_bytes"](8, 16) == 4 * 16 * 128
    assert geometry["parts_bytes"](8, 1) == 4 * 8 * 4 * 8
    assert geometry["parts_bytes"](8, 16) == 4 * 16 * 8 * 4 * 4


@pytest.mark.parametrize("operator", OPERATORS, ids=lambda operator: operator.name)
def test_every_code_of_a_kernel_has_its_text(operator: LaunchKind) -> None:
    constants: Description = operator.description
    phases = {name for name in constants.constants if name.startswith("kPhase")}
    assert phases == {"kPhaseCredit", *operator.phases}
    codes = {constants.constants[name] & 0xFFFF for name in phases}
    assert len(codes) == len(phases)
    for code in codes:
        assert operator.waited_for(code, 7)
    source = "".join((CUDA / header).read_text() for header in _scan(CUDA, f"kernels/{operator.name}.cuh"))
    kinds = re.search(r"enum InputErrorKind : uint64_t {(.*?)}", source, re.DOTALL)
    assert set(operator.input_errors) == set(re.findall(r"k\w+", kinds[1]) if kinds else ())
    record = constants.structs["InputErrorRecord"](outer=1, inner=2, value=30, limit=4)
    for name in operator.input_errors:
        record.kind = constants.constants[name]
        assert "30" in str(operator.input_error(record))

"""The ctypes mirrors of the kernels' structs agree with the structs, field by field."""

from __future__ import annotations

import ast
import ctypes
import subprocess
from pathlib import Path

import pytest
from host_driver.build import compile_source

import persistent_ops
from persistent_ops.ops import embedding_plan, gemv_plan, sparse_plan
from persistent_ops.runtime import host, layout, workspace

MIRRORS: dict[str, type[ctypes.Structure]] = {
    "LocalState": layout.LocalState,
    "ErrorRecord": layout.ErrorRecord,
    "InputErrorRecord": layout.InputErrorRecord,
    "Team": layout.Team,
    "ExchangeOrder": embedding_plan._Order,
    "Table": embedding_plan._Table,
    "Plan": embedding_plan._Plan,
    "GemvPlan": gemv_plan._Plan,
    "RowSets": sparse_plan._RowSets,
    "SparsePlan": sparse_plan._Plan,
    "SparseReport": sparse_plan.Report,
}


class Struct:
    """A struct as the compiler laid it out: its size, and offset and size of each field, in order."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.fields: dict[str, tuple[int, int]] = {}


@pytest.fixture(scope="module")
def printed(tmp_path_factory: pytest.TempPathFactory) -> list[list[str]]:
    program = compile_source("layout_shim.cpp", tmp_path_factory.mktemp("layout") / "layout")
    output = subprocess.run([str(program)], capture_output=True, text=True, check=True).stdout
    return [line.split() for line in output.splitlines()]


@pytest.fixture(scope="module")
def structs(printed: list[list[str]]) -> dict[str, Struct]:
    found: dict[str, Struct] = {}
    for words in printed:
        if words[0] == "struct":
            current = found[words[1]] = Struct(int(words[2]))
        elif words[0] != "constant":
            current.fields[words[0]] = (int(words[1]), int(words[2]))
    return found


def test_constants(printed: list[list[str]]) -> None:
    constants = {words[1]: int(words[2]) for words in printed if words[0] == "constant"}
    assert constants == {
        "kMaxPes": layout.MAX_PES,
        "kContractWords": layout.CONTRACT_WORDS,
        "kEpochShift": layout.EPOCH_SHIFT,
        "kBlameKindShift": layout.BLAME_KIND_SHIFT,
        "kCallWords": host._CALL_WORDS,
        "kReportedByPeer": max(workspace._KINDS),
        "kPhaseRows": max(workspace._PHASES),
        "kTileRows": gemv_plan._TILE_ROWS,
        "sizeof(Packet)": gemv_plan._PACKET_BYTES,
        "kRowsPerWord": sparse_plan._ROWS_PER_WORD,
        "kNumMeetings": sparse_plan._MEETINGS,
        "HotList::kMost": sparse_plan._MOST_HOT,
        "sizeof(HotList)": 8 * (1 + sparse_plan._MOST_HOT),
    }


@pytest.mark.parametrize("name", MIRRORS)
def test_mirror_has_the_kernels_layout(structs: dict[str, Struct], name: str) -> None:
    mirror, struct = MIRRORS[name], structs[name]
    fields = [field for field, *_ in mirror._fields_ if not field.startswith("_pad")]
    assert fields == list(struct.fields)
    descriptors = [getattr(mirror, field) for field in fields]
    assert {f: (d.offset, d.size) for f, d in zip(fields, descriptors, strict=True)} == struct.fields
    assert ctypes.sizeof(mirror) == struct.nbytes


@pytest.mark.parametrize("name", sorted(set(MIRRORS) - {"LocalState"}))  # whose words stand on lines of their own
def test_no_field_is_left_out(structs: dict[str, Struct], name: str) -> None:
    """Between the fields that are compared there is no room for another one, but where the next one is aligned."""
    end = 0
    for offset, size in structs[name].fields.values():
        assert 0 <= offset - end < min(size, 8)
        end = offset + size
    assert 0 <= structs[name].nbytes - end < 8


def test_every_mirror_is_compared() -> None:
    """In the sources, as the module for GPUs cannot be imported without their packages."""
    package = Path(persistent_ops.__file__).parent
    found = set()
    for file in package.rglob("*.py"):
        module = ".".join(file.relative_to(package.parent).with_suffix("").parts)
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ClassDef) and any("Structure" in ast.unparse(base) for base in node.bases):
                found.add((module, node.name))
    assert found == {(mirror.__module__, mirror.__name__) for mirror in MIRRORS.values()}


def test_grant_fills_its_bytes(structs: dict[str, Struct]) -> None:
    grant = structs["Grant"]
    assert grant.nbytes == layout.GRANT_BYTES
    assert sum(size for _, size in grant.fields.values()) == grant.nbytes  # what is put as one block has no padding
    assert (grant.fields["flag"], grant.fields["output_offset"]) == ((0, 8), (8, 8))


@pytest.mark.parametrize("name", ["Call", "GemvCall", "SparseCall"])
def test_call_is_all_words(structs: dict[str, Struct], name: str) -> None:
    assert list(structs[name].fields.values()) == [(8 * i, 8) for i in range(host._CALL_WORDS)]


def test_local_state_is_whole_words(structs: dict[str, Struct]) -> None:
    assert structs["LocalState"].nbytes == layout.LOCAL_STATE_WORDS * 8


def test_words_that_many_wgs_update_share_no_line(structs: dict[str, Struct]) -> None:
    lines = [structs["LocalState"].fields[name][0] // 128 for name in ("epoch", "ticket", "departed", "abort")]
    assert len(set(lines)) == len(lines)

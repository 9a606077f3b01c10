"""The GPU kernels compile for sm_80, sm_90 and sm_100 without spills or stack, and need the registers of the table.

The table has every pair of dtype, pooling and row shape of the embedding, and the other operators' kernels that plans
choose; `python tests/kernel_resources.py --write` makes it. That it is of these sources is seen by digests. A sample,
with a kernel of each operator and some for each architecture, is compiled and compared. Kernels that trace may spill.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import kernel_digests
import pytest
from kernel_digests import CUDA, code_alone, for_gpus
from kernel_resources import (
    ARCHITECTURES,
    BLOCKS_PER_SM,
    REGISTERS_PER_SM,
    TABLE,
    code_of,
    compiled,
    everything,
    nvcc_release,
    row,
    sample,
)

from persistent_ops.ops.gemv_plan import OPERATOR as GEMV
from persistent_ops.runtime.errors import CompileError

SAMPLE = {combination.name: combination for combination in sample()}


@pytest.fixture(scope="module")
def table() -> dict[str, Any]:
    return json.loads(TABLE.read_text())  # type: ignore[no-any-return]


def _check(name: str, found: dict[str, Any]) -> None:
    threads, registers, spill_bytes = found["threads"], found["registers"], found["spill_bytes"]
    if not name.endswith("traced"):
        assert spill_bytes == 0, f"{name} spills {spill_bytes} bytes per thread at {registers} registers"
        stack_bytes = found["stack_bytes"]
        assert stack_bytes == 0, f"{name} has {stack_bytes} bytes of each thread in memory: an array that is indexed"
    # The register file is given out in units of 8 per thread and 256 per warp. A GEMV has one WG per SM; with a single
    # vector, or where it prefetches, there is room for a successor's beside it.
    is_alone = name.startswith("gemv_all_reduce") and " 1 vectors" not in name and "prefetches" not in name
    is_alone |= name.startswith("all_reduce") and threads > 256  # as all_reduce's largest WGs
    is_alone |= name.startswith("embedding_backward")  # whose grid is what fits
    blocks = 1 if is_alone else BLOCKS_PER_SM
    if name.startswith("embedding_inputs") and not name.endswith("traced"):
        blocks = 1024 // threads  # with few threads a WG finds room beside others: 4096 registers
    held = -(-registers // 8) * 8 * threads * blocks
    assert held <= REGISTERS_PER_SM, f"{name}: {blocks} WGs of {threads} threads hold {held} registers of an SM"


@pytest.mark.slow
@pytest.mark.parametrize("name", SAMPLE)
def test_what_is_compiled_is_what_the_table_says(table: dict[str, Any], name: str) -> None:
    try:
        release = nvcc_release()
    except CompileError as error:
        pytest.skip(f"needs the CUDA compiler: {error}")
    found = row(SAMPLE[name], compiled(SAMPLE[name]))
    _check(name, found)
    assert found["registers"] > 16, "so few registers mean that the kernel was compiled to nothing"
    if table["nvcc"] != release:
        pytest.skip(f"the table is of nvcc {table['nvcc']}, this is {release}")
    assert table["kernels"].get(name) == found, f"run `{table['command']}`"


def test_the_table_is_of_these_sources(table: dict[str, Any]) -> None:
    codes = {combination.name: code_of(combination) for combination in everything()}
    assert {name: found["code"] for name, found in table["kernels"].items()} == codes, f"run `{table['command']}`"


def test_a_digest_is_of_what_is_compiled() -> None:
    """Other configurations and architectures have other digests, and only they."""
    combinations = everything()
    assert len({code_of(combination) for combination in combinations}) == len(combinations)


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("a\n#if PO_ON_DEVICE\nb\n#else\nc\n#endif\nd", "abd"),
        ("a\n#if !PO_ON_DEVICE\nb\n#else\nc\n#endif\nd", "acd"),
        ("#if !PO_ON_DEVICE\na\n#elif PO_WITH_NVSHMEM\nb\n#else\nc\n#endif", "bc"),
        ("#if PO_ON_DEVICE\na\n#elif PO_WITH_NVSHMEM\nb\n#endif", "a"),
        ("#if PO_ON_DEVICE && __CUDA_ARCH__ >= 900\na\n#else\nb\n#endif", "ab"),
        ("#if !PO_ON_DEVICE\n#if X\na\n#else\nb\n#endif\nc\n#endif\nd", "d"),
    ],
)
def test_a_digest_leaves_out_what_is_for_the_host_alone(text: str, left: str) -> None:
    assert "".join(line for line in for_gpus(text).splitlines() if line.isalpha()) == left


@pytest.mark.parametrize(
    "other",
    [
        "// What it is.\nint twice(int x) {  // @tag\n  return 2 * x;\n}\n",
        "/* What it is,\n * in two lines. */\nint twice(int x) { return 2 /* times */ * x; }",
        'int twice(int x) {\n\n  return 2 * x;   \n}  /**/ // it\'s "so"',
    ],
)
def test_comments_and_layout_change_no_code(other: str) -> None:
    assert code_alone(other) == code_alone("int twice(int x) { return 2 * x; }")


@pytest.mark.parametrize(
    "code", ['a = "//";', 'a = "\\"//";', 'a = "/*" + "*/";', "a = '\"';", "a = '\\'';", "a = '/' / '/';", "a = 1'000;"]
)
def test_what_is_no_comment_is_code(code: str) -> None:
    assert code_alone(f'{code} // it\'s "so"\n{code}') == f"{code} {code}"


def test_a_digest_is_of_headers_without_comments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    barrier = next(each for each in everything() if each.name == "barrier sm_90")
    shutil.copytree(CUDA, tmp_path / "cuda")
    header = tmp_path / "cuda" / "comm" / "launch.cuh"
    text, old = header.read_text(), "uint64_t started = 0;"
    assert old in text
    monkeypatch.setattr(kernel_digests, "CUDA", tmp_path / "cuda")
    digests = []
    try:
        for new in (old, f"{old}  // when\n  /* and why */", "uint64_t started = 1;"):
            header.write_text(text.replace(old, new))
            kernel_digests._headers.cache_clear()
            digests.append(code_of(barrier))
    finally:
        kernel_digests._headers.cache_clear()
    assert digests[0] == digests[1] != digests[2]


def test_headers_of_the_host_alone_are_in_no_digest() -> None:
    of_gpus = kernel_digests._headers("kernels/barrier.cuh")
    assert "\nplatform/memory.cuh\n" in of_gpus and "host_threads.h" not in of_gpus
    assert '#include "platform/host_threads.h"' in (CUDA / "platform" / "entry.cuh").read_text()


def test_nothing_in_the_table_spills_or_has_a_stack(table: dict[str, Any]) -> None:
    for name, found in table["kernels"].items():
        _check(name, found)


def test_a_plan_leaves_room_for_what_a_kernel_has_beside_its_arena(table: dict[str, Any]) -> None:
    used = [found["shared_bytes"] for name, found in table["kernels"].items() if name.startswith("gemv_all_reduce")]
    assert 0 < max(used) <= GEMV.description.constants["kStaticBytes"]


def test_the_sample_has_each_operator_and_each_architecture() -> None:
    assert set(SAMPLE) <= {combination.name for combination in everything()}
    pairs = {(type(combination), combination.arch) for combination in SAMPLE.values()}
    assert {kind for kind, _ in pairs} == {type(combination) for combination in everything()}
    assert {arch: len([each for _, each in pairs if each == arch]) >= 3 for arch in ARCHITECTURES} == dict.fromkeys(
        ARCHITECTURES, True
    )

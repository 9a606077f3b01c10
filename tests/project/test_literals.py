"""Python reads numbers from the kernels' headers, and defines none of them again."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
from host_driver.build import CUDA

import persistent_ops as po
from persistent_ops.ops.embedding.checks import most_rows
from persistent_ops.ops.embedding.inputs_plan import aligned_bytes
from persistent_ops.runtime.compile.jit import KernelSource, compile_host
from persistent_ops.runtime.compile.literals import literal, vector_bytes, warp_size

PACKAGE = Path(po.__file__).parent
# Names that mean other things in the two languages.
OTHERS = {
    "THREADS": "of sparse_all_reduce's kernel, which is told; the headers' are of kernels that have one choice",
    "MAX_ROWS": "of a gradient in sparse_all_reduce; the header's are of a matrix",
}


def test_the_compiler_reads_the_same_numbers() -> None:
    tail = f"""#include "sched/row_blocks.cuh"
        static_assert(po::kChunkBytes == {vector_bytes()} && po::embedding_inputs::aligned(1) == {aligned_bytes(1)});
    """
    source = KernelSource("kernels/embedding_inputs.cuh", head="#include <cstddef>\n", tail=tail)
    assert compile_host(source, is_portable=True).exists()
    assert (warp_size(), most_rows(), aligned_bytes(129)) == (32, 2**32 - 2, 256)


def test_what_is_no_number_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sizes.cuh").write_text(
        "inline constexpr uint64_t kLanes = 0x20ull;\ninline constexpr int kLanes = 1;\n"
        "inline constexpr int kSum = kLanes + 1;\n"
    )
    monkeypatch.setattr("persistent_ops.runtime.compile.literals.kernel_source_root", lambda: tmp_path)
    assert literal("sizes.cuh", "kLanes") == 32
    for name in ("kSum", "kLane", "kOther"):
        with pytest.raises(ValueError, match=f"sizes.cuh: expected a definition of {name} as a number"):
            literal("sizes.cuh", name)


def _numbers_of_headers() -> dict[str, set[str]]:
    """Return the headers that define a constant, by its name as Python would write it."""
    found: dict[str, set[str]] = {}
    for path in CUDA.rglob("*.cuh"):
        for name in re.findall(r"^inline constexpr [\w:<>]+ k(\w+) = ", path.read_text(), re.MULTILINE):
            snake = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).upper()
            found.setdefault(snake, set()).add(path.relative_to(CUDA).as_posix())
    return found


def _is_number(value: ast.expr) -> bool:
    """Return whether it is a number, or is computed from numbers."""
    return all(
        isinstance(node.value, (int, float)) if isinstance(node, ast.Constant) else not isinstance(node, ast.Name)
        for node in ast.walk(value)
    )


def _numbers_of_python() -> dict[str, str]:
    """Return the modules that define a constant as a number, by its name."""
    found = {}
    for path in (PACKAGE / folder for folder in ("ops", "runtime", "nn")):
        for module in path.glob("*.py"):
            for node in ast.parse(module.read_text()).body:
                if isinstance(node, ast.Assign) and _is_number(node.value):
                    found |= {each.id.strip("_"): module.name for each in node.targets if isinstance(each, ast.Name)}
    return found


def test_no_constant_of_a_header_is_defined_again() -> None:
    """By name. The test does not see a number that has another name in the other language."""
    headers, python = _numbers_of_headers(), _numbers_of_python()
    both = {name: (module, headers[name]) for name, module in python.items() if name in headers}
    assert both.keys() == OTHERS.keys(), both

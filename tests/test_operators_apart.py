"""Each operator is taken away in turn, files and lines: the rest imports, compiles and runs, and nothing is left over.

What `runtime/`, `cuda/comm/` and `cuda/platform/` hold is for all operators: without one of them it still has a user.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Parts:
    """What goes with an operator: its own files, and the modules for users that build on it.

    Attributes:
        package: in persistent_ops/.
        kernels: in cuda/.
        call: of the function, in a world of two PEs.
    """

    package: tuple[str, ...]
    kernels: tuple[str, ...]
    call: str


OPERATORS = {
    "embedding_all_to_all": Parts(
        (
            "ops/embedding_all_to_all.py",
            "ops/embedding_backward.py",
            "ops/embedding_backward_plan.py",
            "ops/embedding_checks.py",
            "ops/embedding_gradients.py",
            "ops/embedding_inputs.py",
            "ops/embedding_inputs_lookups.py",
            "ops/embedding_inputs_plan.py",
            "ops/embedding_inversion.py",
            "ops/embedding_plan.py",
            "ops/embedding_weight_gradients.py",
            "ops/table_set.py",
            "nn/automatic_placement.py",
            "nn/embedding_bag_collection.py",
            "nn/embedding_bag_optimizer.py",
            "nn/embedding_features.py",
            "nn/embedding_tables.py",
            "nn/ignored_tables.py",
            "nn/local_lookups.py",
            "nn/placement_costs.py",
            "nn/placement_report.py",
            "nn/pooled_lookups.py",
            "nn/replicated_tables.py",
            "nn/sharded_table.py",
            "nn/table_layout.py",
            "nn/table_placements.py",
            "nn/table_rounding.py",
            "nn/table_shards.py",
        ),
        (
            "kernels/embedding_all_to_all.cuh",
            "kernels/embedding_backward.cuh",
            "kernels/embedding_backward",
            "kernels/embedding_inputs.cuh",
            "kernels/inputs",
            "kernels/embedding_weight_gradients.cuh",
            "tile/lookup_source.cuh",
            "kernels/embedding_inversion.cuh",
            "kernels/inversion",
            "platform/ballots.cuh",
            "platform/counters.cuh",
            "sched/exchange_order.cuh",
            "tile/bag_stream.cuh",
            "tile/window.cuh",
        ),
        "po.embedding_all_to_all([torch.ones(4, 8)], torch.arange(4), torch.arange(5))",
    ),
    "gemv_all_reduce": Parts(
        ("ops/gemv.py", "ops/gemv_all_reduce.py", "ops/gemv_call.py", "ops/gemv_plan.py", "nn/parallel_linear.py"),
        (
            "kernels/gemv_all_reduce.cuh",
            "kernels/gemv",
            "platform/matrix.cuh",
            "sched/row_tiles.cuh",
            "sched/succession.cuh",
            "tile/weight_stream.cuh",
        ),
        "po.gemv_all_reduce(torch.ones(16, 8), torch.ones(8))",
    ),
    "sparse_all_reduce": Parts(
        (
            "ops/sparse_all_reduce.py",
            "ops/sparse_buffers.py",
            "ops/sparse_launch.py",
            "ops/sparse_plan.py",
            "nn/ddp.py",
        ),
        (
            "kernels/sparse_all_reduce.cuh",
            "kernels/sparse",
            "sched/slot_blocks.cuh",
            "tile/row_chunk.cuh",
        ),
        "po.sparse_all_reduce(torch.eye(4).to_sparse(1))",
    ),
    "all_reduce": Parts(
        ("ops/all_reduce.py", "ops/all_reduce_plan.py"),
        (
            "kernels/all_reduce.cuh",
            "kernels/all_reduce",
        ),
        "po.all_reduce_rms_norm(torch.ones(3, 16), torch.ones(16))",
    ),
}
_PROGRAM = """
import torch, persistent_ops as po
assert po.__file__.startswith({root!r}), po.__file__
assert not hasattr(po, {gone!r}) and not hasattr(torch.ops.persistent_ops, {gone!r})

def program():
    po.init("host", heap_size=32 << 20)
    with torch.no_grad():
        results = [{calls}]
    po.barrier()
    po.finalize()
    return len(results)

print(po.launch(program, 2, threads=True, timeout=200))
"""


def _without(folder: Path, name: str) -> Path:
    """Copy package and kernels without an operator."""
    parts = OPERATORS[name]
    for root, own in (("persistent_ops", parts.package), ("cuda", parts.kernels)):
        shutil.copytree(REPOSITORY / root, folder / root, ignore=shutil.ignore_patterns("__pycache__"))
        for path in (folder / root / file for file in own):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    modules = {Path(file).with_suffix("").as_posix().replace("/", ".") for file in parts.package}
    for init in folder.glob("persistent_ops/**/__init__.py"):
        here = init.parent.relative_to(folder / "persistent_ops").as_posix().strip(".").replace("/", ".")
        kept, lines = [], re.findall(r"from [^\n(]*\([^)]*\)\n|[^\n]*\n", init.read_text())
        for line in lines:
            found = re.match(r"from \.([\w.]*) import \(?\s*(\w+)", line)
            source = ".".join(part for part in (here, found[1]) if part) if found else ""
            # The package takes what an operator's module is named after from `ops`.
            if source not in modules and not (found and source == "ops" and f"ops.{found[2]}" in modules):
                kept.append(line)
        init.write_text("".join(kept))
    return folder


@pytest.mark.parametrize("name", OPERATORS)
def test_the_others_run_without_it(tmp_path: Path, name: str) -> None:
    root = _without(tmp_path, name)
    calls = ", ".join(parts.call for other, parts in OPERATORS.items() if other != name)
    program = root / "program.py"
    program.write_text(_PROGRAM.format(root=str(root), gone=name, calls=calls))
    environment = {**os.environ, "PYTHONPATH": str(root), "PYTHONWARNINGS": "ignore"}
    command = [sys.executable, str(program)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=250, env=environment, cwd=root)
    assert result.returncode == 0, result.stderr[-4000:]
    assert result.stdout.strip() == str([len(OPERATORS) - 1] * 2)


def _names(text: str) -> set[str]:
    """Return what a header defines for others: functions, types, constants; not what is within a class."""
    code = re.sub(r"//[^\n]*", "", text)
    functions = re.findall(r"^(?:PO_FN|PO_NOINLINE inline|inline|constexpr)[^;={(]*?\b(\w+)\(", code, re.MULTILINE)
    types = re.findall(r"^(?:enum class|enum|struct|class) (?:alignas\(\w+\) )?(\w+)\b[^;]*{", code, re.MULTILINE)
    constants = re.findall(r"^inline constexpr [\w:<>]+ (\w+) =", code, re.MULTILINE)
    aliases = re.findall(r"^using (\w+) =", code, re.MULTILINE)
    return {*functions, *types, *constants, *aliases}


@pytest.mark.parametrize("name", OPERATORS)
def test_what_is_shared_has_another_user(tmp_path: Path, name: str) -> None:
    """Of comm/ everything; of platform/, which holds what the hardware has, a part of every header."""
    root = _without(tmp_path, name)
    headers = [*root.glob("cuda/**/*.cuh"), *root.glob("cuda/**/*.h")]
    texts = {path.relative_to(root / "cuda").as_posix(): re.sub(r"//[^\n]*", "", path.read_text()) for path in headers}
    everything = "\n".join(texts.values())
    names = {path: _names(text) for path, text in texts.items()}
    unused = {
        path: {found for found in names[path] if len(re.findall(rf"\b{found}\b", everything)) < 2} for path in texts
    }
    assert set().union(*(unused[path] for path in texts if path.startswith("comm/"))) == set()
    of_one = [path for path in texts if path.startswith("platform/") and names[path] and unused[path] == names[path]]
    assert of_one == []


@pytest.mark.parametrize("name", OPERATORS)
def test_what_is_shared_does_not_know_its_name(name: str) -> None:
    folders = ("persistent_ops/runtime", "cuda/comm", "cuda/platform")
    files = [path for folder in folders for path in (REPOSITORY / folder).iterdir() if path.is_file()]
    own = {name, name.replace("gemv_all_reduce", "gemv")}
    knowing = [path.name for path in files if any(re.search(rf"\b{word}\b", path.read_text()) for word in own)]
    assert knowing == []

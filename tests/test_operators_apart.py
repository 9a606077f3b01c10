"""Each operator is taken away in turn, files and lines: the rest imports, compiles and runs, and nothing is left over.

What `runtime/` and the shared folders of `cuda/` hold is for all operators: without one of them it still has a user.
Two that have only each other would not do: a header counts as used if a kernel that is left includes it, and a
definition in `runtime/` if code that is left leads to it.
"""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Parts:
    """What goes with an operator: its own files, and the modules for users that build on it.

    Attributes:
        package: in persistent_ops/.
        kernels: in cuda/, and the page about them.
        name: in persistent_ops.
        suite: of tests of its bits, whose first cases must give them where another operator is gone.
        users: operators that are built on it, and go with it.
    """

    package: tuple[str, ...]
    kernels: tuple[str, ...]
    name: str
    suite: str
    users: tuple[str, ...] = ()


# Of nn, the embedding module: it trains with the backward pass, and adds up gradients of replicated tables.
_TABLES = (
    "nn/ahead_of_update.py",
    "nn/automatic_placement.py",
    "nn/column_runs.py",
    "nn/embedding_bag_collection.py",
    "nn/embedding_bag_optimizer.py",
    "nn/embedding_features.py",
    "nn/embedding_tables.py",
    "nn/enclosing_ddp.py",
    "nn/ignored_tables.py",
    "nn/kept_lookups.py",
    "nn/local_lookups.py",
    "nn/placement_costs.py",
    "nn/placement_report.py",
    "nn/pooled_lookups.py",
    "nn/replicated_tables.py",
    "nn/sharded_table.py",
    "nn/table_layout.py",
    "nn/table_owners.py",
    "nn/table_placements.py",
    "nn/table_rounding.py",
    "nn/table_shards.py",
)
OPERATORS = {
    "embedding_all_to_all": Parts(
        (
            "ops/embedding_all_to_all.py",
            "ops/embedding_checks.py",
            "ops/embedding_plan.py",
            "ops/embedding_split.py",
            "ops/table_set.py",
        ),
        (
            "comm/credits.cuh",
            "kernels/embedding_all_to_all.cuh",
            "kernels/embedding_all_to_all.md",
            "sched/exchange_order.cuh",
            "tile/bag_stream.cuh",
            "tile/window.cuh",
        ),
        "embedding_all_to_all",
        "test_embedding_all_to_all.TestBits",
        ("embedding_inputs", "embedding_backward"),
    ),
    # Does not go alone: its `Lookups` are an argument of both passes, and gradients of weights go back the way that it
    # brought the weights.
    "embedding_inputs": Parts(
        (
            "ops/embedding_inputs.py",
            "ops/embedding_inputs_lookups.py",
            "ops/embedding_inputs_plan.py",
        ),
        (
            "kernels/embedding_inputs.cuh",
            "kernels/embedding_inputs.md",
            "kernels/inputs",
            "platform/prefetch.cuh",
            "tile/lookup_source.cuh",
        ),
        "EmbeddingInputs",
        "test_embedding_inputs.TestArrivals",
        ("embedding_all_to_all", "embedding_backward"),
    ),
    # With the launches that are parts of it alone: it inverts lookups, and returns gradients of weights.
    "embedding_backward": Parts(
        (
            "ops/embedding_backward.py",
            "ops/embedding_backward_kernel.py",
            "ops/embedding_backward_plan.py",
            "ops/embedding_gradient_rows.py",
            "ops/embedding_gradients.py",
            "ops/embedding_inversion.py",
            "ops/embedding_recorded_call.py",
            "ops/embedding_weight_gradients.py",
            "ops/embedding_widths.py",
            *_TABLES,
        ),
        (
            "kernels/embedding_backward.cuh",
            "kernels/embedding_backward.md",
            "kernels/embedding_backward",
            "kernels/embedding_inversion.cuh",
            "kernels/embedding_weight_gradients.cuh",
            "kernels/inversion",
            "platform/ballots.cuh",
            "platform/random.cuh",
            "platform/streaming.cuh",
        ),
        "EmbeddingOptimizer",
        "test_embedding_backward.TestBits",
    ),
    "gemv_all_reduce": Parts(
        ("ops/gemv.py", "ops/gemv_all_reduce.py", "ops/gemv_call.py", "ops/gemv_plan.py", "nn/parallel_linear.py"),
        (
            "kernels/gemv_all_reduce.cuh",
            "kernels/gemv_all_reduce.md",
            "kernels/gemv",
            "platform/matrix.cuh",
            "sched/row_tiles.cuh",
            "sched/succession.cuh",
            "tile/weight_stream.cuh",
        ),
        "gemv_all_reduce",
        "test_gemv_all_reduce.TestBits",
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
            "kernels/sparse_all_reduce.md",
            "kernels/sparse",
            "sched/slot_blocks.cuh",
            "tile/row_chunk.cuh",
        ),
        "sparse_all_reduce",
        "test_sparse_all_reduce.TestBits",
    ),
    "all_reduce": Parts(
        ("ops/all_reduce.py", "ops/all_reduce_plan.py", *_TABLES),
        (
            "kernels/all_reduce.cuh",
            "kernels/all_reduce.md",
            "kernels/all_reduce",
            "tile/row_block.cuh",
        ),
        "all_reduce",
        "test_all_reduce.TestBits",
    ),
}
TAKEN = [name for name in OPERATORS if name != "embedding_inputs"]  # alone, or with those that are built on it
# Each of the remaining operators' first case in a world of two: six iterations and all ways to call it.
_PROGRAM = """
import importlib, pkgutil, torch, bits, persistent_ops as po
assert po.__file__.startswith({root!r}), po.__file__
for name in {gone!r}:
    assert not hasattr(po, name) and not hasattr(torch.ops.persistent_ops, name), name
for package in (po.ops, po.nn):  # what is left over of an operator does not find the rest of it
    for module in pkgutil.iter_modules(package.__path__, package.__name__ + "."):
        importlib.import_module(module.name)
suites = [getattr(importlib.import_module(file), suite) for file, suite in {suites!r}]

def program():
    po.init("host", heap_size=128 << 20)
    found = [bits.check(suite.trial(suite.worlds["2"].cases[0]))[0] for suite in suites]
    po.finalize()
    return found

print(po.launch(program, 2, threads=True, timeout=200))
"""


def _taken_with(name: str) -> list[str]:
    return [name, *OPERATORS[name].users]


def _without(folder: Path, name: str) -> Path:
    """Copy package and kernels without an operator, and without those that are built on it."""
    taken = [OPERATORS[each] for each in _taken_with(name)]
    package = [file for parts in taken for file in parts.package]
    for root, own in (("persistent_ops", package), ("cuda", [file for parts in taken for file in parts.kernels])):
        shutil.copytree(REPOSITORY / root, folder / root, ignore=shutil.ignore_patterns("__pycache__"))
        for path in (folder / root / file for file in own):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    modules = {Path(file).with_suffix("").as_posix().replace("/", ".") for file in package}
    for init in folder.glob("persistent_ops/**/__init__.py"):
        here = init.parent.relative_to(folder / "persistent_ops").as_posix().strip(".").replace("/", ".")
        kept, lines = [], re.findall(r"from [^\n(]*\([^)]*\)\n|[^\n]*\n", init.read_text())
        for line in lines:
            found = re.match(r"from \.([\w.]*) import \(?\s*(\w+)", line)
            source = ".".join(part for part in (here, found[1]) if part) if found else ""
            if source == "ops":  # from which the package takes what an operator's module is named after
                line = re.sub(r"    (\w+) as \1,\n", lambda each: each[0] * (f"ops.{each[1]}" not in modules), line)
            if source not in modules:
                kept.append(line)
        init.write_text("".join(kept))
    return folder


@pytest.mark.parametrize("name", TAKEN)
def test_the_others_run_without_it(tmp_path: Path, name: str) -> None:
    root = _without(tmp_path, name)
    taken = _taken_with(name)
    suites = [parts.suite.split(".") for other, parts in OPERATORS.items() if other not in taken]
    program = root / "program.py"
    gone = [OPERATORS[each].name for each in taken]
    program.write_text(_PROGRAM.format(root=str(root), gone=gone, suites=suites))
    paths = f"{root}{os.pathsep}{REPOSITORY / 'tests'}"
    environment = {**os.environ, "PYTHONPATH": paths, "PYTHONWARNINGS": "ignore", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(program)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=250, env=environment, cwd=root)
    assert result.returncode == 0, result.stderr[-4000:]
    assert result.stdout.strip() == str([[None] * len(suites)] * 2)


def _names(text: str) -> set[str]:
    """Return what a header defines for others: functions, types, constants, macros; not what is within a class."""
    code = re.sub(r"//[^\n]*", "", text)
    functions = re.findall(r"^(?:PO_FN|PO_NOINLINE inline|inline|constexpr|void)[^;={(]*?\b(\w+)\(", code, re.MULTILINE)
    types = re.findall(r"^(?:enum class|enum|struct|class) (?:alignas\(\w+\) )?(\w+)\b[^;]*{", code, re.MULTILINE)
    constants = re.findall(r"^inline constexpr [\w:<>]+ (\w+) =", code, re.MULTILINE)
    aliases = re.findall(r"^using (\w+) =", code, re.MULTILINE)
    macros = re.findall(r"^#define (\w+)", code, re.MULTILINE)
    return {*functions, *types, *constants, *aliases, *macros}


def _headers(root: Path) -> dict[str, str]:
    """Return the headers by their place in cuda/, without comments."""
    paths = [*root.glob("cuda/**/*.cuh"), *root.glob("cuda/**/*.h")]
    return {path.relative_to(root / "cuda").as_posix(): re.sub(r"//[^\n]*", "", path.read_text()) for path in paths}


def _included(texts: dict[str, str], roots: Iterable[str]) -> set[str]:
    """Return the headers that some include, and those that these include."""
    found: set[str] = set()
    left = [path for path in roots if path in texts]
    while left:
        path = left.pop()
        if path not in found:
            found.add(path)
            left += [each for each in re.findall(r'#include "([^"]+)"', texts[path]) if each in texts]
    return found


@pytest.mark.parametrize("name", TAKEN)
def test_every_header_that_is_left_has_an_includer(tmp_path: Path, name: str) -> None:
    root = _without(tmp_path, name)
    texts = _headers(root)
    named = re.findall(
        r'"([\w/]+\.(?:cuh|h))"', "".join(path.read_text() for path in root.glob("persistent_ops/**/*.py"))
    )
    kernels = [path for path in texts if re.fullmatch(r"kernels/\w+\.cuh", path)]
    assert texts.keys() - _included(texts, [*kernels, *named]) == set()


@pytest.mark.parametrize("name", TAKEN)
def test_what_is_shared_has_another_user(tmp_path: Path, name: str) -> None:
    """Of comm/ everything; of platform/, which holds what the hardware has, a part of every header, in another file."""
    root = _without(tmp_path, name)
    texts = _headers(root)
    everything = "\n".join(texts.values())
    comm = set().union(*(_names(text) for path, text in texts.items() if path.startswith("comm/")))
    assert {found for found in comm if len(re.findall(rf"\b{found}\b", everything)) < 2} == set()
    words = {path: set(re.findall(r"\w+", text)) for path, text in texts.items()}
    compiled = set(re.findall(r"\w+", (root / "persistent_ops/runtime/backend.py").read_text()))  # behind a header
    unused = [
        path
        for path in texts
        if path.startswith("platform/")
        and not _names(texts[path]) & compiled.union(*(found for other, found in words.items() if other != path))
    ]
    assert unused == ["platform/host_runtime.cuh"]  # a library for Python, of what it includes


# What no operator needs but one, or none, and still is no operator's.
THE_LAYER_S_OWN = {
    "jit.clear_memo": "for tests, which play a process that has loaded nothing",
    "nvshmem_end.runs_on": "for tests, which end a process in which NVSHMEM has not come to its end",
    "operator.Operator.tune": "for benchmarks, which find out what the default tuning should be",
    "task._ByName.reducer_override": "called by pickle",
    "workspace.Workspace.set_epoch": "for tests of epochs that no test could count up to",
    "process_group.abort_process_group": "for launch/, whose replays wait for peers in NCCL's sums too",
    "torch_private.abort_groups": "likewise",
    "world.World.lost_peers": "likewise",
    "world.World.preparing_peers": "likewise",
    "call_numbers.CallNumbers.add_caller": "a launch that belongs to an earlier call says to which in its contract",
    "call_numbers.CallNumbers.last_caller": "likewise",
    "call_numbers.CallNumbers.next_of": "likewise",
    "call_numbers.CallNumbers.of_caller": "likewise",
    "operator.Operator.begin_changes": "what a failed launch did to inputs that it changes must hold for every launch",
    "operator.Operator.changed_inputs": "likewise",
    "changes.Changes.know": "PEs agree in `recover` on what to refuse, whichever operator changes it",
    "world.World.learn_of_failures": "what it may have left half changed is not saved either",
    "plans.Plans.drop": "the only way for plans to go before their world does",
    "torch_private.autograd_node": "every private name of torch stands there (test_torch_private.py)",
    "torch_private.active_ddp_module": "likewise",
    "torch_private.storage_has_expired": "likewise",
    "torch_private.wrapper_subclass": "likewise",
    "workspace.Workspace.zero_words": "`recover` must clear them, whoever has asked for them",
    "workspace.Workspace.whole_call": "peers count on all launches of a call, of whichever operators they are",
    "workspace.Workspace.run_beside": "which launches may run side by side is between operators",
    "world.World.agree_to_run_beside": "likewise",
    "world.World.side_workspace": "likewise",
}


@dataclass(frozen=True)
class _Definition:
    """A function, a method, a module's variable; or a class, which has its fields and dunder methods."""

    name: str
    qualified: str
    code: Collection[ast.AST]


def _definitions(module: str, tree: ast.Module) -> tuple[list[_Definition], list[ast.stmt]]:
    """Return what a module defines, and the statements that importing it runs."""
    found, run = [], []
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            found.append(_Definition(node.name, f"{module}.{node.name}", [node]))
        elif isinstance(node, ast.ClassDef):
            methods = [each for each in node.body if isinstance(each, ast.FunctionDef) and each.name[:2] != "__"]
            rest = [each for each in (*node.decorator_list, *node.bases, *node.body) if each not in methods]
            found.append(_Definition(node.name, f"{module}.{node.name}", rest))
            found += [_Definition(each.name, f"{module}.{node.name}.{each.name}", [each]) for each in methods]
        elif isinstance(node, (ast.Assign, ast.AnnAssign)) and node.value is not None:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names = [each.id for each in targets if isinstance(each, ast.Name) and each.id != "__all__"]
            found += [_Definition(each, f"{module}.{each}", [node.value]) for each in names]
        elif not isinstance(node, (ast.Import, ast.ImportFrom)):
            run.append(node)
    return found, run


def _read(code: Iterable[ast.AST]) -> set[str]:
    """Return the names and attributes that code reads."""
    nodes = [node for each in code for node in ast.walk(each) if isinstance(node, (ast.Name, ast.Attribute))]
    read = [node for node in nodes if isinstance(node.ctx, ast.Load)]
    return {node.id if isinstance(node, ast.Name) else node.attr for node in read}


def _unreached(package: Path) -> set[str]:
    """Return the definitions in runtime/ that nothing leads to which the rest of the package does.

    By name alone: of two definitions of one name each keeps the other.
    """
    left, used = [], set()
    for path in package.rglob("*.py"):
        tree = ast.parse(path.read_text())
        if path.parent.name == "runtime":
            found, run = _definitions(path.stem, tree)
            left += found
            used |= _read(run)
        else:
            used |= _read([tree])
    while reached := [each for each in left if each.name in used]:
        left = [each for each in left if each.name not in used]
        used |= _read(node for each in reached for node in each.code)
    return {each.qualified for each in left if each.name[0] != "_"}


@pytest.mark.parametrize("name", TAKEN)
def test_what_the_runtime_defines_has_another_user(tmp_path: Path, name: str) -> None:
    assert _unreached(_without(tmp_path, name) / "persistent_ops") - THE_LAYER_S_OWN.keys() == set()


def test_what_is_the_layer_s_own_would_be_left_over(tmp_path: Path) -> None:
    """No name stands in that list for longer than it must."""
    left = set().union(*(_unreached(_without(tmp_path / name, name) / "persistent_ops") for name in TAKEN))
    assert THE_LAYER_S_OWN.keys() - left == set()


def test_a_definition_that_only_an_unused_one_reads_is_unreached(tmp_path: Path) -> None:
    (tmp_path / "runtime").mkdir()
    (tmp_path / "ops.py").write_text("from .runtime.flags import send\nsend()\n")
    (tmp_path / "runtime/flags.py").write_text(
        "LIMIT = 3\n\n\ndef send(): return LIMIT\n\n\ndef wait(): return poll()\n\n\ndef poll(): return wait()\n"
    )
    assert _unreached(tmp_path) == {"flags.wait", "flags.poll"}


@pytest.mark.parametrize("name", OPERATORS)
def test_what_is_shared_does_not_know_its_name(name: str) -> None:
    folders = ("persistent_ops/runtime", "cuda/comm", "cuda/platform")
    files = [path for folder in folders for path in (REPOSITORY / folder).iterdir() if path.is_file()]
    own = {name, name.replace("gemv_all_reduce", "gemv")}
    knowing = [path.name for path in files if any(re.search(rf"\b{word}\b", path.read_text()) for word in own)]
    assert knowing == []

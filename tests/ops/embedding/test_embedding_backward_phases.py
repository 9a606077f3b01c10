"""The backward pass of embedding_all_to_all while PE 1 stops, dies or is late in one phase of the kernel.

The kernel has one more line at the beginning of each phase, where PE 1 looks for a file.
"""

from __future__ import annotations

import dataclasses
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from embedding_backward_cases import Training, case_of
from warm_python import Popen
from worlds import error_of, gave_up, in_world, init_with_impatient_kernels, meet_in, python_path

import persistent_ops as po
from persistent_ops.ops.embedding.backward_plan import OPERATOR, Tuning
from persistent_ops.runtime import world as po_world
from persistent_ops.runtime.backend import KernelRequest
from persistent_ops.runtime.bootstrap.launchers import LAUNCHER_VARIABLES
from persistent_ops.runtime.compile.jit import kernel_source_root

pytestmark = pytest.mark.host

# ---- the kernel -----------------------------------------------------------------------------------------------------

_FOLDER = "PERSISTENT_OPS_TEST_PHASES"
_REACH = """
#include <unistd.h>

#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <string>

namespace po::phases {
// PE 1 waits in a phase while there is a file <phase>.stop, and ends its process where there is one <phase>.kill.
inline void reach(const char* phase, int rank) {
  const char* folder = std::getenv("PERSISTENT_OPS_TEST_PHASES");
  if (rank != 1 || folder == nullptr) return;
  const std::string path = std::string(folder) + "/" + phase;
  const std::string stop = path + ".stop";
  const bool dies = access((path + ".kill").c_str(), F_OK) == 0;
  if (!dies && access(stop.c_str(), F_OK) != 0) return;
  if (FILE* file = std::fopen((path + ".reached").c_str(), "w")) std::fclose(file);
  if (dies) kill(getpid(), SIGKILL);
  while (access(stop.c_str(), F_OK) == 0) usleep(1000);
}
}  // namespace po::phases
"""
# For each phase: the file, and its first statement. A PE has one thread there, which works through the phases in order.
_PHASES = {
    "credit": ("embedding_backward.cuh", "if (wg.index() == 0) grant_credit(plan.team, wg, 0);", "plan"),
    # After the first table, which PE 2 has then.
    "push": ("embedding_backward/gradient_push.cuh", "copy(push, at.slice);", "plan_"),
    "reduce": ("embedding_backward.cuh", "update_rows(filled, at);", "plan_"),
    "update": ("embedding_backward.cuh", "if (wg.index() == 0) await_all_credits(plan.team, wg);", "plan"),
}


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder of kernel sources with these lines in the backward pass."""
    root = tmp_path_factory.mktemp("phases") / "cuda"
    shutil.copytree(kernel_source_root(), root)
    for phase, (name, statement, plan) in _PHASES.items():
        path = root / "kernels" / name
        text = path.read_text()
        assert text.count(statement) == 1, f"{phase}: where does it begin?"
        condition = "if (piece != 0) " if phase == "push" else ""
        path.write_text(text.replace(statement, f'{condition}phases::reach("{phase}", {plan}.team.rank);\n{statement}'))
    path = root / "kernels" / "embedding_backward" / "plan.cuh"
    text = path.read_text()
    path.write_text(text.replace("#pragma once\n", f"#pragma once\n{_REACH}", 1))
    return root


def _use(kernels: Path, patch: pytest.MonkeyPatch) -> None:
    source = KernelRequest.source

    def edited(request: KernelRequest) -> Any:
        found = source(request)
        return dataclasses.replace(found, root=kernels) if request.name == "embedding_backward" else found

    patch.setattr(KernelRequest, "source", edited)


@pytest.fixture
def folder(kernels: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Use this kernel in worlds of this process; return the folder in which it looks for files."""
    _use(kernels, monkeypatch)
    monkeypatch.setenv(_FOLDER, str(tmp_path))
    yield tmp_path
    for phase in _PHASES:
        (tmp_path / f"{phase}.stop").unlink(missing_ok=True)


def _training() -> Training:
    OPERATOR.tune(po_world.current(), Tuning(work_groups=1))
    return Training(case_of("rowwise_adagrad"))


# ---- stopped --------------------------------------------------------------------------------------------------------


def _stopped(phase: str, folder: Path) -> dict[str, Any]:
    """PE 1 stops in its first backward pass until the others have given up. It is alive again afterwards."""
    po_world.current().workspace.timeout = 3.0  # of kernels; on the host PEs may be late without limit
    training = _training()
    passes = [training.backward(iteration) for iteration in range(3)]
    po.check()
    first = [table.clone() for table in training.tables]
    (folder / f"{phase}.stop").touch()
    meet_in(folder, "ready")
    seen: dict[str, Any] = {"errors": []}
    for iteration, backward in enumerate(passes[:2]):
        name, text, _ = error_of(lambda backward=backward: [backward(), po.check()])
        if not name:
            training.model.step(iteration, 0, 0.1)
            continue
        seen["errors"].append((iteration, name, text))
        break
    seen["changed"] = [not torch.equal(*pair) for pair in zip(training.tables, first, strict=True)]
    seen["is_right"] = training.is_right()
    (folder / f"gave_up_{po.rank()}").touch()
    if po.rank() == 0:
        gave_up(folder, 2)
        (folder / f"{phase}.stop").unlink()
    po.recover()
    seen["refused"] = error_of(passes[2])[:2]
    training.begin()  # from a checkpoint
    training.backward(4)()
    training.model.step(4, 0, 0.1)
    po.check()
    seen["goes_on"] = training.is_right()
    return seen


@pytest.mark.slow
@pytest.mark.parametrize("phase", _PHASES)
def test_a_pe_that_stops(backend: str, phase: str, folder: Path) -> None:
    seen = in_world(_stopped, 3, backend, phase, folder, operator_timeout=60.0)
    assert (folder / f"{phase}.reached").exists()
    is_early = phase in ("credit", "push")  # the others still need data from PE 1
    for rank in (0, 2):
        ((iteration, name, text),) = seen[rank]["errors"]
        assert name == "PeerTimeoutError" and "PE 1" in text, text
        assert iteration == (0 if is_early else 1)
    told = [
        seen[rank]["errors"][0][2] for rank in (0, 2)
    ]  # the first PE that gives up names the phase; then the other one leaves
    assert any("its gradients of table" in text for text in told) is (phase == "push"), told
    for of_pe in seen:
        name, text = of_pe["refused"]
        assert name == "PersistentOpsError" and "load tables and states" in text
        assert of_pe["goes_on"]
    changed = {rank: seen[rank]["changed"] for rank in (0, 2)}
    if phase == "credit":  # nobody's rows change before all credits have arrived
        assert changed == {0: [False] * 2, 2: [False] * 2}
    elif phase == "push":  # PE 2 has all gradients of its first table, PE 0 has none
        assert changed == {0: [False] * 2, 2: [True, False]}
    else:  # the step is made, and no row of the next step
        assert all(seen[rank]["is_right"] and seen[rank]["changed"] == [True] * 2 for rank in (0, 2))


# ---- late -----------------------------------------------------------------------------------------------------------


def _late(folder: Path) -> list[str]:
    training = _training()
    problems = []
    for iteration, phase in enumerate(_PHASES):
        backward = training.backward(iteration)
        stop = folder / f"{phase}.stop"
        stop.touch()
        meet_in(folder, f"ready to {phase}")
        if po.rank() == 1:
            threading.Timer(0.2, stop.unlink).start()
        backward()
        po.check()
        training.model.step(iteration, 0, 0.1)
        po.barrier()
        if not training.is_right() or not (folder / f"{phase}.reached").exists():
            problems.append(phase)
    return problems


def test_a_pe_that_is_late(backend: str, folder: Path) -> None:
    assert in_world(_late, 3, backend, folder) == [[]] * 3


# ---- killed ---------------------------------------------------------------------------------------------------------


def _says(training: Training, backward: Callable[[], None], rows: list[torch.Tensor]) -> str:
    name, text, _ = error_of(lambda: [backward(), po.check()])
    changed = [not torch.equal(*pair) for pair in zip(training.tables, rows, strict=True)]
    return f"{name}|{changed}|{text}"


def be_killed_or_survive(kernels: str, phase: str) -> None:
    """Make backward passes. PE 1 is killed in the first one. Print the errors, and the tables that change."""
    with pytest.MonkeyPatch.context() as patch:
        _use(Path(kernels), patch)
        init_with_impatient_kernels("host", 60.0, 64 << 20)
        training = _training()
        passes = [training.backward(iteration) for iteration in range(3)]
        po.check()
        rows = [table.clone() for table in training.tables]
        po.barrier()
        Path(os.environ[_FOLDER], f"{phase}.kill").touch()
        for backward in passes:
            print(_says(training, backward, rows), flush=True)


@pytest.mark.parametrize("phase", _PHASES)
def test_a_pe_that_is_killed(backend: str, phase: str, kernels: Path, tmp_path: Path) -> None:
    base = {name: value for name, value in os.environ.items() if name not in LAUNCHER_VARIABLES}
    base |= {"MASTER_ADDR": "localhost", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "PYTHONPATH": python_path()}
    base |= {"MASTER_PORT": str(29000 + os.getpid() % 900 * 4 + list(_PHASES).index(phase)), _FOLDER: str(tmp_path)}
    program = "import sys, test_embedding_backward_phases as phases; phases.be_killed_or_survive(*sys.argv[1:])"
    command = [sys.executable, "-c", program, str(kernels), phase]
    # Started by hand, as a launcher would end the survivor.
    pes = [
        Popen(command, env=base | {"RANK": rank, "LOCAL_RANK": rank}, stdout=subprocess.PIPE, text=True)
        for rank in ("0", "1")
    ]
    try:
        said, _ = pes[0].communicate(timeout=120)
        assert pes[1].wait() == -signal.SIGKILL and (tmp_path / f"{phase}.reached").exists()
        first, second, third = (line.split("|", 2) for line in said.splitlines())
        lost = first if phase in ("credit", "push") else second
        assert lost[0] == "PeerLostError" and "PE 1" in lost[2] and "has ended" in lost[2], said
        assert lost is first or first[::2] == ["", ""], said
        # In the step that is given up no row changes, or the rows of the table whose gradients have all arrived.
        assert lost[1] == {"credit": "[False, False]", "push": "[True, False]"}.get(phase, "[True, True]"), said
        assert third[0] and third[1] == lost[1], said
    finally:
        for pe in pes:
            pe.kill()
            pe.wait()

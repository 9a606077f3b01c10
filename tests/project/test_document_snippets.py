"""Python blocks of the documents that are whole programs run as written, without a GPU."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from folders import INTERPRETER
from worlds import python_path

REPOSITORY = Path(__file__).resolve().parents[2]
_BLOCK = re.compile(r"^```python\n(.*?)^```", flags=re.DOTALL | re.MULTILINE)
PROGRAMS = [  # programs of one file: an import of `train` needs another block
    pytest.param(path, block, id=f"{path.stem}-{number}")
    for path in [REPOSITORY / "README.md", *sorted(REPOSITORY.glob("docs/*.md"))]
    for number, block in enumerate(_BLOCK.findall(path.read_text()))
    if "if __name__ ==" in block and not re.search(r"^from train import", block, flags=re.MULTILINE)
]


@pytest.mark.slow
@pytest.mark.host
@pytest.mark.parametrize(("path", "program"), PROGRAMS)
def test_programs_of_documents_run(path: Path, program: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(program)
    folders = f"{INTERPRETER}{os.pathsep}{python_path()}" if "import triton" in program else python_path()
    environment = os.environ | {"PYTHONPATH": folders, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "train.py"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert done.returncode == 0, f"{path.name}: {done.stderr}"


def test_programs_are_found() -> None:
    found = {each.values[0].name for each in PROGRAMS}
    assert {"training_dlrm.md", "tensor_parallel.md", "memory.md", "triton.md"} <= found

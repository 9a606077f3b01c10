"""What Triton has made of an operator's kernel."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import Counter
from typing import NamedTuple

from triton.backends.nvidia.compiler import get_ptxas

from .operator import TritonOperator

__all__ = ["Code", "code_of", "explain"]

_BYTES = re.compile(r"\b(ld|st)\.(?:\w+\.)*global\.(?:\w+::\w+\.)*(?:v(\d)\.)?[bfsu](\d+)\b")


class Code(NamedTuple):
    """A kernel's code.

    Attributes:
        stores, loads: of global memory, by bytes of a thread: how many instructions.
        registers: of a thread.
        spilled: bytes of a thread's registers that are stored to local memory.
    """

    stores: dict[int, int]
    loads: dict[int, int]
    registers: int
    spilled: int


def explain(op: TritonOperator) -> None:
    """Print, for all variants of an operator that were called so far, the widths of stores, registers and spills.

    Stores of 2 to 8 bytes to peers take a half of a link, or less: `put_block` stores 16 bytes where columns, strides
    and masks come in runs of 16 bytes, and Triton knows that. The protocol's own loads and stores have 8 bytes.

    Raises:
        RuntimeError: it has not been called, or the interpreter runs it.
    """
    if not op.compiled:
        raise RuntimeError(f"explain: {op!r} has no code so far: call it once, on a GPU")
    for meta, compiled in op.compiled:
        code = code_of(compiled.ptx)
        print(f"{op!r}, meta {meta}:")  # noqa: T201
        for what, counts in (("stores", code.stores), ("loads", code.loads)):
            told = ", ".join(f"{count} of {nbytes} bytes" for nbytes, count in sorted(counts.items(), reverse=True))
            print(f"  {what} of a thread: {told}")  # noqa: T201
        print(f"  registers of a thread: {code.registers}, spilled: {code.spilled} bytes")  # noqa: T201


def code_of(ptx: str) -> Code:
    """Return what a kernel's code does."""
    found = re.search(r"\.entry (\w+)\(.*?-- End function", ptx, re.DOTALL)
    target = re.search(r"\.target (sm_(\d+)\w*)", ptx)
    assert found is not None and target is not None
    widths = {"ld": Counter[int](), "st": Counter[int]()}
    for kind, vector, bits in _BYTES.findall(found.group(0)):
        widths[kind][int(bits) // 8 * int(vector or 1)] += 1
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(ptx)
        file.flush()
        ptxas = get_ptxas(int(target.group(2))).path
        command = [ptxas, "-v", f"--gpu-name={target.group(1)}", file.name, "-o", "/dev/null"]
        told = subprocess.run(command, check=True, capture_output=True, text=True).stderr
    own = told[told.index(f"Function properties for {found.group(1)}") :]
    spilled, registers = re.search(r"(\d+) bytes spill stores", own), re.search(r"Used (\d+) registers", told)
    assert spilled is not None and registers is not None
    return Code(dict(widths["st"]), dict(widths["ld"]), int(registers.group(1)), int(spilled.group(1)))

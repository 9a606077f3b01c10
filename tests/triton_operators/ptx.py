"""Code that Triton compiles for an H100, without a GPU: how tests get and read it."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.compiler import ASTSource

__all__ = ["Code", "Instruction", "compiled", "ptxas_report", "read"]

_TARGET = GPUTarget("cuda", 90, 32)


class Instruction(NamedTuple):
    """One instruction.

    Attributes:
        guard: register of the predicate, with "!" where it must be false; empty for none.
        op: with all of its suffixes.
        operands: as they are written.
    """

    guard: str
    op: str
    operands: tuple[str, ...]


class Code(NamedTuple):
    """A kernel's code.

    Attributes:
        parameters: names.
        instructions: in their order.
        labels: which instruction follows each.
    """

    parameters: list[str]
    instructions: list[Instruction]
    labels: dict[str, int]

    def places(self, wanted: Callable[[Instruction], bool]) -> set[int]:
        return {place for place, each in enumerate(self.instructions) if wanted(each)}

    def reached(self, start: int, ends: Callable[[Instruction], bool] = lambda each: False) -> set[int]:
        """Return which instructions can run from one on, up to the first one on each path that ends it."""
        seen: set[int] = set()
        places = [start]
        while places:
            place = places.pop()
            if place in seen or place >= len(self.instructions) or ends(self.instructions[place]):
                continue
            seen.add(place)
            guard, op, operands = self.instructions[place]
            if op.startswith("bra"):
                places.append(self.labels[operands[0]])
            if guard or not op.startswith(("bra", "ret")):
                places.append(place + 1)
        return seen


def compiled(kernel: Any, types: Mapping[str, str], *, unaligned: str = "", **options: Any) -> Any:
    """Compile a kernel.

    Args:
        kernel: made by triton.jit.
        types: of its arguments, Triton's names. Pointers and numbers are multiples of 16, except `unaligned`.
        unaligned: an argument.
        options: constexpr arguments, and options of Triton's.
    """
    names = kernel.arg_names
    constants = {name: options.pop(name) for name in names if name not in types}
    aligned = [name for name, kind in types.items() if not kind.startswith("tensordesc") and name != unaligned]
    source = ASTSource(
        kernel,
        {name: types.get(name, "constexpr") for name in names},
        {(names.index(name),): value for name, value in constants.items()},
        {(names.index(name),): [["tt.divisibility", 16]] for name in aligned},
    )
    return triton.compile(source, target=_TARGET, options={"num_warps": 4, **options})


def ptxas_report(ptx: str) -> str:
    """Return what the assembler says of a kernel: warnings, registers, spills."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "kernel.ptx")
        path.write_text(ptx)
        command = [get_ptxas(_TARGET.arch).path, "-v", "--gpu-name=sm_90a", str(path), "-o", str(path) + ".cubin"]
        return subprocess.run(command, check=True, capture_output=True, text=True).stderr


def read(ptx: str) -> Code:
    """Read the code of a kernel that calls no functions."""
    entry = re.search(r"\.entry \w+\((.*?)\)[^{]*\{(.*?)// -- End function", ptx, re.DOTALL)
    assert entry is not None and ".func" not in ptx
    instructions: list[Instruction] = []
    labels: dict[str, int] = {}
    for line in re.sub(r"//.*|^\s*\.loc.*", "", entry.group(2), flags=re.MULTILINE).split(";"):
        text = line.strip()
        while label := re.match(r"[{}]\s*|([$\w]+):\s*", text):  # a block of inline assembly, or a label
            labels[label.group(1)] = len(instructions)
            text = text[label.end() :]
        if text and not text.startswith("."):
            found = re.fullmatch(r"(?:@(!?%?\w+)\s+)?([\w.:]+)\s*(.*)", text, re.DOTALL)
            assert found is not None, text
            operands = re.findall(r"(?:\{[^}]*\}|\[[^\]]*\]|[^,\s])+", found.group(3))
            if (
                found.group(2).startswith("bra") and operands[0][0] != "$"
            ):  # to a label of the block, which others have too
                here = labels[operands[0]]
                operands = [f"{operands[0]} {here}"]
                labels[operands[0]] = here
            instructions.append(Instruction(found.group(1) or "", found.group(2), tuple(operands)))
    return Code(re.findall(r"\w+_param_\d+", entry.group(1)), instructions, labels)

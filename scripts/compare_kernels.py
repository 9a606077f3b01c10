"""Compare the GPU machine code of two commits: python scripts/compare_kernels.py BASE

Compiles the kernels of tests/gpu_kernels.py at BASE and in this checkout. Prints the kernels whose code differs, with
the registers of both. Exits with 1 if any differ. Needs nvcc and no GPU.

    python scripts/compare_kernels.py HEAD~1               a few kernels of each operator: some minutes on two cores
    python scripts/compare_kernels.py main -k all_reduce   those with "all_reduce" in their names
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
Kernels = dict[str, tuple[int, str]]  # registers and a digest of the cubin, by the kernel's name


def compiled_here(pattern: str) -> Kernels:
    """Compile the kernels of the checkout that Python imports."""
    from gpu_kernels import SAMPLE, GpuKernel

    def compiled(kernel: GpuKernel) -> tuple[int, str]:
        used, cubin = kernel.compiled()
        return used.registers, hashlib.sha256(cubin).hexdigest()

    kernels = [each for each in SAMPLE if pattern in each.name]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return dict(zip((each.name for each in kernels), pool.map(compiled, kernels), strict=True))


def compiled_in(tree: Path, options: list[str]) -> Kernels:
    """Compile the kernels of a checkout in a process of its own."""
    paths = [str(tree), str(tree / "tests"), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    command = [sys.executable, __file__, "--here", *options]
    done = subprocess.run(command, cwd=tree, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout)  # type: ignore[no-any-return]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("base", nargs="?", metavar="BASE", help="a commit that has tests/gpu_kernels.py")
    parser.add_argument("-k", default="", metavar="TEXT", help="kernels with this text in their names")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.here:
        json.dump(compiled_here(arguments.k), sys.stdout)
        return 0
    if arguments.base is None:
        parser.error("BASE: expected a commit")
    options = ["-k", arguments.k]
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "base"
        subprocess.run(["git", "worktree", "add", "-q", "--detach", tree, arguments.base], cwd=REPOSITORY, check=True)
        try:
            before = compiled_in(tree, options)
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", tree], cwd=REPOSITORY, check=True)
    now = compiled_in(REPOSITORY, options)
    differing = [name for name in before.keys() & now.keys() if tuple(before[name]) != tuple(now[name])]
    for name in sorted(differing):
        print(f"{before[name][0]:4d} -> {now[name][0]:4d} registers  {name}")
    for name in sorted(before.keys() ^ now.keys()):
        print(f"{'only at BASE' if name in before else 'only here':25s}  {name}")
    print(f"{len(now)} kernels, {len(differing)} differ from {arguments.base}")
    return bool(differing)


if __name__ == "__main__":
    sys.exit(main())

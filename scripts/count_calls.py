"""Count the calls of the package between a public function and the launch: python scripts/count_calls.py [WALK]

Two PEs, threads of this process on the host backend, make each call until all plans exist, and once more under
`sys.setprofile` on PE 0. Every frame of the package that Python enters counts, also frames of comprehensions; a
generator counts each time that it continues. The backward pass runs in the calling thread, as autograd does on CPUs.

    python scripts/count_calls.py                 the table: calls, files, moves from file to file, depth
    python scripts/count_calls.py collection      the calls of one walk, indented by depth
"""

from __future__ import annotations

import argparse
import gc
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch

import persistent_ops as po

__all__ = ["Call", "Summary", "count_on_pe", "counted", "summary_of"]

PACKAGE = f"{Path(po.__file__).parent}/"
_WARM = 4  # calls, after which plans, pools and guards exist
_ROWS, _DIM, _BATCH, _POOLING = 100, 16, 8, 2


class Call(NamedTuple):
    """A call of the package.

    Attributes:
        depth: frames of the package above it.
        file, name: of what is called.
        caller: the file of the nearest frame of the package above it; None at the top.
    """

    depth: int
    file: str
    name: str
    caller: str | None


class Summary(NamedTuple):
    """What a walk comes to."""

    calls: int
    files: int
    moves: int
    depth: int


def counted(action: Callable[[], object]) -> list[Call]:
    """Return the package's calls in this thread while `action` runs."""
    calls: list[Call] = []

    def note(frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if event != "call" or not code.co_filename.startswith(PACKAGE):
            return
        above, callers = frame.f_back, []
        while above is not None and above.f_code is not counted.__code__:
            if above.f_code.co_filename.startswith(PACKAGE):
                callers.append(above.f_code.co_filename)
            above = above.f_back
        file, *callers = (each.removeprefix(PACKAGE) for each in (code.co_filename, *callers))
        calls.append(Call(len(callers), file, code.co_qualname, callers[0] if callers else None))

    gc.disable()  # what it would end now is of no call
    sys.setprofile(note)
    try:
        action()
    finally:
        sys.setprofile(None)
        gc.enable()
    return calls


def summary_of(calls: list[Call]) -> Summary:
    """Return the figures of a walk."""
    moves = sum(call.caller not in (None, call.file) for call in calls)
    return Summary(len(calls), len({call.file for call in calls}), moves, 1 + max(call.depth for call in calls))


def walks() -> Mapping[str, Callable[[], Any]]:
    """Return the calls that are counted, each with its inputs; collective."""
    generator = torch.Generator().manual_seed(po.rank())
    vector = torch.randn(_DIM, generator=generator)
    matrix = torch.randn(_ROWS, _DIM, generator=generator)
    sparse = torch.sparse_coo_tensor(
        torch.tensor([[1, 3]]), torch.ones(2, _DIM), (_ROWS, _DIM), is_coalesced=True, check_invariants=True
    )
    tables = [torch.randn(_ROWS, _DIM, generator=generator) for _ in range(2)]
    bags = len(tables) * po.world_size() * _BATCH
    indices = torch.randint(_ROWS, (bags * _POOLING,), generator=generator)
    offsets = torch.arange(0, bags * _POOLING + 1, _POOLING)
    collection = po.nn.ShardedEmbeddingBagCollection(
        [(name, _ROWS, _DIM, [name]) for name in ("first", "second")],
        max_batch=_BATCH,
        lookups_per_sample=_POOLING,
        optimizer="rowwise_adagrad",
    )
    values, lengths = indices[: 2 * _BATCH * _POOLING], torch.full((2 * _BATCH,), _POOLING)
    return {
        "all_reduce": lambda: po.all_reduce(vector),
        "gemv_all_reduce": lambda: po.gemv_all_reduce(matrix, vector),
        "sparse_all_reduce": lambda: po.sparse_all_reduce(sparse),
        "embedding_all_to_all": lambda: po.embedding_all_to_all(tables, indices, offsets),
        "collection": lambda: collection(values, lengths).sum().backward(),
    }


def count_on_pe() -> dict[str, list[Call]]:
    """Join the world of the PEs that call this, and return this PE's calls of each walk."""
    po.init("host", heap_size=64 << 20)
    try:
        found = {}
        for name, action in walks().items():
            for _ in range(_WARM):
                action()
            found[name] = counted(action) if po.rank() == 0 else (action(), [])[1]
        return found
    finally:
        po.finalize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("walk", nargs="?", metavar="WALK", help="whose calls are printed")
    chosen = parser.parse_args().walk
    found = po.launch(count_on_pe, 2, threads=True)[0]
    if chosen is not None and chosen not in found:
        parser.error(f"WALK: expected one of {', '.join(found)}, got {chosen!r}")
    for call in found.get(chosen, ()):
        print(f"{'  ' * call.depth}{call.name}  {call.file}")
    print(f"{'walk':24s}{''.join(f'{name:>8s}' for name in Summary._fields)}")
    for name, calls in found.items():
        print(f"{name:24s}{''.join(f'{number:8d}' for number in summary_of(calls))}")


if __name__ == "__main__":
    main()

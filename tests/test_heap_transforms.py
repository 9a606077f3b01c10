"""The symmetric heap within transforms of torch.func: memory that is allocated there, and what transforms wrap."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from worlds import error_of, in_world

import persistent_ops as po
from persistent_ops.runtime.world import current


def _free_bytes() -> int:
    return current().heap.free_list.free_bytes


def _in_a_transform(name: str) -> list[Any]:
    """Return whether memory that is allocated in a transform is what it is elsewhere, there and behind it."""

    def act(x: torch.Tensor) -> torch.Tensor:
        board, nothing = po.empty(5), po.empty(0)
        board.fill_(1.0)
        kept.extend((board, nothing))
        if name != "vmap":
            copy = po.to_symmetric(x)
            kept.append(copy)
            return (copy * x).sum()
        return x.square().sum()

    kept: list[torch.Tensor] = []
    x, before = torch.ones(3, 2, device=po.device()), _free_bytes()
    result = {
        "grad": lambda: torch.func.grad(act)(x),  # of the copy nothing flows back
        "vmap": lambda: torch.func.vmap(act)(x),
        "jvp": lambda: torch.func.jvp(act, (x,), (x,))[1],
    }[name]()
    peer, sums = (po.rank() + 1) % po.world_size(), []
    po.barrier()
    for tensor in kept:
        sums.append(float(po.peer_view(tensor, peer).sum()))
        po.barrier()
        po.free(tensor)
    return [result.tolist(), sums, _free_bytes() == before]


@pytest.mark.parametrize(
    ("name", "pes", "want", "sums"),
    [
        ("grad", 2, [[1.0, 1.0]] * 3, [5.0, 0.0, 6.0]),
        ("vmap", 2, [2.0] * 3, [5.0, 0.0]),
        ("jvp", 1, 6.0, [5.0, 0.0, 6.0]),  # torch's level is the process's, so not for PEs that are threads
    ],
)
def test_memory_that_is_allocated_in_a_transform(
    backend: str, name: str, pes: int, want: Any, sums: list[float]
) -> None:
    assert in_world(_in_a_transform, pes, backend, name) == [[want, sums, True]] * pes


def _of_a_transform() -> list[Any]:
    """Return what becomes of a transform's own argument."""
    board, before = po.empty(2, 3), _free_bytes()
    board.fill_(3.0)
    seen: list[Any] = []

    def view(x: torch.Tensor) -> torch.Tensor:
        po.peer_view(x, po.rank()).fill_(4.0)
        return x.sum()

    torch.func.grad(view)(board)
    seen.append(board.tolist() == [[4.0] * 3] * 2)
    for refused in (lambda x: po.peer_view(x, 0), po.to_symmetric):
        seen.append(error_of(lambda refused=refused: torch.func.vmap(refused)(board))[:2])
    seen.append(_free_bytes() == before)
    po.free(board)
    return seen


def test_arguments_of_a_transform(backend: str) -> None:
    ((is_same, view, copy, is_free),) = in_world(_of_a_transform, 1, backend)
    assert is_same and is_free
    got = "got one of torch.func.vmap's"
    assert view == ("NotSymmetricError", f"tensor: expected a tensor in the symmetric heap, {got}")
    assert copy == ("TypeError", f"tensor: expected a dense tensor with memory, {got}")

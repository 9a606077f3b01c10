"""Columns of the tables of embedding_all_to_all's backward pass, on which the PEs agree."""

from __future__ import annotations

import json
import weakref
from collections.abc import Sequence

import torch

from ...runtime.operator import Operator
from ...runtime.world import World
from .backward_plan import OPERATOR, Widths
from .table_set import TableSet

__all__ = ["agree_on_widths"]

_WIDTHS = Operator(
    "agreement on the columns of embedding_all_to_all's tables", (), has_kernel=False, call="forward_pass"
)


def agree_on_widths(
    world: World, which: object, dims: tuple[int, ...], weights: Sequence[torch.Tensor], forward_pass: int = 0
) -> Widths:
    """Return the columns of every PE's tables. Collective the first time that `which` is used.

    Without an optimizer, a PE without tables cannot know when other PEs' tables are new: the PEs agree every time.

    Args:
        world: of this PE.
        which: stands for an optimizer; of tables that have none, their set.
        dims: sum of the columns of each PE's.
        weights: this PE's tables.
        forward_pass: whose backward pass this is, by its number (`CallNumbers`); 0 ahead of any.

    Raises:
        ContractMismatchError: PEs come with backward passes of different forward passes.
        ValueError: they do not add up to the dims.
    """
    state = OPERATOR.state(world)
    if state.own is None:
        state.own = weakref.WeakKeyDictionary()
    known: weakref.WeakKeyDictionary[object, Widths] = state.own
    if which not in known or (isinstance(which, TableSet) and 0 in dims):
        own = [weight.shape[1] for weight in weights]
        told = [own]
        if world.size > 1:
            world.meet(_WIDTHS.contract(world.team, call=forward_pass))
            told = [json.loads(raw) for raw in world.bootstrap.exchange("embedding-widths", json.dumps(own).encode())]
        known[which] = tuple(map(tuple, told))
    widths = known[which]
    if tuple(map(sum, widths)) != dims:
        raise ValueError(
            f"dim_per_rank: expected the columns of each PE's tables, {list(map(sum, widths))}, got {list(dims)}"
        )
    return widths

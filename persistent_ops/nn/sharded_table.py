"""A PE's part of an embedding table, as a module with a parameter."""

from __future__ import annotations

import hashlib
import os
import threading
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch

from ..runtime import world as _world
from .table_layout import Layout
from .table_placements import COLUMN_WISE
from .table_shards import BlockCheck, TableShards

__all__ = ["ShardedTable", "check_memory"]

_DRAWING = threading.Lock()  # of PEs that are threads, and have one generator
_DRAWN_ROWS_BYTES = 16 << 20  # of the parts in which a table's first rows are drawn; another number draws other ones
_MOST_THREADS = 8  # that draw parts


def _seed_of_part(seed: int, number: int) -> int:
    """Return the seed of a part of a table's rows, which has a generator of its own; of the first one the table's."""
    if number == 0:
        return seed
    return int.from_bytes(hashlib.sha256(f"{seed}, {number}".encode()).digest()[:7], "big")


def check_memory(tables: Sequence[ShardedTable]) -> None:
    """Raise RuntimeError where another tensor has taken a parameter's place, which no kernel would read."""
    for table in tables:
        weight = table._parameters.get("weight")
        if weight is None or (weight.data_ptr(), weight.shape, weight.dtype, weight.stride()) != table.place:
            raise RuntimeError(
                f"embedding_bags.{table.name}.weight: its memory was replaced (by `.data =`, vector_to_parameters, "
                "functional_call, torch.export or the like), but kernels use the original memory. Write into the "
                "parameter: weight.copy_() under torch.no_grad(), or load_state_dict."
            )


class ShardedTable(torch.nn.Module):
    """This PE's part of a table.

    Args:
        layout: of all tables.
        number: of this one.
        world: of this PE.
        memory: `[R, D]`, of a replicated table; None: it is allocated.

    Attributes:
        name: of the table.
        slices: numbers of those that this PE has.
        place: address, shape, dtype and strides of `weight`, as kernels know it.
        weight: `[R, D]` or `[0, D]`, or, in slices, `[slices here, R, D / slices]`.
    """

    def __init__(self, layout: Layout, number: int, world: _world.World, memory: torch.Tensor | None = None) -> None:
        super().__init__()
        self._config, placement = layout.configs[number], layout.placements[number]
        self.slices = layout.slices_of(number, world.rank)
        self._width = self._config.embedding_dim // placement.num_slices
        rows = self._config.num_embeddings
        if placement.kind == COLUMN_WISE:
            shape = [len(self.slices), rows, self._width]
        else:
            shape = [rows if self.slices else 0, self._width]
        if memory is None:
            memory = torch.empty(shape, dtype=self._config.data_type, device=world.backend.device)
        self.weight = torch.nn.Parameter(memory, requires_grad=False)
        self._blocks: list[torch.Tensor] = list(memory.view(-1, rows, self._width)) if self.slices else []
        self.name = self._config.name
        self.place = memory.data_ptr(), memory.shape, memory.dtype, memory.stride()
        self._world = world

    def slice(self, number: int) -> torch.Tensor:
        """Return one of this PE's slices, `[R, D / slices]`."""
        return self._blocks[self.slices.index(number)]

    def shards(self) -> TableShards:
        """Return the table, with this PE's part of it as blocks over its memory."""
        config = self._config
        return TableShards(
            (config.num_embeddings, config.embedding_dim),
            [((0, number * self._width), block) for number, block in zip(self.slices, self._blocks, strict=True)],
            dtype=config.data_type,
            device=self.weight.device,
            check=BlockCheck(self._world, f"embedding_bags.{config.name}.weight", self._blocks),
        )

    def draw(self, seed: int) -> None:
        """Draw the rows, of the whole table, since a generator gives numbers in its order; large parts side by side."""
        torch.autograd.graph.increment_version(self.weight)  # also on PEs without a part of it
        if not self.slices:
            return
        config, (low, high) = self._config, self._config.init_bounds
        rows, dim = config.num_embeddings, config.embedding_dim
        if config.init_fn is not None:
            with _DRAWING, torch.random.fork_rng(devices=[]):
                torch.random.default_generator.manual_seed(seed)
                whole = torch.empty(rows, dim, dtype=torch.float32, device="cpu")
                config.init_fn(whole)
            self._take_rows(0, whole)
            return
        at_once = max(1, _DRAWN_ROWS_BYTES // (4 * dim))

        def part(first: int) -> torch.Tensor:
            generator = torch.Generator().manual_seed(_seed_of_part(seed, first // at_once))
            drawn = torch.empty(min(at_once, rows - first), dim, dtype=torch.float32, device="cpu")
            return drawn.uniform_(low, high, generator=generator)

        firsts = range(0, rows, at_once)
        if len(firsts) == 1:
            self._take_rows(0, part(0))
            return
        share = len(os.sched_getaffinity(0)) // self._world.bootstrap.local_world_size
        num_threads = max(1, min(share, len(firsts), _MOST_THREADS))
        under_way: deque[tuple[int, Future[torch.Tensor]]] = deque()
        with ThreadPoolExecutor(num_threads) as threads:
            for first in firsts:
                under_way.append((first, threads.submit(part, first)))
                if len(under_way) > num_threads:
                    self._take(under_way)
            while under_way:
                self._take(under_way)

    def _take(self, under_way: deque[tuple[int, Future[torch.Tensor]]]) -> None:
        first, drawn = under_way.popleft()
        self._take_rows(first, drawn.result())

    def _take_rows(self, first: int, rows: torch.Tensor) -> None:
        for number, block in zip(self.slices, self._blocks, strict=True):
            block[first : first + len(rows)].copy_(rows.narrow(1, number * self._width, self._width))

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        destination[prefix + "weight"] = self.shards()

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        """Take the whole table or shards of this placement, and say that it makes good for a launch given up."""
        name = prefix + "weight"
        extra = [key for key in state_dict if key.startswith(prefix) and key != name]
        unexpected_keys += extra if strict else []
        if name not in state_dict:
            missing_keys += [name] if strict else []
            return
        try:
            self.shards().copy_from(state_dict[name])
        except ValueError as error:
            error_msgs.append(f"{name}: {error}")
            return
        torch.autograd.graph.increment_version(self.weight)  # also on PEs without a part of it
        self._world.workspace.changes.loaded(*self._blocks)

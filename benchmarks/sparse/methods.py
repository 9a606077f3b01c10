"""The ways to sum sparse gradients, for a comparison. All use the same inputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

import persistent_ops as po
from persistent_ops.runtime.world import World

from .cases import DTYPE, Case
from .inputs import RowSet

__all__ = [
    "EAGER",
    "GRAPHS",
    "INTO",
    "LABELS",
    "METHODS",
    "OURS",
    "BASELINES",
    "SCHEMES",
    "SWEPT",
    "Methods",
    "gather_single",
]

LABELS = {
    "auto": "operator",
    "owner": "operator, owner",
    "allgather": "operator, allgather",
    "dense": "operator, dense",
    "into": "into, graph",
    "into_owner": "into, graph, owner",
    "into_allgather": "into, graph, allgather",
    "gloo": "Gloo sparse, through CPU",
    "dense_reduce": "dense {collective}",
    "gather_add": "gather + index_add",
    "union_reduce": "union + {collective}",
    "gather_add_graph": "gather + index_add, graph",
    "union_reduce_graph": "union + {collective}, graph",
}
METHODS = tuple(LABELS)
EAGER = {"auto": "auto", "owner": "owner", "allgather": "allgather", "dense": "dense"}
INTO = {"into": "auto", "into_owner": "owner", "into_allgather": "allgather"}
OURS = (*EAGER, *INTO)
BASELINES = tuple(name for name in METHODS if name not in OURS)
GRAPHS = (*INTO, "dense_reduce", "gather_add_graph", "union_reduce_graph")  # these never wait for the host
SWEPT = ("auto", "owner", "allgather", "dense", "into", "dense_reduce", "gather_add", "union_reduce")

# See limits.sent_rows; "auto" and the entry with preallocated memory use one of the operator's first two.
SCHEMES = {
    "owner": "owner",
    "allgather": "gather",
    "gloo": "gather",
    "gather_add": "gather",
    "gather_add_graph": "gather",
    "union_reduce": "union",
    "union_reduce_graph": "union",
    "dense": "dense",
    "dense_reduce": "dense",
}

gather_single: Callable[..., Any] = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
"""Newer versions of torch have the first name, and warn about the second one."""

Result = tuple[torch.Tensor, torch.Tensor]
"""Indices `[u]`, sorted, and values `[u, D]`; valid until the next call."""


class Methods:
    """One case's buffers, and the methods as functions of the number of an input.

    Collective to make: it allocates symmetric memory. `close` gives it back.

    Args:
        world: of this PE.
        case: the sizes.
        sets: inputs that take turns.
        capacity: rows of the largest result.
        chosen: methods that will run; the others get no buffers.
        gloo: process group for "gloo"; None for the default one.
    """

    def __init__(
        self, world: World, case: Case, sets: Sequence[RowSet], *, capacity: int, chosen: Sequence[str], gloo: Any
    ) -> None:
        self.case = case
        self.sets = sets
        self._gloo = gloo
        device = world.backend.device
        gathered = case.rows_per_rank * world.size
        self._buffers: dict[str, torch.Tensor] = {}
        made = self._buffers
        names = set(chosen)
        if names & set(INTO):
            made["symmetric_out"] = po.empty(capacity, case.dim, dtype=DTYPE)
            made["indices_out"] = torch.empty(capacity, dtype=torch.int64, device=device)
            made["count_out"] = torch.zeros(1, dtype=torch.int64, device=device)
        if names & {"gather_add", "union_reduce", "gather_add_graph", "union_reduce_graph"}:
            made["all_indices"] = torch.empty(gathered, dtype=torch.int64, device=device)
            made["out"] = torch.empty(capacity, case.dim, dtype=DTYPE, device=device)
        if names & {"gather_add", "gather_add_graph"}:
            made["all_values"] = torch.empty(gathered, case.dim, dtype=DTYPE, device=device)
        if names & {"gather_add_graph", "union_reduce_graph"}:
            made["peer_indices_out"] = torch.empty(capacity, dtype=torch.int64, device=device)
            made["is_present"] = torch.empty(case.rows, dtype=torch.uint8, device=device)
            made["places"] = torch.empty(case.rows, dtype=torch.int64, device=device)
        if "dense_reduce" in names:
            made["dense"] = torch.zeros(case.rows, case.dim, dtype=DTYPE, device=device)

    def close(self) -> None:
        """Give the symmetric memory back; collective."""
        if "symmetric_out" in self._buffers:
            po.free(self._buffers.pop("symmetric_out"))
        self._buffers.clear()

    @property
    def symmetric_bytes(self) -> int:
        """Bytes of the symmetric heap that these buffers take."""
        return self._buffers["symmetric_out"].nbytes if "symmetric_out" in self._buffers else 0

    def kept_bytes(self, name: str) -> int:
        """Return the bytes of ordinary memory that a method keeps from call to call."""
        used: tuple[str, ...] = ()
        if name in INTO:
            used = ("indices_out", "count_out")
        elif name == "dense_reduce":
            used = ("dense",)
        elif name in ("gather_add", "gather_add_graph"):
            used = ("all_indices", "all_values", "out")
        elif name in ("union_reduce", "union_reduce_graph"):
            used = ("all_indices", "out")
        if name in ("gather_add_graph", "union_reduce_graph"):
            used += ("peer_indices_out", "is_present", "places")
        return sum(self._buffers[buffer].nbytes for buffer in used)

    def poison(self) -> None:
        """Fill what results are written to with NaN and impossible indices."""
        for name in ("symmetric_out", "out"):
            if name in self._buffers:
                self._buffers[name].fill_(float("nan"))
        for name in ("indices_out", "count_out", "peer_indices_out"):
            if name in self._buffers:
                self._buffers[name].fill_(-1)

    def fill_dense(self, number: int) -> None:
        """Scatter an input into the dense gradient, which "dense_reduce" sums in place."""
        rows = self.sets[number]
        self._buffers["dense"].zero_()
        self._buffers["dense"].index_copy_(0, rows.indices, rows.values)

    def dense_rows(self, indices: torch.Tensor) -> Result:
        """Return rows of the dense gradient."""
        return indices, self._buffers["dense"].index_select(0, indices)

    def into_result(self) -> Result:
        """Return what the entry with preallocated memory has left; waits for its count."""
        count = int(self._buffers["count_out"])
        return self._buffers["indices_out"][: max(count, 0)], self._buffers["symmetric_out"][: max(count, 0)]

    def run(self, name: str, number: int) -> Any:
        """Run one of METHODS on the current stream; returns what that method returns."""
        rows = self.sets[number]
        if name in EAGER:
            return po.sparse_all_reduce(rows.sparse, algorithm=EAGER[name])
        if name in INTO:
            return self._into(rows, INTO[name])
        return getattr(self, name)(rows)

    def result(self, name: str, number: int, union: torch.Tensor) -> Result:
        """Run a method and return indices and values.

        Args:
            name: of METHODS.
            number: of the input.
            union: `[u]`, the rows that the result should have; only the dense gradient needs them.
        """
        if name == "dense_reduce":
            self.fill_dense(number)
            self.run(name, number)
            return self.dense_rows(union)
        returned = self.run(name, number)
        if name in INTO:
            return self.into_result()
        if name in EAGER or name == "gloo":
            returned = returned.coalesce()
            return returned.indices().view(-1), returned.values()
        indices, values = returned
        if name in GRAPHS:
            count = int(self._buffers["places"][-1])
            return indices[:count], values[:count]
        return indices, values

    def _into(self, rows: RowSet, algorithm: str) -> None:
        po.sparse_all_reduce_into(
            rows.indices,
            rows.values,
            num_rows=self.case.rows,
            out_indices=self._buffers["indices_out"],
            out_values=self._buffers["symmetric_out"],
            out_count=self._buffers["count_out"],
            algorithm=algorithm,
            is_coalesced=True,
        )

    def gloo(self, rows: RowSet) -> torch.Tensor:
        # It sums in place: the input's memory must stay as it is.
        summed = rows.sparse.clone()
        dist.all_reduce(summed, group=self._gloo)
        return summed

    def dense_reduce(self, rows: RowSet) -> None:
        """Sum the dense gradient in place: the all-reduce alone, without making it or taking rows out of it.

        Repeated, its values grow until they are infinite, which costs no device more time.
        """
        dist.all_reduce(self._buffers["dense"])

    def gather_add(self, rows: RowSet) -> Result:
        """Gather indices and values, and add them up at their places in the sorted union.

        The values travel while the indices are sorted, whose number the host waits for.
        """
        gathered, arriving = self._gather(rows)
        union, slots = torch.unique(gathered, return_inverse=True)
        out = self._buffers["out"][: union.numel()].zero_()
        arriving.wait()
        return union, out.index_add_(0, slots, self._buffers["all_values"])

    def union_reduce(self, rows: RowSet) -> Result:
        """Gather indices, and sum buffers of the union's rows, whose number the host waits for."""
        gathered = self._buffers["all_indices"]
        gather_single(gathered, rows.indices)
        union = torch.unique(gathered)
        out = self._buffers["out"][: union.numel()].zero_()
        out.index_copy_(0, torch.searchsorted(union, rows.indices), rows.values)
        dist.all_reduce(out)
        return union, out

    def gather_add_graph(self, rows: RowSet) -> Result:
        """Do what `gather_add` does without the host: the result's size is known, places come from a prefix sum."""
        gathered, arriving = self._gather(rows)
        places = self._mark(gathered)
        out = self._buffers["out"].zero_()
        slots = places.index_select(0, gathered).sub_(1)
        indices = self._buffers["peer_indices_out"].scatter_(0, slots, gathered)
        arriving.wait()
        out.index_add_(0, slots, self._buffers["all_values"])
        return indices, out

    def union_reduce_graph(self, rows: RowSet) -> Result:
        """Do what `union_reduce` does without the host: the result's size is known, places come from a prefix sum."""
        gathered = self._buffers["all_indices"]
        gather_single(gathered, rows.indices)
        places = self._mark(gathered)
        out = self._buffers["out"].zero_()
        out.index_copy_(0, places.index_select(0, rows.indices).sub_(1), rows.values)
        slots = places.index_select(0, gathered).sub_(1)
        indices = self._buffers["peer_indices_out"].scatter_(0, slots, gathered)
        dist.all_reduce(out)
        return indices, out

    def _gather(self, rows: RowSet) -> tuple[torch.Tensor, Any]:
        """Gather the indices, and return them while the values are still coming."""
        gathered = self._buffers["all_indices"]
        gather_single(gathered, rows.indices)
        return gathered, gather_single(self._buffers["all_values"], rows.values, async_op=True)

    def _mark(self, gathered: torch.Tensor) -> torch.Tensor:
        """Return how many rows of the union each row of the gradient has before and at it."""
        is_present = self._buffers["is_present"].zero_().index_fill_(0, gathered, 1)
        return torch.cumsum(is_present, 0, out=self._buffers["places"])

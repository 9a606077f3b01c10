"""Results of an exchange of lookups: regions of the heap that alternate, and handles for their contents."""

from __future__ import annotations

import ctypes
import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from ...runtime import world as _world
from ...runtime.areas import Area
from ...runtime.errors import CapacityError, PeerTimeoutError
from ...runtime.operator import Operator
from ...runtime.stream_order import Moment
from ...runtime.workspace import InputRecord, Workspace
from ...runtime.world import World
from .checks import check_are_tables
from .inputs_plan import MOST_LOOKUPS, OPERATOR, OUTGOING, InputsKey, InputsLayout, InputsPlan, outgoing_bytes
from .plan import OfSources, average_lookups_per_bag

__all__ = [
    "Capacity",
    "Given",
    "InputExchange",
    "LookupSource",
    "Lookups",
    "Region",
    "fields_of_source",
    "reserve",
]

Capacity = tuple[tuple[int, ...], ...]  # of each PE's message to each owner
_ROOM = Operator("setup of embedding_inputs", ("number",), has_kernel=False)
_LOOKS = 32
_GIVEN_UP = "embedding_inputs: this exchange was given up: po.recover() or po.finalize() came after it"
_BEHIND_THE_LAST = (
    "call release() after the last launch that reads them, the backward pass where gradients are recorded"
)


@dataclass(frozen=True)
class LookupSource:
    """The lookups that one PE has sent for this PE's tables, as tensors over its region.

    Attributes:
        first_sample: first of the PE's samples in the global batch.
        samples: B_s, the number of its samples.
        offsets: `[T * B_s + 1]`, int32, slot-major, for this PE's T slots.
        indices: `[capacity]`, int32 or int64; entries after the last offset are undefined. -1: skipped.
        per_sample_weights: `[capacity]`, float32, or None.
        num_lookups: lookups that have arrived.
        capacity: lookups that fit.
    """

    first_sample: int
    samples: int
    offsets: torch.Tensor
    indices: torch.Tensor
    per_sample_weights: torch.Tensor | None
    num_lookups: int
    capacity: int


class Given(NamedTuple):
    """The arguments that a PE passes to an exchange."""

    values: torch.Tensor
    bounds: torch.Tensor
    weights: torch.Tensor | None
    gives_gradients: bool
    has_lengths: bool
    samples: int
    batch_per_rank: tuple[int, ...] | None


class Region:
    """This PE's room for the lookups of one batch, from all PEs.

    Attributes:
        memory, offset, nbytes: in this PE's part of the heap.
        sources: `[size, ...]`, int64: LookupSource of the kernels; `samples`: how many each PE brings there.
        num_launches: that were to fill it.
        is_held: whether lookups are there that have not been released.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self.nbytes = 0
        self.is_held = False
        self.num_launches = 0
        self._released: Moment | None = None
        description = OPERATOR.description
        self._words = ctypes.sizeof(description.structs["LookupSource"]) // 8
        self._mailbox = world.backend.host_visible_bytes(ctypes.sizeof(description.structs["Report"]))
        self.report: Any = description.structs["Report"].from_address(self._mailbox.data_ptr())
        self.input = InputRecord(world.backend)
        self._reporting: tuple[int, Moment | None] | None = None

    def begin_report(self) -> None:
        """Assign report and input record to the next launch: the last launch's lookups may have no holder."""
        if self._reporting is not None:
            number, arrived = self._reporting
            if arrived is not None and self.report.state != number:
                arrived.event.synchronize()
        self.input.clear()

    def reported_by(self, number: int, arrived: Moment | None) -> None:
        """Remember the launch that reports here: its number, and where it ends; None on the host."""
        self._reporting = number, arrived

    def move(self, memory: torch.Tensor, offset: int) -> None:
        """Take memory of zeros: any offset that is ever read there is one that a kernel has written, or 0."""
        world = self._world
        self.memory, self.offset, self.nbytes = memory, offset, memory.nbytes
        words = world.backend.private_words(world.size * self._words)
        self.sources = words.view(world.size, self._words)
        self.samples = self.sources[:, fields_of_source()["samples"]]

    def order_behind_readers(self) -> None:
        """Order the current stream's next work after the last readers."""
        if self.is_held:
            raise RuntimeError(
                "embedding_inputs: the lookups of two earlier calls are still held, so there is no region for "
                "these. Call release() after the launches that read them, before the next exchange."
            )
        if self._released is not None:
            self._released.order_behind()

    def release(self) -> None:
        self.is_held = False
        if self._world.backend.name == "cuda":
            self._released = Moment(self._world.backend.device)

    def forget(self) -> None:
        self.is_held, self._released, self._reporting = False, None, None


class InputExchange:
    """The common state of one `EmbeddingInputs` and the handles of its exchanges.

    Args:
        world: of this PE.
        workspace: of the launches.
        layout: of the messages; its number is the same on all PEs.
        bounds: see `EmbeddingInputs`.
        num_beside: see `Lookups`.
        capacity: of the first messages; `reserve` makes the room.

    Attributes:
        rows: of the tables of this PE's slots.
        last: the region that was filled last.
        capacity, arriving: of the next messages: all, and those to this PE.
        generation: counts recoveries; handles of an earlier one are void.
    """

    def __init__(
        self,
        world: World,
        workspace: Workspace,
        layout: InputsLayout,
        *,
        bounds: str,
        num_beside: int,
        capacity: Capacity,
    ) -> None:
        self.world, self.workspace, self.layout, self.num_beside = world, workspace, layout, num_beside
        self.rows = tuple(rows for _, rows in layout.slots[world.rank])
        self._first_capacity = capacity
        self.take_capacity(capacity)
        self.generation = 0
        self.regions = Region(world), Region(world)
        self._bounds = bounds
        self.last: Region | None = None

    def next_region(self) -> Region:
        """Return the region whose turn it is, or another one where its lookups are still held."""
        first, second = self.regions[::-1] if self.last is self.regions[0] else self.regions
        return second if first.is_held and not second.is_held else first

    def take_capacity(self, capacity: Capacity) -> None:
        """Let the next messages have this capacity."""
        self.capacity = capacity
        self.arriving = tuple(of_source[self.world.rank] for of_source in capacity)

    def plan(self, inputs: Given, *used: object) -> InputsPlan:
        """Return the plan that launches this exchange; a CUDA graph keeps `used`."""
        world = self.world
        state = OPERATOR.state(world)
        dtypes = (inputs.values.dtype, inputs.bounds.dtype)
        key = InputsKey(
            world.team,
            self.layout,
            self.capacity,
            state.tuning,
            *dtypes,
            inputs.has_lengths,
            self._bounds,
            inputs.gives_gradients,
        )
        plan: InputsPlan = state.plans.get(key, lambda: InputsPlan(world, self.workspace, key), *used)
        return plan

    def enlarged(self, sources: torch.Tensor) -> Capacity:
        """Return a capacity for all messages of an exchange; collective."""
        world, layout = self.world, self.layout
        fields = fields_of_source()
        counts = [max(of_pe[fields["count"]], of_pe[fields["left_out"]]) for of_pe in sources.tolist()]
        world.meet(_ROOM.contract(world.team, layout.number), self.workspace)
        told = [
            json.loads(raw) for raw in world.bootstrap.exchange("embedding-inputs-count", json.dumps(counts).encode())
        ]
        for source, owner in itertools.product(range(world.size), repeat=2):
            if told[owner][source] > MOST_LOOKUPS:
                raise CapacityError(
                    f"values: PE {source} has {told[owner][source]} lookups for PE {owner}; a message takes at most "
                    f"{MOST_LOOKUPS}"
                )
        return tuple(
            tuple(
                had if told[owner][source] <= had else min(told[owner][source] * 5 // 4, MOST_LOOKUPS)
                for owner, had in enumerate(of_source)
            )
            for source, of_source in enumerate(self.capacity)
        )

    def forget(self) -> None:
        """Go back to what all PEs agree on, after a recovery: nothing is under way, and nothing held."""
        self.generation += 1
        self.take_capacity(self._first_capacity)
        self.last = None
        for region in self.regions:
            region.forget()


class Lookups:
    """Lookups of a batch that travel to this PE's tables, or have arrived.

    Call `wait` before the launches that read the lookups and `release` after the last of them, both on the stream of
    those launches; a `with` statement calls both. ``po.embedding_all_to_all(tables, lookups, ...)`` and its backward
    pass read the lookups. So release them after ``backward()``, or after the call if no gradients are recorded. A
    backward pass that finds them released raises RuntimeError and changes nothing.

    Attributes:
        batch_per_rank: of `exchange`.
        sources: `[world_size, 9]`, int64, in device memory: for each PE in rank order the fields of `LookupSource` in
            cuda/tile/lookup_source.cuh, which kernels read: addresses of indices, offsets and weights, first_sample,
            samples, count, capacity, left_out, first_lookup.
        num_slots: T, of this PE.
        num_beside: number of leading slots with more lookups than the average, by `EmbeddingInputs`' estimates.
        rows: number of rows of each slot's table.
        index_dtype: of the indices.
        is_weighted: whether the lookups have per-sample weights.
        gives_gradients: whether a backward pass sends the weights' gradients to the PEs that passed the weights.
        per_sample_weights: of `exchange`, if `gives_gradients` and until `release`; otherwise None.
        layout, capacity_matrix: of the exchange; `capacity_matrix[source][owner]` held when it was sent.
        capacities, capacity: number of lookups of each PE, and of all, that fit.
        memory: memory of the sources' addresses, `[nbytes]`, uint8: PE 0's region first.
        num_values: number of this PE's values that were passed to `exchange`.
        begins: if `gives_gradients`, the exchange's findings about this PE's own messages: see `InputsPlan.begins`.
    """

    def __init__(self, exchange: InputExchange, region: Region, given: Given) -> None:
        self._exchange, self._region, self._generation = exchange, region, exchange.generation
        self._given: Given | None = given
        self._arrived: Moment | None = None
        self._is_released = self._is_not_entered = False
        self._why_released = ""
        self._is_ordered = False
        self._is_captured = False
        self.batch_per_rank = given.batch_per_rank
        self.sources = region.sources
        self.rows = exchange.rows
        self.num_slots = len(self.rows)
        self.num_beside = exchange.num_beside
        self.is_weighted = exchange.layout.is_weighted
        self.index_dtype = exchange.layout.index_dtype
        self.layout, self.num_values = exchange.layout, given.values.numel()
        self.gives_gradients = given.gives_gradients
        self.per_sample_weights = given.weights if given.gives_gradients else None

    def _launch(self, *, is_captured: bool) -> None:
        exchange, region, given = self._exchange, self._region, self._given
        assert given is not None
        self.memory, self.sources, self._is_captured = region.memory, region.sources, is_captured
        self._samples = region.samples
        self.capacity_matrix, self.capacities = exchange.capacity, exchange.arriving
        self.capacity = sum(self.capacities)
        self._plan = plan = exchange.plan(given, self.memory, self.sources)  # sources may point into its memory
        report = input_error = 0  # a graph's replays have no handle that could look
        if not is_captured:
            region.begin_report()
            report, input_error = ctypes.addressof(region.report), region.input.address
        region.num_launches += 1
        self._report_number = region.num_launches
        split = given.batch_per_rank or ()
        plan.launch(
            given.values,
            given.bounds,
            given.weights,
            given.samples,
            split,
            region.offset,
            self.sources,
            report,
            self._report_number,
            input_error,
        )
        if given.gives_gradients:
            self.begins = plan.begins(given.samples)
        if exchange.world.backend.name == "cuda":
            self._arrived = Moment(exchange.world.backend.device)
        if is_captured:
            self._given = None
        else:
            region.reported_by(self._report_number, self._arrived)

    def wait(self, *, among: Sequence[Lookups] = ()) -> None:
        """Order the next work of the current stream after the arrival of the lookups.

        Outside of CUDA graphs it reads the report of the exchange and waits on the host until the exchange has ended.
        In a loop that sends a batch ahead, the exchange has long ended by then. If a message found no room, `wait`
        makes room and sends again.

        Args:
            among: exchanges of the same batch by other `EmbeddingInputs`. All of these exchanges that lack room get it,
                or none does.

        Raises:
            IndexError: an input of this PE is bad, see `EmbeddingInputs`; the lookups have arrived all the same. Only
                this call reports it.
            PeerTimeoutError, ContractMismatchError: the exchange was given up.
            SymmetricHeapError: no room for more lookups; the exchange is given up on all PEs.

        Collective, in the same order on all PEs as other calls.
        """
        self._check_generation()
        if self._is_released:
            raise RuntimeError("embedding_inputs: these lookups have been released")
        if self._given is not None:
            self._resolve(among)
        if self._arrived is not None:
            self._arrived.order_behind()
        self._is_ordered = True
        if not self._is_captured:
            self._exchange.workspace.raise_pending(self._region.input.take())  # then what graphs have found

    def done(self) -> bool:
        """Return whether `wait` would return without a wait or a launch."""
        report = self._region.report
        return self._given is None or (report.state == self._report_number and report.full_source < 0)

    def learn_split(self) -> None:
        """Read `batch_per_rank` from the lookups that have arrived, if it was not passed. Call after `wait`; waits on
        the host.

        Raises:
            RuntimeError: in a CUDA-graph capture, where the host cannot wait.
        """
        if self.batch_per_rank is None:
            if self._exchange.world.workspace.is_capturing():
                raise RuntimeError(
                    "batch_per_rank: expected the number of samples of each PE in a CUDA-graph capture, where the host "
                    "cannot wait for the peers, got None"
                )
            self.batch_per_rank = tuple(self._samples.tolist())

    def release(self, why: str = _BEHIND_THE_LAST) -> None:
        """Declare that only earlier launches of the current stream read the lookups: their region may be filled again.

        Args:
            why: reason, for the error of a later reader.
        """
        if self._is_released or self._generation != self._exchange.generation:
            return
        self._is_released, self._why_released = True, why
        if self._given is not None and self._arrived is not None:  # it may not have ended
            for tensor in (self._given.values, self._given.bounds, self._given.weights):
                if tensor is not None:
                    tensor.record_stream(self._arrived.stream)
        self._given = self.per_sample_weights = None
        self._region.release()

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refuse to be copied, and pickled."""
        raise TypeError("embedding_inputs: lookups lie in a region of this PE's heap; they are not copied or pickled")

    def __enter__(self) -> Lookups:
        try:
            self.wait()
        except Exception:
            self._is_not_entered = True
            raise
        return self

    def __del__(self) -> None:
        """Release the lookups when the last reference goes, if no `with` statement has them."""
        if self._is_not_entered:
            self.release()

    def __exit__(self, *exception: object) -> None:
        self.release()

    def source(self, rank: int) -> LookupSource:
        """Return the lookups that a PE has brought, for tests; waits on the host, and only outside of a capture."""
        self._check_generation()
        layout, fields = self._exchange.layout, fields_of_source()
        words = self.sources[rank].tolist()
        samples, capacity = words[fields["samples"]], words[fields["capacity"]]

        def view(name: str, dtype: torch.dtype, count: int) -> torch.Tensor:
            nbytes = count * dtype.itemsize
            first = words[fields[name]] - self.memory.data_ptr()
            return self.memory[first : first + nbytes].view(dtype)

        num_offsets = self.num_slots * samples + 1
        is_here = 0 <= words[fields["offsets"]] - self.memory.data_ptr() < self.memory.numel()
        offsets = view("offsets", torch.int32, num_offsets) if is_here else self.memory.new_zeros(num_offsets).int()
        weights = view("weights", torch.float32, capacity) if layout.is_weighted else None
        indices = view("indices", self.index_dtype, capacity)
        first_sample, count = words[fields["first_sample"]], words[fields["count"]]
        return LookupSource(first_sample, samples, offsets, indices, weights, count, capacity)

    def for_tables(self) -> OfSources:
        """Return them as a forward pass reads them."""
        lookups_per_bag = average_lookups_per_bag(self.capacity, self.num_slots * sum(self.batch_per_rank or ()))
        return OfSources(self.sources, self.index_dtype, self.is_weighted, lookups_per_bag, self.num_beside)

    def check_is_here(self) -> None:
        """Raise RuntimeError unless the current stream's next work may read them; see `wait` and `release`."""
        if self._exchange.world is not _world.for_call():
            raise RuntimeError(
                "embedding_inputs: these lookups were exchanged before po.finalize(); exchange the batch again"
            )
        self._check_generation()
        if self._is_released:
            raise RuntimeError(
                f"embedding_inputs: these lookups have been released, and their region may be filled again; "
                f"{self._why_released}"
            )
        if not self._is_ordered:
            raise RuntimeError("embedding_inputs: call wait() before the launches that read these lookups")

    def check_is_of(
        self,
        weights: Sequence[torch.Tensor],
        offsets: torch.Tensor | None,
        per_sample_weights: torch.Tensor | None,
        batch_per_rank: Sequence[int] | None,
    ) -> None:
        """Raise unless the lookups can be read and fit the other arguments of `embedding_all_to_all`."""
        if torch.compiler.is_compiling():
            raise NotImplementedError("indices: lookups of an input exchange cannot be passed inside of torch.compile")
        if offsets is not None or per_sample_weights is not None:
            name = "per_sample_weights" if offsets is None else "offsets"
            raise ValueError(f"{name}: they come with the lookups of an input exchange; pass None")
        split = self.batch_per_rank
        if split is None:
            raise ValueError(
                "indices: these lookups lack the number of samples of each PE; pass batch_per_rank to exchange()"
            )
        if batch_per_rank is not None and tuple(batch_per_rank) != split:
            raise ValueError(
                f"batch_per_rank: got {list(batch_per_rank)}, but the lookups are of {list(split)} samples"
            )
        if not isinstance(weights, (list, tuple)):
            check_are_tables(weights)
        rows = [weight.shape[0] if isinstance(weight, torch.Tensor) and weight.dim() else -1 for weight in weights]
        if rows != list(self.rows):
            check_are_tables(weights)
            raise ValueError(
                f"weights: expected tables of {list(self.rows)} rows, those of the exchange's slots, got {rows}"
            )
        self.check_is_here()

    def check_is_captured(self) -> None:
        """Raise RuntimeError where a capture would keep what this exchange alone has found of its messages."""
        if self._exchange.world.workspace.is_capturing() and not self._is_captured:
            raise RuntimeError(
                "embedding_inputs: the CUDA graph lacks this exchange, so it cannot return gradients of its "
                "per_sample_weights. Capture the exchange too, or pass weights that require no gradient."
            )

    def _check_generation(self) -> None:
        if self._generation != self._exchange.generation:
            raise PeerTimeoutError(_GIVEN_UP)

    def _resolve(self, among: Sequence[Lookups]) -> None:
        """Wait for the report; where there was no room, make it and launch again."""
        while self._lacks_room():
            lacking = [self, *(each for each in among if each is not self and each._lacks_room())]
            reserve([(each._exchange, each._exchange.enlarged(each.sources)) for each in lacking])
            for each in lacking:
                each._launch(is_captured=False)
        self._given = None

    def _lacks_room(self) -> bool:
        return self._given is not None and self._await_report().full_source >= 0

    def _await_report(self) -> Any:
        report, number, looks = self._region.report, self._report_number, 0
        while report.state != number:
            looks += 1  # asking for the launch's end costs more than a look
            is_over = self._arrived is None or (looks % _LOOKS == 0 and self._arrived.event.query())
            if is_over and report.state != number:
                self._exchange.workspace.raise_failure()
                raise PeerTimeoutError(_GIVEN_UP)
        if report.is_aborted:
            self._exchange.workspace.raise_failure()
            raise PeerTimeoutError(_GIVEN_UP)
        return report


def reserve(chosen: Sequence[tuple[InputExchange, Capacity]]) -> None:
    """Make room for such messages in all regions of these, or in none; collective.

    What others hold of the last ones stays.
    """
    world = chosen[0][0].world
    areas = OPERATOR.state(world).areas
    growing = []
    for exchange, capacity in chosen:
        nbytes = exchange.layout.region_offsets(world.rank, capacity)[-1]
        growing += [(region, nbytes) for region in exchange.regions if region.nbytes < nbytes]
    outgoing = max(outgoing_bytes(world, exchange.layout, capacity) for exchange, capacity in chosen)
    sizes = [nbytes for _, nbytes in growing]
    if areas.nbytes_of(OUTGOING) < outgoing:
        sizes.append(outgoing)
    taken = world.outputs.take_on_all_pes(sizes, "lookups_per_sample times max_batch")
    for (region, _), (memory, offset) in zip(growing, taken, strict=False):
        region.move(memory, offset)
    if len(taken) > len(growing):
        areas.put({OUTGOING: Area(*taken[-1])})
    for exchange, capacity in chosen:
        exchange.take_capacity(capacity)


def fields_of_source() -> dict[str, int]:
    """Return which word of a source has which field."""
    struct = OPERATOR.description.structs["LookupSource"]
    return {name: getattr(struct, name).offset // 8 for name, *_ in struct._fields_}

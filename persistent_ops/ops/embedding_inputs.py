"""The exchange of a batch's lookups: from the PEs that loaded the samples to the PEs that own the tables."""

from __future__ import annotations

import ctypes
import json
import math
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from ..runtime import world as _world
from ..runtime.dtypes import INDEX_TYPES
from ..runtime.errors import PeerTimeoutError, SymmetricHeapError
from ..runtime.operator import Operator
from ..runtime.stream_order import capture_of
from .embedding_inputs_plan import OPERATOR, WORKSPACE, InputsKey, InputsLayout, InputsPlan

__all__ = ["EmbeddingInputs", "LookupSource", "Lookups"]

_REGIONS = 2
_BOUNDS = ("fatal", "ignore")
_LOOKS = 32
_GIVEN_UP = "embedding_inputs: this exchange was given up before po.recover()"
_AGREEMENT = Operator("agreement on the layout of EmbeddingInputs", (), has_kernel=False)
_ROOM = Operator("room for more lookups", ("number",), has_kernel=False)


@dataclass(frozen=True)
class LookupSource:
    """The lookups that one PE has brought for this PE's tables, as tensors over its region.

    Attributes:
        first_sample: of the PE's samples in the global batch.
        samples: B_s, how many there are.
        offsets: `[T * B_s + 1]`, int32, slot-major, for this PE's T slots.
        indices: `[capacity]`, int32 or int64; those behind the last offset are undefined. -1: skipped.
        weights: the same, float32, or None.
        count: lookups that are here.
        capacity: lookups that there is room for.
    """

    first_sample: int
    samples: int
    offsets: torch.Tensor
    indices: torch.Tensor
    weights: torch.Tensor | None
    count: int
    capacity: int


class EmbeddingInputs:
    """Brings lookups to the owners of tables, in a launch that may run beside others.

    Each PE passes the lookups of its *own* samples, for all features; each owner gets, from every PE, those of its tables, in
    a region per PE of its symmetric heap, without a host synchronisation. Regions are double: the next batch arrives while
    this one's is read. Launches have a workspace of their own and few WGs, so that on a stream of their own they run beside
    the world's other launches where the GPU has room for both; where it has not, they take turns in the order of the calls.

    Made by all PEs together, with the same arguments.

    Args:
        slots: for each PE, in rank order, its tables in its order: (feature, rows) of each. A feature may go to several
            slots, of one PE or of several. A PE may have none.
        num_features: F, that every PE's lookups have.
        max_batch: the most samples that a PE brings.
        lookups_per_sample: of each feature, or one number for all: the room for lookups is this times `max_batch`. Exact
            where every bag has the same length; otherwise an estimate, see `exchange`.
        capacity: instead of that, `[world_size][world_size]`: lookups of each PE's message to each owner.
        is_weighted: whether lookups have weights.
        index_dtype: of the lookups in regions; None for int32 where all tables have fewer than 2^31 rows, else int64.
        bounds: "fatal" raises IndexError for an index outside of its table, a negative length or an offset that falls or
            leaves the values, on the PE that passed it; "ignore" skips silently.

    Attributes:
        index_dtype: see above.
        capacity: lookups of each PE's message to each owner, as they are.

    Raises:
        ValueError, TypeError: an argument; or the PEs passed different ones.
        SymmetricHeapError: no room for the regions on some PE.

    Collective and blocking.
    Source: TorchRec's distribution of a KeyedJaggedTensor (`KJTAllToAll`), whose layout this takes.
    """

    def __init__(
        self,
        slots: Sequence[Sequence[tuple[int, int]]],
        *,
        num_features: int,
        max_batch: int,
        lookups_per_sample: float | Sequence[float] | None = None,
        capacity: Sequence[Sequence[int]] | None = None,
        is_weighted: bool = False,
        index_dtype: torch.dtype | None = None,
        bounds: str = "fatal",
    ) -> None:
        self._world = world = _world.for_call()
        chosen = _checked_slots(slots, num_features, world.size)
        rows = max((rows for of_pe in chosen for _, rows in of_pe), default=0)
        index_dtype = index_dtype or (torch.int32 if rows < 2**31 else torch.int64)
        _check_choices(max_batch, bounds, index_dtype, rows)
        if (lookups_per_sample is None) == (capacity is None):
            raise ValueError("lookups_per_sample, capacity: expected exactly one of them")
        if capacity is None:
            assert lookups_per_sample is not None
            capacity = _estimated(chosen, num_features, max_batch, lookups_per_sample)
        self._first_capacity = _checked_capacity(capacity, world.size)
        self.index_dtype = index_dtype
        self._bounds = bounds
        self.workspace = world.side_workspace(WORKSPACE)
        OPERATOR.prepare(world)
        self._layout = InputsLayout(chosen, num_features, max_batch, index_dtype, is_weighted, 0)
        self._layout = self._layout._replace(number=self._agree())
        self._generation = 0
        self._next = 0
        self._regions = [_Region(world) for _ in range(_REGIONS)]
        self._set_capacity(self._first_capacity)

    @property
    def capacity(self) -> tuple[tuple[int, ...], ...]:
        return self._capacity

    def _agree(self) -> int:
        """Return which one this is in the world, the same on all PEs; raise where they passed something else."""
        world = self._world
        state = OPERATOR.state(world)
        if state.own is None:
            state.own = _Made()
        made: _Made = state.own
        world.meet(_AGREEMENT.contract(world.team), self.workspace)
        mine = [made.count, repr((self._layout, self._first_capacity))]
        told = [json.loads(raw) for raw in world.bootstrap.exchange("embedding-inputs", json.dumps(mine).encode())]
        made.count = max(count for count, _ in told) + 1
        other = next((pe for pe, (_, text) in enumerate(told) if text != mine[1]), None)
        if other is not None:
            raise ValueError(
                "slots, num_features, max_batch, capacity, is_weighted, index_dtype: expected the same on all PEs, got "
                f"{mine[1]} on PE {world.rank} and {told[other][1]} on PE {other}"
            )
        made.alive.add(self)
        return made.count

    def _set_capacity(self, capacity: tuple[tuple[int, ...], ...]) -> None:
        """Make room for such messages in all regions; collective. What others hold of the last ones stays."""
        world = self._world
        nbytes = self._layout.region_offsets(world.rank, capacity)[-1]
        problem = ""
        try:
            for region in self._regions:
                region.make_room(nbytes)
        except SymmetricHeapError as error:
            problem = str(error)
        world.backend.synchronize()  # nobody writes to them before they are zero
        told = [raw.decode() for raw in world.bootstrap.exchange("embedding-inputs-room", problem.encode())]
        refused = next((pe for pe, text in enumerate(told) if text), None)
        if refused is not None:
            raise SymmetricHeapError(f"room for lookups on PE {refused}: {told[refused]}")
        self._capacity = capacity

    # ---- the exchange ------------------------------------------------------------------------------------------------

    def exchange(
        self,
        values: torch.Tensor,
        *,
        lengths: torch.Tensor | None = None,
        offsets: torch.Tensor | None = None,
        per_sample_weights: torch.Tensor | None = None,
        batch_per_rank: Sequence[int] | None = None,
    ) -> Lookups:
        """Send the lookups of this PE's B samples to the owners of their tables.

        Bag (f, b) is ``values[o[f * B + b] : o[f * B + b + 1]]``, o being `offsets`, or the sums of `lengths` before.

        Args:
            values: `[n]`, int32 or int64, n < 2^31: feature by feature, and in a feature sample by sample.
            lengths: `[F * B]`, int32 or int64: of the bags.
            offsets: `[F * B + 1]`, the same: instead of lengths.
            per_sample_weights: `[n]`, float32, exactly where `is_weighted`.
            batch_per_rank: samples that each PE brings, in rank order, the same on every PE. None where the host does not
                know: then the sources alone tell, in device memory.

        Returns:
            A handle on what arrives. At most two are held at a time: `Lookups.release` gives one back.

        Raises:
            ValueError, TypeError: an argument; before anything is launched.
            RuntimeError: the lookups of the last call but one have not been released.
            PeerTimeoutError, ContractMismatchError: of this or an earlier exchange.

        The inputs must stay as they are until `Lookups.wait`. Where a message finds no room, no lookup of it is sent, and
        every PE learns of it: `wait` makes more room on all and sends again. In a CUDA graph there is no more room to be
        had: po.check() raises CapacityError, and the message's bags are empty.

        Collective, on the current stream; may be captured in a CUDA graph after one eager call with the same dtypes. Two
        regions take turns, also where calls are captured: a graph replays into those that it was captured with.
        """
        world = _world.for_call()
        inputs = self._checked(values, lengths, offsets, per_sample_weights, batch_per_rank)
        region = self._regions[self._next]
        region.order_behind_readers()
        lookups = Lookups(self, region, inputs, self._generation)
        lookups._launch(is_captured=world.workspace.is_capturing())
        region.is_held = True
        self._next = (self._next + 1) % _REGIONS
        return lookups

    def _checked(
        self,
        values: torch.Tensor,
        lengths: torch.Tensor | None,
        offsets: torch.Tensor | None,
        weights: torch.Tensor | None,
        batch_per_rank: Sequence[int] | None,
    ) -> _Inputs:
        layout, world = self._layout, self._world
        if (lengths is None) == (offsets is None):
            raise ValueError("lengths, offsets: expected exactly one of them")
        name = "offsets" if lengths is None else "lengths"
        bounds = offsets if lengths is None else lengths
        assert bounds is not None
        for each, tensor in (("values", values), (name, bounds)):
            self._check_tensor(each, tensor, tuple(INDEX_TYPES))
        if (weights is not None) != layout.is_weighted:
            raise ValueError(f"per_sample_weights: expected exactly where is_weighted, which is {layout.is_weighted}")
        if weights is not None:
            self._check_tensor("per_sample_weights", weights, (torch.float32,))
            if weights.shape != values.shape:
                raise ValueError(
                    f"per_sample_weights: expected the shape of values, {list(values.shape)}, got {list(weights.shape)}"
                )
        num_bags = bounds.numel() - (lengths is None)
        samples, rest = divmod(num_bags, layout.num_features)
        if rest or num_bags < 0:
            raise ValueError(
                f"{name}: expected F * B{' + 1' * (lengths is None)} elements for F = {layout.num_features} features, got "
                f"{bounds.numel()}"
            )
        if samples > layout.max_batch:
            raise ValueError(f"{name}: {samples} samples, but max_batch is {layout.max_batch}")
        if values.numel() >= 2**31:
            raise ValueError(f"values: expected fewer than 2^31, got {values.numel()}")
        split = None if batch_per_rank is None else tuple(batch_per_rank)
        if split is not None:
            is_split = len(split) == world.size and all(isinstance(n, int) for n in split)
            if not is_split or not all(0 <= n <= layout.max_batch for n in split):
                raise ValueError(
                    f"batch_per_rank: expected {world.size} numbers of 0 to max_batch, {layout.max_batch}, got {list(split)}"
                )
            if split[world.rank] != samples:
                raise ValueError(
                    f"batch_per_rank: entry {world.rank} is {split[world.rank]}, but {name} has {samples} samples"
                )
        return _Inputs(values, bounds, weights, lengths is not None, samples, split)

    def _check_tensor(self, name: str, tensor: torch.Tensor, dtypes: Sequence[torch.dtype]) -> None:
        device = self._world.backend.device
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{name}: expected a tensor, got {type(tensor).__name__}")
        if tensor.dtype not in dtypes:
            expected = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
            raise TypeError(f"{name}: expected {expected}, got {tensor.dtype}")
        if tensor.dim() != 1 or not tensor.is_contiguous() or tensor.device != device:
            raise ValueError(
                f"{name}: expected a contiguous 1-D tensor on {device}, got {tensor.dim()}-D on {tensor.device}"
            )

    def _plan(self, inputs: _Inputs, *used: object) -> InputsPlan:
        world = self._world
        state = OPERATOR.state(world)
        dtypes = (inputs.values.dtype, inputs.bounds.dtype)
        key = InputsKey(
            world.team, self._layout, self._capacity, state.tuning, *dtypes, inputs.has_lengths, self._bounds
        )
        plan: InputsPlan | None = state.plans.find(key, *used)
        return plan or state.plans.make(key, lambda: InputsPlan(world, self.workspace, key))

    def _enlarge(self, sources: torch.Tensor) -> None:
        """Make room for all messages of an exchange; collective."""
        world, layout = self._world, self._layout
        fields = _fields()
        counts = [max(of_pe[fields["count"]], of_pe[fields["left_out"]]) for of_pe in sources.tolist()]
        world.meet(_ROOM.contract(world.team, layout.number), self.workspace)
        told = [
            json.loads(raw) for raw in world.bootstrap.exchange("embedding-inputs-count", json.dumps(counts).encode())
        ]
        capacity = tuple(
            tuple(
                had if told[owner][source] <= had else min(told[owner][source] * 5 // 4, 2**31 - 1)
                for owner, had in enumerate(of_source)
            )
            for source, of_source in enumerate(self._capacity)
        )
        self._set_capacity(capacity)

    def _forget(self) -> None:
        """Go back to what all PEs agree on, behind a recovery: nothing is under way, and nothing held."""
        self._generation += 1
        self._capacity = self._first_capacity
        self._next = 0
        for region in self._regions:
            region.forget()


class _Made:
    """All `EmbeddingInputs` of a world; `count`: how many PEs have made."""

    def __init__(self) -> None:
        self.alive: weakref.WeakSet[EmbeddingInputs] = weakref.WeakSet()
        self.count = 0

    def forget(self) -> None:
        for made in self.alive:
            made._forget()


class _Inputs(NamedTuple):
    values: torch.Tensor
    bounds: torch.Tensor
    weights: torch.Tensor | None
    has_lengths: bool
    samples: int
    batch_per_rank: tuple[int, ...] | None


# ---- what arrives ----------------------------------------------------------------------------------------------------


class _Moment:
    """A place in a stream: what was launched there before."""

    def __init__(self, device: torch.device) -> None:
        self.event = torch.cuda.Event()
        self.stream = torch.cuda.current_stream(device)
        self._device = device
        self._capture = capture_of(self.stream.cuda_stream)
        self.event.record(self.stream)

    def order_behind(self) -> None:
        """Let the current stream wait for it, but between captures, or a capture and eager launches: see `StreamOrder`."""
        here = torch.cuda.current_stream(self._device)
        if here != self.stream and capture_of(here.cuda_stream) == self._capture:
            here.wait_event(self.event)


class _Region:
    """This PE's room for the lookups of one batch, from all PEs.

    Attributes:
        memory, offset: in this PE's part of the heap.
        sources: `[size, ...]`, int64: LookupSource of the kernels.
        num_launches: that were to fill it.
        is_held: whether lookups are there that have not been released.
    """

    def __init__(self, world: _world.World) -> None:
        self._world = world
        self._nbytes = 0
        self.is_held = False
        self.num_launches = 0
        self._released: _Moment | None = None
        description = OPERATOR.description
        self._words = ctypes.sizeof(description.structs["LookupSource"]) // 8
        self._mailbox = world.backend.host_visible_bytes(ctypes.sizeof(description.structs["Report"]))
        self.report: Any = description.structs["Report"].from_address(self._mailbox.data_ptr())

    def make_room(self, nbytes: int) -> None:
        if nbytes <= self._nbytes:
            return
        world = self._world
        slot = world.outputs.take(nbytes, world.backend.stream(), is_captured=False)
        self.memory, self.offset, self._nbytes = slot.tensor(torch.uint8, (nbytes,)), slot.offset, nbytes
        self.memory.zero_()  # any offset that is ever read here is one that a kernel has written, or 0
        words = world.backend.private_words(world.size * self._words)
        self.sources = words.view(world.size, self._words)

    def order_behind_readers(self) -> None:
        """Order what the current stream does next behind the last one."""
        if self.is_held:
            raise RuntimeError(
                "embedding_inputs: the lookups of the last call but one have not been released; call release() behind the "
                "launches that read them, before the region is filled again"
            )
        if self._released is not None:
            self._released.order_behind()

    def release(self) -> None:
        self.is_held = False
        if self._world.backend.name == "cuda":
            self._released = _Moment(self._world.backend.device)

    def forget(self) -> None:
        self.is_held, self._released = False, None


class Lookups:
    """A batch's lookups on their way to this PE's tables, or here.

    `wait` comes before the launches that read them, `release` behind the last one; as a context, both are called. Each on the
    stream of those launches.

    Attributes:
        batch_per_rank: of `exchange`.
        sources: `[world_size, 8]`, int64, in device memory: for each PE in rank order the fields of `LookupSource` in
            cuda/tile/lookup_source.cuh, which kernels read: addresses of indices, offsets and weights, first_sample, samples,
            count, capacity, left_out.
        num_slots: T, of this PE.
        index_dtype: of the indices.
    """

    def __init__(self, inputs: EmbeddingInputs, region: _Region, given: _Inputs, generation: int) -> None:
        self._inputs, self._region, self._generation = inputs, region, generation
        self._given: _Inputs | None = given
        self._memory = region.memory
        self._arrived: _Moment | None = None
        self._is_released = False
        self._is_captured = False
        self.batch_per_rank = given.batch_per_rank
        self.sources = region.sources
        self.num_slots = len(inputs._layout.slots[inputs._world.rank])
        self.index_dtype = inputs.index_dtype

    def _launch(self, *, is_captured: bool) -> None:
        inputs, region, given = self._inputs, self._region, self._given
        assert given is not None
        self._memory, self.sources, self._is_captured = region.memory, region.sources, is_captured
        plan = inputs._plan(given, self._memory, self.sources)
        report = 0 if is_captured else ctypes.addressof(region.report)
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
        )
        if inputs._world.backend.name == "cuda":
            self._arrived = _Moment(inputs._world.backend.device)
        if is_captured:
            self._given = None

    def wait(self) -> None:
        """Order what the current stream does next behind the arrival.

        Outside of CUDA graphs it looks at what the exchange reports, and waits on the host until it has ended, which in a
        loop that sends a batch ahead is long over; where a message found no room it makes more and sends again.

        Raises:
            IndexError: an input of this PE is bad, see `EmbeddingInputs`; the lookups are here all the same.
            PeerTimeoutError, ContractMismatchError: the exchange was given up.
            SymmetricHeapError: no room for more lookups; the exchange is given up on all PEs.

        Collective, in the same order on all PEs as other calls.
        """
        self._check_generation()
        if self._is_released:
            raise RuntimeError("embedding_inputs: these lookups have been released")
        if self._given is not None:
            self._resolve()
        if self._arrived is not None:
            self._arrived.order_behind()
        if not self._is_captured:
            self._inputs.workspace.raise_pending()

    def release(self) -> None:
        """Say that the current stream's launches so far are the last that read them: their region may be filled again."""
        if self._is_released or self._generation != self._inputs._generation:
            return
        self._is_released = True
        if self._given is not None and self._arrived is not None:  # it may not have ended
            for tensor in (self._given.values, self._given.bounds, self._given.weights):
                if tensor is not None:
                    tensor.record_stream(self._arrived.stream)
        self._given = None
        self._region.release()

    def __enter__(self) -> Lookups:
        self.wait()
        return self

    def __exit__(self, *exception: object) -> None:
        self.release()

    def source(self, rank: int) -> LookupSource:
        """Return what a PE has brought, for tests; waits on the host, and outside of a capture alone."""
        self._check_generation()
        layout, fields = self._inputs._layout, _fields()
        words = self.sources[rank].tolist()
        samples, capacity = words[fields["samples"]], words[fields["capacity"]]

        def view(name: str, dtype: torch.dtype, count: int) -> torch.Tensor:
            nbytes = count * dtype.itemsize
            first = words[fields[name]] - self._memory.data_ptr()
            return self._memory[first : first + nbytes].view(dtype)

        num_offsets = self.num_slots * samples + 1
        is_here = 0 <= words[fields["offsets"]] - self._memory.data_ptr() < self._memory.numel()
        offsets = view("offsets", torch.int32, num_offsets) if is_here else self._memory.new_zeros(num_offsets).int()
        weights = view("weights", torch.float32, capacity) if layout.is_weighted else None
        indices = view("indices", self.index_dtype, capacity)
        first_sample, count = words[fields["first_sample"]], words[fields["count"]]
        return LookupSource(first_sample, samples, offsets, indices, weights, count, capacity)

    def _check_generation(self) -> None:
        if self._generation != self._inputs._generation:
            raise PeerTimeoutError(_GIVEN_UP)

    def _resolve(self) -> None:
        """Wait for the report; where there was no room, make it and launch again."""
        while True:
            report = self._await_report()
            if report.full_source < 0:
                break
            self._inputs._enlarge(self.sources)
            self._launch(is_captured=False)
        self._given = None

    def _await_report(self) -> Any:
        report, number, looks = self._region.report, self._report_number, 0
        while report.state != number:
            looks += 1  # asking for the launch's end costs more than a look
            is_over = self._arrived is None or (looks % _LOOKS == 0 and self._arrived.event.query())
            if is_over and report.state != number:
                self._inputs.workspace.raise_failure()
                raise PeerTimeoutError(_GIVEN_UP)
        if report.is_aborted:
            self._inputs.workspace.raise_failure()
            raise PeerTimeoutError(_GIVEN_UP)
        return report


def _fields() -> dict[str, int]:
    """Return which word of a source has which field."""
    struct = OPERATOR.description.structs["LookupSource"]
    return {name: getattr(struct, name).offset // 8 for name, *_ in struct._fields_}


# ---- what it can be made of ------------------------------------------------------------------------------------------


def _checked_slots(
    slots: Sequence[Sequence[tuple[int, int]]], num_features: int, size: int
) -> tuple[tuple[tuple[int, int], ...], ...]:
    if not isinstance(num_features, int) or num_features < 1:
        raise ValueError(f"num_features: expected a whole number above 0, got {num_features!r}")
    if len(slots) != size:
        raise ValueError(f"slots: expected a list for each of {size} PEs, got {len(slots)}")
    chosen = tuple(tuple((int(feature), int(rows)) for feature, rows in of_pe) for of_pe in slots)
    for pe, of_pe in enumerate(chosen):
        for feature, rows in of_pe:
            if not 0 <= feature < num_features:
                raise ValueError(f"slots: PE {pe} has feature {feature}, expected 0 to {num_features - 1}")
            if not 0 <= rows < 2**32 - 1:
                raise ValueError(f"slots: PE {pe} has a table of {rows} rows, expected 0 to 2^32 - 2")
    return chosen


def _check_choices(max_batch: int, bounds: str, index_dtype: torch.dtype, rows: int) -> None:
    if not isinstance(max_batch, int) or not 0 <= max_batch < 2**31:
        raise ValueError(f"max_batch: expected a whole number of 0 to 2^31 - 1, got {max_batch!r}")
    if bounds not in _BOUNDS:
        raise ValueError(f"bounds: expected one of {_BOUNDS}, got {bounds!r}")
    if index_dtype not in INDEX_TYPES:
        raise TypeError(f"index_dtype: expected int32 or int64, got {index_dtype}")
    if index_dtype == torch.int32 and rows >= 2**31:
        raise ValueError(f"index_dtype: int32 does not hold the indices of a table of {rows} rows")


def _checked_capacity(capacity: Sequence[Sequence[int]], size: int) -> tuple[tuple[int, ...], ...]:
    chosen = tuple(tuple(int(number) for number in of_source) for of_source in capacity)
    if len(chosen) != size or any(len(of_source) != size for of_source in chosen):
        raise ValueError(f"capacity: expected {size} x {size} numbers, got {[len(row) for row in chosen]}")
    for source, of_source in enumerate(chosen):
        for owner, number in enumerate(of_source):
            if not 0 <= number < 2**31:
                raise ValueError(
                    f"capacity: from PE {source} to PE {owner} expected 0 to 2^31 - 1 lookups, got {number}"
                )
    return chosen


def _estimated(
    slots: Sequence[Sequence[tuple[int, int]]],
    num_features: int,
    max_batch: int,
    lookups_per_sample: float | Sequence[float],
) -> list[list[int]]:
    """Return the capacity of each PE's message to each owner."""
    if isinstance(lookups_per_sample, (int, float)):
        lookups_per_sample = [lookups_per_sample] * num_features
    if len(lookups_per_sample) != num_features or not all(0 <= each < math.inf for each in lookups_per_sample):
        raise ValueError(
            f"lookups_per_sample: expected {num_features} numbers of at least 0, one per feature, got {lookups_per_sample}"
        )
    of_owner = [math.ceil(max_batch * sum(lookups_per_sample[feature] for feature, _ in of_pe)) for of_pe in slots]
    return [of_owner for _ in slots]

"""Plan of an input exchange: layout of regions, kernel, and plan in device memory."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from ...runtime.backend import Backend, Kernel, KernelRequest, LaunchShape, check_resident
from ...runtime.compile.literals import literal, warp_size
from ...runtime.contract import Field
from ...runtime.dtypes import INDEX_TYPES
from ...runtime.errors import CapacityError
from ...runtime.operator import Operator
from ...runtime.plans import Plan, Plans
from ...runtime.team import Team
from ...runtime.tuning import BoundedTuning
from ...runtime.workspace import Workspace
from ...runtime.world import World, upload

__all__ = [
    "MOST_LOOKUPS",
    "MOST_PIECES",
    "MOST_PIECE_LOOKUPS",
    "OPERATOR",
    "OUTGOING",
    "THREADS",
    "THREADS_BESIDE",
    "WORKSPACE",
    "InputsKey",
    "InputsLayout",
    "InputsPlan",
    "Slots",
    "Tuning",
    "aligned_bytes",
    "kernel_request",
    "request_for",
    "sample_requests",
    "launches_beside",
    "outgoing_bytes",
]

WORKSPACE = "inputs"
_NAME = "embedding_inputs"
OUTGOING = "outgoing lookups"  # an area: copies of what is put to PEs that are not reachable
_HOST_WORK_GROUPS = 2
_MOST_WORK_GROUPS_BESIDE = 16
THREADS = 256
THREADS_BESIDE = 64
MOST_PIECE_LOOKUPS = 1 << 20
MOST_LOOKUPS = 2**31 - MOST_PIECE_LOOKUPS  # of a message, whose pieces are counted in 32 bits
MOST_PIECES = 2**31 - 2**20  # of all messages, for warps that count them in 32 bits, in steps of all warps
_MOST_CONTRACTS = 1024  # batches that vary without end must not collect
_FIRST_FIELD = 2  # of a contract's words: operator and team come first


def _bad_index(record: Any) -> IndexError:
    return IndexError(
        f"values: lookup {record.inner}, of feature {record.outer}, has index {record.value}, but the table has "
        f"{record.limit} rows (valid: 0 to {record.limit - 1})"
    )


def _bad_offset(record: Any) -> IndexError:
    return IndexError(
        f"offsets: feature {record.outer}, sample {record.inner} has offset {record.value}, but offsets must start "
        f"at 0, not fall, and end at the number of values, {record.limit}"
    )


def _bad_length(record: Any) -> IndexError:
    return IndexError(
        f"lengths: feature {record.outer}, sample {record.inner} has length {record.value}, which is not within 0 to "
        f"the number of values, {record.limit}"
    )


def _bad_total(record: Any) -> IndexError:
    return IndexError(
        f"lengths, offsets: expected bags with {record.limit} lookups in all, the number of values, got {record.value}"
    )


def _no_room(record: Any) -> CapacityError:
    return CapacityError(
        f"values: PE {record.outer} has {record.value} lookups for PE {record.inner}, and capacity is "
        f"{record.limit}: {record.value - record.limit} too many. None of these were sent; pass a larger "
        "lookups_per_sample or capacity."
    )


@dataclass(frozen=True)
class Tuning(BoundedTuning):
    """Choices that change speed and nothing else; each PE has its own.

    Attributes:
        work_groups: None for as many as messages' pieces keep busy and the GPU holds at once; where launches run beside
            others, 16 at most.
        threads: of a WG on the GPU. None for 256 where launches take turns; for 64 where they run beside others: then
            a WG takes 4096 registers of an SM at most.
        chunk_bags: bags of a feature that a warp adds up at once.
        piece_lookups: lookups that a warp sends at once.
    """

    work_groups: int | None = None
    threads: int | None = None
    chunk_bags: int = 512
    piece_lookups: int = 2048


OPERATOR = Operator(
    _NAME,
    (
        Field.numbers("batch_per_rank"),
        Field("number", argument="the EmbeddingInputs object, in the order they were made,"),
        Field("features", argument="num_features"),
        "max_batch",
        Field.dtype("index_dtype", list(INDEX_TYPES)),
        Field.flag("weighted", "is_weighted"),
        Field.numbers("slots"),
        Field.numbers("capacity", "capacity (or lookups_per_sample)"),
        Field.flag("weight_gradients", "requires_grad of per_sample_weights"),
    ),
    phases={"kPhaseLookups": "its lookups"},
    input_errors={
        "kBadIndex": _bad_index,
        "kBadOffset": _bad_offset,
        "kBadLength": _bad_length,
        "kBadTotal": _bad_total,
        "kNoRoom": _no_room,
    },
    max_plans=64,
    default_tuning=Tuning(),
)

Slots = tuple[tuple[tuple[int, int], ...], ...]


class InputsLayout(NamedTuple):
    """The constant part of one `EmbeddingInputs`, the same on all PEs.

    Attributes:
        slots: of every PE as an owner, (feature, rows of the table) in the order of its tables.
        num_features: that every PE's lookups have.
        max_batch: the most samples of a PE.
        index_dtype: of the lookups in the owners' regions.
        is_weighted: whether they have per-sample weights.
        number: which one it is.
        order: of each slot, a number by which the gradients of a weight that goes to several are put in order.
    """

    slots: Slots
    num_features: int
    max_batch: int
    index_dtype: torch.dtype
    is_weighted: bool
    number: int
    order: tuple[tuple[int, ...], ...]

    def region_bytes(self, owner: int, capacity: int) -> int:
        """Return the size of a region of an owner's heap, with room for so many lookups."""
        query = OPERATOR.description.queries["region_bytes"]
        index_bytes = self.index_dtype.itemsize
        return int(query(len(self.slots[owner]), self.max_batch, capacity, index_bytes, int(self.is_weighted)))

    def region_offsets(self, owner: int, capacities: Sequence[Sequence[int]]) -> list[int]:
        """Return where the sources' regions begin in an owner's room, and the size of that.

        Args:
            owner: the PE.
            capacities: of each source's messages to each owner.
        """
        size_of = functools.cache(functools.partial(self.region_bytes, owner))  # most capacities are equal
        return [0, *itertools.accumulate(size_of(of_source[owner]) for of_source in capacities)]


class InputsKey(NamedTuple):
    """The key of a plan.

    Attributes:
        team: who exchanges.
        layout, capacities: see `InputsLayout`.
        tuning: see `OperatorState`.
        value_dtype, bound_dtype: of values, and of lengths or offsets.
        has_lengths: whether lengths, not offsets, are given.
        bounds: of `EmbeddingInputs`.
        gives_gradients: whether gradients of the weights travel back.
    """

    team: Team
    layout: InputsLayout
    capacities: tuple[tuple[int, ...], ...]
    tuning: Tuning | None
    value_dtype: torch.dtype
    bound_dtype: torch.dtype
    has_lengths: bool
    bounds: str
    gives_gradients: bool


def outgoing_bytes(world: World, layout: InputsLayout, capacities: Sequence[Sequence[int]]) -> int:
    """Return the size of this PE's copies of messages that are put."""
    heaps, of_owners = world.backend.peer_heaps, capacities[world.rank]
    return sum(layout.region_bytes(pe, of_owners[pe]) for pe in range(world.size) if not heaps[pe])


def kernel_request(
    value_dtype: torch.dtype,
    index_dtype: torch.dtype,
    bound_dtype: torch.dtype,
    *,
    has_lengths: bool,
    is_weighted: bool,
    threads: int,
) -> KernelRequest:
    """Return the kernel request for lookups of a kind."""
    return KernelRequest.of(
        _NAME,
        {
            "value": INDEX_TYPES[value_dtype],
            "index": INDEX_TYPES[index_dtype],
            "bound": INDEX_TYPES[bound_dtype],
            "lengths": has_lengths,
            "weighted": is_weighted,
            "threads": threads,
        },
        LaunchShape(threads),
    )


def request_for(world: World, index_dtype: torch.dtype, *, is_weighted: bool) -> KernelRequest:
    """Return the kernel for lookups as most programs pass them, int64 with lengths; any thread."""
    tuning: Tuning = OPERATOR.tuned(world) or OPERATOR.default_tuning
    threads = tuning.threads or (THREADS_BESIDE if world.backend.name == "host" else THREADS)
    dtypes = torch.int64, index_dtype, torch.int64
    return kernel_request(*dtypes, has_lengths=True, is_weighted=is_weighted, threads=threads)


def sample_requests() -> Iterator[KernelRequest]:
    """Yield kernels that differ most in code; tests compile them for GPUs."""
    wide, narrow = (torch.int64,) * 3, (torch.int32,) * 3
    yield kernel_request(*wide, has_lengths=True, is_weighted=True, threads=THREADS_BESIDE)
    yield kernel_request(*narrow, has_lengths=False, is_weighted=False, threads=THREADS)


class Shape(NamedTuple):
    """The shape of a launch on a GPU."""

    work_groups: int
    threads: int


def _shape_beside(backend: Backend, tuning: Tuning) -> Shape:
    """Return the shape of launches that run beside others. Launches in turns use it on the host: one library there."""
    most = _HOST_WORK_GROUPS if backend.name == "host" else _MOST_WORK_GROUPS_BESIDE
    return Shape(min(tuning.work_groups or most, _MOST_WORK_GROUPS_BESIDE), tuning.threads or THREADS_BESIDE)


def aligned_bytes(nbytes: int) -> int:
    """Return the room for so many bytes where the next ones begin as a region's parts do."""
    alignment = literal("kernels/inputs/message.cuh", "kRegionAlignment")
    return -(-nbytes // alignment) * alignment


class InputsPlan(Plan):
    """One key's kernel and plan.

    Args:
        world: of this PE.
        workspace: in which it is launched.
        key: see above.
    """

    def __init__(self, world: World, workspace: Workspace, key: InputsKey) -> None:
        self._world, self._workspace, self._key = world, workspace, key
        backend, layout, team = world.backend, key.layout, key.team
        description = OPERATOR.prepare(world)
        structs, constants = description.structs, description.constants
        tuning = key.tuning or OPERATOR.default_tuning
        if not 1 <= tuning.piece_lookups <= MOST_PIECE_LOOKUPS:
            raise ValueError(f"piece_lookups: expected 1 to {MOST_PIECE_LOOKUPS}, got {tuning.piece_lookups}")
        chunks = max(1, -(-layout.max_batch // tuning.chunk_bags))
        pieces = [
            1 + len(of_pe) * chunks + -(-key.capacities[team.rank][pe] // tuning.piece_lookups)
            for pe, of_pe in enumerate(layout.slots)
        ]
        if max(max(pieces) * team.size, layout.num_features * chunks) >= MOST_PIECES:
            raise ValueError(
                "slots, max_batch: messages of more than 2^31 pieces; use larger chunk_bags or piece_lookups"
            )
        self._most_pieces = max(sum(pieces), layout.num_features * chunks)
        self._kernels: dict[int, Kernel] = {}  # by threads
        self._shapes = {False: self._shape_in_turns(tuning), True: _shape_beside(backend, tuning)}
        if backend.runs_beside:
            self.kernel_and_grid(is_beside=True)
        own_slots = len(layout.slots[team.rank])
        num_slots = sum(map(len, layout.slots))
        self._scratch = {
            "chunks": backend.private_words(layout.num_features * chunks + 1),
            "slot_begins": backend.private_words(num_slots + team.size),
            "longest": backend.private_words(constants["kNumLongest"]),
            "added_up": backend.private_words(max(shape.work_groups for shape in self._shapes.values()) + 1),
            "sent": workspace.zero_words(team, team.size),
            "no_offsets": backend.private_words((own_slots * layout.max_batch + 2) // 2),
        }
        slots = [structs["Slot"](*slot) for of_pe in layout.slots for slot in of_pe]
        own_offsets = layout.region_offsets(team.rank, key.capacities)
        senders = [
            structs["Sender"](region_offset=offset, capacity=of_source[team.rank])
            for offset, of_source in zip(own_offsets, key.capacities, strict=False)
        ]
        self._owners = self._make_owners(structs)
        self._uploaded = [upload(backend, *each) for each in (slots, senders)]
        self._areas = OPERATOR.state(world).areas
        if self._outgoing_bytes:
            self.areas = (OUTGOING,)  # which has room for all capacities that there are
        self._struct: Any = structs["Plan"](
            team=workspace.team(self._contract(())),
            slots=self._uploaded[0].data_ptr(),
            senders=self._uploaded[1].data_ptr(),
            num_features=layout.num_features,
            max_samples=layout.max_batch,
            chunk_bags=tuning.chunk_bags,
            piece_lookups=tuning.piece_lookups,
            contract_word=_FIRST_FIELD,
            reports_bad_input=int(key.bounds == "fatal"),
            **{name: words.data_ptr() for name, words in self._scratch.items()},
        )
        self._contracts: dict[tuple[int, ...], tuple[int, int]] = {}
        self._new_call = structs["Call"]
        self.place()

    def kernel_and_grid(self, *, is_beside: bool) -> tuple[Kernel, int]:
        """Return what is launched, beside other launches or not; the kernel is loaded the first time."""
        shape = self._shapes[is_beside]
        return self._kernel(shape.threads), shape.work_groups

    def _kernel(self, threads: int) -> Kernel:
        kernel = self._kernels.get(threads)
        if kernel is None:
            key = self._key
            request = kernel_request(
                key.value_dtype,
                key.layout.index_dtype,
                key.bound_dtype,
                has_lengths=key.has_lengths,
                is_weighted=key.layout.is_weighted,
                threads=threads,
            )
            kernel = self._kernels[threads] = self._world.load(request)
        return kernel

    def _shape_in_turns(self, tuning: Tuning) -> Shape:
        """Return the shape of launches that take turns with all others: as many warps as have work and find room."""
        backend = self._world.backend
        if backend.name == "host":
            return _shape_beside(backend, tuning)._replace(work_groups=tuning.work_groups or _HOST_WORK_GROUPS)
        threads = tuning.threads or THREADS
        kernel = self._kernel(threads)
        most = -(-self._most_pieces * warp_size() // threads)
        work_groups = tuning.work_groups or min(kernel.resident_work_groups(), most)
        check_resident(kernel, work_groups)
        return Shape(work_groups, threads)

    def _make_owners(self, structs: Any) -> list[Any]:
        key, layout = self._key, self._key.layout
        rank, heaps = key.team.rank, self._world.backend.peer_heaps
        self._outgoing_bytes = 0
        owners, first_slot = [], 0
        for pe, of_pe in enumerate(layout.slots):
            owner = structs["Owner"](
                first_slot=first_slot,
                num_slots=len(of_pe),
                capacity=key.capacities[rank][pe],
                region_offset=layout.region_offsets(pe, key.capacities)[rank],
            )
            if not heaps[pe]:
                owner.outgoing_offset = self._outgoing_bytes
                self._outgoing_bytes += layout.region_bytes(pe, owner.capacity)
            owners.append(owner)
            first_slot += len(of_pe)
        return owners

    def _contract(self, batch_per_rank: tuple[int, ...]) -> Any:
        layout, team = self._key.layout, self._key.team
        return OPERATOR.contract(
            team,
            batch_per_rank,
            layout.number,
            layout.num_features,
            layout.max_batch,
            layout.index_dtype,
            layout.is_weighted,
            tuple(number for of_pe in layout.slots for slot in (*of_pe, (-1, -1)) for number in slot),
            tuple(capacity for of_source in self._key.capacities for capacity in of_source),
            self._key.gives_gradients,
        )

    def place(self) -> None:
        self.held = [self._areas[name] for name in self.areas]
        owners = []
        for owner in self._owners:
            placed = type(owner).from_buffer_copy(owner)
            if self.areas:
                placed.outgoing_offset += self._areas[OUTGOING].offset
            owners.append(placed)
        self._placed = upload(self._world.backend, *owners)
        self._struct.owners = self._placed.data_ptr()
        self._words = upload(self._world.backend, self._struct)

    def _contract_words(self, batch_per_rank: tuple[int, ...]) -> tuple[int, int]:
        """Return hash and word of the contract with so many samples of each PE."""
        found = self._contracts.get(batch_per_rank)
        if found is None:
            if len(self._contracts) >= _MOST_CONTRACTS:
                self._contracts.clear()
            team: Any = self._workspace.team(self._contract(batch_per_rank))
            found = self._contracts[batch_per_rank] = (team.contract_hash, team.contract[_FIRST_FIELD])
        return found

    def launch(
        self,
        values: torch.Tensor,
        bounds: torch.Tensor,
        weights: torch.Tensor | None,
        samples: int,
        batch_per_rank: tuple[int, ...],
        regions_offset: int,
        sources: torch.Tensor,
        report: int,
        report_number: int,
        input_error: int,
    ) -> None:
        """Launch on the current stream; see `Call` of the kernel. It raises nothing about bad input."""
        call = self._new_call()
        call.values, call.bounds = values.data_ptr(), bounds.data_ptr()
        call.weights = 0 if weights is None else weights.data_ptr()
        call.num_values, call.samples = values.numel(), samples
        call.regions_offset, call.sources, call.report = regions_offset, sources.data_ptr(), report
        call.report_number, call.input_error = report_number, input_error
        call.contract_hash, call.contract_word = self._contract_words(batch_per_rank)
        kernel, grid = self.kernel_and_grid(is_beside=self._world.backend.runs_beside)
        self._workspace.launch(kernel, grid, self._words.data_ptr(), call, raises_input_errors=False)

    def begins(self, samples: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return copies of what the last launch has found, made on the current stream, which must be that launch's.

        The next launch waits for what is on this stream before it (`StreamOrder`), so it changes nothing of them.

        Args:
            samples: of that launch.

        Returns:
            Where each feature's values begin, and the last one's end, `[F + 1]`; and where each owner's slots begin in
            the message to it, and its end, side by side. Both int64.
        """
        features, bags = self._key.layout.num_features, self._struct.chunk_bags
        stride = max(-(-samples // bags), 1)
        chunks = self._scratch["chunks"][: features * stride + 1 : stride]
        return chunks.clone(), self._scratch["slot_begins"].clone()


def launches_beside(world: World) -> list[tuple[Kernel, int]]:
    """Return kernels and WGs of the launches so far, as they are where they run beside others."""
    plans: Plans[InputsPlan] = OPERATOR.state(world).plans
    return [plan.kernel_and_grid(is_beside=True) for plan in plans.values()]

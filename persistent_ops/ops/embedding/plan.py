"""Plan of embedding_all_to_all: checks, kernel, and plan in device memory."""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from ...runtime.backend import Backend, KernelRequest, LaunchShape, check_resident
from ...runtime.compile.literals import vector_bytes, warp_size
from ...runtime.contract import Contract, Field
from ...runtime.dtypes import INDEX_TYPES, SCALARS
from ...runtime.operator import Operator
from ...runtime.overlap import check_apart
from ...runtime.plans import Plan
from ...runtime.team import ALONE, Team
from ...runtime.tensor_specs import TensorSpec, TensorSpecs
from ...runtime.tuning import BoundedTuning, at_least
from ...runtime.world import World, upload
from .checks import check_choices, check_split, check_tables, check_wire
from .columns import Columns, columns_of, own_begins
from .table_set import TableSet

__all__ = [
    "OPERATOR",
    "Choices",
    "EmbeddingKey",
    "EmbeddingPlan",
    "LookupKind",
    "OfBatch",
    "OfSources",
    "Tuning",
    "average_lookups_per_bag",
    "request_for",
    "sample_requests",
]

# Areas: rooms from which rows are put, and to which. One of each for all plans, since one launch at a time uses them.
_STAGING = "staging"
_LANDING = "landing"
_MAX_POSITIONS = 2**31 - 1 - 2**20  # tickets are 32-bit numbers, and every warp takes one too many
_TASK_BYTES = 96 << 10
_TASKS_PER_WARP = 3
_MOST_MIXED = 1 << 16  # tables, of which two run beside one another: products of two numbers of tables are 32-bit


def _where(record: Any) -> str:
    return f"table {record.outer}, bag {record.inner}"


def _bad_index(record: Any) -> IndexError:
    return IndexError(
        f"indices: {_where(record)} has index {record.value}, but the table has {record.limit} rows (valid: 0 to "
        f"{record.limit - 1})"
    )


def _bad_offset(record: Any) -> IndexError:
    return IndexError(
        f"offsets: {_where(record)} has offset {record.value}, but offsets must start at 0, not fall, and end at the "
        f"number of indices, {record.limit}"
    )


@dataclass(frozen=True)
class Tuning(BoundedTuning):
    """Choices that change speed and nothing else; the defaults were measured on H200 (docs/lessons.md).

    Attributes:
        threads: of a WG on the GPU; None for the most that the kernel's registers allow without spills.
        work_groups: None for as many per SM as the backend has by default. All PEs must agree.
        rows_in_flight: rows of a table that a group of lanes loads ahead.
        slice_samples: samples per slice and task; None to choose by the work per sample. Where peers are not reachable,
            all PEs must agree, and None chooses by the batch.
        local_delay: rounds by which this PE's own tasks start later than the others', as a share of all rounds: 0 mixes
            them evenly, 1 runs them last.
    """

    threads: int | None = None
    work_groups: int | None = None
    rows_in_flight: int = 8
    slice_samples: int | None = None
    local_delay: float = at_least(0, 0.0)


OPERATOR = Operator(
    "embedding_all_to_all",
    (
        Field("batch", argument="the number of samples of all PEs"),
        Field.internal("output_row_bytes"),
        Field.dtype("dtype", list(SCALARS), "the dtype of weights"),
        Field.dtype("wire_dtype", list(SCALARS)),
        Field.internal("work_groups"),
        Field.internal("slice_samples"),
        Field.numbers("batch_per_rank"),
        Field.numbers("dim_per_rank"),
        Field.numbers("columns"),
    ),
    phases={
        "kPhaseReady": "its rows (sliceRdy word of its work-group {index})",
        "kPhaseSlice": "its rows (sliceRdy word of its slice {index})",
    },
    input_errors={"kBadIndex": _bad_index, "kBadOffset": _bad_offset},
    max_plans=256,  # a plan holds a few KB, and shapes that change without end must not collect
    default_tuning=Tuning(),
)
_LOOKUPS = TensorSpecs(
    TensorSpec("indices", "n", tuple(INDEX_TYPES)),
    TensorSpec("offsets", "num_offsets", tuple(INDEX_TYPES)),
    TensorSpec("per_sample_weights", "n", (torch.float32,)),
)


class LookupKind(NamedTuple):
    """The properties of a call's lookups that a plan depends on.

    Attributes:
        index_dtype, offset_dtype, is_weighted: of the lookups.
        num_offsets: T * B + 1.
        lookups_per_bag: see `average_lookups_per_bag`.
        from_sources: whether they are where an input exchange has left them.
        num_beside: how many of the first tables run beside the others; see `ExchangeOrder`.
    """

    index_dtype: torch.dtype
    offset_dtype: torch.dtype
    num_offsets: int
    is_weighted: bool
    lookups_per_bag: int
    from_sources: bool = False
    num_beside: int = 0


class OfBatch(NamedTuple):
    """The lookups of the global batch, side by side as `embedding_all_to_all` takes them."""

    indices: torch.Tensor
    offsets: torch.Tensor
    per_sample_weights: torch.Tensor | None

    def kind(self, weights: Sequence[torch.Tensor], batch_per_rank: Sequence[int] | None) -> tuple[Any, ...]:
        """Return the properties that a plan depends on: the fields of a `LookupKind`."""
        indices, offsets, factors = self
        num_offsets = offsets.numel()
        lookups_per_bag = average_lookups_per_bag(indices.numel(), num_offsets - 1)
        return indices.dtype, offsets.dtype, num_offsets, factors is not None, lookups_per_bag


class OfSources(NamedTuple):
    """The lookups that an input exchange has left: see `Lookups` and `LookupKind`."""

    sources: torch.Tensor
    index_dtype: torch.dtype
    is_weighted: bool
    lookups_per_bag: int
    num_beside: int

    def kind(self, weights: Sequence[torch.Tensor], batch_per_rank: Sequence[int] | None) -> tuple[Any, ...]:
        """Return the properties that a plan depends on: the fields of a `LookupKind`."""
        _, index_dtype, is_weighted, lookups_per_bag, num_beside = self
        num_offsets = len(weights) * sum(batch_per_rank or ()) + 1
        return index_dtype, torch.int32, num_offsets, is_weighted, lookups_per_bag, True, num_beside


class Choices(NamedTuple):
    """The arguments of `embedding_all_to_all` that are no tensors; None where the caller left them to the operator."""

    dim_per_rank: Sequence[int] | None
    batch_per_rank: Sequence[int] | None
    dtype: torch.dtype | None
    wire_dtype: torch.dtype | None
    pooling: str
    bounds: str
    schedule: str
    columns: Sequence[int] | None

    @classmethod
    def of(
        cls,
        weights: Sequence[torch.Tensor],
        dim_per_rank: Sequence[int] | None,
        batch_per_rank: Sequence[int] | None,
        dtype: torch.dtype | None,
        wire_dtype: torch.dtype | None,
        pooling: str,
        bounds: str,
        schedule: str,
        columns: Sequence[int] | None = None,
    ) -> Choices:
        """Return the choices of a call, with sequences as tuples, and both dtypes."""
        if dim_per_rank is not None:
            dim_per_rank = _numbers_of("dim_per_rank", dim_per_rank)
        if batch_per_rank is not None:
            batch_per_rank = _numbers_of("batch_per_rank", batch_per_rank)
        if columns is not None:
            columns = _numbers_of("columns", columns)
        if dtype is None:
            dtype = weights[0].dtype if len(weights) else torch.float32
        if wire_dtype is None:
            wire_dtype = dtype
        return cls(dim_per_rank, batch_per_rank, dtype, wire_dtype, pooling, bounds, schedule, columns)


def _numbers_of(name: str, values: Sequence[int]) -> tuple[int, ...]:
    """Return a sequence as a tuple, which the caller's own changes do not reach."""
    try:
        return tuple(values)
    except TypeError:
        raise TypeError(f"{name}: expected a sequence of whole numbers, got {values!r}") from None


class EmbeddingKey(NamedTuple):
    """The key of a plan.

    Attributes:
        team: who exchanges.
        tables: this PE's.
        tuning: see `OperatorState`.
        choices: with sequences as tuples, and both dtypes.
        lookups: see `LookupKind`.
    """

    team: Team
    tables: TableSet
    tuning: Tuning | None
    choices: Choices
    lookups: LookupKind


class _Slices(NamedTuple):
    """The tasks of a launch: a table's bags for some samples of a destination.

    Attributes:
        samples: of a task, at most.
        num_rounds: tasks for another PE, at most.
        local_delay: after how many rounds this PE's own tasks begin.
    """

    samples: int
    num_rounds: int
    local_delay: int


class EmbeddingPlan(Plan):
    """One key's kernel and plan. Raises ValueError and TypeError for what the operator cannot take.

    Args:
        world: of this PE.
        key: see above.
        weights: this PE's tables.
        dim_per_rank, batch_per_rank: of `embedding_all_to_all`, completed.

    Attributes:
        dtype, output_shape, output_bytes: of the result.
    """

    def __init__(
        self,
        world: World,
        key: EmbeddingKey,
        weights: Sequence[torch.Tensor],
        dim_per_rank: Sequence[int],
        batch_per_rank: Sequence[int],
    ) -> None:
        structs = OPERATOR.prepare(world).structs
        self._world, self._key, self._backend = world, key, world.backend
        self._device, self._vector_bytes = world.backend.device, vector_bytes()
        self._tuning = key.tuning or OPERATOR.default_tuning
        team, choices, rank = key.team, key.choices, key.team.rank
        assert choices.dtype is not None and choices.wire_dtype is not None
        self._table_dtype, self.dtype = choices.dtype, choices.wire_dtype
        check_choices(choices.pooling, choices.bounds, choices.schedule, is_weighted=key.lookups.is_weighted)
        check_tables(weights, self._table_dtype, self._device)
        check_wire(self._table_dtype, self.dtype)
        check_split(team, weights, key.lookups.num_offsets, dim_per_rank, batch_per_rank)
        begin, end = world.backend.heap_base, world.backend.heap_base + world.backend.heap_bytes
        self._tables_in_heap = [t for t, weight in enumerate(weights) if begin <= weight.data_ptr() < end]
        element = self.dtype.itemsize
        self.output_shape = (batch_per_rank[rank], sum(dim_per_rank))
        row_bytes = self.output_shape[1] * element
        self.output_bytes = self.output_shape[0] * row_bytes
        if row_bytes >= 2**31:
            raise ValueError(f"dim_per_rank: a row of output has {row_bytes} bytes, at most 2 GiB - 1 are possible")
        slices = self._choose_slices(weights, batch_per_rank)
        tables, shapes = _tables(world, key, weights, dim_per_rank)
        senders, ranges = _senders(choices.columns, dim_per_rank, element)
        self._load_kernel(shapes)
        self._wg_done, self._landing_offset = None, 0
        if not team.all_reachable:
            self._wg_done = self._stage(len(weights), batch_per_rank, dim_per_rank[rank] * element, slices.samples)
            self._areas.reserve_own(_LANDING, self.output_bytes, max(self.output_bytes * 5 // 4, 512))
            self.areas = (_STAGING, _LANDING)
        batch_start = list(itertools.accumulate(batch_per_rank, initial=0))
        self._tables, self._ranges = upload(world.backend, *tables), upload(world.backend, *ranges)
        self._senders = upload(world.backend, *senders)
        self._batch_start = upload(world.backend, array("q", batch_start))
        self._pe_bytes = upload(world.backend, array("q", [dim * element for dim in dim_per_rank]))
        self._struct: Any = structs["Plan"](
            team=world.workspace.team(self._contract(row_bytes, slices, dim_per_rank, batch_per_rank)),
            order=self._order(slices, len(weights)),
            tables=self._tables.data_ptr(),
            pe_bytes=self._pe_bytes.data_ptr(),
            ranges=self._ranges.data_ptr(),
            senders=self._senders.data_ptr(),
            batch=batch_start[-1],
            output_row_bytes=row_bytes,
            reports_bad_input=int(choices.bounds == "fatal"),
            wg_done=0 if self._wg_done is None else self._wg_done.data_ptr(),
        )
        self._new_call = structs["Call"]
        self._is_collective = team.number != ALONE
        self.place()

    # ---- its parts -------------------------------------------------------------------------------------------------

    def _choose_slices(self, weights: Sequence[torch.Tensor], batch_per_rank: Sequence[int]) -> _Slices:
        world, team, tuning, lookups_per_bag = (
            self._world,
            self._key.team,
            self._tuning,
            self._key.lookups.lookups_per_bag,
        )
        samples = tuning.slice_samples or _slice_samples(world, team, weights, batch_per_rank, lookups_per_bag)
        if not 1 <= samples <= warp_size():  # the ends of a task's bags lie in the lanes of a warp
            raise ValueError(f"slice_samples: expected 1 to {warp_size()}, got {samples}")
        if -(-max(batch_per_rank) // samples) > world.workspace.max_ready_words:
            raise ValueError(
                f"batch_per_rank: more than {world.workspace.max_ready_words} slices; use larger slice_samples"
            )
        tasks = [-(-rows // samples) * len(weights) for rows in batch_per_rank]
        num_rounds = max((n for pe, n in enumerate(tasks) if pe != team.rank), default=0)
        if (num_rounds + tasks[team.rank]) * team.size > _MAX_POSITIONS:
            raise ValueError("weights, offsets: more than 2^31 tasks; use a larger slice_samples")
        return _Slices(samples, num_rounds, round(min(max(tuning.local_delay, 0.0), 1.0) * num_rounds))

    def _contract(
        self, row_bytes: int, slices: _Slices, dim_per_rank: Sequence[int], batch_per_rank: Sequence[int]
    ) -> Contract:
        team = self._key.team
        return OPERATOR.contract(
            team,
            sum(batch_per_rank),
            row_bytes,
            self._table_dtype,
            self.dtype,
            self._grid,
            0 if team.all_reachable else slices.samples,
            tuple(batch_per_rank),
            tuple(dim_per_rank),
            tuple(self._key.choices.columns or ()),
        )

    def _order(self, slices: _Slices, num_tables: int) -> Any:
        """Return the order of the tasks; two sequences of tables run beside one another if they may."""
        team, is_oblivious = self._key.team, self._key.choices.schedule == "oblivious"
        may_mix = team.all_reachable and not is_oblivious and num_tables < _MOST_MIXED
        return OPERATOR.description.structs["ExchangeOrder"](
            rank=team.rank,
            size=team.size,
            num_tables=num_tables,
            slice_samples=slices.samples,
            batch_start=self._batch_start.data_ptr(),
            num_rounds=slices.num_rounds,
            local_delay=slices.local_delay,
            oblivious=int(is_oblivious),
            slice_major=int(not team.all_reachable),
            num_beside=self._key.lookups.num_beside if may_mix else 0,
        )

    def _load_kernel(self, shapes: int) -> None:
        self._grid = _grid(self._backend, self._tuning)
        self._kernel = self._world.load(_request_of(self._world, self._key, shapes), self._key.team)
        check_resident(self._kernel, self._grid)
        if self._grid > self._world.workspace.max_ready_words:
            raise ValueError(f"work_groups: at most {self._world.workspace.max_ready_words} in all, got {self._grid}")

    def _stage(
        self, num_tables: int, batch_per_rank: Sequence[int], sample_bytes: int, slice_samples: int
    ) -> torch.Tensor:
        """Make room for what peers that cannot be stored to get, and return words for what of it is done."""
        nbytes = max(sum(batch_per_rank) * sample_bytes, 1)
        self._areas.reserve_own(_STAGING, nbytes, max(nbytes + nbytes // 4, 512))
        description = OPERATOR.description
        if num_tables > (most := description.constants["kMaxStagedTables"]):
            raise ValueError(f"weights: at most {most} tables per PE where peers are not reachable, got {num_tables}")
        num_slices = sum(-(-rows // slice_samples) for rows in batch_per_rank)
        return self._world.workspace.zero_words(
            self._key.team, num_slices * description.queries["done_words"](num_tables)
        )

    @property
    def _areas(self) -> Any:
        return OPERATOR.state(self._world).areas

    def place(self) -> None:
        if self.areas:
            self.held = staging, landing = self._areas[_STAGING], self._areas[_LANDING]
            self._struct.staging_offset, self._landing_offset = staging.offset, landing.offset
        self._words = upload(self._backend, self._struct)
        self._address = self._words.data_ptr()

    def check_output(
        self, out: torch.Tensor, weights: Sequence[torch.Tensor], lookups: Mapping[str, torch.Tensor | None]
    ) -> None:
        """Raise unless `out` can hold the result; `weights`, `lookups`: what the launch reads."""
        if out.dtype != self.dtype or out.shape != self.output_shape or not out.is_contiguous():
            raise ValueError(
                f"out: expected a contiguous {self.dtype} tensor of shape {list(self.output_shape)}, got {out.dtype} "
                f"{list(out.shape)}"
            )
        if (behind := out.data_ptr() % (unit := self._vector_bytes)) != 0:
            raise ValueError(
                f"out: expected a tensor that begins at a multiple of {unit} bytes, as po.empty() returns it, got "
                f"one that begins {behind} bytes after one"
            )
        check_apart("out", out, lookups)
        if self._tables_in_heap:
            check_apart("out", out, {f"weights[{t}]": weights[t] for t in self._tables_in_heap})

    def launch(self, lookups: tuple[Any, ...], output_offset: int) -> None:
        """Check what may change from call to call of a key, and launch on the current stream.

        Args:
            lookups: an `OfBatch`, or an `OfSources` where the key says so.
            output_offset: where the output goes in this PE's heap.
        """
        call, device = self._new_call(), self._device
        if self._key.lookups.from_sources:
            call.sources = lookups[0].data_ptr()
        else:
            indices, offsets, factors = lookups
            is_right = factors is None or (factors.dtype == torch.float32 and factors.shape == indices.shape)
            for each in lookups:
                if each is not None and (each.dim() != 1 or not each.is_contiguous() or each.device != device):
                    is_right = False
            if not is_right:
                _LOOKUPS.check(device, *lookups)  # raises
            call.indices, call.offsets, call.num_indices = indices.data_ptr(), offsets.data_ptr(), indices.numel()
            if factors is not None:  # as in all calls of this plan
                call.weights = factors.data_ptr()
        call.output_offset, call.landing_offset = output_offset, self._landing_offset
        self._world.workspace.launch(self._kernel, self._grid, self._address, call, is_counted=self._is_collective)


# ---- choices -------------------------------------------------------------------------------------------------------


def request_for(
    world: World, key: EmbeddingKey, weights: Sequence[torch.Tensor], dim_per_rank: Sequence[int]
) -> KernelRequest:
    """Return the kernel of a key's plan, any thread; see `EmbeddingPlan`."""
    return _request_of(world, key, _tables(world, key, weights, dim_per_rank)[1])


def _grid(backend: Backend, tuning: Tuning) -> int:
    return tuning.work_groups or backend.num_sms * backend.default_blocks_per_sm


def _request_of(world: World, key: EmbeddingKey, shapes: int) -> KernelRequest:
    """Return the kernel for tables of a set of shapes."""
    backend, lookups, choices = world.backend, key.lookups, key.choices
    assert choices.dtype is not None and choices.wire_dtype is not None
    tuning: Tuning = key.tuning or OPERATOR.default_tuning
    threads = tuning.threads or _threads(shapes, lookups.is_weighted, lookups.from_sources)
    if backend.leaves_room and tuning.threads is None:
        threads *= 2  # of both WGs that an SM has otherwise
    blocks_per_sm = -(-_grid(backend, tuning) // backend.num_sms)
    pooling, rows = choices.pooling, tuning.rows_in_flight
    return _request(choices.dtype, choices.wire_dtype, lookups, pooling, shapes, threads, rows, blocks_per_sm)


def average_lookups_per_bag(num_indices: int, num_bags: int) -> int:
    """Return the lookups per bag, rounded up to a power of two: plans are made per such class."""
    lookups_per_bag = -(-num_indices // max(num_bags, 1))
    return 1 << (lookups_per_bag - 1).bit_length() if lookups_per_bag else 1


def _slice_samples(
    world: World, team: Team, weights: Sequence[torch.Tensor], batch_per_rank: Sequence[int], lookups_per_bag: int
) -> int:
    """Return how many samples a slice, and so a task, has.

    A task of some tens of KB keeps a warp's loads in flight; a larger one only spreads the warps over more tables at a
    time, and a table's rows then find less of the cache. Small batches get smaller tasks, some for every warp.
    """
    samples = max(batch_per_rank)
    fewest = max(1, -(-samples // world.workspace.max_ready_words))
    if not team.all_reachable or not weights:
        return max(fewest, min(8, samples // 16))
    bag_bytes = lookups_per_bag * max(weight.shape[1] * weight.element_size() for weight in weights)
    by_bytes = _TASK_BYTES // max(bag_bytes, 1)
    workers = world.backend.num_sms * world.backend.default_blocks_per_sm * 8
    by_share = len(weights) * sum(batch_per_rank) // (_TASKS_PER_WARP * workers)
    largest = max(1, min(8, by_bytes, by_share))
    return max(fewest, 1 << (largest.bit_length() - 1))


def _threads(shapes: int, is_weighted: bool, from_sources: bool) -> int:
    """Return the threads of a WG at which two of them per SM leave every thread enough registers (tests check it)."""
    constants = OPERATOR.description.constants
    elementwise, two_vectors = 1 << constants["kElementwise"], 1 << constants["kLanes32x2"]
    num_shapes = shapes.bit_count()
    if num_shapes > 1 and shapes & (two_vectors | elementwise):
        return 128
    is_large = [shapes & two_vectors != 0, num_shapes > (1 if is_weighted else 2), is_weighted and from_sources]
    return (256, 192, 128)[min(sum(is_large), 2)]


def _row_shape(table: Any, narrowing: int, row_bytes: int, own_bytes: int, backend: str) -> int:
    """Return the RowShape of a table: vectors of 16 bytes where every address of a row, and of its output, allows them.

    Args:
        table: its descriptor.
        narrowing: how many times as wide as an element of output one of the table is.
        row_bytes, own_bytes: of the output's rows: all, and this PE's columns.
        backend: name of it.
    """
    constants = OPERATOR.description.constants
    of_tables, of_output = (table.rows, table.row_bytes), (table.column_bytes, row_bytes, table.staged_bytes, own_bytes)
    unit = vector_bytes()
    if any(address % unit for address in of_tables) or any(address % (unit // narrowing) for address in of_output):
        return constants["kElementwise"]
    if backend == "host":
        return constants["kLanes32x2"]  # one lane does the work of all, so the widths do not differ
    vectors = table.row_bytes // unit
    return constants[next((f"kLanes{lanes}" for lanes in (4, 8, 16, 32) if vectors <= lanes), "kLanes32x2")]


def _tables(
    world: World, key: EmbeddingKey, weights: Sequence[torch.Tensor], dim_per_rank: Sequence[int]
) -> tuple[list[Any], int]:
    """Return the tables' descriptors and the set of their shapes, as a bit mask."""
    choices, backend = key.choices, world.backend.name
    assert choices.dtype is not None and choices.wire_dtype is not None
    narrowing = choices.dtype.itemsize // choices.wire_dtype.itemsize  # of an element in output
    begins = own_begins(choices.columns, dim_per_rank, weights, key.team.rank)
    row_bytes = sum(dim_per_rank) * choices.wire_dtype.itemsize
    tables: list[Any] = [None] * len(weights)
    make = OPERATOR.description.structs["Table"]
    own_bytes = sum(weight.shape[1] * weight.element_size() for weight in weights) // narrowing
    staged = mask = 0
    for t in sorted(range(len(weights)), key=begins.__getitem__):  # so that they are put in few ranges
        weight = weights[t]
        width, element = weight.shape[1] * weight.element_size(), weight.element_size() // narrowing
        table = make(
            rows=weight.data_ptr(),
            num_rows=weight.shape[0],
            row_bytes=width,
            column_bytes=begins[t] * element,
            staged_bytes=staged,
        )
        table.shape = _row_shape(table, narrowing, row_bytes, own_bytes, backend)
        mask |= 1 << table.shape
        tables[t] = table
        staged += width // narrowing
    return tables, mask or 1


def _senders(columns: Sequence[int] | None, dim_per_rank: Sequence[int], element: int) -> tuple[list[Any], list[Any]]:
    """Return each PE as a sender, and the ranges that lie side by side in rows of output and of its staging area.

    Args:
        columns, dim_per_rank: of `embedding_all_to_all`.
        element: bytes of a column.
    """
    structs = OPERATOR.description.structs
    before = list(itertools.accumulate(dim_per_rank, initial=0))
    of_all = Columns(tuple((begin,) for begin in before), tuple((dim,) for dim in dim_per_rank))
    if columns is not None:
        of_all = columns_of(tuple(columns), tuple(dim_per_rank))
    senders: list[Any] = []
    ranges: list[Any] = []
    for pe in range(len(dim_per_rank)):
        first, staged = len(ranges), 0
        for begin, width in sorted(zip(of_all.begins[pe], of_all.widths[pe], strict=True)):
            if len(ranges) == first or ranges[-1].column_bytes + ranges[-1].bytes != begin * element:
                ranges.append(structs["ColumnRange"](column_bytes=begin * element, staged_bytes=staged))
            ranges[-1].bytes += width * element
            staged += width * element
        sender = {"first_range": first, "num_ranges": len(ranges) - first, "bytes_before": before[pe] * element}
        senders.append(structs["Sender"](**sender))
    return senders, ranges


def _request(
    dtype: torch.dtype,
    wire_dtype: torch.dtype,
    lookups: LookupKind,
    pooling: str,
    shapes: int,
    threads: int,
    rows_in_flight: int,
    blocks_per_sm: int,
) -> KernelRequest:
    for name, given in (("indices", lookups.index_dtype), ("offsets", lookups.offset_dtype)):
        if given not in INDEX_TYPES:
            raise TypeError(f"{name}: expected int32 or int64, got {given}")
    enumerator = "kMean" if pooling == "mean" else "kWeightedSum" if lookups.is_weighted else "kSum"
    return KernelRequest.of(
        "embedding_all_to_all",
        {
            "scalar": SCALARS[dtype],
            "wire": SCALARS[wire_dtype],
            "index": INDEX_TYPES[lookups.index_dtype],
            "offset": INDEX_TYPES[lookups.offset_dtype],
            "pooling": f"po::Pooling::{enumerator}",
            "sources": lookups.from_sources,
            "shapes": shapes,
            "rows_in_flight": rows_in_flight,
            "threads": threads,
            "blocks_per_sm": blocks_per_sm,
        },
        LaunchShape(threads),
    )


def sample_requests() -> Iterator[KernelRequest]:
    """Yield kernels that differ most in code; tests compile them for GPUs."""
    for dtype, wire_dtype, pooling, is_weighted, shapes, from_sources in (
        (torch.float32, torch.float32, "sum", True, 1 << 1, False),  # most registers
        (torch.bfloat16, torch.bfloat16, "sum", False, (1 << 6) - 1, False),
        (torch.float32, torch.bfloat16, "mean", False, 1 << 2, True),
    ):
        lookups = LookupKind(torch.int64, torch.int64, 1, is_weighted, 1, from_sources)
        threads = _threads(shapes, is_weighted, from_sources)
        yield _request(dtype, wire_dtype, lookups, pooling, shapes, threads, Tuning().rows_in_flight, 2)

"""Plan of the backward pass of embedding_all_to_all: kernel and plan in device memory."""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from ...runtime.areas import Need
from ...runtime.backend import KernelRequest, check_resident
from ...runtime.changes import OnAbort
from ...runtime.compile.literals import vector_bytes
from ...runtime.contract import Field
from ...runtime.dtypes import SCALARS
from ...runtime.operator import Operator
from ...runtime.plans import Plan
from ...runtime.team import Team
from ...runtime.tuning import BoundedTuning, at_least
from ...runtime.world import World, upload
from .backward_kernel import GRADIENT, NAME, STEPS, Tiles, kernel_request
from .columns import columns_of
from .inversion import Inverted, Rows, is_wide
from .table_set import TableSet

__all__ = [
    "OPERATOR",
    "BackwardKey",
    "BackwardPlan",
    "Step",
    "Tuning",
    "identity",
    "num_sort_keys",
    "request_for",
    "rows_of",
    "staging_need",
]

_STAGING = "gradients"  # an area: where peers put the gradients of this PE's tables
_OUTGOING = "outgoing gradients"  # an area: copies of what is put to PEs that are not reachable
_PIECE_BYTES = 16 << 10


@dataclass(frozen=True)
class Tuning(BoundedTuning):
    """Choices that change speed and nothing else.

    Attributes:
        work_groups: None for as many as the GPU holds at once.
        blocks_per_sm: for which the kernel is compiled; None for as many as its registers allow.
        lanes: of a warp that have a row: 8, 16, or 32; None for half as many as the widest row has chunks of 16
            bytes.
        pushing_work_groups: those that begin with what others wait for, at least.
        pushing_at_par: of these, where as many bytes are pushed as the rows of all lookups have; with more lookups
            fewer in proportion.
        early_work_groups: of these, for which the sort of the lookups leaves room, so that they push meanwhile.
        slice_samples: samples of a table that are pushed at a time; None for 16 KB of them.
    """

    work_groups: int | None = None
    blocks_per_sm: int | None = None
    lanes: int | None = None
    pushing_work_groups: int = 48
    pushing_at_par: int = at_least(0, 192)
    early_work_groups: int = at_least(0, 32)
    slice_samples: int | None = None


OPERATOR = Operator(
    NAME,
    (
        Field("batch", argument="the number of samples of all PEs"),
        Field.dtype("dtype", list(SCALARS), "the dtype of weights"),
        Field.dtype("wire_dtype", list(SCALARS)),
        Field.choice("optimizer", list(STEPS)),
        Field.numbers("batch_per_rank"),
        Field.numbers("dim_per_rank"),
        Field.numbers("widths", "the columns of each PE's tables"),
        Field.numbers("columns"),
        Field.internal("staging_offset"),
    ),
    phases={"kPhaseGradients": "its gradients of table {index}"},
    call="forward_pass",
    known_as="the backward pass of embedding_all_to_all",
    changes={"tables": OnAbort.REFUSE, "states": OnAbort.REFUSE},
    reloading=(
        "load tables and states from a checkpoint, then call EmbeddingOptimizer.loaded(step_count); load_state_dict of "
        "a ShardedEmbeddingBagCollection and of its optimizer does both"
    ),
    max_plans=256,
    default_tuning=Tuning(),
)
_ROOM = Operator("setup of embedding_backward", (Field.internal("room_bytes"),), has_kernel=False)


Widths = tuple[tuple[int, ...], ...]


class BackwardKey(NamedTuple):
    """The key of a plan.

    Attributes:
        team: who exchanges.
        tables: this PE's.
        optimizer: stands for the optimizer whose states are updated; None: there is none, under GRADIENT.
        tuning: see `OperatorState`.
        dim_per_rank, batch_per_rank, dtype, wire_dtype, pooling, is_weighted: of the forward pass.
        widths: of every PE's tables.
        from_sources: whether lookups are where an input exchange has left them.
        columns: of the forward pass.
    """

    team: Team
    tables: TableSet
    optimizer: object | None
    tuning: Tuning | None
    dim_per_rank: tuple[int, ...]
    widths: Widths
    batch_per_rank: tuple[int, ...]
    dtype: torch.dtype
    wire_dtype: torch.dtype
    pooling: str
    is_weighted: bool
    from_sources: bool = False
    columns: tuple[int, ...] | None = None

    @property
    def begins(self) -> tuple[tuple[int, ...], ...]:
        """Where the columns of every PE's tables begin in a row of the gradient."""
        if self.columns is not None:
            return columns_of(self.columns, self.dim_per_rank).begins
        starts = itertools.accumulate(self.dim_per_rank, initial=0)
        return tuple(
            tuple(itertools.accumulate(of_pe, initial=start))[:-1]
            for start, of_pe in zip(starts, self.widths, strict=False)
        )


# ---- plan ------------------------------------------------------------------------------------------------------------


def identity(table: torch.Tensor) -> tuple[int, ...]:
    """Return a key that is equal for tables that are one tensor."""
    return (table.data_ptr(), *table.shape)


def groups_of(weights: Sequence[torch.Tensor]) -> list[list[int]]:
    """Return the numbers of tables that are one tensor, in the order of the first ones."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for table, weight in enumerate(weights):
        groups.setdefault(identity(weight), []).append(table)
    return list(groups.values())


def _order_in_groups(groups: Sequence[Sequence[int]]) -> list[int]:
    """Return each table's number in its group."""
    numbers = {table: number for own in groups for number, table in enumerate(own)}
    return [numbers[table] for table in sorted(numbers)]


def rows_of(gradient: torch.Tensor) -> torch.Tensor:
    """Return a gradient as kernels read it, a copy if need be.

    It is contiguous, or columns of a larger tensor, side by side, of which samples begin at multiples of 16 bytes: a
    `torch.cat` hands on such columns of its own gradient.
    """
    stride_bytes = _row_stride(gradient) * gradient.itemsize
    if not gradient.is_contiguous() and (gradient.stride(1) != 1 or stride_bytes % vector_bytes()):
        gradient = gradient.contiguous()
    return gradient.clone() if gradient.data_ptr() % vector_bytes() else gradient


def _row_stride(gradient: torch.Tensor) -> int:
    """Return how many elements lie between the beginnings of two rows."""
    return gradient.shape[1] if gradient.is_contiguous() else gradient.stride(0)


def staging_need(batch: int, columns: Iterable[int], wire_dtype: torch.dtype) -> Need:
    """Return the area where gradients come, where there are peers.

    Args:
        batch: samples of all PEs.
        columns: of each PE's tables.
        wire_dtype: of gradients.
    """
    nbytes = max(columns) * batch * wire_dtype.itemsize
    return Need(_STAGING, nbytes, nbytes + nbytes // 2)


class Step(NamedTuple):
    """What a kernel does with the gradients; see `kernel_request`."""

    step: str = GRADIENT
    decay: str = "none"
    rounding: str = "nearest"
    has_max_norm: bool = False


def request_for(world: World, key: BackwardKey, weights: Sequence[torch.Tensor], step: Step) -> KernelRequest:
    """Return the kernel of a key's plan, any thread; see `BackwardPlan`."""
    tuning: Tuning = key.tuning or OPERATOR.default_tuning
    is_host, widths = world.backend.name == "host", list(itertools.chain(*key.widths))
    row_bytes = max(key.widths[key.team.rank], default=1) * key.dtype.itemsize
    places = [*(width * key.wire_dtype.itemsize for width in widths), *(weight.data_ptr() for weight in weights)]
    return kernel_request(
        key.dtype,
        key.wire_dtype,
        step.step,
        pooling=key.pooling,
        is_weighted=key.is_weighted,
        is_aligned=not is_host and all(place % vector_bytes() == 0 for place in places),
        tiles=Tiles.on_host(row_bytes) if is_host else Tiles.of(row_bytes, tuning.lanes),
        decay=step.decay,
        rounding=step.rounding,
        has_max_norm=step.has_max_norm,
        has_wide_keys=is_wide(num_sort_keys(weights, from_sources=key.from_sources)),
        blocks_per_sm=tuning.blocks_per_sm,
        has_one_wg=world.backend.leaves_room,
    )


def num_sort_keys(weights: Sequence[torch.Tensor], *, from_sources: bool) -> int:
    """Return `Rows.num_sort_keys` of tables in a backward pass."""
    groups = groups_of(weights)
    num_rows = sum(weights[own[0]].shape[0] for own in groups)
    largest = max(map(len, groups), default=1)
    return num_rows << ((largest - 1).bit_length() if from_sources else 0)


class BackwardPlan(Plan):
    """One key's kernel and plan. Raises ValueError for what the operator cannot take. Collective.

    Args:
        world: of this PE.
        key: see above.
        weights: this PE's tables.
        states: of each table's storage: none, one, or two tensors; none under GRADIENT.
        step: of STEPS.
        decay: of DECAYS.
        rounding: of ROUNDINGS.
        constants: eps, weight_decay, max_norm (0 for any norm), beta1, beta2, where the step has them.

    Attributes:
        rows: of the tables.
        groups: the tensors that tables are, in the order of their keys, each with its tables.
        changed: what launches change.
        early_wgs: how many WGs find work that needs no sorted lookups; 0 where launches do not begin early.
    """

    def __init__(
        self,
        world: World,
        key: BackwardKey,
        weights: Sequence[torch.Tensor],
        states: Sequence[Sequence[torch.Tensor]],
        step: str,
        decay: str,
        rounding: str,
        constants: dict[str, Any],
    ) -> None:
        structs = OPERATOR.prepare(world).structs
        self._world, self._key = world, key
        self._tuning = tuning = key.tuning or OPERATOR.default_tuning
        self._areas = OPERATOR.state(world).areas
        self._batch = sum(key.batch_per_rank)
        self._samples = key.batch_per_rank[key.team.rank]
        self._check_limits()
        self.groups = groups_of(weights)
        groups, first_keys = self._make_groups(weights, states)
        tables = self._make_tables()
        self._make_pushes()
        self._reserve()
        order = _order_in_groups(self.groups) if key.from_sources else None
        self.rows = Rows.of(world, first_keys, [weight.shape[0] for weight in weights], self._batch, order)
        has_max_norm = constants.get("max_norm", 0.0) > 0
        self._kernel = world.load(request_for(world, key, weights, Step(step, decay, rounding, has_max_norm)), key.team)
        fit = world.backend.num_sms if self._is_host else self._kernel.resident_work_groups()
        self._grid = tuning.work_groups or fit
        check_resident(self._kernel, self._grid)
        self._contract_words = (
            self._batch,
            key.dtype,
            key.wire_dtype,
            step,
            tuple(key.batch_per_rank),
            tuple(key.dim_per_rank),
            tuple(width for of_pe in key.widths for width in (*of_pe, 0)),
            key.columns or (),
        )
        self._slot_lookups = OPERATOR.description.constants["kSlotLookups"]
        self._sum_elements = max((weight.shape[1] for weight in weights), default=1)
        self._struct: Any = self._make_struct(groups, tables, constants)
        pushing_wgs = min(int(self._struct.pushing_wgs), tuning.early_work_groups)
        self.early_wgs = pushing_wgs if world.backend.begins_early else 0
        self._new_call = structs["Call"]
        updated = [] if step == GRADIENT else weights
        self.changed = OPERATOR.changed_inputs(
            tables=updated, states=[each for of_table in states for each in of_table]
        )
        self._slots = 0
        self.place()

    # ---- its parts -------------------------------------------------------------------------------------------------

    @property
    def _is_host(self) -> bool:
        return self._world.backend.name == "host"

    @property
    def _own_widths(self) -> tuple[int, ...]:
        return self._key.widths[self._key.team.rank]

    @property
    def _widths(self) -> list[int]:
        return [width for of_pe in self._key.widths for width in of_pe]

    def _wire_bytes(self, width: int) -> int:
        return width * self._key.wire_dtype.itemsize

    def _check_limits(self) -> None:
        most_tables, most_words = max(map(len, self._key.widths)), self._world.workspace.max_ready_words
        if 0 in self._widths:
            raise ValueError("weights: a table without columns has no gradient")
        if most_tables * self._batch >= 2**31:
            raise ValueError(f"offsets: at most 2^31 - 1 bags of a PE, got {most_tables * self._batch}")
        if most_tables > most_words:
            raise ValueError(f"weights: expected at most {most_words} tables per PE")

    def _make_groups(
        self, weights: Sequence[torch.Tensor], states: Sequence[Sequence[torch.Tensor]]
    ) -> tuple[list[Any], list[int]]:
        """Return a struct for each group, and each table's first key."""
        groups, first_keys = [], [0] * len(weights)
        next_key = first_member = first_sum = 0
        for own in self.groups:
            weight, state = weights[own[0]], states[own[0]]
            groups.append(
                OPERATOR.description.structs["Group"](
                    rows=weight.data_ptr(),
                    state=state[0].data_ptr() if state else 0,
                    second=state[1].data_ptr() if len(state) > 1 else 0,
                    num_rows=weight.shape[0],
                    width=weight.shape[1],
                    first_key=next_key,
                    first_member=first_member,
                    num_members=len(own),
                    first_sum=first_sum,
                )
            )
            for table in own:
                first_keys[table] = next_key
            next_key += weight.shape[0]
            first_member += len(own)
            first_sum += weight.numel()
        return groups, first_keys

    def _staged_offsets(self, pe: int) -> list[int]:
        """Return where each of a PE's tables begins in its staging."""
        starts = itertools.accumulate(self._key.widths[pe], initial=0)
        return [self._batch * self._wire_bytes(width) for width in starts]

    def _make_tables(self) -> list[Any]:
        rank = self._key.team.rank
        places = zip(self._key.begins[rank], self._staged_offsets(rank), strict=False)
        make = OPERATOR.description.structs["Table"]
        return [make(column=column, staged_offset=offset) for column, offset in places]

    def _make_pushes(self) -> None:
        """Make the list of pushes: table by table, owners in turn from the next PE on."""
        key, rank, size = self._key, self._key.team.rank, self._key.team.size
        self._outgoing_bytes = 0
        self._pushes: list[Any] = []
        for table in range(max(map(len, key.widths), default=0) if self._samples else 0):
            others = ((rank + hop) % size for hop in range(1, size))
            owners = [owner for owner in others if table < len(key.widths[owner])]
            first = len(self._pushes)
            for owner in owners:
                width = key.widths[owner][table]
                push = OPERATOR.description.structs["Push"](
                    owner=owner,
                    table=table,
                    width=width,
                    column=key.begins[owner][table],
                    staged_offset=self._staged_offsets(owner)[table],
                    first=first,
                    count=len(owners),
                )
                if not self._world.backend.peer_heaps[owner]:
                    push.outgoing_offset = self._outgoing_bytes
                    vectors = -(-self._samples * self._wire_bytes(width) // vector_bytes())
                    self._outgoing_bytes += vectors * vector_bytes()
                self._pushes.append(push)

    def _reserve(self) -> None:
        """Make room for what other PEs push, and for what goes to those that cannot be stored to."""
        if self._key.team.size > 1:
            need = staging_need(self._batch, map(sum, self._key.widths), self._key.wire_dtype)
            contract = _ROOM.contract(self._key.team, need.nbytes)
            own = Need(_OUTGOING, self._outgoing_bytes) if self._outgoing_bytes else None
            self._areas.reserve([need], lambda: contract, own)
            self.areas = (_STAGING,) if own is None else (_STAGING, _OUTGOING)

    def _make_struct(self, groups: Sequence[Any], tables: Sequence[Any], constants: dict[str, Any]) -> Any:
        """Return the kernel's Plan, without what `place` writes; what it refers to is uploaded."""
        batch_start = list(itertools.accumulate(self._key.batch_per_rank, initial=0))
        self._pushed_words = len(self._pushes) + 1
        self._pushed = self._world.workspace.zero_words(self._key.team, self._pushed_words)
        self._groups, self._tables = upload(self._world.backend, *groups), upload(self._world.backend, *tables)
        self._members = upload(self._world.backend, array("q", [table for own in self.groups for table in own]))
        self._batch_start = upload(self._world.backend, array("q", batch_start))
        slice_samples = self._tuning.slice_samples or max(
            1, _PIECE_BYTES // max(map(self._wire_bytes, self._widths), default=1)
        )
        return OPERATOR.description.structs["Plan"](
            groups=self._groups.data_ptr(),
            members=self._members.data_ptr(),
            tables=self._tables.data_ptr(),
            num_groups=len(groups),
            num_tables=len(tables),
            num_pushes=len(self._pushes),
            slice_samples=slice_samples,
            num_slices=-(-self._samples // slice_samples),
            pushing_wgs=min(self._tuning.pushing_work_groups, self._grid) if self._pushes else 0,
            pushing_wg_lookups=self._pushing_wg_lookups(),
            pushed=self._pushed.data_ptr(),
            batch_start=self._batch_start.data_ptr(),
            batch=self._batch,
            first_sample=batch_start[self._key.team.rank],
            num_samples=self._samples,
            sum_elements=self._sum_elements,
            **constants,
        )

    def _pushing_wg_lookups(self) -> int:
        """Return the number of WGs that push after the sort, times the number of lookups."""
        pushed_bytes = self._samples * self._wire_bytes(sum(push.width for push in self._pushes))
        row_bytes = self._key.dtype.itemsize * sum(self._own_widths) // max(len(self._own_widths), 1)  # about
        return self._tuning.pushing_at_par * pushed_bytes // max(row_bytes, 1)

    def place(self) -> None:
        self.held = [self._areas[name] for name in self.areas]
        staging = self._areas[_STAGING].offset if _STAGING in self.areas else 0
        self._struct.staging_offset = staging
        # A sender takes the position from its own plan, and a CUDA graph may have a plan from before the area grew.
        contract = OPERATOR.contract(self._key.team, *self._contract_words, staging)
        self._struct.team = self._world.workspace.team(contract)
        pushes = []
        for push in self._pushes:
            copied = type(push).from_buffer_copy(push)
            if _OUTGOING in self.areas:
                copied.outgoing_offset += self._areas[_OUTGOING].offset
            pushes.append(copied)
        self._placed = upload(self._world.backend, *pushes)
        self._struct.pushes = self._placed.data_ptr()
        self._words = upload(self._world.backend, self._struct)

    def launch(
        self,
        gradient: torch.Tensor,
        inverted: Inverted,
        factors: torch.Tensor | None,
        factor_gradients: torch.Tensor | None,
        *,
        forward_pass: int = 0,
        begins_early: bool = False,
        **of_step: torch.Tensor | None,
    ) -> None:
        """Launch on the current stream.

        Args:
            gradient: `[samples of this PE, columns of all PEs]`, of `rows_of`.
            inverted: the lookups.
            factors, factor_gradients: of lookups, float32, or None.
            forward_pass: its number (`CallNumbers`), which is a part of the contract; 0 on a PE alone.
            begins_early: whether the launch in front of it on the stream is the one that makes `inverted`, with room
                for `early_wgs`; nothing else that this one reads may be written there.
            of_step: what the step alone has, by its name in the kernel's Call: rate, scale, step_count, beta_powers and
                seeds; or, under GRADIENT, scale, sums, places and touched.
        """
        # A row with many lookups is added up in chunks. Their sums and counts are kept by the row's first place.
        slots = inverted.keys.numel() // self._slot_lookups + 2
        if slots > self._slots:
            if self._world.workspace.is_capturing():
                raise RuntimeError(
                    f"{NAME}: a CUDA-graph capture meets more lookups than any call before; make one such call first"
                )
            skipped = self._pushed_words
            self._chunks_done = self._world.workspace.zero_words(self._key.team, skipped + slots)[skipped:]
            self._slots = slots
        sums = torch.empty(slots * self._sum_elements, dtype=torch.float32, device=gradient.device)
        call = self._new_call()
        call.gradient, call.gradient_stride = gradient.data_ptr(), _row_stride(gradient)
        call.keys, call.bags = inverted.keys.data_ptr(), inverted.bags.data_ptr()
        call.count = inverted.count.data_ptr()
        call.lookups = 0 if inverted.lookups is None else inverted.lookups.data_ptr()
        call.counts = 0 if inverted.counts is None else inverted.counts.data_ptr()
        call.factors = 0 if factors is None else factors.data_ptr()
        call.factor_gradients = 0 if factor_gradients is None else factor_gradients.data_ptr()
        call.num_factors = 0 if factor_gradients is None else factor_gradients.numel()
        call.forward_pass = forward_pass
        for name, tensor in of_step.items():
            setattr(call, name, 0 if tensor is None else tensor.data_ptr())
        call.chunk_sums, call.chunks_done = sums.data_ptr(), self._chunks_done.data_ptr()
        launch = self._world.workspace.launch
        launch(self._kernel, self._grid, self._words.data_ptr(), call, begins_early=begins_early)

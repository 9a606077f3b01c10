"""What one shape of embedding_all_to_all's backward needs again at every call: inverted lookups, kernel, and plan."""

from __future__ import annotations

import ctypes
import itertools
import json
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from ..runtime.areas import Need
from ..runtime.backend import KernelRequest
from ..runtime.changes import OnAbort
from ..runtime.contract import Field
from ..runtime.dtypes import SCALARS
from ..runtime.operator import Operator
from ..runtime.plans import Plan
from ..runtime.team import Team
from ..runtime.world import World, upload
from .table_set import TableSet

__all__ = [
    "OPERATOR",
    "STEPS",
    "BackwardKey",
    "BackwardPlan",
    "Inverted",
    "Tuning",
    "agree_on_widths",
    "invert",
    "kernel_request",
]

STEPS = {"sgd": "kSgd", "adagrad": "kAdagrad", "rowwise_adagrad": "kRowwiseAdagrad", "adam": "kAdam"}
_NAME = "embedding_backward"
_STAGING = "gradients"  # an area: where peers put the gradients of this PE's tables
_OUTGOING = "outgoing gradients"  # an area: copies of what is put to PEs that are not reachable
_VECTOR_BYTES = 16
_PIECE_BYTES = 16 << 10
_THREADS = 256


@dataclass(frozen=True)
class Tuning:
    """Choices that change speed and nothing else.

    Attributes:
        work_groups: None for as many per SM as the backend has by default. All PEs must agree.
        pushing_work_groups: those that begin with what others wait for.
        slice_samples: samples of a table that are pushed at a time; None for 16 KB of them.
    """

    work_groups: int | None = None
    pushing_work_groups: int = 32
    slice_samples: int | None = None


OPERATOR = Operator(
    _NAME,
    (
        "batch",
        Field.dtype("dtype", list(SCALARS)),
        Field(
            "optimizer",
            list(STEPS).index,
            lambda word: list(STEPS)[word] if 0 <= word < len(STEPS) else str(word),
        ),
        "work_groups",
        Field.numbers("batch_per_rank"),
        Field.numbers("dim_per_rank"),
        Field.numbers("widths"),
    ),
    phases={"kPhaseGradients": "its gradients of table {index}"},
    changes={"tables": OnAbort.REFUSE, "states": OnAbort.REFUSE},
    max_plans=256,
    default_tuning=Tuning(),
)
_WIDTHS = Operator("agreement on the columns of embedding_all_to_all's tables", (), has_kernel=False)
_ROOM = Operator("room for gradients on their way", ("room_bytes",), has_kernel=False)


Widths = tuple[tuple[int, ...], ...]


class BackwardKey(NamedTuple):
    """What tells plans apart.

    Attributes:
        team: who exchanges.
        tables: this PE's.
        optimizer: stands for the optimizer whose states are updated.
        tuning: see `OperatorState`.
        dim_per_rank, batch_per_rank, dtype, mode, is_weighted: of the forward pass.
        widths: of every PE's tables.
    """

    team: Team
    tables: TableSet
    optimizer: object
    tuning: Tuning | None
    dim_per_rank: tuple[int, ...]
    widths: Widths
    batch_per_rank: tuple[int, ...]
    dtype: torch.dtype
    mode: str
    is_weighted: bool


# ---- lookups by row --------------------------------------------------------------------------------------------------


class Inverted(NamedTuple):
    """The lookups of a batch, sorted by row; see `Call` of the kernel. Those of a row keep their order.

    Attributes:
        keys, bags, lookups: of the sorted lookups, int64, int32, int64.
        counts: `[T * B]`, float32: entries of a bag that are not skipped.
    """

    keys: torch.Tensor
    bags: torch.Tensor
    lookups: torch.Tensor
    counts: torch.Tensor


def invert(
    indices: torch.Tensor, offsets: torch.Tensor, first_keys: torch.Tensor, num_rows: torch.Tensor, num_bags: int
) -> Inverted:
    """Sort lookups by row, without a host synchronisation; they may be any numbers, as in the forward pass.

    Args:
        indices, offsets: of `embedding_all_to_all`.
        first_keys: `[T]`, int64: key of each table's row 0; a key more than rows belongs to it.
        num_rows: `[T]`, int64.
        num_bags: T * B.
    """
    places = torch.arange(indices.numel(), dtype=offsets.dtype, device=indices.device)
    bags = torch.searchsorted(offsets[1:], places, right=True, out_int32=True)
    if num_bags == 0:
        return Inverted(places[:0].long(), bags[:0], places[:0].long(), torch.zeros(1, device=indices.device))
    # What no bag has is skipped, as an index outside of its table is.
    has_bag = (bags < num_bags) & (places >= offsets[0])
    bags = bags.clamp(max=num_bags - 1)
    tables = bags // (num_bags // first_keys.numel())
    rows = num_rows[tables]
    is_row = has_bag & (indices >= 0) & (indices < rows)
    keys = first_keys[tables] + torch.where(is_row, indices, rows)
    counts = torch.zeros(num_bags, device=indices.device).index_add_(0, bags, is_row.float())
    keys, lookups = torch.sort(keys, stable=True)
    return Inverted(keys, bags[lookups], lookups, counts)


# ---- plan ------------------------------------------------------------------------------------------------------------


def kernel_request(dtype: torch.dtype, step: str, *, mode: str, is_weighted: bool, is_aligned: bool) -> KernelRequest:
    """Return what is compiled for one combination of choices."""
    pooling = "kMean" if mode == "mean" else "kWeightedSum" if is_weighted else "kSum"
    config = {
        "scalar": SCALARS[dtype],
        "step": f"po::embedding_backward::Step::{STEPS[step]}",
        "pooling": f"po::embedding_backward::Pooling::{pooling}",
        "aligned": str(is_aligned).lower(),
        "threads": str(_THREADS),
        "blocks_per_sm": "1",
    }
    return KernelRequest(_NAME, tuple(config.items()), _THREADS)


def agree_on_widths(world: World, optimizer: object, dims: tuple[int, ...], weights: Sequence[torch.Tensor]) -> Widths:
    """Return the columns of every PE's tables. Collective the first time that an optimizer is used.

    Raises:
        ValueError: they do not add up to the dims.
    """
    state = OPERATOR.state(world)
    if state.own is None:
        state.own = weakref.WeakKeyDictionary()
    known: weakref.WeakKeyDictionary[object, Widths] = state.own
    if optimizer not in known:
        own = [weight.shape[1] for weight in weights]
        told = [own]
        if world.size > 1:
            world.meet(_WIDTHS.contract(world.team))
            told = [json.loads(raw) for raw in world.bootstrap.exchange("embedding-widths", json.dumps(own).encode())]
        known[optimizer] = tuple(map(tuple, told))
    widths = known[optimizer]
    if tuple(map(sum, widths)) != dims:
        raise ValueError(f"dim_per_rank: {list(dims)}, but the PEs' tables have {widths} columns")
    return widths


class BackwardPlan(Plan):
    """One key's kernel and plan. Raises ValueError for what the operator cannot take. Collective.

    Args:
        world: of this PE.
        key: see above.
        weights: this PE's tables.
        states: of each table's storage: none, one, or two tensors.
        step: of STEPS.
        constants: eps, weight_decay, beta1, beta2, decay_mode.

    Attributes:
        first_keys, num_rows: see `invert`.
    """

    def __init__(
        self,
        world: World,
        key: BackwardKey,
        weights: Sequence[torch.Tensor],
        states: Sequence[Sequence[torch.Tensor]],
        step: str,
        constants: dict[str, Any],
    ) -> None:
        self._world = world
        structs = OPERATOR.prepare(world).structs
        team, tuning = key.team, key.tuning or OPERATOR.default_tuning
        rank, size = team.rank, team.size
        dtype = key.dtype
        element = dtype.itemsize
        batch = sum(key.batch_per_rank)
        batch_start = [0, *itertools.accumulate(key.batch_per_rank)]
        column_start = [0, *itertools.accumulate(key.dim_per_rank)]
        samples = key.batch_per_rank[rank]
        widths = key.widths
        if max(map(len, widths)) * batch >= 2**31:
            raise ValueError(f"offsets: at most 2^31 - 1 bags of a PE, got {max(map(len, widths)) * batch}")
        if max(map(len, widths)) > world.workspace.max_ready_words:
            raise ValueError(f"weights: at most {world.workspace.max_ready_words} tables per PE")
        # Which tables are one tensor.
        numbers: dict[tuple[int, ...], int] = {}
        members: list[list[int]] = []
        for table, weight in enumerate(weights):
            number = numbers.setdefault((weight.data_ptr(), *weight.shape), len(numbers))
            if number == len(members):
                members.append([])
            members[number].append(table)
        first_keys, next_key = [0] * len(weights), 0
        groups = []
        first_member = 0
        for own in members:
            weight, state = weights[own[0]], states[own[0]]
            groups.append(
                structs["Group"](
                    rows=weight.data_ptr(),
                    state=state[0].data_ptr() if state else 0,
                    second=state[1].data_ptr() if len(state) > 1 else 0,
                    num_rows=weight.shape[0],
                    width=weight.shape[1],
                    first_key=next_key,
                    first_member=first_member,
                    num_members=len(own),
                )
            )
            for table in own:
                first_keys[table] = next_key
            next_key += weight.shape[0] + 1
            first_member += len(own)
        is_aligned = all(width * element % _VECTOR_BYTES == 0 for of_pe in widths for width in of_pe)
        is_aligned = is_aligned and all(weight.data_ptr() % _VECTOR_BYTES == 0 for weight in weights)

        def staged(of_pe: Sequence[int]) -> list[int]:
            return [batch * element * width for width in (0, *itertools.accumulate(of_pe))]

        columns = [column_start[rank] + width for width in (0, *itertools.accumulate(widths[rank]))]
        tables = [
            structs["Table"](column=column, staged_offset=offset)
            for column, offset, _ in zip(columns, staged(widths[rank]), widths[rank], strict=False)
        ]
        self._outgoing_bytes = 0
        self._pushes: list[Any] = []
        for table in range(max(map(len, widths), default=0)):
            for hop in range(1, size):
                owner = (rank + hop) % size
                if table >= len(widths[owner]) or not samples:
                    continue
                width = widths[owner][table]
                push = structs["Push"](
                    owner=owner,
                    table=table,
                    width=width,
                    column=column_start[owner] + sum(widths[owner][:table]),
                    staged_offset=staged(widths[owner])[table],
                )
                if not world.backend.peer_heaps[owner]:
                    push.outgoing_offset = self._outgoing_bytes
                    self._outgoing_bytes += -(-samples * width * element // _VECTOR_BYTES) * _VECTOR_BYTES
                self._pushes.append(push)
        self._areas = OPERATOR.state(world).areas
        room = 0 if size == 1 else max(sum(of_pe) for of_pe in widths) * batch * element
        self._areas.reserve([Need(_STAGING, room, room + room // 2)], lambda: _ROOM.contract(team, room))
        self.areas = (_STAGING,)
        if self._outgoing_bytes:
            self._areas.reserve_own(_OUTGOING, self._outgoing_bytes)
            self.areas = (_STAGING, _OUTGOING)
        is_host = world.backend.name == "host"
        most_bytes = max((width * element for of_pe in widths for width in of_pe), default=1)
        slice_samples = tuning.slice_samples or max(1, _PIECE_BYTES // max(most_bytes, 1))
        request = kernel_request(
            dtype,
            step,
            mode=key.mode,
            is_weighted=key.is_weighted,
            is_aligned=is_aligned and not is_host,  # one library on the host, where it makes no difference
        )
        self._kernel = world.load(request)
        self._grid = tuning.work_groups or world.backend.num_sms
        contract = OPERATOR.contract(
            team,
            batch,
            dtype,
            step,
            self._grid,
            tuple(key.batch_per_rank),
            tuple(key.dim_per_rank),
            tuple(width for of_pe in widths for width in (*of_pe, 0)),
        )
        self._pushed = world.workspace.zero_words(max(len(self._pushes), 1))
        self._uploaded = [
            upload(world.backend, b"".join(map(bytes, structures)) or b"\0" * 8) for structures in (groups, tables)
        ]
        self._members = upload(world.backend, _packed([table for own in members for table in own] or [0]))
        self._batch_start = upload(world.backend, _packed(batch_start))
        device = world.backend.device
        self.first_keys = torch.tensor(first_keys, dtype=torch.int64, device=device)
        self.num_rows = torch.tensor([weight.shape[0] for weight in weights], dtype=torch.int64, device=device)
        self.num_bags = len(weights) * batch
        self._struct: Any = structs["Plan"](
            team=world.workspace.team(contract),
            groups=self._uploaded[0].data_ptr(),
            members=self._members.data_ptr(),
            tables=self._uploaded[1].data_ptr(),
            num_groups=len(groups),
            num_tables=len(tables),
            num_pushes=len(self._pushes),
            slice_samples=slice_samples,
            num_slices=-(-samples // slice_samples),
            pushing_wgs=min(tuning.pushing_work_groups, self._grid) if self._pushes else 0,
            pushed=self._pushed.data_ptr(),
            batch_start=self._batch_start.data_ptr(),
            batch=batch,
            row_elements=column_start[-1],
            **constants,
        )
        self._call = structs["Call"]()
        self.place()

    def place(self) -> None:
        self.held = [self._areas[name] for name in self.areas]
        self._struct.staging_offset = self._areas[_STAGING].offset
        pushes = []
        for push in self._pushes:
            copied = type(push).from_buffer_copy(push)
            if _OUTGOING in self.areas:
                copied.outgoing_offset += self._areas[_OUTGOING].offset
            pushes.append(bytes(copied))
        self._placed = upload(self._world.backend, b"".join(pushes) or b"\0" * 8)
        self._struct.pushes = self._placed.data_ptr()
        self._words = upload(self._world.backend, bytes(self._struct))

    def launch(
        self,
        gradient: torch.Tensor,
        inverted: Inverted,
        factors: torch.Tensor | None,
        factor_gradients: torch.Tensor | None,
        rate: torch.Tensor,
        scale: torch.Tensor,
        steps: torch.Tensor,
    ) -> None:
        """Launch on the current stream."""
        call = self._call
        call.gradient = gradient.data_ptr()
        call.keys, call.bags = inverted.keys.data_ptr(), inverted.bags.data_ptr()
        call.lookups, call.counts = inverted.lookups.data_ptr(), inverted.counts.data_ptr()
        call.factors = 0 if factors is None else factors.data_ptr()
        call.factor_gradients = 0 if factor_gradients is None else factor_gradients.data_ptr()
        call.num_lookups = inverted.keys.numel()
        call.rate, call.scale, call.steps = rate.data_ptr(), scale.data_ptr(), steps.data_ptr()
        self._world.workspace.launch(self._kernel, self._grid, self._words.data_ptr(), call)


def _packed(values: Sequence[int]) -> bytes:
    return bytes((ctypes.c_int64 * len(values))(*values))

"""Plans of products whose results PEs exchange: division, kernel, places in the heap, choice of an algorithm."""

from __future__ import annotations

import ctypes
import dataclasses
import math
from collections.abc import Iterator
from typing import NamedTuple

import torch

from ..runtime.areas import Need
from ..runtime.backend import KernelRequest, check_resident
from ..runtime.compile.description import copy_of
from ..runtime.contract import Field
from ..runtime.dtypes import SCALARS
from ..runtime.operator import Operator
from ..runtime.plans import Plan
from ..runtime.team import Team
from ..runtime.world import World, upload
from .product import (
    DTYPES,
    Division,
    Rows,
    Shape,
    Tile,
    Tuning,
    blocks_of_part,
    choose_tile,
    kernel_config,
    launch_shape,
    predicted_cycles,
)

__all__ = [
    "EXCHANGES",
    "OPERATOR",
    "Choice",
    "ExchangeKey",
    "ExchangePlan",
    "choose_algorithm",
    "kernel_request",
    "partial_needs",
    "sample_requests",
]

_NAME = "gemm_exchange"
EXCHANGES = {
    "gemm_all_to_all": "kAllToAll",
    "gemm_reduce_scatter": "kReduceScatter",
    "gemm_all_reduce": "kAllReduce",
}
_WIRES = (*DTYPES, torch.float32)
_PARTIALS = "partials"  # areas: partial sums of tiles, on their way
_FLAGS = "flags"  # of these
_SLOTS = "slots"  # staged tiles of this PE; private

OPERATOR = Operator(
    _NAME,
    (
        Field.choice("operator", tuple(EXCHANGES)),
        Field("rows", argument="the number of rows of a"),
        Field("depth", argument="the number of columns of a"),
        Field("columns", argument="the number of columns of b"),
        Field("segments", argument="the number of rows before scatter_dim"),
        Field.dtype("dtype", DTYPES, "the dtype of a"),
        Field.dtype("wire_dtype", _WIRES),
        Field.flags("epilogue (mean, bias, residual)", ("mean", "bias", "residual")),
        Field.numbers("tile (of the same tuning)"),
        *map(Field.internal, ("work_groups", "carriers")),
    ),
    phases={
        "kPhasePartials": "its partial sums of block {index}",
        "kPhaseRows": "the rows that its warp {index} sends",
    },
    known_as="gemm_all_to_all, gemm_reduce_scatter, gemm_all_reduce",
    default_tuning=Tuning(),
)


class ExchangeKey(NamedTuple):
    """The key of a plan.

    Attributes:
        team: who exchanges.
        operator: of EXCHANGES.
        shape: of the product on each PE.
        rows: whose rows these are.
        dtype, wire_dtype: of the factors, and of partial sums that travel.
        is_mean: whether sums are divided by the number of PEs.
        has_bias, has_residual: whether they are added.
        tuning: see `OperatorState`.
    """

    team: Team
    operator: str
    shape: Shape
    rows: Rows
    dtype: torch.dtype
    wire_dtype: torch.dtype
    is_mean: bool
    has_bias: bool
    has_residual: bool
    tuning: Tuning | None

    @property
    def adds(self) -> bool:
        """Whether partial sums travel."""
        return self.operator != "gemm_all_to_all"

    @property
    def stores_to_peers(self) -> bool:
        """Whether peers store to the output, which lies in the heap."""
        return self.operator != "gemm_reduce_scatter"


def kernel_request(key: ExchangeKey, tile: Tile, *, depth: int) -> KernelRequest:
    """Return the kernel for a key and a tile; `depth`: of a step."""
    config: dict[str, str | int | bool] = {
        "scalar": SCALARS[key.dtype],
        "wire": SCALARS[key.wire_dtype],
        "exchange": f"po::gemm_exchange::Exchange::{EXCHANGES[key.operator]}",
        "is_mean": key.is_mean,
        "bias": key.has_bias,
        "residual": key.has_residual,
    }
    return KernelRequest.of(
        _NAME,
        config | kernel_config(key.shape, tile, depth),
        launch_shape(OPERATOR.description, key.shape, tile, depth, is_resident=True),
    )


def sample_requests() -> Iterator[KernelRequest]:
    """Yield kernels that differ most in code; tests compile them for GPUs."""
    team = Team(0, 2, 64, 0, True)
    for operator, wire_dtype, majors, tile in (
        ("gemm_all_to_all", torch.bfloat16, (True, True), Tile(128, 256, 2, 1, 4)),
        ("gemm_reduce_scatter", torch.bfloat16, (True, True), Tile(128, 256, 2, 1, 4)),
        ("gemm_reduce_scatter", torch.float32, (False, False), Tile(128, 96, 2, 2, 6)),
        ("gemm_all_reduce", torch.bfloat16, (True, True), Tile(128, 256, 2, 1, 4)),
    ):
        adds, shape = operator != "gemm_all_to_all", Shape(4096, 4096, 4096, *majors)
        key = ExchangeKey(
            team,
            operator,
            shape,
            Rows(2, 1, 1, 2048),
            torch.bfloat16,
            wire_dtype,
            operator == "gemm_reduce_scatter",
            adds,
            adds,
            None,
        )
        yield kernel_request(key, tile, depth=64)


def partial_needs(
    world_size: int, rows: Rows, columns: int, tile: Tile, wire_dtype: torch.dtype, *, backend_name: str
) -> list[Need]:
    """Return the areas for the partial sums of a product with so many columns, and for their flags."""
    blocks = blocks_of_part(rows, columns, tile)
    return [
        Need(_PARTIALS, max(1, (world_size - 1) * blocks * _block_bytes(tile, wire_dtype.itemsize))),
        Need(_FLAGS, world_size * blocks * _carriers(backend_name) * 8, fill=0),
    ]


def _block_bytes(tile: Tile, itemsize: int) -> int:
    return tile.rows * tile.columns // tile.parts * itemsize


def _carriers(backend_name: str) -> int:
    return OPERATOR.description.queries["carriers"](int(backend_name == "cuda"))


class ExchangePlan(Plan):
    """One key's kernel and data.

    Raises:
        SymmetricHeapError: no room for partial sums; on all PEs.
        ValueError: the tuning does not suit the shape.
    """

    def __init__(self, world: World, key: ExchangeKey) -> None:
        description = OPERATOR.prepare(world)
        self._structs = structs = description.structs
        self._world, self._key = world, key
        backend, team = world.backend, key.team
        tuning = _tuning(world, key)
        rows = key.rows._replace(lag=_lag(world, key, tuning))
        self._division = division = Division(backend, description, key.shape, tuning, rows)
        tile = division.tile
        self._kernel = world.load(kernel_request(key, tile, depth=division.depth), team)
        check_resident(self._kernel, division.grid, choices="tile")
        carriers = _carriers(backend.name)
        if key.stores_to_peers and (words := division.grid * carriers) > world.workspace.max_ready_words:
            raise ValueError(f"{key.operator}: {words} words for each peer, of {world.workspace.max_ready_words}")
        flags = (key.is_mean, key.has_bias, key.has_residual)
        self._contract = OPERATOR.contract(
            team,
            key.operator,
            key.shape.rows,
            key.shape.depth,
            key.shape.columns,
            key.rows.segments,
            key.dtype,
            key.wire_dtype,
            flags,
            (tile.rows, tile.columns, tile.sharing, tile.parts, division.product.tiles.band, division.product.rows.lag),
            division.grid,
            carriers,
        )
        areas = OPERATOR.state(world).areas
        itemsize = key.wire_dtype.itemsize if key.adds else key.dtype.itemsize
        block_bytes = _block_bytes(tile, itemsize)
        if key.adds:
            needs = partial_needs(
                team.size, key.rows, key.shape.columns, tile, key.wire_dtype, backend_name=backend.name
            )
            areas.reserve(needs, lambda: self._contract)
        areas.reserve_private(_SLOTS, division.grid * description.constants["kSlots"] * block_bytes)
        self.areas = (_PARTIALS, _FLAGS, _SLOTS) if key.adds else (_SLOTS,)
        # All carriers together store as many bytes as the links take. Links that cannot keep up set the pace.
        batch_bytes = 512 * description.constants["kBatch"] * division.grid * carriers
        is_paced = backend.name == "cuda" and _busy(world, key, tile) <= 1
        self._batch_cycles = int(batch_bytes / _PACE_BYTES_PER_US * _CYCLES_PER_US) if is_paced else 0
        self._areas = areas
        self._template = structs["Call"](
            columns=key.shape.columns,
            row_bytes=key.shape.columns * key.dtype.itemsize,
            product=division.product,
            scale=1 / team.size,
        )
        self.place()

    def place(self) -> None:
        held = [self._areas[name] for name in self.areas]
        offsets = [area.offset for area in held[:2]] if self._key.adds else [0, 0]
        plan = self._structs["Plan"](
            team=self._world.workspace.team(self._contract),
            partials_offset=offsets[0],
            flags_offset=offsets[1],
            blocks_per_part=self._division.blocks_per_part,
            slots=held[-1].address,
            batch_cycles=self._batch_cycles,
        )
        self._template.local = plan.team.local
        self._words = upload(self._world.backend, plan)
        self._address = self._words.data_ptr()
        self.held = held

    def launch(
        self,
        a: torch.Tensor,
        b: torch.Tensor,
        bias: torch.Tensor | None,
        residual: torch.Tensor | None,
        output: int,
        output_offset: int,
    ) -> None:
        """Launch on the current stream.

        Args:
            a, b: `[M, K]` and `[K, N]`, in the layouts of the key.
            bias, residual: where the key has them.
            output: address of the output.
            output_offset: the same in the heap, where peers store to it.
        """
        call: ctypes.Structure = copy_of(self._template)
        self._division.set_factors(call.product, a, b)
        call.output, call.output_offset = output, output_offset
        call.bias = 0 if bias is None else bias.data_ptr()
        call.residual = 0 if residual is None else residual.data_ptr()
        self._world.workspace.launch(
            self._kernel, self._division.grid, self._address, call, begins_early=self._world.backend.begins_early
        )


def _tuning(world: World, key: ExchangeKey) -> Tuning:
    """Return the tuning with the tile: the same on all PEs, whatever the layouts of their factors."""
    tuning = key.tuning or OPERATOR.default_tuning
    backend = world.backend
    if backend.name == "host":
        return tuning
    if backend.leaves_room:  # clusters need SMs side by side
        tuning = dataclasses.replace(tuning, sharing=1, parts=1)
    tile = _tile(world, key, tuning)
    return Tuning(tile.rows, tile.columns, tile.sharing, tile.parts, tuning.stages, tuning.band)


def _busy(world: World, key: ExchangeKey, tile: Tile) -> float:
    """Return the links' time for peers' tiles, in times of that in which these are made one after the other."""
    cycles = predicted_cycles(OPERATOR.prepare(world).queries, tile, key.shape, key.rows, world.backend.num_sms)
    assert cycles is not None
    parts = key.rows.parts
    return _link_us(key) / (cycles / _CYCLES_PER_US) * parts / max(1, parts - 1)


def _lag(world: World, key: ExchangeKey, tuning: Tuning) -> int:
    """Return by how many tiles of rows the own part lags, the same on all PEs.

    It lags by all tiles of a part where the links keep up with peers' tiles that are made one after the other, and
    where own tiles need what peers send. Else it covers one tile of each work-group.
    """
    backend = world.backend
    if backend.name == "host":
        return max(1, key.rows.tiles(8) // 2)
    tile = Tile(tuning.rows or 0, tuning.columns or 0, tuning.sharing or 1, tuning.parts or 1, 0)
    of_part = key.rows.tiles(tile.rows)
    if key.adds or _busy(world, key, tile) <= 1:
        return of_part
    return min(of_part, math.ceil(backend.num_sms / math.ceil(key.shape.columns / tile.columns)))


def _link_us(key: ExchangeKey) -> float:
    """Return how long the links take to send all tiles of peers' parts."""
    item = key.wire_dtype.itemsize if key.adds else key.dtype.itemsize
    sent_rows = key.rows.tiles(16) * 16 * (key.team.size - 1)  # tiles travel in strips
    return sent_rows * key.shape.columns * item / _LINK_BYTES_PER_US


def _tile(world: World, key: ExchangeKey, tuning: Tuning) -> Tile:
    queries, backend = OPERATOR.prepare(world).queries, world.backend
    shape = key.shape._replace(a_k_major=True, b_k_major=True)
    if key.adds and key.wire_dtype == torch.float32:  # more sums of a thread and their addends would not fit registers
        tuning = dataclasses.replace(tuning, rows=128)
    return choose_tile(queries, shape, tuning, num_sms=backend.num_sms, arena_bytes=backend.arena_bytes, rows=key.rows)


# ---- the choice of an algorithm ------------------------------------------------------------------------------------

# Measured on H200.
_CYCLES_PER_US = 1600.0
_LINK_BYTES_PER_US = 346e3  # that a GPU sends
_PACE_BYTES_PER_US = 400e3  # at most, of batches that come one after the other
_LAUNCH_US = 4.0
_EXCHANGE_US = 8.0  # of one launch, beside its product and its bytes: the last flags, and sums of the last tiles
_COLLECTIVE_US = 16.0  # of NCCL's, beside its bytes
_MEMORY_BYTES_PER_US = 3e6


class Choice(NamedTuple):
    """What a call took, and why.

    Attributes:
        algorithm: "fused" or "unfused".
        reason: for it.
        fused_us, unfused_us: predicted times of both; None where there was nothing to choose.
    """

    algorithm: str
    reason: str
    fused_us: float | None = None
    unfused_us: float | None = None


def choose_algorithm(world: World, key: ExchangeKey) -> Choice:
    """Return what "auto" takes, by what is the same on all PEs."""
    if world.backend.name == "host":
        return Choice("fused", "the host backend")
    if 0 in key.shape[:3]:
        return Choice("fused", "there is nothing to multiply")
    fused, unfused = _predicted(world, key)
    if _partial_bytes(key) > world.backend.heap_bytes // 4:
        return Choice("unfused", "partial sums would take more than a quarter of the heap", fused, unfused)
    return Choice("fused" if fused <= unfused else "unfused", "predicted to be faster", fused, unfused)


def _partial_bytes(key: ExchangeKey) -> int:
    return key.adds * key.shape.rows * key.shape.columns * key.wire_dtype.itemsize


def _predicted(world: World, key: ExchangeKey) -> tuple[float, float]:
    """Return the times that a fused and an unfused call are expected to take, in us."""
    queries, shape, size, num_sms = OPERATOR.prepare(world).queries, key.shape, key.team.size, world.backend.num_sms
    tile = _tile(world, key, key.tuning or OPERATOR.default_tuning)
    cycles = predicted_cycles(queries, tile, shape, key.rows, num_sms)
    assert cycles is not None
    product = cycles / _CYCLES_PER_US
    link = _link_us(key) * (2 if key.operator == "gemm_all_reduce" else 1)
    tiles = math.ceil(size * key.rows.tiles(tile.rows) / tile.sharing) * math.ceil(shape.columns / tile.columns)
    waves = math.ceil(tiles / max(1, num_sms // tile.cluster))
    fused = _LAUNCH_US + max(product, product / waves + link) + _EXCHANGE_US
    alone = choose_tile(queries, shape, Tuning(), num_sms=num_sms, arena_bytes=world.backend.arena_bytes)
    alone_cycles = predicted_cycles(queries, alone, shape, Rows.of_one_pe(shape.rows), num_sms)
    assert alone_cycles is not None
    result_bytes = shape.rows * shape.columns * key.dtype.itemsize
    added = 2 * result_bytes / _MEMORY_BYTES_PER_US + _LAUNCH_US if key.adds else 0
    unfused = _LAUNCH_US + alone_cycles / _CYCLES_PER_US + _COLLECTIVE_US + link + added
    return fused, unfused

"""What a shape of gemv_all_reduce or gemv needs at every call: kernel, plans in device memory, room for packets."""

from __future__ import annotations

import ctypes
import dataclasses
from dataclasses import dataclass
from typing import Any

import torch

from ..runtime.backend import Kernel, KernelRequest
from ..runtime.contract import Contract, Field, register
from ..runtime.layout import MAX_PES, Team
from ..runtime.world import World, upload

__all__ = [
    "ALGORITHMS",
    "MAX_VECTORS",
    "SCALARS",
    "TUNING",
    "Areas",
    "GemvPlan",
    "Tuning",
    "areas_of",
    "choose_algorithm",
    "choose_depth",
    "kernel_request",
    "kernel_vectors_of",
    "plans_of",
    "team_factor",
]

TUNING = "gemv_all_reduce.tuning"  # key in a world's operator_state of a Tuning other than the default one
ALGORITHMS = ("auto", "one_shot", "two_phase")
MAX_VECTORS = 16
SCALARS = {torch.float32: "Float32", torch.float16: "Float16", torch.bfloat16: "BFloat16"}
_NAME = "gemv_all_reduce"
_ROOM = "room for gemv_all_reduce's packets"
_PLANS = {False: "gemv_all_reduce.plans", True: "gemv.plans"}
_TILE_ROWS = 8
_SERVING_WARPS = 2
_PACKET_BYTES = 16  # half of it data
_STEP_BYTES = 128  # of a row, in one step of a warp
_STEPS_AT_ONCE = 2  # at most, that a warp multiplies
_TEAM_WARPS = 4  # or a few more; whole teams of at least as many, one, two or _MOST_TEAMS
_MOST_TEAMS = 4
_RING_STEP_BYTES = 1024  # a step of all rows of a tile
_DELIVERY_BYTES = 16  # for the word that says that a lone vector has come
_MAX_ROWS = 65536  # of one launch: what the shape word of a call has room for
_MAX_AREA_BYTES = 32 << 20
_LITTLE_BYTES = 160 << 10
_STATIC_BYTES = 1536  # what the kernel has beside its arena, rounded up
_LINE_BYTES = 128
_RESERVED_BYTES = 1024  # of an SM's shared memory, by CUDA, for each WG
register(
    _NAME,
    (
        "world_size",
        "rows",
        "vectors",
        Field.dtype("dtype", list(SCALARS)),
        Field.dtype("comm_dtype", list(SCALARS)),
        Field.flag("two_phase"),
        "work_groups",
        "first_row",
    ),
)
register(_ROOM, ("world_size", "heap_bytes"))


@dataclass(frozen=True)
class Tuning:
    """Choices that change speed and nothing else; the defaults were measured on H200 (benchmarks/README.md).

    Attributes:
        warps: that multiply, per WG; see `team_factor` for when there are more. It decides the order of sums: all calls
            whose bits are compared need the same.
        depth: steps of 1 KiB that a warp copies ahead; None for what suits the shape (`choose_depth`). More makes the
            vectors, and the first tile, come later.
        work_groups: None for one per SM, or per tile where there are fewer. All PEs must agree.
        one_shot_bytes: the most bytes that a PE sends, to all others together, before "auto" takes two phases.
    """

    warps: int = 8
    depth: int | None = None
    work_groups: int | None = None
    one_shot_bytes: int = 4 << 20


class _Plan(ctypes.Structure):
    _fields_ = (
        ("team", Team),
        ("num_tiles", ctypes.c_int64),
        ("output_stride", ctypes.c_int64),
        ("bias", ctypes.c_uint64),
        ("partials_offset", ctypes.c_uint64),
        ("partials_bytes", ctypes.c_uint64),
        ("results_offset", ctypes.c_uint64),
        ("results_bytes", ctypes.c_uint64),
        ("all_reachable", ctypes.c_int64),
        ("heaps", ctypes.c_uint64 * MAX_PES),
        ("asked", ctypes.c_uint64),
    )


@dataclass(frozen=True)
class Areas:
    """Symmetric memory of a world for this operator.

    Attributes:
        partials: for the packets with sums, two parities one behind the other.
        results: the same for the packets with results.
    """

    partials: torch.Tensor
    results: torch.Tensor


def areas_of(world: World) -> Areas:
    """Return the world's room for packets; collective the first time."""
    areas: Areas | None = world.operator_state.get(_NAME)
    if areas is None:
        _refuse_capture(world, _NAME)
        world.meet(Contract(_ROOM, (world.size, world.backend.heap_bytes)))
        # Enough for every launch: rows that need more are done in several launches.
        nbytes = min(_MAX_AREA_BYTES, world.backend.heap_bytes // 16)
        nbytes = nbytes // (4096 * world.size) * (4096 * world.size)
        words = (nbytes // 8, nbytes // 8 // world.size)
        room = world.heap.empty((2 * sum(words),), torch.int64)
        room.zero_()
        partials, results = (area.view(2, -1) for area in room.split([2 * count for count in words]))
        world.backend.synchronize()
        world.bootstrap.exchange("gemv-areas", b"")  # no packet comes before the areas are zero
        areas = world.operator_state[_NAME] = Areas(partials, results)
    return areas


def plans_of(world: World, *, is_alone: bool = False) -> dict[tuple[Any, ...], GemvPlan]:
    """Return the world's plans by signature, of gemv_all_reduce or, where a PE is alone, of gemv."""
    plans: dict[tuple[Any, ...], GemvPlan] = world.operator_state.setdefault(_PLANS[is_alone], {})
    return plans


def choose_algorithm(world: World, rows: int, num_vectors: int, comm_dtype: torch.dtype) -> str:
    """Return what "auto" means for a shape."""
    tuning: Tuning = world.operator_state.get(TUNING) or Tuning()
    sent = (world.size - 1) * rows * num_vectors * 2 * comm_dtype.itemsize
    return "two_phase" if sent > tuning.one_shot_bytes else "one_shot"


def choose_depth(bytes_per_wg: int, room_for_two: int) -> int:
    """Return a ring's steps per warp, as measured on H200 (benchmarks/README.md).

    With little to read, what counts is how soon the vectors come, which queue behind the weights of a deep ring. To a
    launch that begins early they come last anyway, and the more weights come before, the better.

    Args:
        bytes_per_wg: of weights.
        room_for_two: steps for which two WGs find room on an SM; 0 if the launch does not begin beside another one.
    """
    if room_for_two >= 8:
        return min(room_for_two // 2 * 2, 12)
    return 6 if _is_little(bytes_per_wg) else 8


def team_factor(warps: int, dtype: torch.dtype) -> int:
    """Return how many times the warps multiply that otherwise would, where the vectors find no room in a WG.

    They come again for each tile of every team, and the teams share them: twice the teams read them half as often. The
    warps' shares of the columns stay, and with them the bits. fp32 takes too many registers.
    """
    return 2 if _TEAM_WARPS <= warps < _MOST_TEAMS * _TEAM_WARPS and dtype != torch.float32 else 1


def kernel_vectors_of(num_vectors: int) -> int:
    """Return for how many vectors the kernel is made that multiplies so many."""
    return next(n for n in (1, 8, MAX_VECTORS) if num_vectors <= n)


def _is_little(bytes_per_wg: int) -> bool:
    """Return whether a WG has not much more to read than what it asks for at once."""
    return bytes_per_wg <= _LITTLE_BYTES


def _lets_in(has_room: bool, prefetches: bool, bytes_per_wg: int) -> str:
    """Return when a launch lets its successor in; `has_room`: for another one like it beside it."""
    if not prefetches:
        return "kAtOnce" if has_room else "kAtEnd"
    # Where a successor finds no room, or this launch is nearly over when its vectors have come, the sooner the better.
    return "kLate" if has_room and not _is_little(bytes_per_wg) else "kAtOnce"


def _warps_of_team(warps: int) -> int:
    """Return how many of a WG's warps share the columns of a tile."""
    return warps // next(teams for teams in (_MOST_TEAMS, 2, 1) if warps >= teams * _TEAM_WARPS or teams == 1)


def _slots_of(kernel_vectors: int) -> int:
    """Return how many tiles of a WG may be under way in its own memory."""
    return 8 if kernel_vectors == 1 else 4


def _refuse_capture(world: World, name: str) -> None:
    if world.workspace.is_capturing():
        raise RuntimeError(
            f"{name}: the first call with these shapes compiles and loads its kernel, which a CUDA-graph capture "
            "cannot do: call it once before the capture, with the same shapes and bias"
        )


@dataclass
class _Launch:
    """One launch: a range of rows."""

    first_row: int
    shape: int
    plan: torch.Tensor
    address: int
    asked: torch.Tensor


class GemvPlan:
    """One signature's kernel and plans.

    Args:
        world: of this PE.
        rows: M.
        columns: this PE's K.
        num_vectors: N.
        dtype: of the weight.
        comm_dtype: of partial sums under way.
        bias: `[M]` or None.
        algorithm: of ALGORITHMS.
        is_aligned: whether every row of weight and x begins at a multiple of 16 bytes.
        prefetch_weight: ask for weights before the kernel before has ended.
        is_alone: the product of this PE by itself, in one shot. The first other plan of a world is collective.
    """

    def __init__(
        self,
        world: World,
        rows: int,
        columns: int,
        num_vectors: int,
        dtype: torch.dtype,
        comm_dtype: torch.dtype,
        bias: torch.Tensor | None,
        algorithm: str,
        is_aligned: bool,
        prefetch_weight: bool,
        *,
        is_alone: bool = False,
    ) -> None:
        _refuse_capture(world, "gemv" if is_alone else _NAME)
        if columns >= 1 << 30:
            raise ValueError(f"weight: at most 2^30 - 1 columns per PE, got {columns}")
        tuning: Tuning = world.operator_state.get(TUNING) or Tuning()
        rank, size = (0, 1) if is_alone else (world.rank, world.size)
        element = dtype.itemsize
        two_phase = algorithm == "two_phase"
        if algorithm == "auto":
            two_phase = choose_algorithm(world, rows, num_vectors, comm_dtype) == "two_phase"
        vectors_per_tile = num_vectors * _TILE_ROWS
        tile_bytes = vectors_per_tile // (8 // comm_dtype.itemsize) * _PACKET_BYTES
        max_tiles = _MAX_ROWS // _TILE_ROWS
        packets = {}
        if not is_alone:
            areas = areas_of(world)
            max_tiles = min(max_tiles, areas.partials[0].nbytes // (tile_bytes * size))
            if not world.all_reachable:
                max_tiles = min(max_tiles, world.workspace.max_ready_words // 2)
            packets = {
                "partials_offset": areas.partials.data_ptr() - world.backend.heap_base,
                "partials_bytes": areas.partials[0].nbytes,
                "results_offset": areas.results.data_ptr() - world.backend.heap_base,
                "results_bytes": areas.results[0].nbytes,
                "all_reachable": int(world.all_reachable),
                "heaps": (ctypes.c_uint64 * MAX_PES)(*world.backend.peer_heaps),
            }
        if max_tiles == 0:
            raise ValueError(
                f"x: {num_vectors} vectors do not fit the symmetric heap's room for packets; pass a larger heap_size "
                "to po.init()"
            )
        total_tiles = max(1, -(-rows // _TILE_ROWS))
        launches = -(-total_tiles // max_tiles)
        tiles_each = -(-total_tiles // launches)
        grid = min(tuning.work_groups or world.backend.num_sms, max(1, tiles_each))
        kernel_vectors = kernel_vectors_of(num_vectors)
        bytes_per_wg = -(-tiles_each // grid) * _TILE_ROWS * columns * element
        warps = tuning.warps
        arena = _Arena.of_wg(world.backend.arena_bytes, warps, kernel_vectors, columns * element)
        # More vectors take too many registers for a second WG on an SM.
        shares_sm = kernel_vectors == 1 or (prefetch_weight and kernel_vectors <= 8)
        room_for_two = arena.steps_of_each_of_two() if shares_sm else 0
        depth = tuning.depth or choose_depth(bytes_per_wg, room_for_two if prefetch_weight else 0)
        if depth < _STEPS_AT_ONCE:
            raise ValueError(f"depth: at least {_STEPS_AT_ONCE}, the steps that a warp multiplies at once; got {depth}")
        is_resident = arena.holds_vectors(depth)
        prefetches = prefetch_weight and is_resident
        arena_bytes = arena.with_depth(depth, is_resident=is_resident)
        if not is_resident:
            factor = team_factor(warps, dtype)
            larger = _Arena.of_wg(world.backend.arena_bytes, warps * factor, kernel_vectors, columns * element)
            own_depth = tuning.depth or depth // factor
            if (larger_bytes := larger.with_depth(own_depth, is_resident=False)) <= larger.room:
                warps, depth, arena_bytes = warps * factor, own_depth, larger_bytes
        if arena_bytes > arena.room:
            raise ValueError(f"depth: {arena_bytes} bytes of shared memory per WG, an SM has room for {arena.room}")
        request = kernel_request(
            dtype,
            comm_dtype,
            kernel_vectors,
            warps=warps,
            depth=depth,
            arena_bytes=arena_bytes,
            is_aligned=is_aligned,
            is_resident=is_resident,
            two_phase=two_phase,
            prefetches=prefetches,
            lets_in=_lets_in(depth <= room_for_two, prefetches, bytes_per_wg),
        )
        if world.backend.name == "host":  # most choices are not about the host: one library for all of them
            defines = dict(request.defines) | {"PO_DEPTH": "1", "PO_ALIGNED": "true", "PO_RESIDENT": "true"}
            defines |= {"PO_WARPS": "8", "PO_PREFETCHES": "false", "PO_LETS_IN": "kAtOnce"}
            defines["PO_VECTORS"] = "1" if num_vectors == 1 else str(MAX_VECTORS)
            request = dataclasses.replace(request, defines=tuple(defines.items()))
        self._kernel: Kernel = world.load(request)
        resident = self._kernel.max_blocks_per_sm() * world.backend.num_sms
        if world.backend.name == "cuda" and resident < grid:
            raise ValueError(
                f"warps, depth, work_groups: {resident} WGs with {arena_bytes} bytes of shared memory fit the GPU, not "
                f"{grid}; a persistent grid must be resident as a whole"
            )
        self.is_two_phase = two_phase
        self._bias = bias
        self._grid = grid
        self._element = element
        self._columns = columns
        self._launches: list[_Launch] = []
        for first_tile in range(0, total_tiles, tiles_each):
            first_row = first_tile * _TILE_ROWS
            num_rows = min(tiles_each * _TILE_ROWS, rows - first_row)
            num_tiles = -(-num_rows // _TILE_ROWS)
            values = (
                size,
                rows,
                num_vectors,
                dtype,
                comm_dtype,
                two_phase,
                grid,
                first_row,
            )
            asked = world.backend.private_words(_LINE_BYTES // 8)  # a line that no other word is on
            plan = _Plan(
                team=world.workspace.team(Contract(_NAME, values), is_alone=is_alone),
                num_tiles=num_tiles,
                output_stride=rows,
                bias=0 if bias is None else bias.data_ptr() + first_row * element,
                asked=asked.data_ptr(),
                **packets,
            )
            words = upload(world.backend, bytes(plan))
            shape = num_rows | rank << 17 | size << 23 | (num_vectors - 1) << 30 | columns << 34
            self._launches.append(_Launch(first_row, shape, words, words.data_ptr(), asked))

    def launch(self, world: World, weight: int, x: int, output: int, residual: int) -> None:
        """Launch on the current stream. All arguments are addresses; `residual` is 0 where there is none."""
        for number, launch in enumerate(self._launches, start=1):
            skipped = launch.first_row * self._element
            words = (
                weight + skipped * self._columns,
                x,
                output + skipped,
                residual + skipped if residual else 0,
                launch.shape,
            )
            # What earlier operators left behind is raised once the peers have all launches of this call.
            is_last = number == len(self._launches)
            world.workspace.launch(self._kernel, self._grid, launch.address, words, raises_input_errors=is_last)


@dataclass(frozen=True)
class _Arena:
    """How a WG's own memory is divided: ring, the warps' parts of sums, and the vectors, or a ring for them too.

    Attributes:
        room: bytes, for one WG alone on an SM.
        step_bytes: of the ring, for each step of its depth.
    """

    room: int
    _: dataclasses.KW_ONLY
    step_bytes: int
    parts_bytes: int
    vectors_bytes: int
    vector_ring_step_bytes: int

    @classmethod
    def of_wg(cls, sm_bytes: int, warps: int, kernel_vectors: int, row_bytes: int) -> _Arena:
        """Return the sizes for `warps` that multiply; `sm_bytes`: what one WG may have."""
        vector_step_bytes = kernel_vectors * _STEP_BYTES
        return cls(
            sm_bytes - _STATIC_BYTES,
            step_bytes=warps * _RING_STEP_BYTES,
            parts_bytes=_warps_of_team(warps) * kernel_vectors * _TILE_ROWS * 4 * _slots_of(kernel_vectors),
            vectors_bytes=-(-row_bytes // _STEP_BYTES) * vector_step_bytes + (kernel_vectors == 1) * _DELIVERY_BYTES,
            vector_ring_step_bytes=_warps_of_team(warps) * vector_step_bytes,
        )

    def steps_of_each_of_two(self) -> int:
        """Return the depth for which two WGs with vectors of their own fit an SM; below 1: none."""
        room = (self.room - _STATIC_BYTES - _RESERVED_BYTES) // 2
        return (room - self.parts_bytes - self.vectors_bytes) // self.step_bytes

    def holds_vectors(self, depth: int) -> bool:
        """Return whether the vectors fit beside a ring of this depth."""
        return depth * self.step_bytes + self.parts_bytes + self.vectors_bytes <= self.room

    def with_depth(self, depth: int, *, is_resident: bool) -> int:
        """Return the arena's bytes, with the vectors in it or with their ring."""
        ring_bytes = (depth + _STEPS_AT_ONCE) * self.vector_ring_step_bytes
        return depth * self.step_bytes + self.parts_bytes + (self.vectors_bytes if is_resident else ring_bytes)


def kernel_request(
    dtype: torch.dtype,
    comm_dtype: torch.dtype,
    kernel_vectors: int,
    *,
    warps: int,
    depth: int,
    arena_bytes: int,
    is_aligned: bool,
    is_resident: bool,
    two_phase: bool,
    prefetches: bool,
    lets_in: str,
) -> KernelRequest:
    """Return what is compiled for one combination of choices; `kernel_vectors` is 1, 8 or 16.

    `prefetches`: the launch asks for weights before its predecessor has ended. `lets_in`: when it lets its successor
    begin, an enumerator of LetsIn in cuda/sched/succession.cuh.
    """
    defines = {
        "PO_SCALAR": SCALARS[dtype],
        "PO_SUM_SCALAR": SCALARS[comm_dtype],
        "PO_VECTORS": str(kernel_vectors),
        "PO_DEPTH": str(depth),
        "PO_ALIGNED": str(is_aligned).lower(),
        "PO_RESIDENT": str(is_resident).lower(),
        "PO_TWO_PHASE": str(two_phase).lower(),
        "PO_PREFETCHES": str(prefetches).lower(),
        "PO_LETS_IN": lets_in,
        "PO_WARPS": str(warps),
    }
    return KernelRequest(
        _NAME,
        tuple(defines.items()),
        ctypes.sizeof(_Plan),
        (warps + _SERVING_WARPS) * 32,
        arena_bytes=arena_bytes,
        overlaps_predecessor=True,
    )

"""Plan of a gemv_all_reduce or gemv shape: kernel, plans in device memory, room for packets."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from ..runtime.areas import Need
from ..runtime.backend import Kernel, KernelRequest, LaunchShape, check_resident
from ..runtime.compile.description import copy_of
from ..runtime.compile.literals import warp_size
from ..runtime.contract import Field
from ..runtime.dtypes import SCALARS, fill_nan
from ..runtime.errors import PersistentOpsError
from ..runtime.operator import Operator
from ..runtime.plans import Plan
from ..runtime.team import Team
from ..runtime.tuning import BoundedTuning, at_least
from ..runtime.world import World, heaps_of, upload

__all__ = [
    "ALGORITHMS",
    "MAX_VECTORS",
    "OPERATOR",
    "SCALARS",
    "GemvKey",
    "GemvPlan",
    "Tuning",
    "choose_algorithm",
    "choose_depth",
    "kernel_request",
    "sample_requests",
    "kernel_vectors_of",
    "packet_need",
    "request_for",
    "reserve_packets",
    "team_factor",
]

ALGORITHMS = ("auto", "one_shot", "two_shot")
MAX_VECTORS = 16
_NAME = "gemv_all_reduce"
_PACKETS = "packets"  # an area: sums in two parities, then results in two
_MAX_AREA_BYTES = 32 << 20
_HEAP_PARTS = 16  # of which one parity of sums has one
_UNIT_BYTES = 4096  # of it, for each PE
_LITTLE_BYTES = 160 << 10
_LINE_BYTES = 128
_RESERVED_BYTES = 1024  # of an SM's shared memory, by CUDA, for each WG
_ADDENDS = tuple(itertools.product((False, True), repeat=2))  # whether a call brings a bias, and a residual


@dataclass(frozen=True)
class Tuning(BoundedTuning):
    """Choices that change speed and nothing else; the defaults were measured on H200 (docs/lessons.md).

    Attributes:
        warps: that multiply, per WG; see `team_factor` for when there are more. It decides the order of sums: all calls
            whose bits are compared need the same.
        depth: steps of 1 KiB that a warp copies ahead; None for what suits the shape (`choose_depth`). More makes the
            vectors, and the first tile, come later.
        work_groups: None for one per SM, or per tile where there are fewer. All PEs must agree.
        one_shot_bytes: the most bytes that a PE sends, to all others together, before "auto" takes two shots.
    """

    warps: int = 8
    depth: int | None = None
    work_groups: int | None = None
    one_shot_bytes: int = at_least(0, 4 << 20)


OPERATOR = Operator(
    _NAME,
    (
        Field("rows", argument="the number of rows of weight"),
        Field("vectors", argument="the number of vectors in x"),
        Field.dtype("dtype", list(SCALARS), "the dtype of weight"),
        Field.dtype("wire_dtype", list(SCALARS)),
        Field.flag("algorithm", texts=("one_shot", "two_shot")),
        Field.flag("bias", texts=("None", "a tensor")),
        Field.flag("residual", texts=("None", "a tensor")),
        Field.internal("work_groups"),
        Field.internal("first_row"),
    ),
    phases={
        "kPhasePartial": "its partial sums of the rows in tile {index}",
        "kPhaseResult": "the result of the rows in tile {index}, which it owns",
    },
    default_tuning=Tuning(),
)
_ROOM = Operator("setup of gemv_all_reduce", (Field.internal("heap_bytes"),), has_kernel=False)


class GemvKey(NamedTuple):
    """The key of a plan.

    Attributes:
        team: the world's, or this PE alone, in one shot.
        rows, columns, num_vectors: M, this PE's K, N.
        dtype: of the weight.
        wire_dtype: of partial sums under way; None: float32.
        algorithm: of ALGORITHMS; `GemvPlan` is made for what "auto" means.
        is_aligned: whether every row of weight and x begins at a multiple of 16 bytes.
        prefetch_weight: ask for weights before the kernel before has ended.
        tuning: see `OperatorState`.
    """

    team: Team
    rows: int
    columns: int
    num_vectors: int
    dtype: torch.dtype
    wire_dtype: torch.dtype | None
    algorithm: str
    is_aligned: bool
    prefetch_weight: bool
    tuning: Tuning | None


def _packet_bytes(world_size: int, heap_bytes: int) -> tuple[int, int]:
    """Return the bytes of one parity of sums, and of results, in a heap of so many bytes."""
    # Enough for every launch: rows that need more are done in several launches.
    nbytes = min(_MAX_AREA_BYTES, heap_bytes // _HEAP_PARTS)
    nbytes = nbytes // (_UNIT_BYTES * world_size) * (_UNIT_BYTES * world_size)
    return nbytes, nbytes // world_size


def packet_need(world_size: int, heap_bytes: int) -> Need:
    """Return the area for packets in a heap of so many bytes."""
    return Need(_PACKETS, 2 * sum(_packet_bytes(world_size, heap_bytes)), fill=0)


def reserve_packets(world: World) -> None:
    """See to the world's room for packets; collective the first time."""
    need, heap_bytes = packet_need(world.size, world.backend.heap_bytes), world.backend.heap_bytes
    OPERATOR.state(world).areas.reserve([need], lambda: _ROOM.contract(world.team, heap_bytes))


def choose_algorithm(world: World, key: GemvKey) -> str:
    """Return the algorithm for "auto"."""
    tuning = key.tuning or OPERATOR.default_tuning
    sent = (world.size - 1) * key.rows * key.num_vectors * 2 * (key.wire_dtype or torch.float32).itemsize
    return "two_shot" if sent > tuning.one_shot_bytes else "one_shot"


def choose_depth(bytes_per_wg: int, room_for_two: int) -> int:
    """Return a ring's steps per warp, as measured on H200 (docs/lessons.md).

    With few bytes to read, the delay of the vectors counts: they queue after the weights of a deep ring. A launch that
    begins early gets the vectors last in any case; there a deeper ring is better.

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
    num_teams = OPERATOR.description.queries["num_teams"]
    return 2 if num_teams(2 * warps) > num_teams(warps) and dtype != torch.float32 else 1


def kernel_vectors_of(num_vectors: int) -> int:
    """Return the number of vectors of the kernel that multiplies this number of vectors."""
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


def _wire_dtype(key: GemvKey) -> torch.dtype:
    return key.wire_dtype or torch.float32


def _packets(world: World, key: GemvKey) -> Any:
    """Return where packets are; a PE alone sends none."""
    make = OPERATOR.description.structs["PacketPlan"]
    if key.team is not world.team:
        return make()
    area = OPERATOR.state(world).areas[_PACKETS]
    partials_bytes, results_bytes = _packet_bytes(world.size, world.backend.heap_bytes)
    return make(
        partials_offset=area.offset,
        partials_bytes=partials_bytes,
        results_offset=area.offset + 2 * partials_bytes,
        results_bytes=results_bytes,
        all_reachable=int(key.team.all_reachable),
    )


def _most_tiles(world: World, key: GemvKey) -> int:
    """Return the most tiles of a launch, for which there is room for packets."""
    constants, team = OPERATOR.description.constants, key.team
    most = constants["kMaxRows"] // constants["kTileRows"]
    if team is not world.team:
        return most
    packet_bytes = constants["sizeof(Packet)"]  # half of it data
    tile_data = key.num_vectors * constants["kTileRows"] * _wire_dtype(key).itemsize
    tile_bytes = tile_data // (packet_bytes // 2) * packet_bytes
    partials_bytes, _ = _packet_bytes(world.size, world.backend.heap_bytes)
    if partials_bytes < tile_bytes * team.size:
        enough = -(-tile_bytes // _UNIT_BYTES) * _UNIT_BYTES * team.size * _HEAP_PARTS
        raise ValueError(
            f"x: the packets of {key.num_vectors} vectors do not fit the symmetric heap; pass heap_size >= {enough} to "
            "po.init()"
        )
    most = min(most, partials_bytes // (tile_bytes * team.size))
    return most if team.all_reachable else min(most, world.workspace.max_ready_words // 4)


class _Division(NamedTuple):
    """The tiles of a key's rows: all, and those of a launch; and the WGs of a launch."""

    total_tiles: int
    tiles_each: int
    grid: int

    @classmethod
    def of(cls, world: World, key: GemvKey) -> _Division:
        tuning: Tuning = key.tuning or OPERATOR.default_tuning
        total = max(1, -(-key.rows // OPERATOR.description.constants["kTileRows"]))
        each = -(-total // -(-total // _most_tiles(world, key)))  # of launches of about the same size
        return cls(total, each, min(tuning.work_groups or world.backend.num_sms, max(1, each)))


def request_for(world: World, key: GemvKey) -> KernelRequest:
    """Return the kernel of a key's plan, any thread; see `GemvPlan`."""
    if key.algorithm == "auto":
        key = key._replace(algorithm=choose_algorithm(world, key))
    return _request_of(world, key, _Division.of(world, key))


def _request_of(world: World, key: GemvKey, division: _Division) -> KernelRequest:
    """Return the kernel, and how it divides the shared memory of WGs."""
    tuning: Tuning = key.tuning or OPERATOR.default_tuning
    constants, geometry = OPERATOR.description.constants, OPERATOR.description.queries
    row_bytes = key.columns * key.dtype.itemsize
    bytes_per_wg = -(-division.tiles_each // division.grid) * constants["kTileRows"] * row_bytes
    kernel_vectors, warps = kernel_vectors_of(key.num_vectors), tuning.warps
    static_bytes = geometry["static_bytes"](key.team.room)
    arena = _Arena.of_wg(world.backend.arena_bytes, static_bytes, warps, kernel_vectors, row_bytes)
    shares_sm = geometry["shares_sm"](kernel_vectors, key.prefetch_weight)
    room_for_two = arena.steps_of_each_of_two() if shares_sm else 0
    depth = tuning.depth or choose_depth(bytes_per_wg, room_for_two if key.prefetch_weight else 0)
    if depth < (steps := constants["kMostStepsAtOnce"]):
        raise ValueError(f"depth: at least {steps}, the steps that a warp multiplies at once; got {depth}")
    is_resident = arena.holds_vectors(depth)
    prefetches = key.prefetch_weight and is_resident
    arena_bytes = arena.with_depth(depth, is_resident=is_resident)
    if not is_resident:
        factor = team_factor(warps, key.dtype)
        larger = _Arena.of_wg(world.backend.arena_bytes, static_bytes, warps * factor, kernel_vectors, row_bytes)
        own_depth = tuning.depth or depth // factor
        if (larger_bytes := larger.with_depth(own_depth, is_resident=False)) <= larger.room:
            warps, depth, arena_bytes = warps * factor, own_depth, larger_bytes
    if arena_bytes > arena.room:
        raise ValueError(f"depth: {arena_bytes} bytes of shared memory per WG, an SM has room for {arena.room}")
    request = kernel_request(
        key.dtype,
        _wire_dtype(key),
        kernel_vectors,
        warps=warps,
        depth=depth,
        arena_bytes=arena_bytes,
        is_aligned=key.is_aligned,
        is_resident=is_resident,
        two_shot=key.algorithm == "two_shot",
        prefetches=prefetches,
        lets_in=_lets_in(depth <= room_for_two, prefetches, bytes_per_wg),
    ).with_config(pes=key.team.room)
    if world.backend.name != "host":
        return request
    return request.with_config(  # most choices are not about the host: one library for all of them
        vectors=1 if key.num_vectors == 1 else MAX_VECTORS,
        depth=1,
        warps=8,
        aligned=True,
        resident=True,
        prefetches=False,
        lets_in="po::LetsIn::kAtOnce",
    )


@dataclass
class _Launch:
    """One launch: a range of rows.

    Attributes:
        plans: one beside the other for each of _ADDENDS, whose contracts differ: a capture may be the first to bring a
            bias.
        addresses: of each of them.
    """

    first_row: int
    call: Any
    plans: torch.Tensor
    addresses: list[int]
    asked: torch.Tensor


class GemvPlan(Plan):
    """One key's kernel and plans; where others take part there is room for packets already."""

    def __init__(self, world: World, key: GemvKey) -> None:
        structs = OPERATOR.prepare(world).structs
        team, rows, columns, num_vectors = key.team, key.rows, key.columns, key.num_vectors
        tile_rows = OPERATOR.description.constants["kTileRows"]
        if columns > (most := OPERATOR.description.constants["kMaxColumns"]):
            raise ValueError(f"weight: at most {most} columns per PE, got {columns}")
        self.is_two_shot = key.algorithm == "two_shot"
        self._element, self._columns = key.dtype.itemsize, columns
        packets = _packets(world, key)
        total_tiles, tiles_each, grid = division = _Division.of(world, key)
        self._grid = grid
        self._kernel: Kernel = world.load(_request_of(world, key, division), team)
        check_resident(self._kernel, grid, choices="warps, depth, work_groups")
        chosen = (rows, num_vectors, key.dtype, _wire_dtype(key), self.is_two_shot)
        pack = OPERATOR.description.queries["packed_shape"]
        self._launches: list[_Launch] = []
        for first_tile in range(0, total_tiles, tiles_each):
            first_row = first_tile * tile_rows
            num_rows = min(tiles_each * tile_rows, rows - first_row)
            asked = world.backend.private_words(_LINE_BYTES // 8)  # a line that no other word is on
            output = structs["OutputPlan"](num_tiles=-(-num_rows // tile_rows), stride=rows)
            plans = [
                structs["Plan"](
                    team=world.workspace.team(OPERATOR.contract(team, *chosen, *added, grid, first_row)),
                    output=output,
                    packets=packets,
                    asked=asked.data_ptr(),
                )
                for added in _ADDENDS
            ]
            heaps = heaps_of(world.backend, team)
            words = upload(world.backend, *(part for plan in plans for part in (plan, heaps)))
            plan_bytes = words.nbytes // len(plans)
            shape = structs["Shape"](pack(num_rows, num_vectors, columns), team.rank, team.size)
            call = structs["Call"](shape=shape)
            addresses = [words.data_ptr() + place * plan_bytes for place in range(len(plans))]
            self._launches.append(_Launch(first_row, call, words, addresses, asked))

    def launch(self, world: World, weight: int, x: int, bias: int, residual: int, out: torch.Tensor) -> None:
        """Launch on the current stream. Arguments before `out` are addresses; 0 where there is none.

        Rows that no launch comes to any more become NaN.
        """
        output = out.data_ptr()
        added = 2 * (bias != 0) + (residual != 0)  # of _ADDENDS
        world.workspace.raise_failure()  # of before
        for number, launch in enumerate(self._launches, start=1):
            skipped = launch.first_row * self._element
            call = copy_of(launch.call)
            call.weight = weight + skipped * self._columns
            call.vectors = x
            call.output = output + skipped
            call.residual = residual + skipped if residual else 0
            call.bias = bias + skipped if bias else 0
            # Errors of earlier operators are raised once the peers have all launches of this call.
            is_last = number == len(self._launches)
            plan = launch.addresses[added]
            try:
                world.workspace.launch(self._kernel, self._grid, plan, call, raises_input_errors=is_last)
            except PersistentOpsError:
                fill_nan(out[..., launch.first_row :])
                raise


@dataclass(frozen=True)
class _Arena:
    """How a WG's shared memory is divided: ring, the warps' parts of sums, and the vectors, or a ring for them too.

    Attributes:
        room: bytes, for one WG alone on an SM.
        static_bytes: of a WG, beside its arena.
        steps_at_once: that a warp multiplies, at most.
        step_bytes: of the ring, for each step of its depth.
    """

    room: int
    _: dataclasses.KW_ONLY
    static_bytes: int
    steps_at_once: int
    step_bytes: int
    parts_bytes: int
    vectors_bytes: int
    vector_ring_step_bytes: int

    @classmethod
    def of_wg(cls, sm_bytes: int, static_bytes: int, warps: int, kernel_vectors: int, row_bytes: int) -> _Arena:
        """Return the sizes for `warps` that multiply; `sm_bytes`: what one WG may have."""
        constants, geometry = OPERATOR.description.constants, OPERATOR.description.queries
        return cls(
            sm_bytes - static_bytes,
            static_bytes=static_bytes,
            steps_at_once=constants["kMostStepsAtOnce"],
            step_bytes=geometry["ring_step_bytes"](warps),
            parts_bytes=geometry["parts_bytes"](warps, kernel_vectors),
            vectors_bytes=geometry["vectors_bytes"](kernel_vectors, row_bytes),
            vector_ring_step_bytes=geometry["vector_ring_step_bytes"](warps, kernel_vectors),
        )

    def steps_of_each_of_two(self) -> int:
        """Return the depth for which two WGs with vectors of their own fit an SM; below 1: none."""
        room = (self.room - self.static_bytes - _RESERVED_BYTES) // 2
        return (room - self.parts_bytes - self.vectors_bytes) // self.step_bytes

    def holds_vectors(self, depth: int) -> bool:
        """Return whether the vectors fit beside a ring of this depth."""
        return depth * self.step_bytes + self.parts_bytes + self.vectors_bytes <= self.room

    def with_depth(self, depth: int, *, is_resident: bool) -> int:
        """Return the arena's bytes, with the vectors in it or with their ring."""
        ring_bytes = (depth + self.steps_at_once) * self.vector_ring_step_bytes
        return depth * self.step_bytes + self.parts_bytes + (self.vectors_bytes if is_resident else ring_bytes)


def kernel_request(
    dtype: torch.dtype,
    wire_dtype: torch.dtype,
    kernel_vectors: int,
    *,
    warps: int,
    depth: int,
    arena_bytes: int,
    is_aligned: bool,
    is_resident: bool,
    two_shot: bool,
    prefetches: bool,
    lets_in: str,
) -> KernelRequest:
    """Return the kernel request for one combination of choices; `kernel_vectors` is 1, 8 or 16.

    `prefetches`: the launch asks for weights before its predecessor has ended. `lets_in`: when it lets its successor
    begin, an enumerator of LetsIn in cuda/sched/succession.cuh.
    """
    return KernelRequest.of(
        _NAME,
        {
            "scalar": SCALARS[dtype],
            "sum_scalar": SCALARS[wire_dtype],
            "vectors": kernel_vectors,
            "depth": depth,
            "warps": warps,
            "aligned": is_aligned,
            "resident": is_resident,
            "two_shot": two_shot,
            "prefetches": prefetches,
            "lets_in": f"po::LetsIn::{lets_in}",
        },
        LaunchShape(
            (warps + OPERATOR.description.constants["kServingWarps"]) * warp_size(),
            arena_bytes=arena_bytes,
            overlaps_predecessor=True,
        ),
        holds_call=True,
    )


def sample_requests() -> Iterator[KernelRequest]:
    """Yield kernels that differ most in code; tests compile them for GPUs."""
    base: dict[str, Any] = {
        "warps": Tuning().warps,
        "depth": 8,
        "arena_bytes": 0,
        "is_aligned": True,
        "is_resident": True,
        "two_shot": False,
        "prefetches": False,
        "lets_in": "kAtOnce",
    }
    dtypes = torch.bfloat16, torch.float32
    yield kernel_request(*dtypes, 1, **base)
    early = kernel_request(*dtypes, 1, **{**base, "depth": 12, "prefetches": True, "lets_in": "kLate"})
    yield early
    yield dataclasses.replace(early, traces=True)
    yield kernel_request(*dtypes, 16, **{**base, "two_shot": True, "lets_in": "kAtEnd"})
    factor = team_factor(base["warps"], torch.float16)
    wide = {"warps": base["warps"] * factor, "depth": 8 // factor, "is_aligned": False, "is_resident": False}
    yield kernel_request(torch.float16, torch.float16, 8, **{**base, **wide})

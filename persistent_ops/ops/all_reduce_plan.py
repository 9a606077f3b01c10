"""Plan of an all_reduce shape: algorithm, kernel, plans in device memory, room in the heap."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from ..runtime.areas import Need
from ..runtime.backend import Kernel, KernelRequest, LaunchShape, check_resident
from ..runtime.compile.description import copy_of
from ..runtime.contract import Field
from ..runtime.dtypes import SCALARS
from ..runtime.errors import PersistentOpsError
from ..runtime.heap import whole_pages
from ..runtime.operator import Operator
from ..runtime.plans import Plan
from ..runtime.team import Team
from ..runtime.tuning import BoundedTuning, at_least
from ..runtime.world import World, heaps_of, upload

__all__ = [
    "ALGORITHMS",
    "FLOAT8",
    "OPERATOR",
    "SCALARS",
    "SWITCH_POINTS",
    "AllReduceKey",
    "AllReducePlan",
    "SwitchPoints",
    "Tuning",
    "choose_algorithm",
    "kernel_request",
    "room_needs",
    "sample_requests",
    "reserve_room",
    "resolved",
]

ALGORITHMS = ("auto", "one_shot", "two_shot", "slices")
FLOAT8 = torch.float8_e4m3fn


class SwitchPoints(NamedTuple):
    """The most bytes of x for which "auto" takes one shot, the same where the norm is wanted, and two shots."""

    one_shot: int
    one_shot_with_norm: int
    two_shot: int


# By PEs; a world between two sizes takes the larger one's, and one beyond all the last one's. Measured on 2 H200 and
# on 2 and 4 H100 (docs/results.md); for more PEs reckoned from there: one shot sends every element to each of them.
SWITCH_POINTS = {
    1: SwitchPoints(4 << 20, 4 << 20, 4 << 20),
    2: SwitchPoints(256 << 10, 1 << 20, 6 << 20),
    4: SwitchPoints(32 << 10, 256 << 10, 6 << 20),
    8: SwitchPoints(32 << 10, 128 << 10, 6 << 20),
    64: SwitchPoints(16 << 10, 16 << 10, 4 << 20),
}
_NAME = "all_reduce"
_PACKETS = "packets"  # areas: elements and sums on their way; empty between launches
_FLAGS = "flags"  # of the blocks there, in two parities; nowhere else, as places of packets must be empty
_SLICES = "slices"
_TURNS = "turns"  # words that count them
_SQUARES = "squares"  # packets with the sums of squares of one launch's blocks, private; grows
_HEAP_PARTS = 8  # of which the packets and slices have one
_PACKET_SHARE = 3 / 8  # of the room in the heap; slices have the rest
_MOST_PACKET_LAUNCHES = 2  # for which "auto" takes packets
_MOST_WAYS = 3  # of a slice: left by a sender, returned by an owner, about to be put
_MOST_BLOCKS = 1 << 30  # of a launch: their numbers are 32-bit
_PACKET_THREADS = (128, 256, 512)  # of a WG; the fewest with which warps have one block at most, a WG's last none
_SLICE_THREADS = 544  # of a WG of slices: 16 warps, and one that keeps turns
_HOST_THREADS = 128
_WARP_BLOCKS = (2, 1)


@dataclass(frozen=True)
class Tuning(BoundedTuning):
    """Choices that change speed and nothing else. All PEs must agree.

    Attributes:
        room_bytes: of the heap, at most; what does not fit goes in rounds. More than what the first call of a world set
            aside (64 MiB, or 1/8 of a smaller heap) has no effect. Where it differs, `blocks_of_launch` do in an error.
        work_groups: None for one per SM, or as many as there is work for.
        threads: of a WG; None for what suits the size.
        warp_blocks: with packets, blocks (of 512 bytes) that a warp has under way together: 1 or 2; None for what suits
            the size.
        one_shot_bytes, two_shot_bytes: instead of the world's SWITCH_POINTS.
    """

    room_bytes: int = 64 << 20
    work_groups: int | None = None
    threads: int | None = None
    warp_blocks: int | None = None
    one_shot_bytes: int | None = at_least(0, None)
    two_shot_bytes: int | None = at_least(0, None)


OPERATOR = Operator(
    _NAME,
    (
        Field("rows", argument="the number of rows of x"),
        Field("width", argument="the number of elements of x (of a row in all_reduce_rms_norm)"),
        Field.dtype("dtype", list(SCALARS), "the dtype of x"),
        Field.choice("algorithm", ALGORITHMS),
        Field.flags("epilogue (bias, residual, norm)", ("bias", "residual", "norm")),
        *map(Field.internal, ("work_groups", "threads", "warp_blocks", "first_element", "blocks_of_launch")),
    ),
    call="forward_pass",
    phases={
        "kPhaseSums": "its elements of block {index}",
        "kPhaseResult": "the sum of block {index}, which it owns",
        "kPhaseSlice": "its elements of a slice (its work-group {index})",
        "kPhaseTurn": "its results of a slice, or the end of a turn (its work-group {index})",
    },
    default_tuning=Tuning(),
)
_ROOM = Operator("setup of all_reduce", (Field.internal("room_bytes"),), has_kernel=False)


class AllReduceKey(NamedTuple):
    """The key of a plan.

    Attributes:
        team: who sums.
        rows, width: of x; one row where nothing depends on rows.
        dtype: of x.
        algorithm: of ALGORITHMS; `AllReducePlan` is made for what "auto" means.
        has_bias, has_residual: whether they are added.
        norms: whether the norm is wanted.
        is_aligned: whether every row of every tensor begins at a multiple of 16 bytes.
        tuning: see `OperatorState`.
    """

    team: Team
    rows: int
    width: int
    dtype: torch.dtype
    algorithm: str
    has_bias: bool
    has_residual: bool
    norms: bool
    is_aligned: bool
    tuning: Tuning | None


def _working_warps(world: World, threads: int) -> int:
    """Return how many warps of a work-group have slices: all but one, which keeps turns; a lone one does both."""
    return max(world.backend.warps_of(threads) - 1, 1)


def _room(heap_bytes: int) -> int:
    """Return how much of a heap packets and slices have."""
    room_bytes: int = OPERATOR.default_tuning.room_bytes
    return min(room_bytes, heap_bytes // _HEAP_PARTS)


def room_needs(world_size: int, heap_bytes: int, *, puts: bool = False) -> list[Need]:
    """Return the areas in a heap of so many bytes; that of the slices is below 0 where there is no room.

    Args:
        world_size: number of PEs.
        heap_bytes: see above.
        puts: whether some peers are not reachable.
    """
    room, constants = _room(heap_bytes), OPERATOR.description.constants
    packets = int(room * _PACKET_SHARE) // 512 * 512
    flags = 2 * (packets // 4 // constants["kBlockBytes"]) * 8
    turns = world_size * constants["kMaxSliceWgs"] * (constants["kPutWords"] if puts else 1) * 8
    return [
        Need(_PACKETS, packets, fill=-1, is_restored=True),
        Need(_FLAGS, flags, fill=0),
        Need(_SLICES, room // 512 * 512 - packets - flags - turns, fill=-1, is_restored=True),
        Need(_TURNS, turns, fill=0),
    ]


def reserve_room(world: World) -> None:
    """See to the world's room for packets and slices; collective the first time."""
    constants, heap_bytes = OPERATOR.prepare(world).constants, world.backend.heap_bytes
    least = _MOST_WAYS * world.size * constants["kPlaces"] * _working_warps(world, _SLICE_THREADS)
    least *= constants["kBlockBytes"]

    def lacking(nbytes: int) -> int:
        needs = room_needs(world.size, nbytes, puts=not world.all_reachable)
        return next(least - need.nbytes for need in needs if need.name == _SLICES)

    if lacking(heap_bytes) > 0:
        enough = next(size for size in itertools.count(heap_bytes, whole_pages(1)) if lacking(size) <= 0)
        raise ValueError(
            f"heap_size: all_reduce uses 1/8 of the heap, and its {_room(heap_bytes)} bytes are {lacking(heap_bytes)} "
            f"bytes too few; pass heap_size >= {enough} to po.init()"
        )
    needs = room_needs(world.size, heap_bytes, puts=not world.all_reachable)
    OPERATOR.state(world).areas.reserve(needs, lambda: _ROOM.contract(world.team, _room(heap_bytes)))


def choose_algorithm(world_size: int, nbytes: int, tuning: Tuning | None, *, norms: bool) -> str:
    """Return the best algorithm for a tensor of this size in bytes."""
    tuning = tuning or OPERATOR.default_tuning
    points = SWITCH_POINTS[min((pes for pes in SWITCH_POINTS if world_size <= pes), default=max(SWITCH_POINTS))]
    one_shot = points.one_shot_with_norm if norms else points.one_shot
    if nbytes <= (one_shot if tuning.one_shot_bytes is None else tuning.one_shot_bytes):
        return "one_shot"
    two_shot = points.two_shot if tuning.two_shot_bytes is None else tuning.two_shot_bytes
    return "two_shot" if nbytes <= two_shot else "slices"


def resolved(world: World, key: AllReduceKey) -> AllReduceKey:
    """Return the key that "auto" means in a world: slices where packets would take more launches than pays."""
    nbytes = key.rows * key.width * key.dtype.itemsize
    algorithm = choose_algorithm(key.team.size, nbytes, key.tuning, norms=key.norms)
    key = key._replace(algorithm=algorithm)
    if algorithm == "slices":
        return key
    per_row, most = _blocks_per_row(world, key), _most_packet_blocks(world, key)
    # If rows are not cut, a launch has whole rows.
    of_launch = most if _is_flat(key) else most // max(per_row, 1) * per_row
    fits = most > 0 and per_row * max(key.rows, 1) <= _MOST_PACKET_LAUNCHES * of_launch
    return key if fits else key._replace(algorithm="slices")


def _is_flat(key: AllReduceKey) -> bool:
    """Return whether a launch may have any part of the elements."""
    return key.rows == 1 and not key.norms and not key.has_bias


def _part_bytes(team: Team, nbytes: int) -> int:
    """Return a share of the packets' area: elements, sums, and copies of both where some are put; in two parities."""
    return nbytes // (4 if team.all_reachable else 8) // 512 * 512


def _most_packet_blocks(world: World, key: AllReduceKey) -> int:
    """Return how many blocks of a launch find room for their packets."""
    team, tuning = key.team, key.tuning or OPERATOR.default_tuning
    nbytes = min(OPERATOR.state(world).areas.nbytes_of(_PACKETS), int(tuning.room_bytes * _PACKET_SHARE))
    places = _part_bytes(team, nbytes) // OPERATOR.prepare(world).constants["kBlockBytes"]
    # A PE has places for all elements that it adds up, of the PEs: all of each one, or its own blocks.
    most = places // team.size * (team.size if key.algorithm == "two_shot" else 1)
    return most if team.all_reachable else min(most, world.workspace.max_ready_words // 4)


def _blocks_per_row(world: World, key: AllReduceKey) -> int:
    return -(-key.width * key.dtype.itemsize // OPERATOR.prepare(world).constants["kBlockBytes"])


def kernel_request(
    dtype: torch.dtype,
    algorithm: str,
    *,
    norms: bool,
    is_aligned: bool,
    warp_blocks: int,
    threads: int,
) -> KernelRequest:
    """Return the kernel request for one combination of choices; `algorithm` is not "auto"."""
    enumerator = {"one_shot": "kOneShot", "two_shot": "kTwoShot", "slices": "kSlices"}[algorithm]
    return KernelRequest.of(
        _NAME,
        {
            "scalar": SCALARS[dtype],
            "algorithm": f"po::all_reduce::Algorithm::{enumerator}",
            "norms": norms,
            "aligned": is_aligned,
            "vectors": warp_blocks,
            "threads": threads,
        },
        LaunchShape(threads, overlaps_predecessor=True),
    )


def sample_requests() -> Iterator[KernelRequest]:
    """Yield kernels that differ most in code; tests compile them for GPUs."""
    yield kernel_request(torch.bfloat16, "one_shot", norms=True, is_aligned=True, warp_blocks=1, threads=128)
    yield kernel_request(torch.float16, "two_shot", norms=False, is_aligned=False, warp_blocks=1, threads=256)
    yield kernel_request(torch.float32, "slices", norms=True, is_aligned=True, warp_blocks=1, threads=_SLICE_THREADS)


class _Launch(NamedTuple):
    """One launch: a range of the elements, and what its call has for all calls."""

    first_element: int
    call: Any
    plan: torch.Tensor
    address: int


class AllReducePlan(Plan):
    """One key's kernel and plans; the world's room must be there.

    Attributes:
        algorithm: of the key.
        launches: one after the other, in every call.

    Raises:
        ValueError: a row finds no room for its packets.
    """

    def __init__(self, world: World, key: AllReduceKey) -> None:
        description = OPERATOR.prepare(world)
        self._structs, self._constants, self._queries = description.structs, description.constants, description.queries
        self._world, self._key = world, key
        self._tuning: Tuning = key.tuning or OPERATOR.default_tuning
        if (self._tuning.threads or 32) % 32:
            raise ValueError(f"threads: expected a multiple of 32, got {self._tuning.threads}")
        if (self._tuning.warp_blocks or 1) > max(_WARP_BLOCKS):
            raise ValueError(f"warp_blocks: expected 1 or 2, got {self._tuning.warp_blocks}")
        self._areas = OPERATOR.state(world).areas
        self._element = key.dtype.itemsize
        self.algorithm = key.algorithm
        self._blocks_per_row = _blocks_per_row(world, key)
        blocks = key.rows * self._blocks_per_row
        most = self._plan_slices(blocks) if self.algorithm == "slices" else self._plan_packets(blocks)
        is_host = world.backend.name == "host"
        request = kernel_request(
            key.dtype,
            self.algorithm,
            # One library for all variants that make no difference on the host.
            norms=key.norms or is_host,
            is_aligned=key.is_aligned or is_host,
            warp_blocks=self._warp_blocks,
            threads=self._threads,
        ).with_config(pes=key.team.room)
        self._kernel: Kernel = world.load(request, key.team)
        check_resident(self._kernel, self._grid, choices="work_groups, threads")
        if key.norms:
            self._areas.reserve_private(_SQUARES, max(min(blocks, most), 1) * self._constants["sizeof(Packet)"])
            self.areas = (_SQUARES,)
        self._parts = [self._part(*each) for each in self._ranges(most)]
        self.place()

    def place(self) -> None:
        self.held = squares = self._areas[_SQUARES] if self.areas else None
        self.launches = []
        for first_element, struct, call in self._parts:
            struct.squares = 0 if squares is None else squares.address
            words = upload(self._world.backend, struct, heaps_of(self._world.backend, self._key.team))
            self.launches.append(_Launch(first_element, call, words, words.data_ptr()))

    # ---- sizes -----------------------------------------------------------------------------------------------------

    def _plan_packets(self, blocks: int) -> int:
        """Choose grid and WGs; return how many blocks a launch has room for."""
        world = self._world
        most = _most_packet_blocks(world, self._key)
        here = min(blocks, most)
        num_sms = world.backend.num_sms
        if world.backend.name == "host":
            self._threads = _HOST_THREADS
        else:
            fits = (threads for threads in _PACKET_THREADS if here <= (threads // 32 - 1) * num_sms)
            self._threads = self._tuning.threads or next(fits, _PACKET_THREADS[-1])
        self._grid = max(1, min(self._tuning.work_groups or num_sms, here))
        has_several = world.backend.name == "host" or here > self._grid * (self._threads // 32)
        self._warp_blocks = self._tuning.warp_blocks or _WARP_BLOCKS[0 if has_several else -1]
        self._way_bytes = 0
        return most

    def _plan_slices(self, blocks: int) -> int:
        """Choose grid, WGs and places; return how many blocks a launch can have."""
        world, team, constants = self._world, self._key.team, self._constants
        room = min(self._areas.nbytes_of(_SLICES), int(self._tuning.room_bytes * (1 - _PACKET_SHARE)))
        ways = _MOST_WAYS - 1 if team.all_reachable else _MOST_WAYS
        fitting = room // (ways * constants["kPlaces"] * team.size * constants["kBlockBytes"])  # workers
        if world.backend.name == "host":
            self._threads = _HOST_THREADS
        else:
            self._threads = self._tuning.threads or min(_SLICE_THREADS, 32 * (fitting + 1))
        self._warp_blocks = 1
        workers = _working_warps(world, self._threads)
        if fitting < workers:
            raise ValueError(
                f"threads, room_bytes: the slices of a WG of {self._threads} threads do not fit {room} bytes; use "
                "fewer threads or a larger room_bytes"
            )
        most_wgs = min(self._tuning.work_groups or world.backend.num_sms, constants["kMaxSliceWgs"])
        step = team.size * workers  # of a WG
        self._grid = max(1, min(most_wgs, fitting // workers, -(-blocks // step)))
        self._way_bytes = constants["kPlaces"] * self._grid * step * constants["kBlockBytes"]
        return min(constants["kMaxSteps"] * self._grid * step, _MOST_BLOCKS)

    def _ranges(self, most: int) -> list[tuple[int, int, int]]:
        """Return first element, rows and width of each launch, which has at most so many blocks."""
        key = self._key
        if most == 0:
            raise ValueError(
                "room_bytes: the packets of a block do not fit; use a larger room_bytes, or algorithm='slices'"
            )
        if _is_flat(key):
            step = most * (self._constants["kBlockBytes"] // self._element)
            return [(first, 1, min(step, key.width - first)) for first in range(0, max(key.width, 1), step)]
        rows_each = most // max(self._blocks_per_row, 1)
        if rows_each == 0:
            raise ValueError(
                f"x: the packets of a row of {key.width} elements do not fit the heap; pass algorithm='slices', or "
                "a larger heap_size to po.init()"
            )
        return [
            (first * key.width, min(rows_each, key.rows - first), key.width)
            for first in range(0, max(key.rows, 1), rows_each)
        ]

    # ---- launches --------------------------------------------------------------------------------------------------

    def _part(self, first_element: int, rows: int, width: int) -> tuple[int, Any, Any]:
        """Return a launch's first element, its plan but for the squares, and what its call has for all calls."""
        key, team, world = self._key, self._key.team, self._world
        per_row = -(-width * self._element // self._constants["kBlockBytes"])
        contract = OPERATOR.contract(
            team,
            key.rows,
            key.width,
            key.dtype,
            self.algorithm,
            (key.has_bias, key.has_residual, key.norms),
            self._grid,
            32 * world.backend.warps_of(self._threads),
            self._warp_blocks,
            first_element,
            rows * per_row,
        )
        packets, flags, slices, turns = (self._areas[name] for name in (_PACKETS, _FLAGS, _SLICES, _TURNS))
        # The same in all plans: a PE may be one launch ahead, whatever that is.
        part = _part_bytes(team, packets.nbytes)
        staged = slices.nbytes // _MOST_WAYS // 512 * 512
        plan = self._structs["Plan"](
            team=world.workspace.team(contract),
            sums_offset=packets.offset,
            sums_bytes=part,
            flags_offset=flags.offset,
            flags_bytes=flags.nbytes // 2,
            results_offset=packets.offset + 2 * part,
            results_bytes=part,
            blocks_per_adder=-(-rows * per_row // (team.size if self.algorithm == "two_shot" else 1)),
            copies_offset=packets.offset + 4 * part,
            slices_offset=slices.offset,
            returned_offset=slices.offset + self._way_bytes,
            staging_offset=slices.offset + (_MOST_WAYS - 1) * staged,
            turns_offset=turns.offset,
            size=self._divisor(team.size),
            num_wgs=self._divisor(self._grid),
            all_reachable=int(team.all_reachable),
        )
        shape = self._structs["RowBlocks"](
            width=width,
            num_rows=rows if width else 0,
            num_blocks=rows * per_row,
            blocks_per_row=self._divisor(per_row),
        )
        return first_element, plan, self._structs["Call"](rows=shape, local=plan.team.local)

    def _divisor(self, value: int) -> Any:
        """Return the divisor that the kernel uses for a number."""
        multiplier, shift = self._queries["divisor_multiplier"](value), self._queries["divisor_shift"](value)
        return self._structs["Divisor"](multiplier=multiplier, shift=shift, value=value)

    def launch(
        self,
        addresses: list[int],
        eps: float,
        weight_bias: float,
        norm_element: int,
        forward_pass: int = 0,
        *,
        poison: Callable[[int], None],
    ) -> None:
        """Launch on the current stream.

        Args:
            addresses: of x, residual, bias, sum, weight, norm and scale; 0 where there is none.
            eps, weight_bias: of the norm.
            norm_element: bytes of an element of the norm.
            forward_pass: whose gradients are added up, by its number (`CallNumbers`), a part of the contract; or 0.
            poison: makes the results NaN from an element on, which no launch comes to any more.
        """
        self._world.workspace.raise_failure()  # of before
        x, residual, bias, total, weight, norm, scale = addresses
        last = self.launches[-1]
        for launch in self.launches:
            skipped = launch.first_element * self._element
            call = copy_of(launch.call)
            call.x = x + skipped
            call.residual = residual + skipped if residual else 0
            call.bias = bias
            call.output = total + skipped
            call.forward_pass = forward_pass
            if weight:
                call.weight = weight
                call.norm_output = norm + launch.first_element * norm_element
                call.scale = scale
                call.eps = eps
                call.weight_bias = weight_bias
            # Errors of earlier operators are raised once the peers have all launches of this call.
            try:
                self._world.workspace.launch(
                    self._kernel, self._grid, launch.address, call, raises_input_errors=launch is last
                )
            except PersistentOpsError:
                poison(launch.first_element)
                raise

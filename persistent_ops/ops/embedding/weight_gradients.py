"""Return path of an input exchange: gradients of per-sample weights, from the owners to the PEs that passed them."""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from ...runtime.areas import Need
from ...runtime.backend import KernelRequest, LaunchShape, check_resident
from ...runtime.contract import Field
from ...runtime.operator import Operator
from ...runtime.plans import Plan, Plans
from ...runtime.team import Team
from ...runtime.tuning import BoundedTuning
from ...runtime.world import World, upload
from .inputs_plan import MOST_PIECE_LOOKUPS, MOST_PIECES, InputsLayout, aligned_bytes
from .lookups import Lookups

__all__ = ["OPERATOR", "Tuning", "kernel_request", "sample_requests", "return_gradients"]

_NAME = "embedding_weight_gradients"
_STAGING = "returned gradients of weights"  # an area: owners put the gradients for this PE's lookups here
_OUTGOING = "outgoing gradients of weights"  # an area: copies of what is put to PEs that are not reachable


@dataclass(frozen=True)
class Tuning(BoundedTuning):
    """Choices that change speed and nothing else; each PE has its own.

    Attributes:
        work_groups: None for one on each SM of a GPU.
        piece_lookups: that a warp sends or adds up at once, a multiple of 4.
    """

    work_groups: int | None = None
    piece_lookups: int = 2048


OPERATOR = Operator(
    _NAME,
    (
        Field("number", argument="the EmbeddingInputs object, in the order they were made,"),
        Field.numbers("capacity", "capacity (or lookups_per_sample)"),
        Field.internal("staging_offset"),
    ),
    phases={"kPhaseReturns": "the gradients of its lookups' weights"},
    max_plans=64,
    default_tuning=Tuning(),
)
_ROOM = Operator("setup of embedding_weight_gradients", (Field.internal("room_bytes"),), has_kernel=False)


class ReturnKey(NamedTuple):
    """The key of a plan.

    Attributes:
        team: who exchanges.
        layout, capacities: of the exchange.
        tuning: see `OperatorState`.
    """

    team: Team
    layout: InputsLayout
    capacities: tuple[tuple[int, ...], ...]
    tuning: Tuning | None


def kernel_request(threads: int) -> KernelRequest:
    """Return the kernel request."""
    return KernelRequest(_NAME, None, LaunchShape(threads))


def sample_requests() -> Iterator[KernelRequest]:
    """Yield the kernel; tests compile it for GPUs."""
    yield kernel_request(OPERATOR.description.constants["kThreads"])


def return_gradients(world: World, lookups: Lookups, products: torch.Tensor) -> torch.Tensor:
    """Bring the gradients of lookups' weights to the PEs that passed them to the exchange.

    A weight whose feature goes to several slots gets the sum of what these have for it, in float32, in the order of
    `EmbeddingInputs`' `slot_order`.

    Args:
        world: of this PE.
        lookups: what the exchange has returned, `gives_gradients`.
        products: float32, as many as there are floats in ``lookups.memory``: at each weight's place its gradient, 0
            where a lookup was skipped.

    Returns:
        `[n]`, float32: of this PE's weights, in their order; 0 where no table has the lookup.

    Raises:
        RuntimeError: a CUDA-graph capture meets a combination that was not called before.
        PeerTimeoutError, ContractMismatchError: of this or an earlier launch.

    Collective, on the current stream, no host synchronization; may be captured in a CUDA graph after a first call.
    """
    state = OPERATOR.state(world)
    plans: Plans[ReturnPlan] = state.plans
    key = ReturnKey(world.team, lookups.layout, lookups.capacity_matrix, state.tuning)
    plan = plans.get(key, lambda: ReturnPlan(world, key), lookups.sources)
    return plan.launch(lookups, products)


class ReturnPlan(Plan):
    """One key's kernel and plan. Collective.

    Args:
        world: of this PE.
        key: see above.
    """

    def __init__(self, world: World, key: ReturnKey) -> None:
        self._world, self._key = world, key
        description = OPERATOR.prepare(world)
        structs, constants = description.structs, description.constants
        backend, layout, team = world.backend, key.layout, key.team
        tuning = key.tuning or OPERATOR.default_tuning
        piece, unit = tuning.piece_lookups, constants["kChunkFloats"]
        if not 1 <= piece <= MOST_PIECE_LOOKUPS or piece % unit:
            raise ValueError(f"piece_lookups: expected a multiple of {unit} up to {MOST_PIECE_LOOKUPS}, got {piece}")
        returned = max((of[team.rank] for pe, of in enumerate(key.capacities) if pe != team.rank), default=0)
        if -(-returned // piece) * (team.size - 1) >= MOST_PIECES:
            raise ValueError(f"piece_lookups: {returned} lookups are more than 2^31 pieces in all; use larger ones")
        self._kernel = world.load(kernel_request(constants["kThreads"]))
        self._grid = tuning.work_groups or backend.num_sms
        check_resident(self._kernel, self._grid)
        places = [_places(pe, key.capacities[pe]) for pe in range(team.size)]
        first_slots = [0, *itertools.accumulate(map(len, layout.slots))]
        self._outgoing_bytes = 0
        self._peers = []
        for pe, of_pe in enumerate(layout.slots):
            peer = structs["Peer"](
                capacity=key.capacities[team.rank][pe],
                count_number=first_slots[pe] + pe + len(of_pe),
                returned_offset=places[team.rank][pe],
                target_offset=places[pe][team.rank],
            )
            if not backend.peer_heaps[pe] and pe != team.rank:
                peer.outgoing_offset = self._outgoing_bytes
                self._outgoing_bytes += aligned_bytes(4 * key.capacities[pe][team.rank])
            self._peers.append(peer)
        numbered = sorted(
            (feature, layout.order[pe][at], pe, first_slots[pe] + pe + at)
            for pe, of_pe in enumerate(layout.slots)
            for at, (feature, _) in enumerate(of_pe)
        )
        slots = [structs["Slot"](owner=pe, number=number) for *_, pe, number in numbered]
        counts = [0] * layout.num_features
        for feature, *_ in numbered:
            counts[feature] += 1
        self._slots = upload(backend, *slots)
        self._feature_slots = upload(backend, array("q", [0, *itertools.accumulate(counts)]))
        self._areas = OPERATOR.state(world).areas
        if team.size > 1:
            room = max(of_pe[-1] for of_pe in places)
            own = Need(_OUTGOING, self._outgoing_bytes) if self._outgoing_bytes else None
            self._areas.reserve([Need(_STAGING, room, room + room // 2)], lambda: _ROOM.contract(team, room), own)
            self.areas = (_STAGING,) if own is None else (_STAGING, _OUTGOING)
        self._sent = world.workspace.zero_words(team, team.size)
        self._struct: Any = structs["Plan"](
            slots=self._slots.data_ptr(),
            feature_slots=self._feature_slots.data_ptr(),
            num_features=layout.num_features,
            piece_lookups=piece,
            sent=self._sent.data_ptr(),
        )
        self._new_call = structs["Call"]
        self.place()

    def place(self) -> None:
        self.held = [self._areas[name] for name in self.areas]
        staging = self._areas[_STAGING].offset if _STAGING in self.areas else 0
        self._struct.staging_offset = staging
        # A sender takes the position from its own plan, and a CUDA graph may have a plan from before the area grew.
        capacities = tuple(itertools.chain(*self._key.capacities))
        contract = OPERATOR.contract(self._key.team, self._key.layout.number, capacities, staging)
        self._struct.team = self._world.workspace.team(contract)
        peers = []
        for peer in self._peers:
            copied = type(peer).from_buffer_copy(peer)
            if _OUTGOING in self.areas:
                copied.outgoing_offset += self._areas[_OUTGOING].offset
            peers.append(copied)
        self._placed = upload(self._world.backend, *peers)
        self._struct.peers = self._placed.data_ptr()
        self._words = upload(self._world.backend, self._struct)

    def launch(self, lookups: Lookups, products: torch.Tensor) -> torch.Tensor:
        """Launch on the current stream; see `return_gradients`."""
        value_begins, slot_begins = lookups.begins
        gradient = torch.empty(lookups.num_values, dtype=torch.float32, device=products.device)
        if gradient.is_cuda:  # the exchange may have been on another stream
            for tensor in lookups.begins:
                tensor.record_stream(torch.cuda.current_stream(gradient.device))
        call = self._new_call()
        call.products, call.sources = products.data_ptr(), lookups.sources.data_ptr()
        call.value_begins, call.slot_begins = value_begins.data_ptr(), slot_begins.data_ptr()
        call.gradient, call.num_values = gradient.data_ptr(), lookups.num_values
        self._world.workspace.launch(self._kernel, self._grid, self._words.data_ptr(), call)
        return gradient


def _places(pe: int, capacities: Sequence[int]) -> list[int]:
    """Return where in a PE's staging the owners' parts begin, and the size of that; its own takes no room.

    Args:
        pe: the number of the PE.
        capacities: of its messages to each owner.
    """
    sizes = (0 if owner == pe else aligned_bytes(4 * capacity) for owner, capacity in enumerate(capacities))
    return [0, *itertools.accumulate(sizes)]

"""The exchange of a batch's lookups: from the PEs that loaded the samples to the PEs that own the tables."""

from __future__ import annotations

import functools
import itertools
import math
import operator
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from ...runtime import world as _world
from ...runtime.agreement import agree
from ...runtime.arguments import as_number, as_whole_numbers
from ...runtime.dtypes import INDEX_TYPES
from ...runtime.operator import Operator
from ...runtime.plain_call import PLAIN, PlainCalls, require_plain
from ...runtime.torch_private import num_dispatch_modes
from ...runtime.workspace import Workspace
from ...runtime.world import World
from .checks import BOUNDS, most_rows
from .inputs_plan import MOST_LOOKUPS, OPERATOR, WORKSPACE, InputsLayout, launches_beside, request_for
from .lookups import Capacity, Given, InputExchange, Lookups, reserve
from .plan import LookupKind

__all__ = ["EmbeddingInputs", "checked_lookups", "layout_of"]

_INTEGERS = tuple(INDEX_TYPES)
_plain = PlainCalls()  # exchanges
_AGREEMENT = Operator("agreement on the layout of EmbeddingInputs", (), has_kernel=False)


class EmbeddingInputs:
    """Sends lookups to the owners of tables, in a launch that may run beside other launches.

    Each PE passes the lookups of its *own* samples, for all features. Each owner receives, from every PE, the lookups
    of its tables, in one region per PE of its symmetric heap, without a host synchronization. Regions are double
    buffered: the next batch arrives while the current one is read. The launches have their own workspace. On a stream
    of their own they may run beside the world's other launches (`run_beside`), with few CTAs. Otherwise all launches
    run in the order of the calls, and each has the whole GPU.

    Made by all PEs together, with the same arguments.

    Args:
        slots: for each PE, in rank order, its tables in its order: (feature, rows) of each. A feature may go to several
            slots, of one PE or of several. A PE may have no slots.
        num_features: F, the number of features of every PE's lookups.
        max_batch: largest number of samples of a PE.
        lookups_per_sample: of each feature, or one number for all. The room for lookups is this times `max_batch`. It
            is exact if all bags have the same length; otherwise it is an estimate, see `exchange`. Pass a PE's slots
            with the most lookups first: `embedding_all_to_all` then runs slots above the average beside the others.
        capacity: instead of lookups_per_sample, `[world_size][world_size]`: lookups of each PE's message to each owner.
        is_weighted: whether lookups have per-sample weights.
        index_dtype: of the lookups in regions; None for int32 if all tables have fewer than 2^31 rows, else int64.
        bounds: "fatal" raises IndexError, on the PE that passed it, for an index outside of its table, a negative
            length, lengths whose sum is not the number of values, or offsets that do not start at 0, fall, or do not
            end at the number of values. "ignore" skips such entries silently.
        slot_order: for each PE, a number for each of its slots. If a feature goes to several slots, the gradient of a
            per-sample weight is the sum of the slots' gradients in ascending order of these numbers. Equal numbers, and
            all slots if it is None, are added in the order of `slots`.

    Attributes:
        index_dtype: of the lookups in regions.
        capacity: current number of lookups of each PE's message to each owner.

    Raises:
        ValueError, TypeError: an invalid argument; or the PEs passed different arguments.
        SymmetricHeapError: a PE has no room for the regions.

    Collective and blocking. Source: TorchRec's distribution of a KeyedJaggedTensor (`KJTAllToAll`), with the same
    layout.
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
        slot_order: Sequence[Sequence[int]] | None = None,
    ) -> None:
        self._world = world = _world.for_call()
        layout, first_capacity, estimates = layout_of(
            slots,
            world.size,
            num_features=num_features,
            max_batch=max_batch,
            lookups_per_sample=lookups_per_sample,
            capacity=capacity,
            is_weighted=is_weighted,
            index_dtype=index_dtype,
            bounds=bounds,
        )
        world.compile_ahead([lambda: request_for(world, layout.index_dtype, is_weighted=is_weighted)])
        num_beside = _num_beside([estimates[feature] for feature, _ in layout.slots[world.rank]]) if estimates else 0
        self.index_dtype = layout.index_dtype
        self.workspace = world.side_workspace(WORKSPACE)
        self.workspace.launches_beside = functools.partial(launches_beside, world)
        OPERATOR.prepare(world)
        layout = layout._replace(order=_checked_order(slot_order, layout.slots))
        made = _made_in(world)
        layout = layout._replace(number=made.agree(world, self.workspace, layout, first_capacity))
        self._exchange = InputExchange(
            world, self.workspace, layout, bounds=bounds, num_beside=num_beside, capacity=first_capacity
        )
        made.alive.add(self._exchange)
        reserve([(self._exchange, first_capacity)])

    @property
    def capacity(self) -> Capacity:
        return self._exchange.capacity

    def expected(self) -> tuple[LookupKind, int]:
        """Return what lookups `embedding_all_to_all` gets, and for how many there is room."""
        is_weighted, room = self._exchange.layout.is_weighted, sum(self._exchange.arriving)
        return LookupKind(self.index_dtype, torch.int32, 0, is_weighted, 1, from_sources=True), room

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

        Bag (f, b) is ``values[o[f * B + b] : o[f * B + b + 1]]``, where o is `offsets`, or the running sum of
        `lengths`.

        Args:
            values: `[n]`, int32 or int64, n < 2^31: feature by feature, and sample by sample within a feature.
            lengths: `[F * B]`, int32 or int64: lengths of the bags.
            offsets: `[F * B + 1]`, int32 or int64: instead of lengths.
            per_sample_weights: `[n]`, float32, if and only if `is_weighted`. If they require a gradient on one PE, and
                gradients are recorded, they must do so on all PEs. A backward pass through `embedding_all_to_all` then
                brings each PE the gradients of its own weights, ``<gradient of the pooled row, the table's row before
                its update>``, in float32, summed over the slots of the lookup's feature. The gradient of a lookup that
                was skipped, or found no room, is 0.
            batch_per_rank: number of samples of each PE, in rank order, the same on every PE. None if the host does not
                know the numbers: then they are only in device memory, in the sources.

        Returns:
            A handle for the lookups that arrive. At most two are held at a time; `Lookups.release` frees one.

        Raises:
            ValueError, TypeError: an invalid argument; before any launch.
            NotImplementedError: in a FakeTensorMode.
            RuntimeError: the lookups of two earlier calls have not been released, or the world has been left.
            PeerTimeoutError, ContractMismatchError: of this or an earlier exchange.

        Do not change the inputs until `Lookups.wait`. If a message finds no room, none of its lookups are sent, and
        every PE learns of it: `wait` makes more room on all PEs and sends again, up to 2^31 - 2^20 lookups from a PE to
        an owner. In a CUDA graph no room can be added: po.check() raises CapacityError, and the message's bags are
        empty.

        Collective, on the current stream; may be captured in a CUDA graph after one eager call with the same dtypes.
        The two regions alternate while both are free, also in captured calls: a graph replays into the regions of its
        capture.
        """
        world, layout = _world.for_call(), self._exchange.layout
        if world is not self._world:
            raise RuntimeError(
                "EmbeddingInputs: this object was made before po.finalize(); make a new one in this world"
            )
        return self.send(
            checked_lookups(
                world,
                values,
                lengths,
                offsets,
                per_sample_weights,
                batch_per_rank,
                num_features=layout.num_features,
                max_batch=layout.max_batch,
                is_weighted=layout.is_weighted,
            )
        )

    def send(self, given: Given) -> Lookups:
        """Send the result of `checked_lookups`, as `exchange` does."""
        exchange = self._exchange
        region = exchange.next_region()
        region.order_behind_readers()
        lookups = Lookups(exchange, region, given)
        lookups._launch(is_captured=self._world.workspace.is_capturing())
        region.is_held, exchange.last = True, region
        return lookups

    def run_beside(self) -> bool:
        """Let exchanges run beside the world's other launches, if every PE's GPU has room for both.

        Without this call they run in the order of the calls, on all streams: on some GPU neither launch might find room
        until the other has ended. Call it after every operator has been called once with its largest shape, since it
        examines the kernels so far. A kernel that is launched for the first time later, and leaves no room, raises
        RuntimeError. Capture CUDA graphs after this call: graphs that were captured before keep their launches, and no
        exchange may become resident beside those.

        Returns:
            Whether exchanges run beside other launches; the same on all PEs.

        Collective and blocking, not in a CUDA-graph capture.
        """
        return _world.for_call().agree_to_run_beside()


def checked_lookups(
    world: World,
    values: torch.Tensor,
    lengths: torch.Tensor | None,
    offsets: torch.Tensor | None,
    weights: torch.Tensor | None,
    batch_per_rank: Sequence[int] | None,
    *,
    num_features: int,
    max_batch: int,
    is_weighted: bool,
) -> Given:
    """Return a batch's lookups for `EmbeddingInputs.send`; raise for what `EmbeddingInputs.exchange` refuses."""
    if (lengths is None) == (offsets is None):
        raise ValueError("lengths, offsets: expected exactly one of them")
    name, bounds = ("offsets", offsets) if lengths is None else ("lengths", lengths)
    assert bounds is not None
    given = {"values": values, name: bounds}
    if _plain.has((values,), (bounds, weights)) is False:
        require_plain(given if weights is None else {**given, "per_sample_weights": weights})
        if num_dispatch_modes() and type(torch.empty(1, dtype=torch.uint8, device="cpu")) not in PLAIN:
            raise NotImplementedError(
                "values: expected real tensors, got fake ones (torch.compile, FakeTensorMode), and what is sent "
                "depends on the values; call exchange outside of compiled code"
            )
    device = world.backend.device
    for each, tensor in given.items():
        _check_list(each, tensor, _INTEGERS, device)
        if tensor.numel() >= 2**31:
            raise ValueError(f"{each}: expected fewer than 2^31 elements, got {tensor.numel()}")
    if (weights is not None) != is_weighted:
        raise ValueError(
            f"per_sample_weights: expected {'a tensor' if is_weighted else 'None'}, since is_weighted is {is_weighted}"
        )
    if weights is not None:
        _check_list("per_sample_weights", weights, (torch.float32,), device)
        if weights.shape != values.shape:
            raise ValueError(
                f"per_sample_weights: expected the shape of values, {list(values.shape)}, got {list(weights.shape)}"
            )
    num_bags = bounds.numel() - (lengths is None)
    samples, rest = divmod(num_bags, num_features)
    if rest or num_bags < 0:
        raise ValueError(
            f"{name}: expected F * B{' + 1' * (lengths is None)} elements for F = {num_features}, got {bounds.numel()}"
        )
    if samples > max_batch:
        raise ValueError(
            f"{name}: expected at most max_batch = {max_batch} samples, got {samples}; pass fewer, or make "
            "EmbeddingInputs with a larger max_batch"
        )
    split = None
    if batch_per_rank is not None:
        split = _checked_split(batch_per_rank, world, max_batch, samples, name)
    gives_gradients = weights is not None and weights.requires_grad and torch.is_grad_enabled()
    return Given(values, bounds, weights, gives_gradients, lengths is not None, samples, split)


def _check_list(name: str, tensor: torch.Tensor, dtypes: Sequence[torch.dtype], device: torch.device) -> None:
    """Raise TypeError or ValueError for plain tensors that kernels cannot read as lookups, bounds or weights."""
    if tensor.dtype not in dtypes:
        expected = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise TypeError(f"{name}: expected {expected}, got {tensor.dtype}")
    if tensor.dim() != 1 or tensor.device != device:
        raise ValueError(f"{name}: expected a 1-D tensor on {device}, got {tensor.dim()}-D on {tensor.device}")
    if not tensor.is_contiguous():
        raise ValueError(f"{name}: expected a contiguous tensor; pass {name}.contiguous()")


def _checked_split(given: Any, world: World, max_batch: int, samples: int, name: str) -> tuple[int, ...]:
    """Return `batch_per_rank` as numbers; ValueError where it is none, or is not true of this PE's `name`."""
    split = _whole_numbers(given)
    if split is None or len(split) != world.size or not all(0 <= n <= max_batch for n in split):
        raise ValueError(f"batch_per_rank: expected {world.size} numbers of 0 to max_batch = {max_batch}, got {given}")
    if split[world.rank] != samples:
        raise ValueError(f"batch_per_rank: entry {world.rank} is {split[world.rank]}, but {name} has {samples} samples")
    return split


def _whole_numbers(given: Any) -> tuple[int, ...] | None:
    """Return numbers of any kind of integer; None if they are something else."""
    try:
        return tuple(operator.index(number) for number in given)
    except TypeError:
        return None


class _Made:
    """All exchanges of a world; `count`: how many PEs have made."""

    def __init__(self) -> None:
        self.alive: weakref.WeakSet[InputExchange] = weakref.WeakSet()
        self.count = 0

    def agree(self, world: World, workspace: Workspace, layout: InputsLayout, capacity: Capacity) -> int:
        """Return the number of the next one, the same on all PEs; raise where they passed something else."""
        choices = {**layout._asdict(), "capacity (or lookups_per_sample)": capacity}
        choices["slot_order"] = choices.pop("order")
        agree(world, _AGREEMENT, choices, workspace)
        self.count = 1 + max(map(int, world.bootstrap.exchange("embedding-inputs", str(self.count).encode())))
        return self.count

    def forget(self) -> None:
        for made in self.alive:
            made.forget()


def _made_in(world: World) -> _Made:
    state = OPERATOR.state(world)
    if state.own is None:
        state.own = _Made()
    made: _Made = state.own
    return made


# ---- what it can be made of ------------------------------------------------------------------------------------------


def layout_of(
    slots: Sequence[Sequence[tuple[int, int]]],
    world_size: int,
    *,
    num_features: int,
    max_batch: int,
    lookups_per_sample: float | Sequence[float] | None,
    capacity: Sequence[Sequence[int]] | None,
    is_weighted: bool,
    index_dtype: torch.dtype | None,
    bounds: str,
) -> tuple[InputsLayout, Capacity, list[float] | None]:
    """Return layout (without number and order) and capacity for arguments of `EmbeddingInputs`, and the estimates."""
    chosen = _checked_slots(slots, num_features, world_size)
    rows = max((rows for of_pe in chosen for _, rows in of_pe), default=0)
    index_dtype = index_dtype or (torch.int32 if rows < 2**31 else torch.int64)
    _check_choices(max_batch, bounds, index_dtype, rows)
    if (lookups_per_sample is None) == (capacity is None):
        raise ValueError("lookups_per_sample, capacity: expected exactly one of them")
    estimates = None
    if capacity is None:
        assert lookups_per_sample is not None
        estimates = _checked_estimates(num_features, lookups_per_sample)
        capacity = _estimated(chosen, max_batch, estimates)
    layout = InputsLayout(chosen, num_features, max_batch, index_dtype, bool(is_weighted), 0, ())
    return layout, _checked_capacity(capacity, world_size), estimates


def _checked_slots(
    slots: Sequence[Sequence[tuple[int, int]]], num_features: int, size: int
) -> tuple[tuple[tuple[int, int], ...], ...]:
    if not isinstance(num_features, int) or num_features < 1:
        raise ValueError(f"num_features: expected a whole number above 0, got {num_features!r}")
    expected = f"slots: expected pairs (feature, rows) of whole numbers, a list of them for each of {size} PEs, got "
    try:
        listed = [list(of_pe) for of_pe in slots]
    except TypeError:
        raise TypeError(f"{expected}{slots!r}") from None
    if len(listed) != size:
        raise ValueError(f"slots: expected a list for each of {size} PEs, got {len(listed)}")
    chosen = tuple(
        tuple(_pair(each, f"{expected}{each!r} among PE {pe}'s") for each in of_pe) for pe, of_pe in enumerate(listed)
    )
    for pe, of_pe in enumerate(chosen):
        for feature, rows in of_pe:
            if not 0 <= feature < num_features:
                raise ValueError(f"slots: PE {pe} has feature {feature}, expected 0 to {num_features - 1}")
            if not 0 <= rows <= most_rows():
                raise ValueError(f"slots: PE {pe} has a table of {rows} rows, expected 0 to {most_rows()}")
    return chosen


def _pair(given: Any, message: str) -> tuple[int, int]:
    pair = as_whole_numbers(given, message)
    if len(pair) != 2:
        raise TypeError(message)
    return pair[0], pair[1]


def _rows_of_numbers(name: str, given: Sequence[Sequence[int]]) -> tuple[tuple[int, ...], ...]:
    message = f"{name}: expected a list of whole numbers for each PE, got {given!r}"
    if not isinstance(given, Iterable):
        raise TypeError(message)
    return tuple(as_whole_numbers(of_pe, message) for of_pe in given)


def _checked_order(
    order: Sequence[Sequence[int]] | None, slots: Sequence[Sequence[tuple[int, int]]]
) -> tuple[tuple[int, ...], ...]:
    if order is None:
        return tuple((0,) * len(of_pe) for of_pe in slots)
    chosen = _rows_of_numbers("slot_order", order)
    if [len(of_pe) for of_pe in chosen] != [len(of_pe) for of_pe in slots]:
        raise ValueError(
            f"slot_order: expected a number for each slot, {[len(of_pe) for of_pe in slots]} of them, got "
            f"{[len(of_pe) for of_pe in chosen]}"
        )
    return chosen


def _check_choices(max_batch: int, bounds: str, index_dtype: torch.dtype, rows: int) -> None:
    if not isinstance(max_batch, int) or not 0 <= max_batch < 2**31:
        raise ValueError(f"max_batch: expected a whole number of 0 to 2^31 - 1, got {max_batch!r}")
    if bounds not in BOUNDS:
        raise ValueError(f"bounds: expected one of {BOUNDS}, got {bounds!r}")
    if index_dtype not in INDEX_TYPES:
        raise TypeError(f"index_dtype: expected int32 or int64, got {index_dtype}")
    if index_dtype == torch.int32 and rows >= 2**31:
        raise ValueError(f"index_dtype: int32 does not hold the indices of a table of {rows} rows")


def _checked_capacity(capacity: Sequence[Sequence[int]], size: int) -> tuple[tuple[int, ...], ...]:
    chosen = _rows_of_numbers("capacity", capacity)
    if len(chosen) != size or any(len(of_source) != size for of_source in chosen):
        raise ValueError(f"capacity: expected {size} x {size} numbers, got {[len(row) for row in chosen]}")
    for source, of_source in enumerate(chosen):
        for owner, number in enumerate(of_source):
            if not 0 <= number <= MOST_LOOKUPS:
                raise ValueError(
                    f"capacity: from PE {source} to PE {owner} expected 0 to {MOST_LOOKUPS} lookups, got {number}"
                )
    return chosen


def _checked_estimates(num_features: int, lookups_per_sample: float | Sequence[float]) -> list[float]:
    if isinstance(lookups_per_sample, (int, float)):
        lookups_per_sample = [lookups_per_sample] * num_features
    if isinstance(lookups_per_sample, str) or not isinstance(lookups_per_sample, Iterable):
        raise TypeError(f"lookups_per_sample: expected a number, or one for each feature, got {lookups_per_sample!r}")
    lookups_per_sample = [as_number("lookups_per_sample", each) for each in lookups_per_sample]
    if len(lookups_per_sample) != num_features or not all(0 <= each < math.inf for each in lookups_per_sample):
        raise ValueError(
            f"lookups_per_sample: expected {num_features} numbers of at least 0, one per feature, got "
            f"{lookups_per_sample}"
        )
    return lookups_per_sample


def _estimated(
    slots: Sequence[Sequence[tuple[int, int]]], max_batch: int, estimates: Sequence[float]
) -> list[list[int]]:
    """Return the capacity of each PE's message to each owner."""
    of_owner = [math.ceil(max_batch * sum(estimates[feature] for feature, _ in of_pe)) for of_pe in slots]
    return [of_owner for _ in slots]


def _num_beside(estimates: Sequence[float]) -> int:
    """Return how many of the first slots have more lookups than the average of all; 0 where all have as many."""
    if len(set(estimates)) < 2:
        return 0
    average = sum(estimates) / len(estimates)
    return len(list(itertools.takewhile(lambda lookups: lookups > average, estimates)))

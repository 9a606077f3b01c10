"""Backward pass of embedding_all_to_all with the optimizer's step, in one kernel."""

from __future__ import annotations

import ctypes
import itertools
import math
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

import numpy as np
import torch

from ...runtime import world as _world
from ...runtime.arguments import as_number, as_whole_number
from ...runtime.plain_call import require_plain_list
from ...runtime.plans import Plans
from ...runtime.team import Team
from .ahead import GLOBAL_BATCH, compile_passes
from .backward_kernel import DECAYS, GRADIENT, STEPS, check_rounding
from .backward_plan import OPERATOR, BackwardKey, BackwardPlan, Step, identity, rows_of
from .checks import check_gradient, seeds_of
from .columns import columns_of
from .plan import OPERATOR as FORWARD, LookupKind
from .recorded_call import BatchInputs, EmbeddingCall, Inputs, Recording, record
from .split import completed, table_set
from .table_set import TableSet
from .widths import agree_on_widths

__all__ = [
    "EmbeddingOptimizer",
    "ModuleOptimizer",
    "backward_key",
    "compile_training",
    "in_float32",
    "name_tables",
    "num_passes",
    "num_tables",
    "record_update",
    "refuse_half_updated",
    "step_of",
    "tables_named",
    "update_alone",
]

_OPTIMIZERS = tuple(step for step in STEPS if step != GRADIENT)
_DECAY_MODES = tuple(decay for decay in DECAYS if decay != "none")
_MOST_STEPS = 1_000_000
_MOST_NAMED = 8  # tables, in an error
_MOST_KEYS = 256


class EmbeddingOptimizer:
    """Updates this PE's tables in the backward pass of `embedding_all_to_all`.

    ``po.embedding_all_to_all(tables, ..., optimizer=optimizer)`` records what ``loss.backward()`` needs. In the
    backward pass the gradients of the result travel to the tables' owners, the gradients of a row are summed over the
    global batch, and the row is updated once, in one launch on every PE. The bits are the same for every run, world
    size and schedule.

    Below, g is a row's summed gradient times `gradient_scale`, w is the row, and lr is the learning rate. Only rows
    that some bag contains are updated:

    - "sgd": ``w -= lr * g``
    - "adagrad": ``s += g^2; w -= lr * g / (sqrt(s) + eps)``
    - "rowwise_adagrad": ``s += mean(g'^2); m = lr / (sqrt(s) + eps); w = c * w - m * g``, where g' = g and c = 1. With
      weight decay "l2", g' = g + weight_decay * w and c = 1 - m * weight_decay. With "decoupled", g' = g and c = 1 - lr
      * weight_decay. With `max_norm`, then ``w *= min(1, max_norm / |w|)``, before w is rounded to 16 bits.
    - "adam": ``m = b1 * m + (1 - b1) * g; v = b2 * v + (1 - b2) * g^2; w -= lr * ((m / (1 - b1^t)) / (sqrt(v / (1 -
      b2^t)) + eps) + weight_decay * w)``, where t counts all steps.

    Args:
        weights: this PE's tables, as passed to `embedding_all_to_all`, in the same order; in a list, tuple or
            `nn.ParameterList`. Each list of tables needs an optimizer of its own, made at the same time on all PEs with
            the same `optimizer` name. The other options are for this PE's tables only: peers may choose others.
        optimizer: "sgd", "adagrad", "rowwise_adagrad" or "adam"; see above.
        lr: learning rate of the first step; see the attribute `lr`.
        eps: added to square roots.
        weight_decay: see above; decoupled for "adam", not available for "sgd" and "adagrad".
        weight_decay_mode: "l2" or "decoupled"; see above.
        max_norm: for "rowwise_adagrad", from 1e-18 to 1e18: a row with a larger Euclidean norm after the step is scaled
            to this norm before it is rounded. None for no limit.
        betas: of "adam".
        rounding: of rows of 16 bits. "nearest": ties to even. "stochastic": up or down in magnitude, with the
            probability that makes the expected value exact (in float16, below 2^-14, to within 2^-40). Each element
            uses 16 random bits of a counter-based generator; they depend only on the table's seed, the number of steps,
            the row and the column.
        seed: of stochastic rounding, from 0 up to 2^63: one for each table, or s for s, s + 1, ... If tables may move
            to another PE or to another place in the list, pass one seed per table, and keep it with the table.

    Attributes:
        lr, gradient_scale: `[1]`, float32, on the device. The kernel reads them, so a replay of a CUDA graph uses the
            values that are written there. An assigned number is written there.
        step_count: `[1]`, int64, on the device: number of steps, counted by the kernel. Assign it after loading states.
            A value that is written in place counts from the next step outside of a CUDA graph on; that step waits on
            the host.
        seeds: `[T]`, int64, on the device: see `seed`; assign them after loading. Tables that are one tensor use the
            first of their seeds.

    Raises:
        ValueError, TypeError: an invalid argument.

    The backward pass is collective: all PEs run the same backward passes in the same order. Otherwise they raise
    ContractMismatchError, also for equal tables and for two forward passes of one optimizer. A second backward pass of
    one forward pass is refused. A launch that is given up may leave tables partly updated. Then all PEs refuse all
    tables of the optimizer until they are loaded from a checkpoint and `loaded` is called. Source: FBGEMM's
    table-batched embeddings (exact optimizers), section III of the SC24 paper for the exchange, and Philox4x32-10 of
    "Parallel random numbers: as easy as 1, 2, 3" (SC11).
    """

    @torch.inference_mode(False)  # steps write to what it holds
    def __init__(
        self,
        weights: Sequence[torch.Tensor],
        optimizer: str = "sgd",
        *,
        lr: float = 0.01,
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        weight_decay_mode: str = "l2",
        max_norm: float | None = None,
        betas: tuple[float, float] = (0.9, 0.999),
        rounding: str = "nearest",
        seed: int | Sequence[int] = 0,
    ) -> None:
        if optimizer not in _OPTIMIZERS:
            raise ValueError(f"optimizer: expected one of {', '.join(map(repr, _OPTIMIZERS))}, got {optimizer!r}")
        if weight_decay_mode not in _DECAY_MODES:
            raise ValueError(f"weight_decay_mode: expected one of {_DECAY_MODES}, got {weight_decay_mode!r}")
        for name, value in (("lr", lr), ("eps", eps), ("weight_decay", weight_decay)):
            _check_number(name, value)
        if weight_decay and optimizer in ("sgd", "adagrad"):
            raise ValueError(f"weight_decay: {optimizer!r} has none, got {weight_decay}")
        if max_norm is not None:
            _check_max_norm(max_norm, optimizer)
        try:
            betas = (float(betas[0]), float(betas[1]))
        except (TypeError, ValueError, IndexError, OverflowError):
            raise TypeError(f"betas: expected two numbers, got {betas!r}") from None
        if not all(beta >= 0 and in_float32(beta) < 1 for beta in betas):
            raise ValueError(f"betas: expected numbers of at least 0 and below 1, also in float32, got {betas}")
        self._tables = _listed(weights)
        self._optimizer, self._rounding = optimizer, rounding
        self._token = _Token()  # what plans know it by, which outlive it
        self._tables_named, self._name = num_tables(len(self._tables)), ""  # for errors
        self._states: dict[tuple[int, ...], tuple[torch.Tensor, ...]] = {}
        for table in self._tables:
            self._states.setdefault(identity(table), self._state_of(table))
        _check_overlap(self._tables)
        _check_rounding(rounding, self._tables)
        self._make_own(lr, seed)
        self._num_passes = 0  # backward, begun by all PEs alike
        self._seen: TableSet | None = None  # what the tables were in the last call
        self._keys: dict[Hashable, BackwardKey] = {}  # of backward passes, by what their forward passes were like
        self._decay = weight_decay_mode if weight_decay and optimizer == "rowwise_adagrad" else "none"
        self._constants = {
            "eps": eps,
            "weight_decay": weight_decay,
            "max_norm": 0.0 if max_norm is None else float(max_norm),
            "beta1": betas[0],
            "beta2": betas[1],
        }
        self._compile_ahead()

    def _compile_ahead(self) -> None:
        """Begin to compile what training will load, if it passes lookups as most programs do."""
        if self._tables and _world.is_initialized():
            compile_training(_world.current(), self._tables, self, GLOBAL_BATCH)

    def _make_own(self, lr: float, seed: int | Sequence[int]) -> None:
        """Make the optimizer's values in device memory, besides the states."""
        device = self._tables[0].device if self._tables else _world.current().backend.device
        self._lr = torch.full((1,), lr, dtype=torch.float32, device=device)
        self._gradient_scale = torch.ones(1, dtype=torch.float32, device=device)
        self._step_count = torch.zeros(1, dtype=torch.int64, device=device)
        self._beta_powers = torch.ones(2, dtype=torch.float32, device=device)  # to as many steps
        self._counted = self._step_count._version  # as of which the powers are
        self._seeds = torch.tensor(seeds_of(seed, len(self._tables)), dtype=torch.int64, device=device)
        states = itertools.chain(*self._states.values())
        self._own = (self._lr, self._gradient_scale, self._step_count, self._beta_powers, self._seeds, *states)
        # The tables as autograd sees them.
        self._placeholder = torch.zeros(0, dtype=torch.float32, device=device, requires_grad=True)

    @property
    def lr(self) -> torch.Tensor:
        return self._lr

    @lr.setter
    def lr(self, value: float | torch.Tensor) -> None:
        _write("lr", self._lr, value)

    @property
    def gradient_scale(self) -> torch.Tensor:
        return self._gradient_scale

    @gradient_scale.setter
    def gradient_scale(self, value: float | torch.Tensor) -> None:
        _write("gradient_scale", self._gradient_scale, value)

    @property
    def step_count(self) -> torch.Tensor:
        return self._step_count

    @step_count.setter
    def step_count(self, value: int | torch.Tensor) -> None:
        count = as_whole_number(value, f"step_count: expected a whole number, got {value!r}")
        if not 0 <= count < 2**63:
            raise ValueError(f"step_count: expected a number of at least 0 and below 2^63, got {count}")
        powers = [_power(self._constants[beta], count) for beta in ("beta1", "beta2")]
        self._step_count.fill_(count)
        self._beta_powers.copy_(torch.tensor(powers, dtype=torch.float32, device="cpu"))
        self._counted = self._step_count._version

    @property
    def seeds(self) -> torch.Tensor:
        return self._seeds

    @seeds.setter
    def seeds(self, values: Sequence[int] | torch.Tensor) -> None:
        given = values.tolist() if isinstance(values, torch.Tensor) else values
        if not isinstance(given, Iterable):
            raise TypeError(f"seeds: expected a whole number for each table, got {values!r}")
        seeds = seeds_of(list(given), len(self._tables))
        self._seeds.copy_(torch.tensor(seeds, dtype=torch.int64, device="cpu"))

    def state(self, weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return the states of a table, float32: none for "sgd", s, or m and v."""
        if not isinstance(weight, torch.Tensor):
            raise TypeError(f"weight: expected a tensor, got {type(weight).__name__}")
        found = self._states.get(identity(weight))
        if found is None:
            raise ValueError("table: it is not one of the optimizer's")
        return found

    def loaded(self, step_count: int) -> None:
        """Declare that tables and states were loaded again after a launch that was given up may have changed them in
        part.

        Args:
            step_count: of the loaded state, the same on every PE.

        All PEs load and call this: they agreed in `po.recover()` on which tables to refuse.
        """
        self.step_count = step_count  # type: ignore[assignment]  # mypy knows one type for both
        _world.current().workspace.changes.loaded(*self._tables, *self._own)

    def _state_of(self, table: torch.Tensor) -> tuple[torch.Tensor, ...]:
        if not isinstance(table, torch.Tensor) or table.dim() != 2:
            raise TypeError(f"weights: expected [R, D] tensors, got {type(table).__name__}")
        shape: tuple[int, ...] = tuple(table.shape)
        count = {"sgd": 0, "adam": 2}.get(self._optimizer, 1)
        if self._optimizer == "rowwise_adagrad":
            shape = shape[:1]
        return tuple(torch.zeros(shape, dtype=torch.float32, device=table.device) for _ in range(count))

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refuse to be pickled, and copied."""
        raise TypeError(
            "an EmbeddingOptimizer is its tables' and cannot be copied or pickled: save their states and its "
            "step_count, and make another one of the new tables"
        )

    # ---- autograd ----------------------------------------------------------------------------------------------------

    def _first_named(self, world: _world.World) -> str:
        name = world.workspace.calls.next_of("EmbeddingOptimizer")
        world.workspace.changes.know(name, OPERATOR.changed_inputs(tables=self._tables, states=self._own))
        self._name = f"{self._tables_named}, {name}"
        return self._name

    def _backward(
        self, call: EmbeddingCall, gradient: torch.Tensor, inputs: Inputs, *, wants_factors: bool, forward_pass: int
    ) -> tuple[Sequence[torch.Tensor | None], torch.Tensor | None]:
        world, weights = call.world, call.weights
        refuse_half_updated(self, world)
        self._num_passes += 1
        known = FORWARD.state(world).own.find(weights), OPERATOR.state(world).tuning, gradient.dtype, call.key
        key = self._keys.get(known)
        if key is None:
            if len(self._keys) >= _MOST_KEYS:
                self._keys.clear()
            key = self._keys[known] = backward_key(call, self._token, gradient.dtype, forward_pass)
        return self._launch(
            world, key, gradient, weights, inputs, wants_factors=wants_factors, forward_pass=forward_pass
        )

    def _launch(
        self,
        world: _world.World,
        key: BackwardKey,
        gradient: torch.Tensor,
        weights: Sequence[torch.Tensor],
        inputs: Inputs,
        *,
        wants_factors: bool,
        forward_pass: int = 0,
    ) -> tuple[Sequence[torch.Tensor | None], torch.Tensor | None]:
        if self._counted != self._step_count._version and not world.workspace.is_capturing():
            self.step_count = int(self._step_count)  # type: ignore[assignment]  # written where it lies
        gradient = rows_of(gradient)
        plans: Plans[BackwardPlan] = OPERATOR.state(world).plans
        own = self._own
        # A CUDA graph keeps what its launches read and write.
        plan = plans.get(key, lambda: self._plan(world, key, weights), *weights, *own)
        factors = inputs.per_sample_weights
        factor_gradients = torch.zeros_like(factors) if wants_factors and factors is not None else None
        early_wgs = plan.early_wgs
        rate, scale, step_count, beta_powers, seeds, *states = own
        with world.workspace.whole_call():
            inverted = inputs.invert(world, plan.rows, counts=key.pooling == "mean", room_for=early_wgs)
            OPERATOR.begin_changes(world, plan.changed, [*weights, *states])
            plan.launch(
                gradient,
                inverted,
                factors,
                factor_gradients,
                forward_pass=forward_pass,
                rate=rate,
                scale=scale,
                step_count=step_count,
                beta_powers=beta_powers,
                seeds=seeds,
                begins_early=early_wgs > 0,
            )
            return (), None if factor_gradients is None else inputs.returned(world, factor_gradients)

    def _plan(self, world: _world.World, key: BackwardKey, weights: Sequence[torch.Tensor]) -> BackwardPlan:
        states = [self.state(weight) for weight in weights]
        chosen = (self._optimizer, self._decay, self._rounding)
        return BackwardPlan(world, key, weights, states, *chosen, self._constants)


class ModuleOptimizer(EmbeddingOptimizer):
    """The same for tables of a module, which says itself what to compile."""

    def _compile_ahead(self) -> None:
        """Nothing."""


# ---- what the package does with an optimizer ------------------------------------------------------------------------


def step_of(optimizer: EmbeddingOptimizer) -> Step:
    """Return what kernels do with gradients."""
    chosen = optimizer._optimizer, optimizer._decay, optimizer._rounding
    return Step(*chosen, optimizer._constants["max_norm"] > 0)


def record_update(
    optimizer: EmbeddingOptimizer, call: EmbeddingCall, launch: Callable[[], torch.Tensor], *lookups: Any
) -> torch.Tensor:
    """Make a call of `embedding_all_to_all`, and keep what the backward pass needs; see `record`."""
    found = call.key.tables
    if found is not optimizer._seen:
        is_known = all(identity(table) in optimizer._states for table in optimizer._tables)
        if found is not table_set(call.world, optimizer._tables) or not is_known:
            raise ValueError(
                "weights: expected the tables that the optimizer was made of, in their order and in the same memory. "
                "Pass these tables, or make another EmbeddingOptimizer, of the tables of this call"
            )
        optimizer._seen = found
    recording = Recording(
        optimizer._backward,
        optimizer._placeholder,
        optimizer._name or optimizer._first_named(call.world),
        once="would update the tables twice",
        version=lambda: num_passes(optimizer),
    )
    return record(recording, call, launch, *lookups)


def compile_training(
    world: _world.World,
    weights: Sequence[torch.Tensor],
    optimizer: EmbeddingOptimizer | None,
    lookups: LookupKind,
    num_lookups: int = 0,
    *,
    team: Team | None = None,
    **choices: Any,
) -> None:
    """Begin to compile the kernels of both passes of `embedding_all_to_all` through some tables.

    Args:
        world: of this PE.
        weights: the tables.
        optimizer: of them; None for gradients.
        lookups, num_lookups: that are expected.
        team: who exchanges; the world by default.
        choices: other arguments of `embedding_all_to_all`.
    """
    step = Step() if optimizer is None else step_of(optimizer)
    compile_passes(world, team or world.team, weights, step, lookups, num_lookups, **choices)


def num_passes(optimizer: EmbeddingOptimizer) -> int:
    """Backward passes of forward passes so far: of all PEs, also of those without a table."""
    return optimizer._num_passes


def name_tables(optimizer: EmbeddingOptimizer, names: Sequence[str]) -> None:
    """Let errors name the tables; of all PEs, where they are a module's."""
    before, optimizer._tables_named = optimizer._tables_named, tables_named(names)
    if optimizer._name:
        optimizer._name = optimizer._tables_named + optimizer._name.removeprefix(before)


def refuse_half_updated(optimizer: EmbeddingOptimizer, world: _world.World) -> None:
    """Raise PersistentOpsError where tables, of any PE, may be half updated; also on a PE that has none."""
    world.workspace.changes.check("tables", optimizer._own)


def update_alone(
    optimizer: EmbeddingOptimizer, gradient: torch.Tensor, indices: torch.Tensor, offsets: torch.Tensor
) -> None:
    """Update this PE's tables by gradients that it has itself, on this PE alone.

    Args:
        gradient: `[B, sum of D]`, of the tables' dtype: of the sums of bags' rows.
        indices: `[n]`, int32 or int64; those outside of a table are skipped.
        offsets: `[T * B + 1]`, int32 or int64, feature-major: of the bags.

    Raises:
        ValueError, TypeError: an argument; before anything is launched.

    Not collective, on the current stream; may be captured in a CUDA graph after a first call with the same shapes.
    """
    world = _world.for_call()
    check_gradient(gradient, optimizer._tables)
    widths = tuple(table.shape[1] for table in optimizer._tables)
    key = BackwardKey(
        world.alone,
        table_set(world, optimizer._tables),
        optimizer._token,
        OPERATOR.state(world).tuning,
        (sum(widths),),
        (widths,),
        (gradient.shape[0],),
        gradient.dtype,
        gradient.dtype,
        "sum",
        is_weighted=False,
    )
    optimizer._launch(world, key, gradient, optimizer._tables, BatchInputs(indices, offsets, None), wants_factors=False)


class _Token:
    """Stands for an optimizer."""


def tables_named(names: Sequence[str]) -> str:
    """Return the name of tables in errors."""
    if len(names) > _MOST_NAMED:
        return num_tables(len(names))
    return f"table{'s' * (len(names) != 1)} {', '.join(names)}"


def num_tables(count: int) -> str:
    """Return the same for this number of tables."""
    return f"{count} table{'s' * (count != 1)}"


def backward_key(
    call: EmbeddingCall, optimizer: object | None, wire_dtype: torch.dtype, forward_pass: int
) -> BackwardKey:
    """Return what the backward pass of a call has a plan for. Collective where the PEs have not agreed on widths.

    Args:
        call: of the forward pass.
        optimizer: stands for one; None: there is none.
        wire_dtype: of the gradient.
        forward_pass: its number.
    """
    world, weights, (team, _, _, choices, lookups) = call.world, call.weights, call.key
    assert choices.dtype is not None  # as in all keys
    dims, batches = completed(world, weights, lookups.num_offsets, *choices[:2])
    tables, dim_per_rank = table_set(world, weights), tuple(dims)
    if choices.columns is None:
        widths = agree_on_widths(world, optimizer or tables, dim_per_rank, weights, forward_pass)
    else:
        widths = columns_of(tuple(choices.columns), dim_per_rank).widths
    return BackwardKey(
        team,
        tables,
        optimizer,
        OPERATOR.state(world).tuning,
        dim_per_rank,
        widths,
        tuple(batches),
        choices.dtype,
        wire_dtype,
        choices.pooling,
        lookups.is_weighted,
        lookups.from_sources,
        None if choices.columns is None else tuple(choices.columns),
    )


def _listed(weights: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    if isinstance(weights, (torch.Tensor, torch.nn.Module)) or not isinstance(weights, Iterable):
        raise TypeError(f"weights: expected a sequence of tensors, got {type(weights).__name__}")
    listed = list(weights)
    require_plain_list("weights", listed)
    return listed


def _check_number(name: str, value: float) -> None:
    if not 0 <= in_float32(as_number(name, value)) < math.inf:
        raise ValueError(f"{name}: expected a number of at least 0 and below infinity, also in float32, got {value}")


def _check_max_norm(max_norm: float, optimizer: str) -> None:
    if not 1e-18 <= as_number("max_norm", max_norm) <= 1e18:  # the squares of which float32 holds
        raise ValueError(f"max_norm: expected a number from 1e-18 to 1e18, or None for any norm, got {max_norm}")
    if optimizer != "rowwise_adagrad":
        raise ValueError(f"max_norm: 'rowwise_adagrad' alone has one, got {max_norm} for {optimizer!r}")


def _write(name: str, memory: torch.Tensor, value: float | torch.Tensor) -> None:
    """Write a number, or a tensor of one element, which may be this memory."""
    if not isinstance(value, torch.Tensor):
        _check_number(name, value)
        memory.fill_(float(value))
    elif value.numel() != 1:
        raise ValueError(f"{name}: expected one element, got shape {list(value.shape)}")
    elif value is not memory:
        memory.copy_(value.detach().reshape(1))


def in_float32(value: float) -> float:
    """Return a number as float32 has it, infinity for one that is too large."""
    return ctypes.c_float(value).value


def _power(base: float, exponent: int) -> float:
    """Return a power as the kernel comes to it, which multiplies in float32 once a step; of many steps about that."""
    base = in_float32(base)
    if exponent > _MOST_STEPS:
        return float(base**exponent)
    if not exponent:
        return 1.0
    return float(np.multiply.accumulate(np.full(exponent, base, np.float32))[-1])  # one product after the other


def _check_rounding(rounding: str, weights: Sequence[torch.Tensor]) -> None:
    check_rounding(rounding)
    for t, table in enumerate(weights):
        if rounding == "stochastic" and table.dtype.itemsize != 2:
            raise ValueError(f"rounding: 'stochastic' is for tables of 16 bits, but weights[{t}] has {table.dtype}")


def _check_overlap(weights: Sequence[torch.Tensor]) -> None:
    """Raise where rows of two tables share memory and the tables are not the same: two warps would update them."""
    ranges = sorted({(table.data_ptr(), table.data_ptr() + table.nbytes, *table.shape) for table in weights})
    for (_, end, *_), (begin, *_) in itertools.pairwise(each for each in ranges if each[0] != each[1]):
        if begin < end:
            raise ValueError("weights: two of them overlap and are not the same tensor; pass tables with memory apart")

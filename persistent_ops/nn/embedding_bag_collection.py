"""Embedding tables that are spread over the PEs, as a module that is trained."""

from __future__ import annotations

import functools
import itertools
import math
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from ..ops.embedding.ahead import describe_step
from ..ops.embedding.all_to_all import embedding_all_to_all
from ..ops.embedding.backward import EmbeddingOptimizer, ModuleOptimizer, compile_training, name_tables, num_passes
from ..ops.embedding.checks import BOUNDS
from ..ops.embedding.inputs import EmbeddingInputs, checked_lookups
from ..ops.embedding.lookups import Lookups
from ..runtime import world as _world
from ..runtime.agreement import agree
from ..runtime.arguments import as_number
from ..runtime.errors import CapacityError, to_raise
from ..runtime.operator import Operator
from ..runtime.torch_private import backward_pass
from ..runtime.uncompiled import uncompiled
from .automatic_placement import layout_of
from .clamped_gradients import clamp_gradient
from .column_runs import side_by_side
from .embedding_bag_optimizer import EmbeddingBagOptimizer
from .embedding_features import Features, KeyedEmbeddings, features_of
from .embedding_tables import TableConfig, check_wire, lookup_estimates, table_configs, whole_number
from .enclosing_ddp import spare_under_ddp
from .forward_passes import ForwardPasses, SentFeatures
from .pooled_lookups import pool_copies
from .replicated_tables import ReplicatedTables
from .sharded_table import ShardedTable, check_memory
from .table_placements import TablePlacement, placements_of
from .table_rounding import check_rounding, drawn_of, rounding_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from rich.table import Table
    from typing_extensions import Self

__all__ = ["ShardedEmbeddingBagCollection"]

_AGREEMENT = Operator("agreement on a ShardedEmbeddingBagCollection", (), has_kernel=False)
_CLIPPING = (
    "the backward pass updates rows before the norm of all gradients is known. Pass max_gradient, which clamps "
    "single elements."
)
_RECOMPUTED = (
    "a forward pass that torch.utils.checkpoint computes again would read rows that another backward pass of "
    "this module has updated. Checkpoint only the last call of this module in a step."
)
_NOT_ANEW = (
    "; a region that torch.utils.checkpoint computes again can neither take a batch that was sent "
    "ahead nor run while one waits"
)


def _versions_of(tables: Sequence[ShardedTable], optimizers: Sequence[EmbeddingOptimizer]) -> Callable[[], list[int]]:
    """Return a function that reports, without holding the collection, whether rows have changed on any PE."""
    weights = [table.weight for table in tables]
    return lambda: [*(weight._version for weight in weights), *(num_passes(each) for each in optimizers)]


def _clamp(max_gradient: float | None, max_grad_norm: float | None) -> float:
    """Return the bound of a gradient's elements, infinity where there is none."""
    if max_grad_norm is not None:
        raise NotImplementedError(f"max_grad_norm: {_CLIPPING}")
    if max_gradient is None:
        return math.inf
    clamp = as_number("max_gradient", max_gradient)
    if not clamp > 0:
        raise ValueError(f"max_gradient: expected a number above 0, got {clamp}")
    return clamp


def _check_choices(
    configs: Sequence[TableConfig], bounds: str, *, is_weighted: bool, wire_dtype: torch.dtype | None, rounding: str
) -> None:
    if bounds not in BOUNDS:
        raise ValueError(f"bounds: expected one of {BOUNDS}, got {bounds!r}")
    if is_weighted and any(config.pooling != "sum" for config in configs):
        raise ValueError("is_weighted: expected only tables with pooling 'sum'")
    if wire_dtype is not None:
        check_wire(configs, wire_dtype)
    check_rounding(configs, rounding)


class ShardedEmbeddingBagCollection(torch.nn.Module):
    """Pools the lookups of this PE's samples in tables of all PEs, and updates the tables in the backward pass.

    Block k of the result's columns is ``pool(table_k[bag of feature k])``, in the order of `tables` and of their
    features, for every placement and number of PEs. Lookups travel to the owners of the tables (`EmbeddingInputs`),
    pooled rows come back, and gradients travel to the owners (`embedding_all_to_all`, `EmbeddingOptimizer`). One call
    serves all tables of equal pooling and dtype.

    All PEs make the module together, with the same arguments.

    Args:
        tables: `TableConfig`s, TorchRec's EmbeddingBagConfigs, or tuples of TableConfig's fields.
        max_batch: largest number of samples of a PE.
        lookups_per_sample: of each feature, by name, or one number for all: estimates, which decide the room for
            lookups and the balance of the placement.
        placement: "table_wise", "replicated", "auto", a `TablePlacement`, a mapping from tables' names to these, or
            TorchRec's ShardingPlan with table_wise, column_wise and data_parallel.
        optimizer: of `EmbeddingOptimizer`.
        lr, eps, weight_decay, weight_decay_mode, max_norm, betas: of `EmbeddingOptimizer`; norms are per slice of a
            table.
        gradient_scale: factor of gradients. None: 1 / P, so that a row's sum over the PEs becomes the mean, as for the
            dense part under DistributedDataParallel.
        max_gradient: clamps every element of the gradient that arrives at the module, divided by P, as FBGEMM does.
            Gradients that are sent in 16 bits are clamped to the largest 16-bit number that is at most P times the
            bound.
        max_grad_norm: refused.
        is_weighted: whether lookups have per-sample weights; then all tables have pooling "sum". If weights require a
            gradient, they do so on all PEs. It is the gradient of this PE's result, in float32, without
            `gradient_scale`. For a lookup in several slices or tables it is the sum.
        wire_dtype: bfloat16 halves the bytes of pooled rows of float32 tables, and of their gradients. Their part of
            the result has that dtype (`embedding_all_to_all`). Tables of 16 bits are not changed by it.
        rounding: of rows of 16 bits: "nearest" or "stochastic" (`EmbeddingOptimizer`). Random bits depend on `seed`,
            the step, the table, the slice, and the row and column in it. So they depend on the number of slices, but
            not on the world or the owner. Replicated tables of equal pooling, dtype and width draw as one table.
        seed: of the initial rows, which are uniform in TableConfig's init_range and the same for every placement and
            world; and of stochastic rounding, until a loaded optimizer replaces it.
        bounds: of `EmbeddingInputs`.
        keyed_tensor: makes the result for a KeyedJaggedTensor from names, columns of each, and values; TorchRec's
            KeyedTensor fits.

    Attributes:
        layout: the parts of each PE.
        feature_names: F names, in the order of inputs: as features first occur in the tables.
        embedding_names, embedding_dims: of the result's blocks.
        optimizer: see `EmbeddingBagOptimizer`.

    Raises:
        ValueError, TypeError: an invalid argument; or the PEs passed different arguments.
        NotImplementedError: an unsupported placement or clipping.
        SymmetricHeapError: no room for lookups.
        RuntimeError: `po.init()` has not been called.

    Parameters are named ``embedding_bags.<table>.weight``, as in an EmbeddingBagCollection. On a PE a parameter holds
    the PE's part: `[R, D]` or `[0, D]`, or, in slices, `[slices here, R, D / slices]`. Parameters require no gradient,
    so other optimizers leave them alone. DistributedDataParallel leaves parameters alone whose parts differ between
    PEs. State dicts have `TableShards` under these names; plain tensors `[R, D]` can be loaded too.
    ``full_state_dict=True`` does not gather them: torch.distributed.checkpoint saves them from all PEs, and loads them
    into plain tensors.

    Kernels hold the memory of the tables: change rows in place (``weight.copy_()``, ``load_state_dict``). A replaced
    parameter is refused.

    `requires_grad_` does not freeze a table: make a module of the frozen tables, and call it under `torch.no_grad()`.
    torch.compile breaks its graph around a call.

    Source: TorchRec's ShardedEmbeddingBagCollection, with the same names and orders.
    """

    @torch.inference_mode(False)  # backward passes write to the tables
    def __init__(
        self,
        tables: Iterable[Any],
        *,
        max_batch: int,
        lookups_per_sample: float | Mapping[str, float] = 1.0,
        placement: Any = "table_wise",
        optimizer: str = "sgd",
        lr: float = 0.01,
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        weight_decay_mode: str = "l2",
        max_norm: float | None = None,
        betas: tuple[float, float] = (0.9, 0.999),
        gradient_scale: float | None = None,
        max_gradient: float | None = None,
        max_grad_norm: float | None = None,
        is_weighted: bool = False,
        wire_dtype: torch.dtype | None = None,
        rounding: str = "nearest",
        seed: int = 0,
        bounds: str = "fatal",
        keyed_tensor: Callable[[list[str], list[int], torch.Tensor], Any] = KeyedEmbeddings,
    ) -> None:
        super().__init__()
        self._world = world = _world.for_call()
        describe_step(world)
        clamp = _clamp(max_gradient, max_grad_norm)
        max_batch = whole_number("max_batch", max_batch, 0, 2**31 - 1)
        seed = whole_number("seed", seed)
        configs = table_configs(tables)
        _check_choices(configs, bounds, is_weighted=is_weighted, wire_dtype=wire_dtype, rounding=rounding)
        estimates = lookup_estimates(configs, lookups_per_sample)
        options = {
            "lr": lr,
            "eps": as_number("eps", eps),
            "weight_decay": as_number("weight_decay", weight_decay),
            "weight_decay_mode": weight_decay_mode,
            "betas": betas,
        }
        max_norm = None if max_norm is None else as_number("max_norm", max_norm)
        scale = 1.0 / world.size if gradient_scale is None else gradient_scale
        placements = placements_of(configs, placement)
        # Before all collective calls: PEs with other tables or placements make more or fewer of them.
        choices = {"tables": configs, "placement": placements, "optimizer": optimizer, **options, "max_norm": max_norm}
        choices |= {"gradient_scale": scale, "max_gradient": clamp, "wire_dtype": wire_dtype}
        agree(world, _AGREEMENT, {**choices, "rounding": rounding, "seed": seed})
        self.layout = layout_of(world, configs, placements, estimates, max_batch, optimizer, wire_dtype, rounding)
        rates = {"max_batch": max_batch, "lookups_per_sample": estimates}
        agree(world, _AGREEMENT, {**rates, "placement": self.layout})
        self.feature_names = list(self.layout.features)
        self.embedding_names = list(self.layout.names)
        self.embedding_dims = list(self.layout.dims)
        self._lookups_per_sample, self._max_batch, self._is_weighted = estimates, max_batch, is_weighted
        self._keyed_tensor, self._wire_dtype = keyed_tensor, wire_dtype
        self._clamp = None if clamp == math.inf else clamp * world.size
        self._inputs = self._make_inputs(bounds)
        self._make_parts(bounds, optimizer, options, max_norm, rounding, scale, seed)
        self._begin_passes()

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refuse to be pickled, and copied."""
        raise TypeError(
            "a ShardedEmbeddingBagCollection belongs to its world and cannot be copied or pickled. Save its state_dict "
            "and load it into a new one."
        )

    @classmethod
    def from_collection(cls, collection: Any, **options: Any) -> Self:
        """Make a module from an EmbeddingBagCollection, with its tables' rows, to replace it in a model.

        Args:
            collection: TorchRec's, whole on every PE, on any device. It is not changed and not kept. Replicated tables
                take PE 0's rows, as under DistributedDataParallel; other tables take their owner's rows. Tables on the
                device "meta" are drawn.
            options: keyword arguments of the class.

        Raises:
            NotImplementedError: a table is frozen, or the collection's tables are already spread over PEs.
        """
        for kind in type(collection).__mro__:
            if kind.__name__ in ("DistributedModelParallel", "ShardedEmbeddingBagCollection"):
                raise NotImplementedError(
                    f"collection: expected an EmbeddingBagCollection, got a {kind.__name__}, whose tables are spread "
                    "already. Pass the original collection, and put the dense part under DistributedDataParallel."
                )
        frozen = [name for name, parameter in collection.named_parameters() if not parameter.requires_grad]
        if frozen:
            raise NotImplementedError(
                f"collection: {', '.join(frozen)} is frozen (requires_grad=False), but a module's backward pass "
                "updates all its tables. Make a module of the frozen tables, and call it under torch.no_grad()."
            )
        is_weighted = getattr(collection, "is_weighted", lambda: False)()
        given = {name: each.detach() for name, each in collection.state_dict().items()}
        there = {name: each for name, each in given.items() if not each.is_meta}
        with _world.for_call().workspace.whole_call():
            made = cls(collection.embedding_bag_configs(), **{"is_weighted": is_weighted, **options})
            made.load_state_dict(there, strict=len(there) == len(given))
            made.sync_replicas()
        return made

    def placements(self) -> dict[str, TablePlacement]:
        """Return the placement of each table by name; pass it as `placement` to get the same placement again."""
        layout = self.layout
        return {
            config.name: replace(placement, ranks=layout.owners[number] or None)
            for number, (config, placement) in enumerate(zip(layout.configs, layout.placements, strict=True))
        }

    def placement_table(self) -> Table:
        """Return the parts of each PE and their costs, as a table for ``rich.print``."""
        from .placement_report import placement_table

        return placement_table(self.layout, self._lookups_per_sample)

    def embedding_bag_configs(self) -> list[TableConfig]:
        """Return the tables' configs."""
        return list(self.layout.configs)

    def table_names(self) -> list[str]:
        """Return the names of the tables' parameters; a subclass may have others."""
        return [name for name, _ in self.embedding_bags.named_parameters(prefix="embedding_bags")]

    def is_weighted(self) -> bool:
        """Return whether lookups have weights."""
        return self._is_weighted

    def reset_parameters(self, seed: int = 0) -> None:
        """Draw all rows again, each table from its own generator: the same rows for every placement and world."""
        for number, table in enumerate(self._tables):
            table.draw((seed * 1_000_003 + 1 + number) % 2**64)

    def sync_replicas(self) -> None:
        """Copy PE 0's rows of replicated tables to all PEs; collective if there are replicated tables.

        Replicas must start equal. Call it after each PE has written rows on its own, as ``torch.nn.init`` does with
        each PE's generator. `ignore_sharded_tables` does the same, and so does DistributedDataParallel for tables that
        it does not ignore.
        """
        if self._replicas is None:
            return
        self._check_world()
        with self._world.workspace.whole_call():
            self._replicas.take_first()

    # ---- making ------------------------------------------------------------------------------------------------------

    def _make_inputs(self, bounds: str) -> list[EmbeddingInputs]:
        configs, features, estimates = self.layout.configs, self.layout.features, self._lookups_per_sample
        most = max(placement.num_slices for placement in self.layout.placements)
        return [
            EmbeddingInputs(
                [[(slot.feature, configs[slot.table].num_embeddings) for slot in of_pe] for of_pe in group.slots],
                num_features=len(features),
                max_batch=self._max_batch,
                lookups_per_sample=[estimates[name] for name in features],
                is_weighted=self._is_weighted,
                bounds=bounds,
                slot_order=[[slot.table * most + slot.slice for slot in of_pe] for of_pe in group.slots],
            )
            for group in self.layout.groups
        ]

    def _make_parts(
        self,
        bounds: str,
        optimizer: str,
        options: Mapping[str, Any],
        max_norm: float | None,
        rounding: str,
        scale: float,
        seed: int,
    ) -> None:
        """Make tables and optimizers, from the values that all PEs have agreed on."""
        of_tables = {**options, "max_norm": max_norm}
        self._replicas = self._make_replicas(bounds, optimizer, of_tables, rounding, scale)
        self._make_tables()
        self._optimizers = self._make_groups(optimizer, of_tables, rounding, scale)
        of_replicas = [] if self._replicas is None else self._replicas.optimizers
        self.optimizer = EmbeddingBagOptimizer(
            optimizer,
            {**options, "seed": seed},
            self._of_optimizer(),
            [*self._optimizers, *of_replicas],
            drawn_of(self.layout, self._world.rank),
            rounding,
            max_norm,
        )
        self.reset_parameters(seed)  # while kernels are compiled

    def _begin_passes(self) -> None:
        """Say that nothing was sent ahead, and no forward pass waits for its backward pass."""
        self._ahead: weakref.ref[SentFeatures] | None = None  # who has dropped it wants it no more
        self._ahead_lookups: list[Lookups] = []
        self._ahead_since = self._world.num_recoveries
        # These do not hold the module, which may hold a result that holds them.
        self._kept = ForwardPasses(self._world, self.optimizer)
        self._versions = _versions_of(self._tables, self._optimizers)

    def _make_replicas(
        self, bounds: str, optimizer: str, options: Mapping[str, Any], rounding: str, scale: float
    ) -> ReplicatedTables | None:
        if not self.layout.replicated:
            return None
        return ReplicatedTables(
            self._world,
            self.layout,
            self._max_batch,
            self._lookups_per_sample,
            bounds=bounds,
            optimizer=optimizer,
            options=options,
            rounding=rounding,
            scale=scale,
            is_weighted=self._is_weighted,
        )

    def _make_tables(self) -> None:
        self._tables = [self._make_table(number) for number in range(len(self.layout.configs))]
        self.embedding_bags = torch.nn.ModuleDict({table.name: table for table in self._tables})
        spare_under_ddp(
            table.weight for number, table in enumerate(self._tables) if not self.layout.is_replicated(number)
        )

    def _make_table(self, number: int) -> ShardedTable:
        if self._replicas is not None and self.layout.is_replicated(number):
            return ShardedTable(self.layout, number, self._world, self._replicas.table(number))
        return ShardedTable(self.layout, number, self._world)

    def _make_groups(
        self, optimizer: str, options: Mapping[str, Any], rounding: str, scale: float
    ) -> list[EmbeddingOptimizer]:
        """Return the optimizer of each group, and make the call that pools for it."""
        layout = self.layout
        optimizers: list[EmbeddingOptimizer] = []
        self._pools: list[functools.partial[torch.Tensor]] = []
        choices: dict[str, Any]
        for group, columns, inputs in zip(layout.groups, layout.begins, self._inputs, strict=False):
            weights = [self._tables[slot.table].slice(slot.slice) for slot in group.slots[self._world.rank]]
            made = ModuleOptimizer(weights, optimizer, rounding=rounding_of(group, rounding), **options)
            made.gradient_scale = scale  # type: ignore[assignment]  # mypy knows one type for both
            name_tables(made, list(dict.fromkeys(layout.configs[slot.table].name for slot in group.columns)))
            optimizers.append(made)
            choices = {
                "pooling": group.pooling,
                "dim_per_rank": group.dim_per_rank,
                "dtype": group.dtype,
                "wire_dtype": self._wire_dtype if group.dtype == torch.float32 else None,
                "columns": columns,
            }
            compile_training(self._world, weights, made, *inputs.expected(), **choices)
            # Bad lookups are skipped here: the exchange has reported them.
            self._pools.append(
                functools.partial(embedding_all_to_all, weights, bounds="ignore", optimizer=made, **choices)
            )
        return optimizers

    def _of_optimizer(self) -> dict[str, Any]:
        groups = {slot.table: number for number, group in enumerate(self.layout.groups) for slot in group.columns}
        found = {}
        for number, config in enumerate(self.layout.configs):
            table = self._tables[number]
            if self._replicas is not None and self.layout.is_replicated(number):
                slices = [(0, self._replicas.states(number))]
            else:
                optimizer = self._optimizers[groups[number]]
                slices = [(each, optimizer.state(table.slice(each))) for each in table.slices]
            size = torch.Size((config.num_embeddings, config.embedding_dim))
            found[config.name] = (table.weight, size, self.layout.placements[number].num_slices, slices)
        return found

    # ---- forward -----------------------------------------------------------------------------------------------------

    @uncompiled
    def input_dist(
        self,
        features: Any,
        lengths: torch.Tensor | None = None,
        *,
        per_sample_weights: torch.Tensor | None = None,
        batch_per_rank: Sequence[int] | None = None,
    ) -> SentFeatures:
        """Send the lookups of this PE's B samples ahead of the forward pass that pools them.

        The lookups travel while the device does other work. In a training loop, call it for the next batch after the
        forward pass of the current batch. On a stream of its own, it waits only for that stream and for earlier
        launches.

        Args: the arguments of `forward`. Do not change them until the backward pass: replicated tables read them there.
        Whether weights get gradients is decided here: under no_grad they get none.

        Returns:
            A value for `forward` in place of `features`; at most one at a time. If it is dropped, the next call
            releases it, on all PEs or on none.

        Raises:
            RuntimeError: the batch that was sent before has neither been pooled nor released.
            ValueError, TypeError, NotImplementedError: see `forward`.

        Collective, on the current stream. If forward passes wait for their backward passes, only the last one keeps its
        lookups.
        """
        self._check_world()
        return self._send(features, lengths, per_sample_weights, batch_per_rank)

    def _send(
        self,
        features: Any,
        lengths: torch.Tensor | None,
        per_sample_weights: torch.Tensor | None,
        batch_per_rank: Sequence[int] | None,
    ) -> SentFeatures:
        ahead = None if self._ahead is None else self._ahead()
        if ahead is not None and not ahead.is_over and self._ahead_since == self._world.num_recoveries:
            raise RuntimeError(
                "features: what input_dist has sent has not been pooled. Call the module with it, or release() it."
                + _NOT_ANEW * (backward_pass() >= 0)
            )
        is_keyed = lengths is None
        if is_keyed:
            if per_sample_weights is not None:
                raise ValueError("per_sample_weights: cannot be given with a KeyedJaggedTensor, which has its own")
            features, lengths, per_sample_weights = features_of(
                features, self.feature_names, is_weighted=self._is_weighted
            )
        given = checked_lookups(
            self._world,
            features,
            lengths,
            None,
            per_sample_weights,
            batch_per_rank,
            num_features=len(self.feature_names),
            max_batch=self._max_batch,
            is_weighted=self._is_weighted,
        )
        if self._ahead is not None and ahead is None:
            for lookups in self._ahead_lookups:
                lookups.release()
        self._kept.make_room()
        own = None
        if self._replicas is not None:
            own = self._replicas.begin(Features(given.values, given.bounds, given.weights))
        sent = SentFeatures(is_keyed=is_keyed, knows_split=batch_per_rank is not None, own=own)
        try:
            for inputs in self._inputs:
                sent.lookups.append(inputs.send(given))
        except BaseException:
            sent.release()
            raise
        self._ahead, self._ahead_lookups = weakref.ref(sent), sent.lookups
        self._ahead_since = self._world.num_recoveries
        return sent

    def run_beside(self) -> bool:
        """Let lookups that are sent ahead travel beside the world's other launches: see `EmbeddingInputs.run_beside`.

        Returns:
            Whether every PE's GPU has room for both.

        Collective and blocking. Call it after a step, not in a CUDA-graph capture.
        """
        self._check_world()
        return self._world.agree_to_run_beside()

    @uncompiled
    def forward(
        self,
        features: Any,
        lengths: torch.Tensor | None = None,
        *,
        per_sample_weights: torch.Tensor | None = None,
        batch_per_rank: Sequence[int] | None = None,
    ) -> Any:
        """Pool the lookups of this PE's B samples.

        Args:
            features: `[n]`, int32 or int64: values, feature by feature in the order of `feature_names`, and sample by
                sample within a feature; or a KeyedJaggedTensor; or the result of `input_dist` for either, without other
                arguments.
            lengths: `[F * B]`, int32 or int64: lengths of the bags; only with values.
            per_sample_weights: `[n]`, float32, if and only if `is_weighted`; only with values. They, or the weights of
                a KeyedJaggedTensor, may require a gradient. Then call the module once for each backward pass, since the
                gradient is computed from the rows of the forward pass.
            batch_per_rank: number of samples of each PE, the same on every PE. Without it, the host waits for the
                numbers to arrive. If another forward pass already waits for its backward pass, the module then copies
                the lookups, unless weights require a gradient.

        Returns:
            `[B, sum of D]`, of the tables' dtype or, for float32 tables, `wire_dtype`. With several dtypes, the dtype
            to which torch promotes them. For a KeyedJaggedTensor, a KeyedTensor of it (see `keyed_tensor`).

        Raises:
            ValueError, TypeError: an argument's shape, dtype, device or layout.
            NotImplementedError: a batch size that varies from feature to feature; weights of a KeyedJaggedTensor that
                require a gradient, if its features come in another order and its `permute` drops the gradient; weights
                with a tangent, or that require a gradient inside of torch.func.
            RuntimeError: the result of `input_dist` was pooled or released before, or waits while other features are
                passed; a table's parameter or its memory was replaced.
            IndexError: an input of this PE is bad, see `EmbeddingInputs`; on "cuda" possibly at the next call.
            PeerTimeoutError, ContractMismatchError: a peer did not answer, or called something else.

        Collective, on the current stream. If gradients are recorded, the backward pass is collective too: once for each
        call, and in the same order on all PEs.
        """
        self._check_world()
        check_memory(self._tables)
        if backward_pass() < 0:
            self._kept.have_updated = False
        elif self._kept.have_updated:
            raise RuntimeError(_RECOMPUTED)
        if not isinstance(features, SentFeatures):
            features = self._send(features, lengths, per_sample_weights, batch_per_rank)
        elif any(each is not None for each in (lengths, per_sample_weights, batch_per_rank)):
            raise ValueError("lengths, per_sample_weights, batch_per_rank: they were given to input_dist")
        elif self._ahead is None or features is not self._ahead():
            raise RuntimeError(
                "features: expected what the last call of this module's input_dist returned"
                + _NOT_ANEW * (backward_pass() >= 0)
            )
        with self._world.workspace.whole_call():
            pooled = self._pool(features)
        if not features.is_keyed:
            return pooled
        return self._keyed_tensor(self.embedding_names, self.embedding_dims, pooled)

    def _check_world(self) -> None:
        if _world.for_call() is not self._world:
            raise RuntimeError(
                "ShardedEmbeddingBagCollection: this module was made before po.finalize(); make a new one in this world"
            )

    def _pool(self, features: SentFeatures) -> torch.Tensor:
        sent = features.take()
        self._kept.forget_lost()
        self._ahead, self._ahead_lookups = None, []
        pooled, problem, is_kept = [], None, False
        is_recorded = torch.is_grad_enabled()
        wants_factors = any(lookups.gives_gradients for lookups in sent)
        # Any number of forward passes may wait for their backward passes: those after the first one have copies.
        is_copied = is_recorded and len(self._kept) > 0 and not features.knows_split and not wants_factors
        try:
            if not self._world.workspace.is_capturing():
                self.optimizer.push_rate()
            for pool, lookups in zip(self._pools, sent, strict=True):
                try:
                    lookups.wait(among=sent)
                except (IndexError, CapacityError) as error:
                    # Raised later: the peers wait for this PE, so it first completes the exchange.
                    problem = problem or to_raise(error)
                if is_copied:
                    pooled.append(pool_copies(pool, lookups))
                else:
                    lookups.learn_split()
                    pooled.append(pool(lookups))
            if self._replicas is not None and features.own is not None:
                pooled += [self._as_on_the_wire(each) for each in self._replicas.pool(features.own)]
                wants_factors |= features.own.weights is not None
            if problem is not None:
                raise to_raise(problem)
            is_kept = is_recorded and not is_copied
        finally:
            if not is_kept:
                for lookups in sent:
                    lookups.release()
        result = pooled[0] if len(self.layout.runs) == 1 else side_by_side(self.layout.runs, pooled)
        if result.requires_grad:
            self._record(result, pooled, sent if is_kept else [], wants_factors=wants_factors)
        return result

    def _record(
        self, result: torch.Tensor, pooled: Sequence[torch.Tensor], kept: Sequence[Lookups], *, wants_factors: bool
    ) -> None:
        """Let the backward pass be seen to; `kept`: lookups that it reads, of the first groups."""
        forward_pass = self._kept.begin(kept, self._versions if wants_factors else None)
        result.register_hook(forward_pass.check)
        for each, lookups in itertools.zip_longest(pooled, kept):
            if each.grad_fn is not None:
                if self._clamp is not None:
                    clamp_gradient(each, self._clamp)
                each.grad_fn.register_hook(functools.partial(forward_pass.updated, lookups))

    def _as_on_the_wire(self, pooled: torch.Tensor) -> torch.Tensor:
        """Round what this PE has pooled itself as the rows of other PEs' tables are rounded."""
        is_narrowed = self._wire_dtype is not None and pooled.dtype == torch.float32
        return pooled.to(self._wire_dtype) if is_narrowed else pooled

    # ---- what a module may be asked for ------------------------------------------------------------------------------

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Self:
        """Let ``to(device)`` be called where nothing changes; kernels hold the tables' memory, so it cannot move."""
        tables = self.embedding_bags
        for name, parameter in tables.named_parameters(prefix="embedding_bags"):
            wanted = fn(parameter.detach().new_empty(0))
            if (wanted.dtype, wanted.device) != (parameter.dtype, parameter.device):
                raise NotImplementedError(
                    f"{name}: tables stay {parameter.dtype} on {parameter.device}, and cannot become {wanted.dtype} on "
                    f"{wanted.device}; say the dtype in TableConfig, and move the other modules"
                )
        for module in self.children() if recurse else ():  # of a subclass
            if module is not tables:
                module._apply(fn)
        super()._apply(fn, recurse=False)
        return self

    def extra_repr(self) -> str:
        """Return the placement and its costs, for repr()."""
        layout = self.layout
        owners = {
            config.name: "all" if layout.is_replicated(number) else list(layout.owners[number])
            for number, config in enumerate(layout.configs)
        }
        return f"owners={owners}, {layout.costs.unit}={[float(f'{load:.3g}') for load in layout.loads]}"

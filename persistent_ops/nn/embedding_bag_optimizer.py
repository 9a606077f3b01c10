"""Optimizer of an embedding collection's tables, with the interface that torch's schedulers and checkpoints expect."""

from __future__ import annotations

import copy
import math
import operator
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ..ops.embedding.backward import EmbeddingOptimizer, in_float32
from ..runtime import world as _world
from ..runtime.arguments import as_number
from .table_rounding import Drawn, draws, rounding_seed
from .table_shards import BlockCheck, TableShards

__all__ = ["EmbeddingBagOptimizer"]

_STATE_NAMES = ("momentum1", "exp_avg_sq")  # TorchRec's names of the first state and of Adam's second
_OF_MODULE = (
    "params",
    "step",
    "beta_powers",
    "optimizer",
    "column_slices",
)  # of a saved group; not taken over as they are
_FIXED = ("eps", "weight_decay", "weight_decay_mode", "betas")  # of a group: what kernels have from the beginning
_OF_SLICES = "a state of 'rowwise_adagrad' is a mean over the columns of a slice"
_RENAMED = (
    "get_state_dict, get_optimizer_state_dict: they rename the states of an EmbeddingBagOptimizer, and nothing loads "
    "these then. Pass them the other optimizers alone, and save module.optimizer.state_dict() beside their result"
)
_UNKNOWN = object()  # what no group can have

_States = tuple[int, tuple[torch.Tensor, ...]]  # of a slice: its number, and its states


class EmbeddingBagOptimizer(torch.optim.Optimizer):
    """Holds the states of a `ShardedEmbeddingBagCollection`'s tables; the backward pass updates the rows.

    So `step` and `zero_grad` only copy ``param_groups[0]["lr"]`` to the device, where kernels read it, also in a CUDA
    graph. The collection's forward pass does so too, outside of a capture. Step a scheduler of torch's after
    `step()`, as with torch's optimizers. In a capture, a rate on the host (a number or a tensor) is not copied: call
    one of these functions before a replay. A rate in a tensor on the device is copied by every replay of a graph that
    contains one of the calls.

    The state dict has TorchRec's form: ``state["embedding_bags.<table>.weight"]["<table>.momentum1"]``, and
    ``"<table>.exp_avg_sq"`` beside it for "adam", each a `TableShards` that exists from the beginning. States of
    "rowwise_adagrad" are `[R * slices]`. torch.distributed.checkpoint loads it in another world.

    Args:
        optimizer: of `po.EmbeddingOptimizer`.
        options: of `po.EmbeddingOptimizer`, and the seed of stochastic rounding.
        weights: of the collection, by name: the parameter, size of the table, its number of slices, and for each slice
            of this PE its number and its states.
        optimizers: optimizers that hold these states.
        drawn: for each of them, the tables as they are drawn (`drawn_of`).
        rounding: of the rows of tables of 16 bits.
        max_norm: of rows.
    """

    _step_supports_amp_scaling = True  # so that GradScaler calls step(), which refuses

    def __init__(
        self,
        optimizer: str,
        options: Mapping[str, Any],
        weights: Mapping[str, tuple[torch.nn.Parameter, torch.Size, int, Sequence[_States]]],
        optimizers: Sequence[EmbeddingOptimizer],
        drawn: Sequence[Sequence[Drawn]],
        rounding: str,
        max_norm: float | None,
    ) -> None:
        self._optimizer = optimizer
        # A part of that, as a group's own entry would be missed in checkpoints that do not have it.
        self._saved_as = optimizer if max_norm is None else f"{optimizer}, max_norm={max_norm}"
        self._optimizers, self._drawn = list(optimizers), drawn
        self._column_slices = {name: count for name, (_, _, count, _) in weights.items()}
        self._drawing = {name for name, (parameter, *_) in weights.items() if draws(parameter.dtype, rounding)}
        world = _world.current()
        self._workspace = world.workspace
        self._shards = {name: self._states_of(world, name, *table) for name, table in weights.items()}
        self._saves_param_groups = True
        self._fixed = {name: _plain(options[name]) for name in _FIXED if name in options}
        self._choices_of = operator.itemgetter("lr", *self._fixed)
        self._pushed: Any = _UNKNOWN  # what the choices were when the rate was brought to the device
        super().__init__([parameter for parameter, *_ in weights.values()], dict(options))
        self.push_rate()
        self._push_seeds()

    def _states_of(
        self,
        world: _world.World,
        name: str,
        parameter: torch.nn.Parameter,
        size: torch.Size,
        num_slices: int,
        slices: Sequence[_States],
    ) -> list[TableShards]:
        is_rowwise = self._optimizer == "rowwise_adagrad"
        rows, dim = size
        whole = (rows * num_slices,) if is_rowwise else (rows, dim)
        states = [
            ((number * rows,) if is_rowwise else (0, number * dim // num_slices), of_slice)
            for number, of_slice in slices
        ]
        return [
            TableShards(
                whole,
                [(offsets, of_slice[kind]) for offsets, of_slice in states],
                check=BlockCheck(world, f"states of {name}", [of_slice[kind] for _, of_slice in states]),
                dtype=torch.float32,
                device=parameter.device,
                remark=f"{rows} rows of {num_slices} column slices: {_OF_SLICES}, so their number must stay"
                if is_rowwise
                else "",
            )
            for kind in range({"sgd": 0, "adam": 2}.get(self._optimizer, 1))
        ]

    def push_rate(self) -> None:
        """Copy the learning rate to the device if it has changed; in a capture only from a tensor on the device.

        Raises:
            NotImplementedError: another option of the group has changed.
        """
        group = self.param_groups[0]
        rate, found = group["lr"], self._choices_of(group)
        if not isinstance(rate, torch.Tensor) and found == self._pushed:
            return
        for name, value in self._fixed.items():
            if _plain(group[name]) != value:
                raise NotImplementedError(
                    f"param_groups: {name} is {value!r} since the collection was made and cannot become "
                    f"{group[name]!r}; change only lr"
                    + "; OneCycleLR and CyclicLR need cycle_momentum=False"
                    * (name == "betas")
                )
        if self._workspace.is_capturing() and not self._is_on_device(rate):
            return  # every replay would bring what the rate is now
        if isinstance(rate, torch.Tensor):
            if rate.numel() != 1:
                raise ValueError(f"lr: expected a tensor of one element, got shape {list(rate.shape)}")
            for optimizer in self._optimizers:
                optimizer.lr.copy_(rate.detach().reshape(1))
        else:
            for optimizer in self._optimizers:
                optimizer.lr.fill_(_rate("lr", rate))
        self._pushed = found

    def _is_on_device(self, rate: Any) -> bool:
        return isinstance(rate, torch.Tensor) and all(rate.device == each.lr.device for each in self._optimizers)

    def _push_seeds(self) -> None:
        seed = self.param_groups[0]["seed"]
        for optimizer, drawn in zip(self._optimizers, self._drawn, strict=True):
            optimizer.seeds = [rounding_seed(seed, each) for each in drawn]  # type: ignore[assignment]  # as above

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Copy the learning rate to the device; the backward pass has updated the tables.

        Raises:
            NotImplementedError: called by GradScaler, or with a closure.
        """
        if self.__dict__.pop("found_inf", None) is not None:  # GradScaler says so to those that look themselves
            self.__dict__.pop("grad_scale", None)
            raise NotImplementedError(
                "GradScaler: the backward pass updates the tables before a scaler could check their gradients, so "
                "no step can be skipped. Train in float32 or bfloat16 without it, or step only the dense part's "
                "optimizer with it and pass a fixed gradient_scale."
            )
        if closure is not None:
            raise NotImplementedError("closure: cannot be given, since each backward pass updates the tables")
        self.push_rate()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Copy the learning rate to the device; there are no gradients to clear."""
        self.push_rate()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refuse parameters other than the collection's tables."""
        if self.param_groups:
            raise NotImplementedError("param_groups: the tables are the only group; other parameters need an optimizer")
        super().add_param_group(param_group)

    # ---- states ------------------------------------------------------------------------------------------------------

    def save_param_groups(self, save: bool) -> None:
        """Set whether state dicts have "param_groups", which TorchRec's do not have by default.

        Without "param_groups", torch.distributed.checkpoint loads TorchRec's checkpoints.
        """
        self._saves_param_groups = save

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refuse to be pickled, and copied."""
        raise TypeError(
            "an EmbeddingBagOptimizer belongs to its module and cannot be copied or pickled. Save its state_dict and "
            "load it into another module's optimizer."
        )

    def state_dict(self, *, prefix: str = "") -> dict[str, Any]:  # type: ignore[override]
        """Return rates, seed, the number of steps and all states, as shards over this PE's memory; waits on the host.

        Args:
            prefix: of the tables' names: "sparse." if the collection is the model's attribute `sparse`, as in
                TorchRec's names under DistributedModelParallel.

        Raises:
            NotImplementedError: called by torch.distributed.checkpoint.state_dict, which would rename the states.
        """
        if sys._getframe(1).f_globals.get("__name__") == "torch.distributed.checkpoint.state_dict":
            raise NotImplementedError(_RENAMED)
        for before in self._optimizer_state_dict_pre_hooks.values():
            before(self)
        state = self._state_dict(prefix)
        for behind in self._optimizer_state_dict_post_hooks.values():
            replaced = behind(self, state)
            state = state if replaced is None else replaced
        return state

    def _state_dict(self, prefix: str) -> dict[str, Any]:
        state = {
            _key(prefix, name): {f"{name}.{kind}": shards for kind, shards in zip(_STATE_NAMES, of_table, strict=False)}
            for name, of_table in self._shards.items()
        }
        if not self._saves_param_groups:
            return {"state": state}
        group = {name: value for name, value in self.param_groups[0].items() if name != "params"}
        if isinstance(group["lr"], torch.Tensor):
            group["lr"] = group["lr"].detach().clone()  # loading fills this one's own
        group["params"] = list(state)
        # As the kernel has multiplied them, so that training continues with the same bits after loading.
        group["beta_powers"] = self._optimizers[0]._beta_powers.tolist()
        group["step"] = int(self._optimizers[0].step_count)
        group["optimizer"] = self._saved_as
        group["column_slices"] = [list(each) for each in self._column_slices.items()]
        return {"state": state, "param_groups": [group]}

    def load_state_dict(self, state_dict: Mapping[str, Any], *, prefix: str = "") -> None:  # type: ignore[override]
        """Load states; this also repairs tables after a launch that was given up.

        Args:
            state_dict: whole states, or shards of this placement. Without "param_groups", as in TorchRec's checkpoints,
                rates and the seed of stochastic rounding stay, and steps start at 0.
            prefix: of the tables' names; see `state_dict`.

        A rate that is a tensor here stays that tensor and takes the loaded value: a CUDA graph may read it.

        Raises:
            ValueError: the state is of another optimizer, of other constants or tables, or of another number of column
                slices (under "rowwise_adagrad", or for a table with stochastic rounding); or the rate does not fit into
                float32, or the number of steps is invalid.
            TypeError: the rate or the step is not a number.
            After an error everything is unchanged.
        """
        given = dict(state_dict)
        for before in self._optimizer_load_state_dict_pre_hooks.values():
            replaced = before(self, given)
            given = given if replaced is None else replaced
        self._load(given, prefix)
        for behind in self._optimizer_load_state_dict_post_hooks.values():
            behind(self)

    def _load(self, state_dict: Mapping[str, Any], prefix: str) -> None:
        groups = state_dict.get("param_groups") or [{}]
        saved = groups[0]
        if saved.get("optimizer", self._saved_as) != self._saved_as:
            raise ValueError(f"state_dict: of {saved['optimizer']!r}, but the optimizer is {self._saved_as!r}")
        for name, value in self._fixed.items():
            if _plain(saved.get(name, value)) != value:
                raise ValueError(f"state_dict: saved with {name}={saved[name]!r}, but the collection has {value!r}")
        if self._optimizer == "adam" and "step" not in saved:
            raise ValueError("state_dict: expected param_groups with the number of steps, which 'adam' needs, got none")
        # Nothing is written before everything is checked.
        steps, rate = as_number("state_dict: step", saved.get("step", 0)), _rate("state_dict: lr", saved.get("lr", 0.0))
        if not 0 <= steps < 2**63:
            raise ValueError(f"state_dict: step: expected a number of at least 0 and below 2^63, got {saved['step']}")
        powers = torch.tensor(saved.get("beta_powers", (1.0, 1.0)), dtype=torch.float32, device="cpu")
        if powers.shape != (2,):
            raise ValueError(f"state_dict: beta_powers: expected two numbers, got {saved['beta_powers']!r}")
        # A scheduler changes values in place; these must not be the caller's.
        options = {
            name: copy.deepcopy(value.detach() if isinstance(value, torch.Tensor) else value)
            for name, value in saved.items()
            if name not in _OF_MODULE
        }
        of_tables = state_dict.get("state", {})
        self._check_tables(of_tables, prefix)
        found = {name: of_tables.get(_key(prefix, name), {}) for name in self._shards}
        for name, of_table in self._shards.items():
            self._check_table(name, of_table, saved, found[name])
        for name, of_table in self._shards.items():
            for kind, shards in zip(_STATE_NAMES, of_table, strict=False):
                shards.copy_from(found[name][f"{name}.{kind}"])
        own = self.param_groups[0]["lr"]
        self.param_groups[0].update(options)
        if isinstance(own, torch.Tensor) and "lr" in saved:
            own.detach().fill_(rate)
            self.param_groups[0]["lr"] = own
        changes = self._workspace.changes
        for optimizer in self._optimizers:
            optimizer.step_count = int(steps)  # type: ignore[assignment]  # mypy knows one type for both
            if "beta_powers" in saved:
                optimizer._beta_powers.copy_(powers)
            changes.loaded(*optimizer._own)
        for of_table in self._shards.values():
            changes.loaded(*(block for shards in of_table for _, block in shards.shards))
        self._pushed = _UNKNOWN
        self.push_rate()
        self._push_seeds()

    def _check_tables(self, of_tables: Mapping[str, Any], prefix: str) -> None:
        """Raise ValueError for states of other tables, or of another optimizer."""
        known = {_key(prefix, name): name for name in self._shards}
        others = [key for key in of_tables if key not in known and str(key).startswith(f"{prefix}embedding_bags.")]
        if others or (of_tables and not any(key in known for key in of_tables)):
            raise ValueError(f"state_dict: expected states of {sorted(known)}, got {sorted(map(str, of_tables))}")
        for key, name in known.items():
            expected = [f"{name}.{kind}" for kind, _ in zip(_STATE_NAMES, self._shards[name], strict=False)]
            of_others = {f"{name}.{kind}" for kind in _STATE_NAMES} - set(expected)
            if surplus := sorted(of_others & set(of_tables.get(key, {}))):
                raise ValueError(f"state_dict: {self._optimizer!r} has {expected} of {key}, but not {surplus}")

    def _check_table(
        self, name: str, of_table: Sequence[TableShards], saved: Mapping[str, Any], found: Mapping[str, Any]
    ) -> None:
        """Raise ValueError for states that this table cannot take."""
        here = self._column_slices[name]
        counts: dict[str, int] = dict(saved.get("column_slices", []))
        reason = self._needs_slices(name)
        if reason and counts.get(name, here) != here:
            raise ValueError(
                f"state_dict: {name} was trained in {counts[name]} column slices, and has {here}: {reason}, so the "
                "number of slices must stay"
            )
        for kind, shards in zip(_STATE_NAMES, of_table, strict=False):
            key = f"{name}.{kind}"
            if key not in found:
                raise ValueError(f"state_dict: expected {key!r}, got {sorted(found)}")
            try:
                shards.check_source(found[key])
            except ValueError as error:
                raise ValueError(
                    f"state_dict: {key}: {error}"
                    + " (the number of column slices must stay)" * (self._optimizer == "rowwise_adagrad")
                ) from error

    def _needs_slices(self, name: str) -> str:
        """Return why a table's number of column slices affects the training; "" if it does not."""
        if self._optimizer == "rowwise_adagrad":
            return _OF_SLICES
        if name in self._drawing:
            return "stochastic rounding draws random bits for each slice"
        return ""


def _rate(name: str, given: Any) -> float:
    """Return a rate as a number; raise TypeError or ValueError if it is not one, or is infinite in float32."""
    rate = as_number(name, given)
    if math.isinf(in_float32(rate)):
        raise ValueError(f"{name}: expected a number below infinity, also in float32, got {given}")
    return rate


def _key(prefix: str, table: str) -> str:
    return f"{prefix}embedding_bags.{table}.weight"


def _plain(value: Any) -> Any:
    """Return an option as it compares: a pair is a list where it was loaded."""
    return tuple(value) if isinstance(value, (list, tuple)) else value

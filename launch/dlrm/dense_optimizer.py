"""The optimizer of the dense part: torch's, eager or in a CUDA graph. In a graph it reads rates from device tensors.

Such a tensor is float32, and most rates are no float32: the group keeps the exact number beside the tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

__all__ = [
    "DENSE_OPTIMIZERS",
    "EPS",
    "count_steps",
    "load_optimizer",
    "make_capturable",
    "optimizer_state",
    "rate_of",
    "set_rate",
]

EPS = 1e-8  # of Adagrad, MLPerf's
# Torch's, of dense gradients, by the name of the tables' optimizer.
DENSE_OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": torch.optim.SGD,
    "adagrad": lambda parameters, lr: torch.optim.Adagrad(parameters, lr=lr, eps=EPS),
    "rowwise_adagrad": lambda parameters, lr: torch.optim.Adagrad(parameters, lr=lr, eps=EPS),
}
_EXACT = "exact_lr"  # of a group whose rate is in a tensor: the number that was rounded to it
_KERNELS = ("foreach", "fused", "capturable")  # of a group: which kernels make its step


def make_capturable(
    optimizer: str, parameters: Iterable[torch.nn.Parameter], rate: float, device: torch.device
) -> torch.optim.Optimizer:
    """Return the same optimizer as `DENSE_OPTIMIZERS`, with a step that can be captured.

    Torch reads a rate in a tensor on the device alone where SGD is fused, or Adagrad works on lists of tensors.
    Adagrad reads its counts of steps on the host, which is where they have to be.
    """
    of_device = torch.tensor(rate, device=device)
    made: torch.optim.Optimizer
    if optimizer == "sgd":
        made = torch.optim.SGD(parameters, lr=of_device, fused=True)
    else:
        made = torch.optim.Adagrad(parameters, lr=of_device, eps=EPS, foreach=True)
    for group in made.param_groups:
        group[_EXACT] = rate
    return made


def set_rate(group: dict[str, Any], rate: float) -> None:
    """Set a group's learning rate; one in a tensor stays in it, where graphs read it."""
    if isinstance(group["lr"], torch.Tensor):
        group["lr"].fill_(rate)
        group[_EXACT] = rate
    else:
        group["lr"] = rate


def rate_of(group: dict[str, Any]) -> float:
    """Return a group's learning rate, as it was set; a number that other code wrote to its tensor counts too."""
    rate, exact = group["lr"], group.get(_EXACT)
    if exact is not None and isinstance(rate, torch.Tensor) and float(torch.tensor(exact, dtype=rate.dtype)) == rate:
        return float(exact)
    return float(rate)


def count_steps(optimizer: torch.optim.Optimizer, num_steps: int) -> None:
    """Let the counts that an optimizer has on the host say so many steps: a replay does not add to them."""
    for state in optimizer.state.values():
        count = state.get("step")
        if isinstance(count, torch.Tensor) and not count.is_cuda:
            count.fill_(num_steps)


def optimizer_state(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the state dict, with rates as numbers: a training with graphs and one without have the same."""
    state = optimizer.state_dict()
    state["param_groups"] = [
        {name: value for name, value in group.items() if name != _EXACT} | {"lr": rate_of(group)}
        for group in state["param_groups"]
    ]
    return state


def load_optimizer(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Load a state dict on the host; rates in tensors are loaded into them, and which kernels make the step stays.

    Counts of steps stay on the host where the optimizer reads them there.
    """
    rates = [group["lr"] for group in optimizer.param_groups]
    groups = [
        {**saved, **{name: own[name] for name in _KERNELS if name in own}}
        for saved, own in zip(state["param_groups"], optimizer.param_groups, strict=True)
    ]
    optimizer.load_state_dict({**state, "param_groups": groups})
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        if isinstance(rate, torch.Tensor):
            group["lr"], loaded = rate, float(group["lr"])
            set_rate(group, loaded)

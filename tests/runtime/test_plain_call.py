"""Calls that may skip to the kernel: one check of all tensors agrees with a check of each tensor."""

from __future__ import annotations

import contextlib
import itertools
import random
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode

from persistent_ops.runtime import plain_call
from persistent_ops.runtime.plain_call import PlainCalls, are_plain, is_watched
from persistent_ops.runtime.torch_private import num_dispatch_modes


class _Own(torch.Tensor):
    pass


class _Seeing(TorchDispatchMode):
    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return function(*args, **(kwargs or {}))


def _tensors() -> dict[str, torch.Tensor]:
    with torch.inference_mode():
        inference = torch.ones(3)
    return {
        "plain": torch.ones(3),
        "other": torch.ones(3),
        "longer": torch.ones(5),
        "half": torch.ones(3, dtype=torch.float16),
        "matrix": torch.ones(3, 3),
        "parameter": torch.nn.Parameter(torch.ones(3)),
        "frozen": torch.nn.Parameter(torch.ones(3), requires_grad=False),
        "requires": torch.ones(3, requires_grad=True),
        "recorded": torch.ones(3, requires_grad=True) * 2,
        "negative": torch._neg_view(torch.ones(3)),
        "zeros": torch._efficientzerotensor(3),
        "of a class": torch.ones(3).as_subclass(_Own),
        "sparse": torch.eye(3).to_sparse(),
        "quantized": torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8),
        "conjugate": torch.ones(3, dtype=torch.complex64).conj(),
        "inference": inference,
        "none": None,  # type: ignore[dict-item]
        "text": "text",  # type: ignore[dict-item]
    }


CONTEXTS: dict[str, Callable[[], Any]] = {
    "recording": contextlib.nullcontext,
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "fake": FakeTensorMode,
    "dispatch mode": _Seeing,
    "dual level": forward_ad.dual_level,
}


def _with_transforms(call: Callable[[torch.Tensor | None], bool]) -> list[bool]:
    """Return the decision on a call in each context, and in transforms, which wrap one of its tensors."""
    said: list[bool] = []
    for context in CONTEXTS.values():
        with context():
            said.append(call(None))

    def inside(wrapped: torch.Tensor) -> torch.Tensor:
        said.extend((call(None), call(wrapped)))
        return wrapped.sum()

    torch.func.vmap(inside)(torch.ones(2, 3))
    torch.func.grad(inside)(torch.ones(3))
    torch.func.jvp(inside, (torch.ones(3),), (torch.ones(3),))
    return said


def _is_plain(tensors: tuple[torch.Tensor, ...], optional: tuple[torch.Tensor, ...]) -> bool:
    """Return whether only the kernel must see a call, by a check of each tensor."""
    given = (*tensors, *(other for other in optional if other is not None))
    if num_dispatch_modes() or is_watched() or not are_plain(given):
        return False
    return not torch.is_grad_enabled() or not any(each.requires_grad for each in given)


def test_one_look_says_what_looks_at_each_tensor_say() -> None:
    tensors = _tensors()
    pairs = list(itertools.product(tensors, repeat=2))
    some_plain = 0
    for round_number in range(6):
        random.Random(round_number).shuffle(pairs)
        calls = PlainCalls()
        if round_number % 2:  # what has been plain in one context is asked about in all others
            for context, kind in itertools.product(("no_grad", "recording"), ("parameter", "plain")):
                with CONTEXTS[context]():
                    calls.has((tensors[kind],), (tensors["other"],))
        for first, second in pairs[:40]:

            def both(
                wrapped: torch.Tensor | None, first: str = first, second: str = second, calls: PlainCalls = calls
            ) -> bool:
                nonlocal some_plain
                given = (tensors[first] if wrapped is None else wrapped,), (tensors[second], tensors["plain"])
                wanted = _is_plain(*given)
                some_plain += wanted
                for _ in range(2):
                    assert bool(calls.has(*given)) == wanted, (first, second)
                return wanted

            _with_transforms(both)
    assert some_plain > 100


@pytest.mark.parametrize("is_recording", [False, True])
def test_calls_of_a_kind_are_looked_at_once(is_recording: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[int] = []

    def counted(*given: Any) -> bool:
        looked.append(1)
        return are_plain(*given)

    monkeypatch.setattr(plain_call, "are_plain", counted)
    tensors, calls = _tensors(), PlainCalls()
    names = ["half", "frozen" if is_recording else "parameter"]
    with torch.set_grad_enabled(is_recording):
        for _ in range(3):
            for name in names:
                x, fresh = tensors[name], torch.ones(7)
                assert calls.has((x,), (None, fresh)) and calls.has((x,), (fresh, x, None))
                assert calls.has((fresh, x), (x, None))
        assert len(looked) == 2 * len(names)  # (x, fresh) and (fresh, x) are two kinds
        for dimensions in range(2, 9):  # more kinds than are kept
            assert all(calls.has((torch.ones((1,) * dimensions),)) for _ in range(2))
    assert max(map(len, calls._kinds.values())) == plain_call._MOST_KINDS


def test_without_what_compares_all_calls_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plain_call, "TensorGuards", None)
    calls = PlainCalls()
    assert all(calls.has((torch.ones(3),)) and not calls.has((torch._neg_view(torch.ones(3)),)) for _ in range(2))


def test_nested_tensors_end_no_process() -> None:
    plain, calls = torch.ones(2, 8), PlainCalls()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that they are a prototype
        nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    assert not calls.has((nested,)) and not calls.has((plain,), (nested,))
    assert calls.has((plain,)) and calls.has((plain, torch.zeros(2, 8)))
    assert not calls.has((nested,)) and not calls.has((plain, nested)) and not calls.has((plain,), (nested,))


def test_gradients_alone_make_a_call_not_plain() -> None:
    calls, x = PlainCalls(), torch.ones(3, requires_grad=True)
    for _ in range(2):
        assert calls.has((x,)) is None
        assert calls.has((torch._neg_view(x),)) is False
        with torch.no_grad():
            assert calls.has((x,)) is True

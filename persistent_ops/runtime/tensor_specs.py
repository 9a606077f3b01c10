"""Specifications of an operator's tensors: declared once, checked in one place, with one wording."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from .dtypes import SCALARS

__all__ = ["Dims", "TensorSpec", "TensorSpecs"]

Dims = Mapping[str, int]
_MOST_KNOWN = 512  # calls that were right


class TensorSpec(NamedTuple):
    """A tensor argument.

    Attributes:
        name: of the argument.
        shape: names of its dimensions, which are equal in all arguments of a call: "M K". A name with "?" is of a
            dimension that may be missing, then in all of them: "N? K". "...", first or last, is any dimensions. A
            number is a size; "one" is one element, whatever the shape.
        dtypes: that it may have, or the name of the argument whose dtype it has.
        is_contiguous: whether it must be.
    """

    name: str
    shape: str
    dtypes: tuple[torch.dtype, ...] | str = tuple(SCALARS)
    is_contiguous: bool = True


class TensorSpecs:
    """The tensor arguments of an operator, in the order in which they are checked."""

    def __init__(self, *specs: TensorSpec) -> None:
        self._specs = specs
        self._known: dict[tuple[object, ...], Dims] = {}

    def check(self, device: torch.device | None, *tensors: torch.Tensor | None) -> Dims:
        """Return the sizes of the dimensions that are there; raise for what the operator cannot take.

        Args:
            device: of this PE; None in a fake call, whose sizes may be symbols.
            tensors: one for each spec, None for those that are not given. The gate has seen that they are plain.

        Raises:
            TypeError: a dtype.
            ValueError: a shape, a layout or a device.
        """
        if device is None:
            return self._checked(None, tensors)
        kind = tuple([None if t is None else (t.shape, t.dtype, t.device, t.is_contiguous()) for t in tensors])
        dims = self._known.get(kind)
        if dims is None:
            dims = self._checked(device, tensors)
            if len(self._known) >= _MOST_KNOWN:
                self._known.clear()
            self._known[kind] = dims
        return dims

    def _checked(self, device: torch.device | None, tensors: Sequence[torch.Tensor | None]) -> Dims:
        given = {spec.name: tensor for spec, tensor in zip(self._specs, tensors, strict=True)}
        dims = _Dims()
        for spec, tensor in zip(self._specs, tensors, strict=True):
            if tensor is None:
                continue
            _check_dtype(spec, tensor, given)
            names = spec.shape.split()
            if not dims.binds(names, tuple(tensor.shape)):
                raise ValueError(f"{spec.name}: expected {dims.expected(names)} {list(tensor.shape)}")
            if spec.is_contiguous and not tensor.is_contiguous():
                raise ValueError(
                    f"{spec.name}: expected a contiguous tensor, got strides {tensor.stride()}; pass "
                    f"{spec.name}.contiguous()"
                )
            if device is not None and tensor.device != device:
                raise ValueError(f"{spec.name}: expected a tensor on {device}, got one on {tensor.device}")
        return {name: size for name, size in dims.sizes.items() if size is not None}


def _check_dtype(spec: TensorSpec, tensor: torch.Tensor, given: Mapping[str, torch.Tensor | None]) -> None:
    if isinstance(spec.dtypes, str):
        other = given[spec.dtypes]
        assert other is not None
        if tensor.dtype != other.dtype:
            raise TypeError(f"{spec.name}: expected {spec.dtypes}'s dtype {other.dtype}, got {tensor.dtype}")
    elif tensor.dtype not in spec.dtypes:
        *others, last = (str(dtype).removeprefix("torch.") for dtype in spec.dtypes)
        expected = f"{', '.join(others)} or {last}" if others else last
        raise TypeError(f"{spec.name}: expected {expected}, got {tensor.dtype}")


class _Dims:
    """The sizes of a call's dimensions, as its tensors give them one after the other."""

    def __init__(self) -> None:
        self.sizes: dict[str, int | None] = {}
        self._others: tuple[int, ...] | None = None  # what "..." stands for

    def binds(self, names: list[str], sizes: tuple[int, ...]) -> bool:
        """Return whether a shape fits; take note of its sizes where it does."""
        if names == ["one"]:
            return math.prod(sizes) == 1
        others = self._others
        if "..." in names:
            others, names, sizes = _split(names, sizes)
        missing = [name[:-1] for name in names if name.endswith("?")] if len(sizes) < len(names) else []
        present = [name.removesuffix("?") for name in names if name[:-1] not in missing]
        if len(sizes) != len(present) or self._others not in (None, others):
            return False
        own: dict[str, int | None] = dict.fromkeys(missing) | dict(zip(present, sizes, strict=True))
        if any((int(name) if name.isdigit() else self.sizes.get(name, size)) != size for name, size in own.items()):
            return False
        self.sizes |= own
        self._others = others
        return True

    def expected(self, names: list[str]) -> str:
        """Return a shape as an error says it, with the sizes that are known."""
        if names == ["one"]:
            return "one element, got shape"
        shapes: list[list[str]] = [[]]
        for name in names:
            known, is_optional = name.removesuffix("?"), name.endswith("?")
            if name == "...":
                others = ["..."] if self._others is None else list(map(str, self._others))
                shapes = [[*shape, *others] for shape in shapes]
            elif known in self.sizes:
                size = self.sizes[known]
                own = [] if size is None and is_optional else [known if size is None else str(size)]
                shapes = [[*shape, *own] for shape in shapes]
            else:
                shapes = [*(shapes if is_optional else []), *([*shape, known] for shape in shapes)]
        texts = [f"[{', '.join(shape)}]" for shape in shapes]
        return f"shape {' or '.join(texts)}, got"


def _split(names: list[str], sizes: tuple[int, ...]) -> tuple[tuple[int, ...], list[str], tuple[int, ...]]:
    """Return the sizes that "..." stands for, and the names and sizes of the other dimensions."""
    if names[-1] == "...":
        named = len(names) - 1
        return sizes[named:], names[:-1], sizes[:named]
    first = max(len(sizes) - len(names) + 1, 0)
    return sizes[:first], names[1:], sizes[first:]

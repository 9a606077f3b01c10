"""The weights of a PE: drawn, or read from safetensors files. In both cases only the PE's own part."""

from __future__ import annotations

import math
import zlib
from pathlib import Path
from typing import Any, Protocol

import torch

__all__ = ["FolderWeights", "RandomWeights", "WeightSource"]


class WeightSource(Protocol):
    """Gives parameters by their Hugging Face names."""

    def read(
        self, name: str, shape: tuple[int, ...], *, dim: int = 0, first: int = 0, last: int | None = None
    ) -> torch.Tensor:
        """Return part of a parameter, contiguous, on the source's device and in its dtype.

        Args:
            name: of the parameter.
            shape: of the whole.
            dim: that is cut.
            first: index in that dimension where the part begins.
            last: index after its end; None for the whole parameter.
        """
        ...


class RandomWeights:
    """Weights drawn so that activations keep their size: N(0, 1 / fan_in), embeddings N(0, 1), norms about 1.

    Args:
        seed: of the model.
        device: of the tensors.
        dtype: of the tensors.
        rank: whose parts are drawn on the device, each from a seed of its own; models of any size, but other weights on
            each number of PEs. None: the whole parameter is drawn on the CPU and cut, the same on any number of PEs.
    """

    def __init__(self, seed: int, device: torch.device, dtype: torch.dtype, rank: int | None) -> None:
        self._seed = seed
        self._device = device
        self._dtype = dtype
        self._rank = rank

    def read(
        self, name: str, shape: tuple[int, ...], *, dim: int = 0, first: int = 0, last: int | None = None
    ) -> torch.Tensor:
        """Return part of a parameter; see `WeightSource`."""
        is_part = last is not None
        if self._rank is None or not is_part:
            drawn = self._draw(name, shape, shape, torch.device("cpu") if self._rank is None else self._device)
            part = drawn.narrow(dim, first, (shape[dim] if last is None else last) - first)
            return part.to(self._device, self._dtype).contiguous()
        part_shape = list(shape)
        part_shape[dim] = (last or 0) - first
        return self._draw(f"{name} of PE {self._rank}", tuple(part_shape), shape, self._device).to(self._dtype)

    def _draw(self, key: str, shape: tuple[int, ...], whole: tuple[int, ...], device: torch.device) -> torch.Tensor:
        generator = torch.Generator(device).manual_seed(zlib.crc32(f"{self._seed} {key}".encode()))
        dtype = torch.float32 if self._rank is None else self._dtype
        drawn = torch.empty(shape, device=device, dtype=dtype)
        if len(whole) == 1:
            return drawn.normal_(1.0, 0.1, generator=generator)
        scale = 1.0 if key.startswith("model.embed_tokens") else 1 / math.sqrt(whole[1])
        return drawn.normal_(0.0, scale, generator=generator)


class FolderWeights:
    """Weights of a Hugging Face folder's *.safetensors, of which only the parts that are asked for are read.

    Args:
        folder: which holds the files.
        device: of the tensors.
        dtype: of the tensors; what the files have is converted.

    Raises:
        ValueError: there are no such files, one is damaged, or the library safetensors is not installed.
    """

    def __init__(self, folder: Path, device: torch.device, dtype: torch.dtype) -> None:
        try:
            from safetensors import SafetensorError, safe_open
        except ImportError as error:
            raise ValueError("reading a model folder needs the library safetensors: pip install safetensors") from error
        self._device = device
        self._dtype = dtype
        self._folder = folder
        self._file_of: dict[str, Any] = {}
        for path in sorted(folder.glob("*.safetensors")):
            try:
                file = safe_open(str(path), framework="pt", device="cpu")
            except SafetensorError as error:
                raise ValueError(f"{path} is no safetensors file, or is cut off: {error}") from error
            self._file_of.update(dict.fromkeys(file.keys(), file))
        if not self._file_of:
            raise ValueError(f"{folder} holds no *.safetensors; expected a Hugging Face model folder")

    def read(
        self, name: str, shape: tuple[int, ...], *, dim: int = 0, first: int = 0, last: int | None = None
    ) -> torch.Tensor:
        """Return part of a parameter; see `WeightSource`.

        Raises:
            ValueError: the files lack it, or have it in another shape.
        """
        file = self._file_of.get(name)
        if file is None:
            raise ValueError(f"{self._folder}: no safetensors file has {name}")
        stored = file.get_slice(name)
        if tuple(stored.get_shape()) != shape:
            raise ValueError(
                f"{self._folder}: expected {name} of shape {list(shape)}, got {list(stored.get_shape())}; do "
                "config.json and the weights belong together?"
            )
        part = slice(first, shape[dim] if last is None else last)
        found = stored[part] if dim == 0 else stored[:, part]
        return found.to(self._device, self._dtype).contiguous()

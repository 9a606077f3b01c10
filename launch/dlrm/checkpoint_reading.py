"""Read a folder of torch.distributed.checkpoint. Code and paths in its files are neither run nor followed.

torch reads `.metadata`, a pickle, with `pickle.load`, and values that are no tensors with `weights_only=False`.
`torch.load(weights_only=True)` cannot read `.metadata`: it takes pickles of protocol 2 alone, and torch writes a newer
protocol there.
"""

from __future__ import annotations

import io
import os
import pickle
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import ReadItem

__all__ = ["PlainPlanner", "PlainReader"]

_METADATA = "torch.distributed.checkpoint.metadata"
# All that torch writes, beside dtypes and paths.
_ALLOWED = {
    *((_METADATA, name) for name in ("Metadata", "MetadataIndex", "StorageMeta", "TensorProperties")),
    *((_METADATA, f"{kind}StorageMetadata") for kind in ("Bytes", "Chunk", "Tensor")),
    (_METADATA, "_MEM_FORMAT_ENCODING"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
}


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if is_dtype or (module, name) in _ALLOWED:
            return super().find_class(module, name)
        if (module, name) in (("pathlib", "PosixPath"), ("pathlib._local", "PosixPath")):
            return lambda *parts: os.path.join(*parts)  # a pickle can set attributes of what it is given
        raise pickle.UnpicklingError(f"it refers to {module}.{name}, which no checkpoint needs")


class PlainReader(FileSystemReader):
    """Read a checkpoint whose metadata are of torch's own types and name files of its folder alone."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return the checkpoint's metadata.

        Raises:
            OSError, pickle.UnpicklingError: the file cannot be read, or holds anything else.
        """
        rank = kwargs.get("rank")  # of one that each PE has written for itself
        path = Path(self.path) / (".metadata" if rank is None else f"__{rank}.metadata")
        with path.open("rb") as file:
            found = _MetadataUnpickler(file).load()
        if not isinstance(found, Metadata):
            raise pickle.UnpicklingError(f"{path}: expected torch's Metadata, got {type(found).__name__}")
        for stored in found.storage_data.values():
            if Path(stored.relative_path).name != stored.relative_path:
                raise pickle.UnpicklingError(f"{path} names {stored.relative_path!r}, which is no file of its folder")
        return found


class PlainPlanner(DefaultLoadPlanner):
    """Load values that are no tensors if they are numbers, strings, or containers of these."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Take over one value."""
        checked = io.BytesIO()
        torch.save(torch.load(value, weights_only=True), checked)  # the base class unpickles whatever it is given
        checked.seek(0)
        super().load_bytes(read_item, checked)

"""A tensor whose blocks are spread over the PEs, in the form that torch.distributed.checkpoint takes."""

from __future__ import annotations

import math
import warnings
import weakref
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from ..runtime.torch_private import wrapper_subclass
from ..runtime.world import World

__all__ = ["BlockCheck", "TableShards"]

_aten = torch.ops.aten
_MAPPED = {  # operators that apply to every block
    _aten.detach.default,
    _aten.clone.default,
    _aten._to_copy.default,
    _aten.empty_like.default,
    _aten.zeros_like.default,
}


_SAVED_IN_PART = (
    "TableShards: what is pickled has this PE's part of the table alone, and torch.save on one PE loses those of the "
    "others. Save with torch.distributed.checkpoint.save, called by all PEs. Or call torch.save on every PE, with a "
    "file for each: these files load with the same placement on as many PEs."
)
_SAVED_ALONE = (
    "TableShards: torch.distributed.checkpoint saves without a process group, so each PE takes itself for the whole "
    "job and overwrites the files of the others. Save inside of `with po.process_group():`, on all PEs."
)
_COPYING = {_aten.clone.default, _aten._to_copy.default}


class _RemarkedSize(tuple[int, ...]):
    """A size that says more where a message has it."""

    remark: str

    @classmethod
    def of(cls, size: torch.Size, remark: str) -> _RemarkedSize:
        made = cls(size)
        made.remark = remark
        return made

    def __repr__(self) -> str:
        return f"{torch.Size(self)} ({self.remark})"

    def numel(self) -> int:
        return math.prod(self)


class BlockCheck:
    """What raises where blocks should be neither saved nor copied, as they may be half changed; copies have none.

    Args:
        world: whose launches change them; it is not held.
        name: of the blocks.
        blocks: contiguous.
    """

    def __init__(self, world: World, name: str, blocks: Sequence[torch.Tensor]) -> None:
        self._world, self._changes = weakref.ref(world), world.workspace.changes
        self._name, self._blocks = name, list(blocks)

    def __call__(self) -> None:
        """Raise PersistentOpsError where a launch that was given up changes them, and they were not loaded since."""
        world = self._world()
        if world is not None:
            world.learn_of_failures()
        self._changes.check(self._name, self._blocks)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Copy to None."""
        return type(None), ()


class TableShards(torch.Tensor):
    """A tensor whose blocks are spread over the PEs; this PE's may be none.

    `torch.distributed.checkpoint` writes each PE's blocks and reads whatever blocks another placement or world asks
    for, also into and from plain tensors, DTensors and ShardedTensors of the same global shape. Beside that it can be
    detached, cloned, copied to another device, and copied into; there is no arithmetic.

    Args:
        size: of the whole tensor.
        shards: this PE's blocks: where each begins in the whole, and the block. They are not copied.
        dtype, device: of the blocks, for a PE that has none.
        remark: on the size, for errors about another size: torch.distributed.checkpoint shows it in its message.
        check: called before the blocks are saved or copied, and raises where they should not be. It may be that they
            are to be loaded, so to have them is no harm.
    """

    _shards: tuple[tuple[torch.Size, torch.Tensor], ...]
    _remark: str
    _check: BlockCheck | None = None  # of those that were pickled, too

    @staticmethod
    def __new__(
        cls,
        size: Sequence[int],
        shards: Sequence[tuple[Sequence[int], torch.Tensor]],
        *,
        dtype: torch.dtype,
        device: torch.device,
        remark: str = "",
        check: BlockCheck | None = None,
    ) -> TableShards:
        for offsets, block in shards:
            inside = all(a >= 0 and a + n <= all_ for a, n, all_ in zip(offsets, block.shape, size, strict=True))
            if not inside or block.dtype != dtype:
                raise ValueError(
                    f"shards: a block of {list(block.shape)}, {block.dtype}, at {list(offsets)} is not one of "
                    f"{list(size)}, {dtype}"
                )
        made: TableShards = wrapper_subclass(cls, torch.Size(size), dtype=dtype, device=device)
        made._shards = tuple((torch.Size(offsets), block.detach()) for offsets, block in shards)
        made._remark, made._check = remark, check
        return made

    def check_whole(self) -> None:
        """Raise where the blocks should be neither saved nor copied."""
        if self._check is not None:
            self._check()

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Return what is pickled: the blocks, which are checked, and no check; warn where other PEs have more."""
        if self._check is None:
            if self._is_part():
                warnings.warn(_SAVED_IN_PART, stacklevel=2)
            return super().__reduce_ex__(protocol)
        self.check_whole()
        plain = TableShards(self.shape, self._shards, dtype=self.dtype, device=self.device, remark=self._remark)
        return plain.__reduce_ex__(protocol)

    def _is_part(self) -> bool:
        """Return whether other PEs have blocks of the tensor."""
        return sum(block.numel() for _, block in self._shards) < math.prod(self.shape)

    def size(self, dim: int | None = None) -> Any:  # type: ignore[override]
        """Return its size, with the remark, or the size of a dimension."""
        if dim is not None:
            return self.shape[dim]
        return _RemarkedSize.of(self.shape, self._remark) if self._remark else self.shape

    @property
    def shards(self) -> tuple[tuple[torch.Size, torch.Tensor], ...]:
        """This PE's blocks, each after where it begins."""
        return self._shards

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        blocks = [f"{list(block.shape)} at {list(offsets)}" for offsets, block in self._shards]
        return f"TableShards(size={list(self.shape)}, dtype={self.dtype}, shards={blocks})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if function in _MAPPED:
            whole = args[0]
            if function in _COPYING:
                whole.check_whole()
            check = whole._check if function is _aten.detach.default else None
            blocks = [(offsets, function(block, *args[1:], **kwargs)) for offsets, block in whole._shards]
            dtype = kwargs.get("dtype") or whole.dtype
            device = blocks[0][1].device if blocks else torch.device(kwargs.get("device") or whole.device)
            return TableShards(whole.shape, blocks, dtype=dtype, device=device, remark=whole._remark, check=check)
        if function is _aten.new_empty.default and torch.Size(args[1]) == args[0].shape:
            # For torch.distributed.checkpoint.async_save, which puts copies of the blocks into it.
            whole, dtype = args[0], kwargs.get("dtype") or args[0].dtype
            whole.check_whole()
            device = torch.device(kwargs.get("device") or whole.device)
            return TableShards(whole.shape, (), dtype=dtype, device=device, remark=whole._remark)
        if function is _aten.copy_.default:
            args[0].copy_from(args[1])
            return args[0]
        raise NotImplementedError(
            f"TableShards: {function} is not computed on a table that is spread over the PEs; use its shards"
        )

    def copy_from(self, source: torch.Tensor) -> None:
        """Copy this PE's blocks from a tensor of the same global shape: whole, or with the same blocks on this PE.

        Raises:
            ValueError: see `check_source`; nothing is copied then.
        PersistentOpsError: see `check_whole`, of the source.
        """
        self.check_source(source)
        given = dict(source._shards) if isinstance(source, TableShards) else None
        if given is not None and any(given[offsets].data_ptr() != block.data_ptr() for offsets, block in self._shards):
            source.check_whole()  # type: ignore[attr-defined]
        with torch.no_grad():
            for offsets, block in self._shards:
                if given is None:
                    found = source
                    for dim, (first, count) in enumerate(zip(offsets, block.shape, strict=True)):
                        found = found.narrow(dim, first, count)
                else:
                    found = given[offsets]
                if found.data_ptr() != block.data_ptr() or found.stride() != block.stride():
                    block.copy_(found)

    def check_source(self, source: Any) -> None:
        """Raise ValueError for a source that cannot be copied from. The check of type and shape is the same on all PEs.

        Raises:
            ValueError: it is no dense tensor with data, its shape is another one, or it lacks a block that this PE has.
        """
        if not isinstance(source, torch.Tensor):
            raise ValueError(f"expected a tensor, got {type(source).__name__}")
        if source.shape != self.shape:
            raise ValueError(f"expected a tensor of {list(self.shape)}, got {list(source.shape)}")
        if source.layout != torch.strided:
            raise ValueError(f"expected a dense tensor, got layout {source.layout}")
        if not isinstance(source, TableShards):
            if source.is_meta:
                raise ValueError("expected a tensor with data, got one on meta")
            return
        given = dict(source._shards)
        for offsets, block in self._shards:
            if offsets not in given or given[offsets].shape != block.shape:
                raise ValueError(
                    f"expected the block of {list(block.shape)} at {list(offsets)}, which these shards lack: they are "
                    "of another placement or world; go through torch.distributed.checkpoint"
                )

    # ---- what torch.distributed.checkpoint asks ----------------------------------------------------------------------

    def __create_write_items__(self, fqn: str, _: object) -> list[Any]:
        from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
        from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

        self.check_whole()
        if self._is_part() and not dist.is_initialized():
            warnings.warn(_SAVED_ALONE, stacklevel=2)
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=chunk, properties=TensorProperties(dtype=self.dtype), size=self.shape
                ),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __create_chunk_list__(self) -> list[Any]:
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

        return [ChunkStorageMetadata(offsets=offsets, sizes=block.shape) for offsets, block in self._shards]

    def __get_tensor_shard__(self, index: Any) -> torch.Tensor:
        for offsets, block in self._shards:
            if offsets == index.offset:
                return block
        raise ValueError(f"{index.fqn}: this PE has no block at {index.offset}")


# torch.load takes state dicts as they are saved (`weights_only`, its default): unpickling one calls the class alone.
torch.serialization.add_safe_globals([TableShards])

"""A training's state on disk: the dense part in one file, the tables through torch.distributed.checkpoint.

A checkpoint is a folder step-N.X. It is complete as soon as the file `latest` names it:

    training.pt    the state that all PEs share, written by rank 0
    embedding/     tables and the states of their optimizer, each PE's part written by itself; another number of PEs
                   can read them where the module's state dicts say which part of a table a PE has
"""

from __future__ import annotations

import contextlib
import re
import secrets
import shutil
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from persistent_ops.testing.output_files import put_in_place, sync

from .embedding import EmbeddingModule

__all__ = ["Progress", "load", "pointer", "save"]

_POINTER = "latest"
_ADDED = {"contents"}  # of identities: older checkpoints lack them
_WRITING = f"{_POINTER}.writing"  # a folder
_COMPLETE = re.compile(r"step-\d+\.[0-9a-f]{8}")
_FILE = "training.pt"
_EMBEDDING = "embedding"


@dataclass(frozen=True)
class Progress:
    """The state that all PEs share.

    Attributes:
        identity: what decides the losses.
        step: steps so far.
        epoch, batch: position of the next batch.
        losses: of the steps so far.
        evaluations: so far; see `History`.
        model: state dict of the dense part.
        optimizer: state dict of its optimizer.
    """

    identity: dict[str, Any]
    step: int
    epoch: int
    batch: int
    losses: list[float]
    evaluations: list[dict[str, float]]
    model: dict[str, Any]
    optimizer: dict[str, Any]


def pointer(folder: Path) -> Path:
    """Return the file that names a folder's complete checkpoint, where it has one."""
    return folder / _POINTER


def save(folder: Path, progress: Progress, embedding: EmbeddingModule) -> None:
    """Write a checkpoint and remove the one before; collective, in a folder that all PEs see.

    Whoever interrupts it, or a loss of power, finds the one before.
    """
    import torch.distributed.checkpoint as dcp  # which takes most of a second: not of a program that only starts PEs

    writing = folder / _WRITING
    if _rank() == 0:
        shutil.rmtree(writing, ignore_errors=True)
        writing.mkdir(parents=True)
    _meet()
    with _quietly_alone():
        dcp.save(_tables(embedding), checkpoint_id=writing / _EMBEDDING, no_dist=_is_alone())
    _meet()
    if _rank() == 0:
        torch.save(dict(vars(progress)), writing / _FILE)
        for path in (writing / _FILE, writing / _EMBEDDING, writing):  # dcp.save has synced its files
            sync(path)
        # A step may be saved again by a resumed training.
        done = folder / f"step-{progress.step}.{secrets.token_hex(4)}"
        writing.rename(done)
        sync(folder)
        beside = folder / f"{_POINTER}.part"
        beside.write_text(done.name)
        put_in_place(beside, pointer(folder))
        for other in folder.iterdir():
            has_parts = any((other / part).exists() for part in (_FILE, _EMBEDDING))  # perhaps not all, if interrupted
            if other != done and _COMPLETE.fullmatch(other.name) and has_parts:
                shutil.rmtree(other, ignore_errors=True)
    _meet()


def load(folder: Path, identity: dict[str, Any], embedding: EmbeddingModule) -> Progress:
    """Read the latest checkpoint; collective. Tables and the states of their optimizer are taken over.

    What is returned is on the host, from where torch's optimizers take what they want on the device and leave counts of
    steps that they read on the host.

    Args:
        folder: of the checkpoints.
        identity: of this training.
        embedding: whose tables are loaded, once the identity is right.

    Raises:
        ValueError: there is none, it cannot be read, or it is of another training.
    """
    import torch.distributed.checkpoint as dcp  # as above

    from .checkpoint_reading import PlainPlanner, PlainReader

    try:
        name = pointer(folder).read_text().strip()
    except FileNotFoundError as error:
        raise ValueError(f"there is no checkpoint in {folder}") from error
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{pointer(folder)} cannot be read: {error}") from error
    if not _COMPLETE.fullmatch(name):
        raise ValueError(
            f"{pointer(folder)} names {name!r}, which is no checkpoint of its folder: expected a name such as "
            "step-10.0123abcd; write that of a complete one there, or train again"
        )
    found = folder / name
    try:
        progress = Progress(**torch.load(found / _FILE, map_location="cpu", weights_only=True))
    except Exception as error:
        raise ValueError(f"{found} is no checkpoint of this program: {error}") from error
    changed = _changed("", progress.identity, identity)
    if changed:
        raise ValueError(f"{found} is of another training: {'; '.join(changed)}")
    tables = _tables(embedding)
    try:
        with _quietly_alone():
            reader = PlainReader(found / _EMBEDDING)
            dcp.load(tables, storage_reader=reader, planner=PlainPlanner(), no_dist=_is_alone())
    except dcp.CheckpointException as error:
        told = "; ".join(f"PE {rank}: {cause}" for rank, (cause, _) in sorted(error.failures.items()))
        raise ValueError(f"{found / _EMBEDDING} cannot be loaded into these tables: {told}") from error
    embedding.load_state_dict(tables["tables"])
    embedding.optimizer.load_state_dict(tables["optimizer"])
    return progress


def _changed(name: str, saved: Any, wanted: Any) -> list[str]:
    """Return the differences, each with its path of names."""
    if isinstance(saved, dict) and isinstance(wanted, dict):
        prefix = f"{name}." if name else ""
        told = [key for key in wanted if key in saved or key not in _ADDED]
        return [each for key in told for each in _changed(prefix + key, saved.get(key), wanted[key])]
    return [] if saved == wanted else [f"{name} {saved!r}, not {wanted!r}"]


def _tables(embedding: EmbeddingModule) -> dict[str, Any]:
    return {"tables": embedding.state_dict(), "optimizer": embedding.optimizer.state_dict()}


@contextlib.contextmanager
def _quietly_alone() -> Iterator[None]:
    """Keep torch from warning that one process is one process."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or uninitialized")
        yield


def _is_alone() -> bool:
    return not dist.is_initialized()


def _rank() -> int:
    return 0 if _is_alone() else dist.get_rank()


def _meet() -> None:
    if not _is_alone():
        dist.barrier()

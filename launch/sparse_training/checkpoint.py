"""A training's state in a file."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from persistent_ops.testing.output_files import put_in_place

__all__ = ["Checkpoint", "load", "save"]


@dataclass(frozen=True)
class Checkpoint:
    """The state that a training needs to continue as if it had not been interrupted.

    Attributes:
        identity: what decides the losses, and the text's digest.
        step: the next one.
        losses: of the steps so far.
        model: state dict.
        optimizer: state dict.
    """

    identity: dict[str, Any]
    step: int
    losses: list[float]
    model: dict[str, Any]
    optimizer: dict[str, Any]


def save(path: Path, checkpoint: Checkpoint) -> None:
    """Write a checkpoint; whoever interrupts it finds the one before."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_suffix(".part")  # of a run that was killed there, the next one's takes its place
    try:
        torch.save(dict(vars(checkpoint)), beside)
        put_in_place(beside, path)
    finally:
        beside.unlink(missing_ok=True)


def load(path: Path, identity: dict[str, Any], device: torch.device) -> Checkpoint:
    """Read a checkpoint.

    Args:
        path: of the file.
        identity: of this training.
        device: of its tensors.

    Raises:
        ValueError: there is none, it cannot be read, or it is of another training.
    """
    try:
        found = Checkpoint(**torch.load(path, map_location=device, weights_only=True))
    except FileNotFoundError as error:
        raise ValueError(
            f"--resume: there is no checkpoint {path}; leave --resume out, or pass its --output"
        ) from error
    except Exception as error:
        raise ValueError(f"--resume: {path} is no checkpoint of this program: {error}") from error
    changed = [name for name in identity if found.identity.get(name) != identity[name]]
    if changed:
        told = ", ".join(f"{name} {found.identity.get(name)!r}, not {identity[name]!r}" for name in changed)
        raise ValueError(f"--resume: {path} is of another training: {told}")
    return found

"""The exceptions that users of persistent_ops can meet."""

from __future__ import annotations

import copy
from typing import TypeVar

__all__ = [
    "BackendUnavailableError",
    "BootstrapError",
    "CapacityError",
    "CompileError",
    "ContractMismatchError",
    "NotSymmetricError",
    "PeerLostError",
    "PeerTimeoutError",
    "PersistentOpsError",
    "SymmetricHeapError",
    "to_raise",
]

_Error = TypeVar("_Error", bound=Exception)


def to_raise(error: _Error) -> _Error:
    """Return an error, which somebody keeps, such as it may be raised.

    One that is raised has the frames of all who called, and so their tensors and CUDA graphs. Where one of them has the
    error in turn, these would live until garbage is collected: in the middle of a capture, perhaps.
    """
    again = copy.copy(error)
    again.__cause__ = error.__cause__
    again.__suppress_context__ = error.__suppress_context__
    return again


class PersistentOpsError(RuntimeError):
    """Base class of the errors of joining, launching, compiling and memory. What an argument has wrong is a TypeError,
    a ValueError or an IndexError."""


class BootstrapError(PersistentOpsError):
    """The processing elements (PEs) of a job could not find each other, or disagree about the job."""


class BackendUnavailableError(BootstrapError):
    """The backend that was asked for cannot run on this machine."""


class CompileError(PersistentOpsError):
    """A kernel could not be compiled; the message carries the command and the compiler's output."""


class SymmetricHeapError(PersistentOpsError):
    """The symmetric heap is exhausted, or its PEs disagree about an allocation."""


class CapacityError(PersistentOpsError):
    """A result has more rows, or a message more lookups, than there is room for; nothing of it was written."""


class NotSymmetricError(ValueError):
    """A tensor that must live in this PE's symmetric heap does not (any more)."""


class PeerTimeoutError(PersistentOpsError):
    """A peer did not answer within the time-out.

    Outputs are poisoned with NaN. The message says whether what is changed in place, as tables are by their optimizer,
    may be half changed.
    """


class PeerLostError(PeerTimeoutError):
    """A peer that was waited for has ended, or this PE was interrupted; what that leaves is as in PeerTimeoutError."""


class ContractMismatchError(PersistentOpsError):
    """The PEs launched operators that do not match: another operator, shape, dtype, option or order of calls."""

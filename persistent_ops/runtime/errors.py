"""The exceptions of persistent_ops."""

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
    """Return a copy of a stored error, to be raised.

    A raised error holds the frames of all callers, and so their tensors and CUDA graphs. If one of these refers to the
    error, they would live until the next garbage collection, possibly in the middle of a capture.
    """
    again = copy.copy(error)
    again.__cause__ = error.__cause__
    again.__suppress_context__ = error.__suppress_context__
    return again


class PersistentOpsError(RuntimeError):
    """Base class of errors of joining, launching, compiling and memory.

    Invalid arguments raise TypeError, ValueError or IndexError.
    """


class BootstrapError(PersistentOpsError):
    """The processing elements (PEs) of a job did not find each other, or disagree about the job."""


class BackendUnavailableError(BootstrapError):
    """The requested backend cannot run on this machine."""


class CompileError(PersistentOpsError):
    """A kernel could not be compiled. The message has the command and the compiler's output."""


class SymmetricHeapError(PersistentOpsError):
    """The symmetric heap is exhausted, or its PEs disagree about an allocation."""


class CapacityError(PersistentOpsError):
    """A result has more rows, or a message has more lookups, than its buffers hold; nothing was written."""


class NotSymmetricError(ValueError):
    """A tensor that must be in this PE's symmetric heap is not, or no longer is."""


class PeerTimeoutError(PersistentOpsError):
    """A peer did not answer within the time-out.

    Outputs are poisoned with NaN. The message says whether tensors that a launch changes in place, such as an
    optimizer's tables, may be partly updated.
    """


class PeerLostError(PeerTimeoutError):
    """A peer that this PE waited for has ended, or this PE was interrupted. Outputs are as for PeerTimeoutError."""


class ContractMismatchError(PersistentOpsError):
    """The PEs launched operators that do not match: another operator, shape, dtype, option or order of calls."""

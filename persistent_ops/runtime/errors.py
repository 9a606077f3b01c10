"""The exceptions that users of persistent_ops can meet."""

from __future__ import annotations

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
]


class PersistentOpsError(RuntimeError):
    """Base class of every error that the package raises on its own account."""


class BootstrapError(PersistentOpsError):
    """The processing elements (PEs) of a job could not find each other, or disagree about the job."""


class BackendUnavailableError(BootstrapError):
    """The backend that was asked for cannot run on this machine."""


class CompileError(PersistentOpsError):
    """A kernel could not be compiled; the message carries the command and the compiler's output."""


class SymmetricHeapError(PersistentOpsError):
    """The symmetric heap is exhausted, or its PEs disagree about an allocation."""


class CapacityError(PersistentOpsError):
    """A result has more rows than the room that the caller gave it; nothing was written."""


class NotSymmetricError(ValueError):
    """A tensor that must live in this PE's symmetric heap does not (any more)."""


class PeerTimeoutError(PersistentOpsError):
    """A peer did not answer within the time-out; the operator's output is poisoned with NaN."""


class PeerLostError(PeerTimeoutError):
    """A peer that was waited for has ended, or this PE was interrupted; the operator's output is poisoned with NaN."""


class ContractMismatchError(PersistentOpsError):
    """The PEs launched operators that do not match: another operator, shape, dtype or option."""

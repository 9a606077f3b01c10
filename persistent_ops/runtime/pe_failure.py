"""The reason why a PE that `launch` started has no result, and the first cause among several failures."""

from __future__ import annotations

from collections.abc import Iterable

from torch.distributed import DistError

from persistent_ops.runtime.errors import BootstrapError, PeerTimeoutError

__all__ = ["Failure", "RemoteTraceback", "first_cause", "text_of"]


def text_of(error: BaseException) -> str:
    """Return an error's text, even if its `__str__` raises: the other information must not be lost."""
    try:
        return str(error)
    except Exception as problem:
        return f"(its text cannot be had: {type(problem).__name__})"


class RemoteTraceback(Exception):
    """Carries a PE's traceback as text, to be shown as the cause of its exception."""

    def __str__(self) -> str:
        return str(self.args[0])


class Failure:
    """Why one PE has no result."""

    def __init__(self, rank: int, error: BaseException, *, killed: bool = False) -> None:
        self.rank = rank
        self.error = error
        # A PE that died, or failed in its own code, explains the ones that then missed it.
        self.order = 0 if killed else 2 if _missed_a_peer(error) else 1


def _missed_a_peer(error: BaseException) -> bool:
    is_gloo = type(error) is RuntimeError and "/gloo/transport/" in text_of(error)  # Gloo has no type of its own
    return is_gloo or isinstance(error, (BootstrapError, PeerTimeoutError, DistError))


def first_cause(failures: Iterable[Failure]) -> BaseException:
    """Return the error that explains the others, of the earliest failures."""
    return min(failures, key=lambda failure: failure.order).error

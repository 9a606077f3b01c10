"""Hints of the host to running launches: which PEs have ended, which prepare a launch, and whether to give up."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable, Iterator

from .backend import Backend
from .compile.description import COMM, describe

__all__ = ["HostHints"]


class HostHints:
    """The hints of one workspace.

    Args:
        backend: of the workspace.
        rank: of this PE.
        size: of the world.

    Attributes:
        words: in device memory, one for each PE.
        words_alone: the same of a team of this PE alone: always 0.
        gives_up: whether launches that wait leave, since a peer is in another call.
        lock: is held where `gives_up` changes.
    """

    def __init__(self, backend: Backend, rank: int, size: int) -> None:
        self._backend, self._rank = backend, rank
        self.words = backend.private_words(size)
        self.words_alone = backend.private_words(1)
        self.gives_up = False
        self.lock = threading.Lock()
        self._said = [0] * size  # in the words
        self._lost: frozenset[int] = frozenset()
        self._preparing: frozenset[int] = frozenset()
        self._is_interrupted = False

    def peers_changed(self, lost: Iterable[int], preparing: Iterable[int]) -> None:
        """Let launches know which PEs have ended, and which prepare a launch; from any thread."""
        with self.lock:
            self._lost, self._preparing = frozenset(lost), frozenset(preparing)
            self.tell()

    @contextlib.contextmanager
    def interrupted(self) -> Iterator[None]:
        """Make waiting launches give up while this context is open; `recover` repairs that. From any thread."""
        self._set_interrupted(True)
        try:
            yield
        finally:
            self._set_interrupted(False)

    def _set_interrupted(self, is_interrupted: bool) -> None:
        with self.lock:
            self._is_interrupted = is_interrupted
            self.tell()

    def tell(self) -> None:
        """Store what has changed in device memory; the lock is held."""
        own = {self._rank} if self._is_interrupted or self.gives_up else set()
        constants = describe(COMM).constants
        lost, preparing = constants["kLost"], constants["kPreparing"]
        for pe, before in enumerate(self._said):
            said = lost * (pe in self._lost or pe in own) | preparing * (pe in self._preparing)
            if said != before:
                self._backend.set_word(self.words, pe, said)
                self._said[pe] = said

"""Find PEs that wait for each other in launches of different workspaces.

A workspace sees only its own flags. But the launches of all workspaces of a PE have one order, the order of its calls
(`StreamOrder`), and this order is the same on all PEs. So of two PEs, one has begun a prefix of what the other has
begun. If each has begun a launch that the other has not, they have made different calls, and neither launch ends.

A launch begins with credit for the peers, which carries its epoch. So a PE has in its memory what its peers have begun.
The peers publish in the mailbox what they have seen of this PE. Both may be old, which does no harm. But all of it must
be from one time, so it counts only after it has stayed the same for a second.

Two cases are left out: workspaces that run beside others, which have no common order with them, and launches after a
failure, which give no credit.
"""

from __future__ import annotations

import itertools
import struct
from array import array
from collections.abc import Callable, Mapping, Sequence

from .backend import Peeked
from .credits import OtherCall
from .workspace import Workspace

__all__ = ["CallOrder"]

_STILL_LOOKS = 4  # four a second
_LOOKS_BEFORE_GIVING_UP = 3  # so that all PEs know why, before the first one leaves its launch


class CallOrder:
    """What one PE knows of the order of calls; for the thread of `PeerWatch` alone.

    Args:
        rank: of this PE.
        workspaces: returns all that share an order, as all PEs number them.
        peek: of the backend.
    """

    def __init__(
        self,
        rank: int,
        workspaces: Callable[[], Sequence[Workspace]],
        peek: Callable[[Sequence[Peeked]], bool],
    ) -> None:
        self._rank = rank
        self._workspaces = workspaces
        self._peek = peek
        self._begun: list[list[int]] = []  # by workspace and peer: epochs
        self._num_still = 0
        self._num_differing = 0
        self._told = b""

    def look(self) -> bytes:
        """Look at what the peers have begun; return the report for them."""
        workspaces = self._workspaces()
        is_known = self._peek([workspace.credits.piece for workspace in workspaces])
        begun = [workspace.credits.begun() for workspace in workspaces]
        self._num_still = self._num_still + 1 if is_known and begun == self._begun else 0
        self._begun = begun
        if self._num_still == _STILL_LOOKS:
            self._told = array("q", itertools.chain.from_iterable(begun)).tobytes()
        return self._told

    def compare(self, told: Mapping[int, bytes]) -> None:
        """Let launches give up that wait for a peer in another call; call `look` first.

        Args:
            told: the last result of each peer's `look`.
        """
        found = []
        if self._num_still >= _STILL_LOOKS and not any(workspace.has_failed for workspace in self._workspaces()):
            found = [each for peer, raw in told.items() if raw for each in self._differing(peer, raw)]
        self._num_differing = self._num_differing + 1 if found else 0
        for workspace, epoch, call in found:
            workspace.is_in_another_call(call, epoch, gives_up=self._num_differing > _LOOKS_BEFORE_GIVING_UP)

    def _differing(self, peer: int, told: bytes) -> list[tuple[Workspace, int, OtherCall]]:
        """Return where this PE waits for a peer in another call: the workspace, its first epoch, and the calls."""
        ahead, behind = [], []
        for place, (workspace, theirs) in enumerate(zip(self._workspaces(), self._begun, strict=False)):
            at = 8 * (place * len(theirs) + self._rank)
            if at >= len(told):
                break  # the peer has not this workspace yet
            (mine,) = struct.unpack_from("=q", told, at)
            first = workspace.first_epoch  # below it is what came before the last recovery
            own, other = max(mine, first), max(theirs[peer], first)
            if own > other:
                ahead.append((workspace, first, workspace.credits.own_contract(own)))
            elif other > own:
                behind.append(workspace.credits.contract_of(peer))
        return [(workspace, first, OtherCall(peer, own, behind[0])) for workspace, first, own in ahead if behind]

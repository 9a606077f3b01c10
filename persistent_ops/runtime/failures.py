"""Turn the ErrorRecord of a launch that was given up into an exception."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

from .backend import Backend
from .call_numbers import CallNumbers
from .changes import Changes
from .compile.description import COMM, describe
from .contract import Contract, LaunchKind, describe as describe_contract, difference, kind_of
from .credits import Credits, OtherCall
from .errors import ContractMismatchError, PeerLostError, PeerTimeoutError, PersistentOpsError

__all__ = ["Failures"]

_MAX_CONTRACTS = 1024  # whose values are kept for messages
_KINDS = {"kTimeout": "timeout", "kContractMismatch": "contract", "kPeerLost": "lost", "kReportedByPeer": "reported"}


class Failures:
    """See the module.

    Args:
        backend: of the workspace.
        rank: of this PE.
        credits, changes, calls, is_capturing: of the workspace.

    Attributes:
        record: the ErrorRecord, which the host sees; its `state` is 0 where no launch was given up.
        is_asynchronous: whether the host continues while a launch waits.
    """

    def __init__(
        self,
        backend: Backend,
        rank: int,
        credits: Credits,
        changes: Changes,
        calls: CallNumbers,
        is_capturing: Callable[[], bool],
    ) -> None:
        description = describe(COMM)
        constants, kind = description.constants, description.structs["ErrorRecord"]
        self._kinds = {constants[name]: each for name, each in _KINDS.items()}
        self._epoch_shift, self._blame_shift = constants["kEpochShift"], constants["kBlameKindShift"]
        self._memory = backend.host_visible_bytes(ctypes.sizeof(kind))
        self.record: Any = kind.from_address(self._memory.data_ptr())
        self.is_asynchronous = backend.name == "cuda"
        self._rank, self._credits, self._changes, self._calls = rank, credits, changes, calls
        self._is_capturing = is_capturing
        self._contracts: dict[tuple[int, ...], Contract] = {}

    def remember(self, contract: Contract, words: tuple[int, ...]) -> None:
        """Keep a contract of a plan of this PE's, for messages."""
        if len(self._contracts) >= _MAX_CONTRACTS:
            self._contracts.clear()
        self._contracts[words] = contract

    def describe(self, other_call: OtherCall | None) -> PersistentOpsError:
        """Return the exception; `other_call`: the host's finding about a peer, see `CallOrder`."""
        error = self.record
        kind, me = self._kinds[error.kind], self._rank
        operator = kind_of(error.own_contract[0])
        assert operator is not None
        remedy = self._remedy(operator)
        if kind == "contract":
            return ContractMismatchError(f"{self._mismatch(error.other_side, tuple(error.peer_contract))} {remedy}")
        if kind == "reported":
            return self._describe_report(remedy, other_call)
        launch = self._launch_of(operator)
        if kind == "lost" and error.peer == me:
            if other_call is not None:
                return self._describe_other_call(other_call, remedy)
            return PeerLostError(f"PE {me} was interrupted while it waited in {launch}. {remedy}")
        peer = error.peer
        has_begun = any(error.peer_contract)  # else no credit of this epoch has come, with which every launch begins
        what = operator.waited_for(error.phase, error.index) if has_begun else f"PE {peer} has not called the operator"
        waited = f"In {launch}, PE {me} waited {error.waited_ns / 1e9:.2f} s for PE {peer}: {what}"
        epochs = f" (expected epoch {error.epoch}, saw {error.seen >> self._epoch_shift})"
        if kind == "lost":
            return PeerLostError(
                f"{waited}{epochs}. PE {peer} has ended, or has left by po.finalize() or a failed po.recover(): look "
                f"at its output.{self._what_is_lost(operator)}"
            )
        room = "" if has_begun else self._lack_of_room(me)
        advice = f"Find out what PE {peer} does, or pass a longer operator_timeout to po.init()."
        return PeerTimeoutError(f"{waited}{room or epochs}. {advice} {remedy}")

    def _what_is_lost(self, operator: LaunchKind) -> str:
        """Describe the outputs and inputs of launches whose peer has ended."""
        output, at_risk = "" if operator.changes else " The output is NaN.", self._changes.at_risk()
        return f"{output}{at_risk and ' '}{at_risk}"

    def _lack_of_room(self, waiting: int) -> str:
        """Say what else keeps a PE's launch from beginning; `waiting`: the PE that waits for it."""
        if not self.is_asynchronous:
            return ""  # threads find room, or their PE says that they do not
        return (
            ", or its launch found no room on its GPU beside another library's collective (NCCL's), which waited there "
            f"for PE {waiting}: let all PEs meet the two in one order (po.nn.order_all_reduce), or leave room for both "
            "(po.nn.leave_room)"
        )

    def _launch_of(self, operator: LaunchKind) -> str:
        """Return the call that this PE had launched."""
        number = self.record.own_contract[-1]
        call = f", {operator.call.replace('_', ' ')} {self._calls.show(number)}" if number else ""
        return operator.title + call

    def _remedy(self, operator: LaunchKind) -> str:
        """Describe the state that a launch leaves after it was given up, and the remedy."""
        recovery = "all PEs must call po.recover() before the next call."
        at_risk = self._changes.at_risk()
        left = f"{recovery[0].upper()}{recovery[1:]}" if operator.changes else f"The output is NaN; {recovery}"
        return f"{left}{at_risk and ' '}{at_risk}"

    def _mismatch(self, side: int, theirs: tuple[int, ...], finder: str = "") -> str:
        """Return the difference between this PE's call and another PE's call, in the caller's words.

        Args:
            side: the PE.
            theirs: its contract.
            finder: a sentence on who has found it, where that is another PE.
        """
        error, me, show = self.record, self._rank, self._calls.show
        mine = tuple(error.own_contract)
        own = self._known(mine)
        pes, order = f"PE {me} and PE {side}", "Make the same calls in the same order on all PEs."
        kind = kind_of(mine[0])
        assert kind is not None
        found = difference(mine, own, theirs, me, side, show)
        if found is None:
            calls = [describe_contract(words, own, show) for words in (mine, theirs)]
            return f"{pes} made different calls: {calls[0]} on PE {me}, {calls[1]} on PE {side}.{finder} {order}"
        if found.arguments:
            told = f"{pes} called {kind.title} with different arguments: {found.arguments}.{finder}"
            return f"{told} Pass the same on all PEs, in the same order of calls."
        if found.call:
            return f"{pes} launched {kind.title} for different calls: {found.call}.{finder} {order}"
        told = f"{pes} launched {kind.title} from different plans in epoch {error.epoch}: {found.internals}.{finder}"
        return f"{told} Set the same tuning, and replay the same CUDA graphs in the same order, on all PEs."

    def _known(self, words: tuple[int, ...]) -> Contract | None:
        """Return the contract of a plan of this PE's, which has no number of a call; a launch may have set one."""
        return self._contracts.get(words) or self._contracts.get((*words[:-1], 0))

    def _side_to_tell(self) -> tuple[int, tuple[int, ...]]:
        """Return a side of a reported mismatch, and its contract, of zeros where that is not here yet."""
        error = self.record
        told = error.other_side, tuple(error.peer_contract)
        if any(told[1]) or self._is_capturing():  # a capture allows no copy
            return told
        # The report was faster than the credits; the credits have arrived by now.
        late = [
            (pe, self._credits.launched_by(pe, error.epoch)) for pe in (error.peer, error.index) if pe != self._rank
        ]
        return next((side for side in late if any(side[1]) and side[1] != tuple(error.own_contract)), told)

    def _describe_report(self, remedy: str, other_call: OtherCall | None) -> PersistentOpsError:
        """Describe a failure that another PE met first and reported to this PE."""
        error, me = self.record, self._rank
        blamed = f"PE {error.peer}" + (" (this PE)" if error.peer == me else "")
        operator = kind_of(error.own_contract[0])
        assert operator is not None
        left = f"so PE {me} left its launch of {self._launch_of(operator)} too"
        reason = self._kinds[error.seen >> self._blame_shift & 3]
        if reason == "contract":
            finder = f" PE {error.index} found a mismatch with {blamed}, {left}."
            side, theirs = self._side_to_tell()
            if any(theirs) and theirs != tuple(error.own_contract):
                return ContractMismatchError(f"{self._mismatch(side, theirs, finder)} {remedy}")
            return ContractMismatchError(f"{finder[1:]} The error on PE {error.index} says what differs. {remedy}")
        if reason == "lost" and other_call is not None:  # which the other PE has found first
            return self._describe_other_call(other_call, remedy)
        if reason == "lost":
            if error.peer == error.index:
                return PeerLostError(f"PE {error.index} was interrupted, {left}. {remedy}")
            advice = f"Look at the output of PE {error.peer}, and start the job again.{self._what_is_lost(operator)}"
            return PeerLostError(f"PE {error.index} found that {blamed} has ended, {left}. {advice}")
        gave_up = f"PE {error.index} gave up on epoch {error.seen >> self._epoch_shift} because of {blamed}, {left}"
        if error.peer != me or not self.is_asynchronous:
            return PeerTimeoutError(f"{gave_up}. {remedy}")
        cause = f"PE {me} called the operator too late{self._lack_of_room(error.index)}"
        return PeerTimeoutError(f"{gave_up}. {cause}. {remedy}")

    def _describe_other_call(self, other: OtherCall, remedy: str) -> ContractMismatchError:
        me, peer, show = self._rank, other.peer, self._calls.show
        mine, theirs = (describe_contract(words, self._known(words), show) for words in (other.mine, other.theirs))
        return ContractMismatchError(
            f"PE {me} and PE {peer} wait for each other in different calls: PE {me} in {mine}, PE {peer} in {theirs}. "
            f"Make the same calls in the same order on all PEs. {remedy}"
        )

"""A bound for the host's wait behind steps that are replays of a CUDA graph.

Torch's watchdog looks after NCCL's work where it is launched by a call, and knows nothing of it in a replay: there it
waits for a peer that is stuck for ever, and a host that synchronises waits with it.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
import traceback
from collections import deque
from collections.abc import Callable
from typing import NoReturn, Protocol

import torch

import persistent_ops as po
from persistent_ops.runtime.bootstrap.connection import fail_all
from persistent_ops.runtime.bootstrap.process_group import abort_process_group

__all__ = ["Peers", "StepWatch"]

# Behind the operators' own time-out, so that a launch that gives up is the first to: it knows for whom it has waited.
_MARGIN_S = 10.0
_ABORT_S = 30.0  # for torch to end NCCL's kernels, and again for what stands behind them
_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 50e-6, 0.05


class Peers(Protocol):
    """What is known of the other PEs; `World` has it."""

    @property
    def lost_peers(self) -> frozenset[int]:
        """Those that have ended."""

    @property
    def preparing_peers(self) -> frozenset[int]:
        """Those that make ready for a launch, which may take long."""


class StepWatch:
    """Waits for steps, each at most so long behind the one before; then it ends what they wait for, and raises.

    Args:
        peers: of this PE; time in which one prepares a launch is not counted.
        device: on which the steps are.
        seconds: that operators wait for a peer; a step gets a little more.
        check: raises what launches have reported.
        mark: returns what tells whether all that has been launched on the current stream is over; None for an event
            on a GPU, while on the host it is over when a call returns.
        abort: ends NCCL's kernels, in about so many seconds.
    """

    def __init__(
        self,
        peers: Peers,
        device: torch.device,
        seconds: float,
        check: Callable[[], None],
        *,
        mark: Callable[[], Callable[[], bool]] | None = None,
        abort: Callable[[float], None] = abort_process_group,
    ) -> None:
        self._peers = peers
        self._seconds = seconds
        self._check = check
        self._mark = mark or (_mark_stream if device.type == "cuda" else _mark_nothing)
        self._abort = abort
        self._under_way: deque[tuple[int, Callable[[], bool]]] = deque()

    def launched(self, step: int) -> None:
        """Take note of a step whose work has just been launched, all of it on the current stream."""
        self._under_way.append((step, self._mark()))

    def wait(self) -> None:
        """Wait for the steps under way, and raise what their launches have reported.

        Raises:
            PeerLostError: a step has not ended, and a peer has.
            PeerTimeoutError: a step has not ended in time.
            PersistentOpsError: see `check`.
        """
        try:
            self._await_steps()
        except (po.PeerTimeoutError, KeyboardInterrupt, SystemExit) as error:
            self._end_steps(error)  # else NCCL's kernels would keep the process from leaving, also behind Ctrl-C
            try:
                self._check()
            except po.PersistentOpsError as reported:  # by a launch: it names the peer, and `error` says what to do
                raise error from reported
            raise
        self._check()

    def close(self) -> None:
        """See that nothing is under way, where a training ends early: what follows waits for the device."""
        if self._under_way:
            with contextlib.suppress(RuntimeError):  # the error that ends the training is the one to be told
                self.wait()

    def _await_steps(self) -> None:
        waited, last, lost_at = 0.0, time.monotonic(), None
        while self._under_way:
            step, is_over = self._under_way[0]
            if is_over():
                self._under_way.popleft()
                waited, last = 0.0, time.monotonic()
                continue
            now = time.monotonic()
            if not self._peers.preparing_peers:
                waited += now - last
            last = now
            lost = sorted(self._peers.lost_peers)
            if lost and lost_at is None:
                lost_at = now
            if lost and lost_at is not None and now - lost_at > _MARGIN_S:
                raise po.PeerLostError(
                    f"step {step} has not ended, and PE {', '.join(map(str, lost))} has: look at its output, and go on "
                    "from the last checkpoint with --resume"
                )
            if waited > self._seconds + _MARGIN_S:
                raise po.PeerTimeoutError(
                    f"step {step} has not ended within {self._seconds + _MARGIN_S:g} s: a peer is stuck. Look at the "
                    "output of all PEs, pass a longer --timeout if one was only slow, and go on from the last "
                    "checkpoint with --resume; without --graph torch names the sum that waits"
                )
            # In proportion, so that it adds little to the time that a step is found to take.
            time.sleep(min(max(waited / 100, _SHORTEST_PAUSE_S), _LONGEST_PAUSE_S))

    def _end_steps(self, error: BaseException) -> None:
        """End what the steps wait for; where that does not help, end the process, which could not leave by itself."""
        try:
            self._abort(_ABORT_S)
            until = time.monotonic() + _ABORT_S
            while not all(is_over() for _, is_over in self._under_way):
                if time.monotonic() > until:
                    _end_process(error)
                time.sleep(_LONGEST_PAUSE_S)
        except Exception as failure:
            failure.__cause__ = error
            _end_process(failure)
        self._under_way.clear()


def _mark_stream() -> Callable[[], bool]:
    event = torch.cuda.Event()
    event.record()
    return event.query


def _mark_nothing() -> Callable[[], bool]:
    return lambda: True


def _end_process(error: BaseException) -> NoReturn:
    traceback.print_exception(error)
    print("error: NCCL's kernels could not be ended: this process ends without leaving its world", file=sys.stderr)
    fail_all(f"{type(error).__name__}: {error}")
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)

"""A bound for the host's wait for training steps that are replays of a CUDA graph.

Torch's watchdog watches NCCL's work where a call launches it. It does not see NCCL's work in a replay. There a stuck
peer blocks that work for ever, and so also a host that synchronizes.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
import traceback
from collections import deque
from collections.abc import Callable
from typing import NoReturn

import torch

from ..runtime.bootstrap.connection import fail_all
from ..runtime.bootstrap.process_group import abort_process_group
from ..runtime.errors import PeerLostError, PeerTimeoutError, PersistentOpsError
from ..runtime.world import current

__all__ = ["StepWatchdog"]

# After the operators' own time-out: a launch that gives up knows for whom it has waited, so it reports first.
_MARGIN_S = 10.0
_ABORT_S = 30.0  # for torch to end NCCL's kernels, and again for what waits for them
_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 50e-6, 0.05


class StepWatchdog:
    """Bounds the wait for training steps that are replays of a CUDA graph, and aborts the collectives that they wait
    for.

    Call `launched` after each step, `wait` where the host needs results, and `close` at the end of the training. A step
    may take 10 s more than `operator_timeout` (see `po.init`) after the step before it. Time in which a peer prepares a
    launch does not count. If a step takes longer, or a peer has ended, the watchdog aborts NCCL's process groups of
    this PE, since their kernels would keep the process from ending, and raises an error. Ctrl-C during a wait does the
    same. If the abort does not end the steps within 60 s, this process ends with exit code 1 and reports that to the
    other PEs.
    """

    def __init__(self) -> None:
        self._world = current()
        self._seconds = self._world.workspace.timeout + _MARGIN_S
        self._under_way: deque[tuple[int, Callable[[], bool]]] = deque()

    def launched(self, step: int) -> None:
        """Record the number of a step whose work has just been launched, all of it on the current stream."""
        mark = _mark_stream if self._world.backend.name == "cuda" else _mark_nothing
        self._under_way.append((step, mark()))

    def wait(self) -> None:
        """Wait for the recorded steps, and raise the errors that their launches have reported.

        Raises:
            PeerLostError: a step has not ended, and a peer has.
            PeerTimeoutError: a step has not ended in time.
            PersistentOpsError: see `po.check`.
        """
        try:
            self._await_steps()
        except (PeerTimeoutError, KeyboardInterrupt, SystemExit) as error:
            self._end_steps(error)  # else NCCL's kernels would keep the process from leaving, also after Ctrl-C
            try:
                self._world.check()
            except PersistentOpsError as reported:  # by a launch: it names the peer, and `error` says what to do
                raise error from reported
            raise
        self._world.check()

    def close(self) -> None:
        """Make sure that no step is running, also if the training ends early: the code after it waits for the
        device.
        """
        if self._under_way:
            with contextlib.suppress(RuntimeError):  # the error that ends the training is the one to report
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
            if not self._world.preparing_peers:
                waited += now - last
            last = now
            lost = sorted(self._world.lost_peers)
            if lost and lost_at is None:
                lost_at = now
            if lost and lost_at is not None and now - lost_at > _MARGIN_S:
                raise PeerLostError(
                    f"step {step} has not ended, and PE {', '.join(map(str, lost))} is no longer running. Look at that "
                    "PE's output, and resume from the last checkpoint."
                )
            if waited > self._seconds:
                raise PeerTimeoutError(
                    f"step {step} has not ended within {self._seconds:g} s: a peer is stuck. Look at the output of all "
                    "PEs, and resume from the last checkpoint; if a PE was only slow, pass a longer operator_timeout "
                    "to po.init()."
                )
            # In proportion, so that it adds little to the time that a step is found to take.
            time.sleep(min(max(waited / 100, _SHORTEST_PAUSE_S), _LONGEST_PAUSE_S))

    def _end_steps(self, error: BaseException) -> None:
        """End the work that the steps wait for. If that fails, end the process, which could not leave by itself."""
        try:
            abort_process_group(_ABORT_S)
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
    sys.stderr.write("error: NCCL's kernels could not be ended: this process ends without leaving its world\n")
    fail_all(f"{type(error).__name__}: {error}")
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)

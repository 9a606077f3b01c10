"""The end of NVSHMEM in this process: it waits for all PEs, without a time-out.

If some PEs do not come, it never returns. NVSHMEM then runs until the process ends, which frees its resources. Until
then it cannot be started again.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable
from contextlib import nullcontext

from .bounded import refuse_after, within
from .errors import BootstrapError
from .nvshmem_turns import turn_to_end

__all__ = ["end", "leave_out", "refuse_restart", "runs_on"]

_log = logging.getLogger("persistent_ops")
_END = "NVSHMEM's end"
_CLOSE_S = 10.0  # for that: peers may die on the way
_TURN_S = 60.0  # for jobs that start on a GPU that is shared: a start takes one to three, and many may be waiting
_REMEDY = "start this process again"

_is_left_running = False


def runs_on() -> bool:
    """Return whether `end` has left NVSHMEM running in this process."""
    return _is_left_running


def refuse_restart() -> None:
    """Raise BootstrapError where NVSHMEM has not come to its end in this process."""
    refuse_after(1, _END, _REMEDY)
    if _is_left_running:
        raise BootstrapError(
            f"NVSHMEM is still running in this process, from a world that ended without its peers; {_REMEDY}"
        )


def leave_out() -> None:
    """Leave NVSHMEM running, because it would wait for peers that do not come, and say so."""
    global _is_left_running
    _is_left_running = True
    _log.warning(
        "persistent_ops: NVSHMEM's end is left out, because it would wait for peers that have not come to leave the "
        "world: what it holds is given back when this process ends, and until then it cannot start here again"
    )


def end(
    free: Callable[[], None], finalize: Callable[[], None], *, heap: object, is_alone: bool, shares_gpu: bool
) -> None:
    """End NVSHMEM; collective. What goes wrong is logged and not raised: nothing may keep a process from leaving.

    Args:
        free: gives back the heap; called in another thread, as `finalize` is.
        finalize: NVSHMEM's.
        heap: what `free` gives back.
        is_alone: some peers have not come to leave the world: nothing is called, since it would wait for them.
        shares_gpu: whether PEs of other jobs may be on this GPU.
    """
    if is_alone:
        leave_out()
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(heap))  # else released at exit, where that waits for peers too
        return

    def free_and_finalize() -> None:
        free()
        with turn_to_end(_TURN_S) if shares_gpu else nullcontext():
            finalize()

    try:
        within(_CLOSE_S + (_TURN_S if shares_gpu else 0.0), free_and_finalize, _END)
    except Exception as error:
        _log.warning("persistent_ops: NVSHMEM reported an error while closing: %s", error)

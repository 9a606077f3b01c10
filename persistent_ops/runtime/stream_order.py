"""The order of launches from several streams: one launch on a workspace is in flight at a time."""

from __future__ import annotations

from typing import NamedTuple

import torch

__all__ = ["StreamOrder", "capture_of", "is_foreign"]


class _Last(NamedTuple):
    """A launch to be ordered behind.

    Attributes:
        handle: of its stream.
        stream: its stream, where that is torch's; None otherwise.
        event: recorded behind it, where the stream is not torch's: that may be gone by now, and another one have its
            handle.
    """

    handle: int
    stream: torch.cuda.Stream | None
    event: torch.cuda.Event | None


class StreamOrder:
    """What earlier launches on a workspace leave for the next one to be ordered behind.

    Eager launches follow one another, and so do the launches of one capture, where the event becomes an edge of the
    graph. Nothing connects two captures, or a capture and eager launches: CUDA allows no such edge (it invalidates the
    capture), and none is needed before the replay, which its stream orders like any other use of a graph's memory.

    A stream of torch's own lives as long as the process: an event is recorded there when a launch on another stream has
    to wait, and launches that stay on it cost nothing. Any other one (`torch.cuda.ExternalStream`) may be destroyed as
    soon as the launch has been made, and is not touched later: an event is recorded behind every launch on it.

    Args:
        device: whose current stream launches go to.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._eager: _Last | None = None
        self._captured: dict[int, _Last] = {}  # by the capture's number
        self._foreign: tuple[torch.cuda.Stream, int] | None = None  # of a launch to come, and its capture's number

    def follow(self, stream: int) -> None:
        """Order what comes next on the current stream, whose handle is `stream`, behind the last launch.

        `launched` is to be called behind the launch.

        Raises:
            RuntimeError: the last eager launch is on a stream of torch's that has begun a capture since, so nothing
                outside of that capture can wait for it.
        """
        self._foreign = None
        if torch.cuda.is_current_stream_capturing():
            here = torch.cuda.current_stream(self._device)
            capture = capture_of(stream)
            last = self._captured.get(capture)
            if last is None:
                self._forget_captures(stream)
            elif last.handle != stream or last.event is not None:
                _wait(here, last)  # it is still in this capture: a stream leaves one with the capture's end alone
            if is_foreign(here):
                self._foreign = here, capture
            else:
                self._captured[capture] = _Last(stream, here, None)
        elif self._eager is None or self._eager.handle != stream or self._eager.event is not None:
            here = torch.cuda.current_stream(self._device)
            if self._eager is not None:
                if self._eager.event is None and capture_of(self._eager.handle):
                    # An event recorded there now would draw this stream into the capture.
                    raise RuntimeError(
                        "the last launch outside of a CUDA graph was on a stream that is being captured now, and this "
                        "one on another stream cannot wait for it: launch before that capture begins, or after its end"
                    )
                _wait(here, self._eager)
            if is_foreign(here):
                self._foreign = here, 0
            else:
                self._eager = _Last(stream, here, None)

    def launched(self) -> None:
        """Take note of the launch that `follow` was called for, where its stream may be gone before the next one."""
        if self._foreign is None:
            return
        (stream, capture), self._foreign = self._foreign, None
        last = _Last(stream.cuda_stream, None, _recorded(stream))
        if capture:
            self._captured[capture] = last
        else:
            self._eager = last

    def _forget_captures(self, stream: int) -> None:
        """Forget captures that are over, as `stream` has begun another one.

        Of a stream that may be gone that is known when its handle is met again; so their number is that of handles.
        """
        for number, last in list(self._captured.items()):
            is_over = last.handle == stream if last.event is not None else capture_of(last.handle) != number
            if is_over:
                del self._captured[number]


def is_foreign(stream: torch.cuda.Stream) -> bool:
    """Return whether a stream is none of torch's, which are never destroyed: its id in torch is then its handle."""
    return stream.cuda_stream != 0 and stream.stream_id == stream.cuda_stream


def _wait(stream: torch.cuda.Stream, last: _Last) -> None:
    event = last.event
    if event is None:
        assert last.stream is not None
        event = _recorded(last.stream)
    stream.wait_event(event)


def _recorded(stream: torch.cuda.Stream) -> torch.cuda.Event:
    event = torch.cuda.Event()
    event.record(stream)
    return event


def capture_of(stream: int) -> int:
    """Return the number of the capture that a stream is in, which no other capture has; 0 where it is in none."""
    from cuda.bindings import driver  # only where there are GPUs

    result, status, number, *_ = driver.cuStreamGetCaptureInfo(driver.CUstream(stream))
    if result != driver.CUresult.CUDA_SUCCESS:
        raise RuntimeError(f"the CUDA driver does not tell whether a stream is being captured: {result.name}")
    return 0 if status == driver.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_NONE else int(number)

"""The order of launches from several streams: one launch on a workspace is in flight at a time."""

from __future__ import annotations

import torch

__all__ = ["StreamOrder", "capture_of"]


class StreamOrder:
    """What earlier launches on a workspace leave for the next one to be ordered behind.

    Eager launches follow one another, and so do the launches of one capture, where the event becomes an edge of the
    graph. Nothing connects two captures, or a capture and eager launches: CUDA allows no such edge (it invalidates the
    capture), and none is needed before the replay, which its stream orders like any other use of a graph's memory.

    Args:
        device: whose current stream launches go to.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._eager: tuple[int, torch.cuda.Stream] | None = None
        self._captured: dict[int, tuple[int, torch.cuda.Stream]] = {}  # by the capture's number

    def follow(self, stream: int) -> None:
        """Order what comes next on the current stream, whose handle is `stream`, behind the last launch.

        Raises:
            RuntimeError: the last eager launch is on a stream that has begun a capture since, so nothing outside of
                that capture can wait for it.
        """
        if torch.cuda.is_current_stream_capturing():
            here = torch.cuda.current_stream(self._device)
            capture = capture_of(stream)
            last = self._captured.get(capture)
            if last is None:
                self._captured = {number: at for number, at in self._captured.items() if capture_of(at[0]) == number}
            elif last[0] != stream:
                _wait(here, last[1])  # it is still in this capture: a stream leaves one with the capture's end alone
            self._captured[capture] = (stream, here)
        elif self._eager is None or self._eager[0] != stream:
            here = torch.cuda.current_stream(self._device)
            if self._eager is not None:
                if capture_of(self._eager[0]):
                    # An event recorded there now would draw this stream into the capture.
                    raise RuntimeError(
                        "the last launch outside of a CUDA graph was on a stream that is being captured now, and this "
                        "one on another stream cannot wait for it: launch before that capture begins, or after its end"
                    )
                _wait(here, self._eager[1])
            self._eager = (stream, here)


def _wait(stream: torch.cuda.Stream, last: torch.cuda.Stream) -> None:
    event = torch.cuda.Event()
    event.record(last)
    stream.wait_event(event)


def capture_of(stream: int) -> int:
    """Return the number of the capture that a stream is in, which no other capture has; 0 where it is in none."""
    from cuda.bindings import driver  # only where there are GPUs

    result, status, number, *_ = driver.cuStreamGetCaptureInfo(driver.CUstream(stream))
    if result != driver.CUresult.CUDA_SUCCESS:
        raise RuntimeError(f"the CUDA driver does not tell whether a stream is being captured: {result.name}")
    return 0 if status == driver.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_NONE else int(number)

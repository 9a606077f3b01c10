"""The order of launches from several streams: one launch on a workspace is in flight at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple, Protocol

import torch

__all__ = ["Collective", "Moment", "StreamOrder", "capture_of", "in_order", "is_foreign"]


_MOST_CAPTURES = 64  # more than are ever under way


class Collective(Protocol):
    """Another library's collective that has been started, as torch.distributed's `Work`."""

    def wait(self) -> object:
        """Let the current stream wait for it."""


class _Last(NamedTuple):
    """A launch to be ordered after.

    Attributes:
        handle: of its stream.
        stream: its stream, where that is torch's; None otherwise.
        event: recorded after it, where the stream is not torch's: that may be gone by now, and another one have its
            handle.
    """

    handle: int
    stream: torch.cuda.Stream | None
    event: torch.cuda.Event | None


class Moment:
    """A place in a stream, after earlier launches."""

    def __init__(self, device: torch.device) -> None:
        self.event = torch.cuda.Event()
        self.stream = torch.cuda.current_stream(device)
        self._device = device
        self._capture = capture_of(self.stream.cuda_stream)
        self.event.record(self.stream)

    def order_behind(self) -> None:
        """Let the current stream wait for it, unless one of the two is in another capture: see `StreamOrder`."""
        here = torch.cuda.current_stream(self._device)
        # A stream that is not torch's may be another stream with the handle of a stream that is gone.
        is_elsewhere = here != self.stream or is_foreign(here)
        if is_elsewhere and capture_of(here.cuda_stream) == self._capture:
            here.wait_event(self.event)


class StreamOrder:
    """The order of launches on a workspace: the places that the next launch comes after.

    Eager launches follow one another, and so do the launches of one capture, where the event becomes an edge of the
    graph. Nothing connects two captures, or a capture and eager launches: CUDA allows no such edge (it invalidates the
    capture), and none is needed before the replay, which its stream orders like any other use of a graph's memory.

    A stream of torch's own lives as long as the process: an event is recorded there when a launch on another stream has
    to wait, and launches that stay on it cost nothing. Any other one (`torch.cuda.ExternalStream`) may be destroyed as
    soon as the launch has been made, and is not touched later: an event is recorded after every launch on it.

    Collectives of other libraries, which wait for peers as launches do, take part (`in_order`): they come after the
    launches that were made before, and launches after them.

    Args:
        device: whose current stream launches go to.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._eager: _Last | None = None
        self._captured: dict[int, _Last] = {}  # by the capture's number
        self._foreign: tuple[torch.cuda.Stream, int] | None = None  # of a launch to come, and its capture's number
        # Of those that the next launch comes after: each group's last one, by its capture's number.
        self._collectives: dict[int, dict[object, Collective]] = {}

    def follow(self, stream: int) -> None:
        """Order what comes next on the current stream, whose handle is `stream`, after all launches and collectives.

        `launched` is to be called after the launch.

        Raises:
            RuntimeError: the last eager launch is on a stream of torch's that has begun a capture since, so nothing
                outside of that capture can wait for it.
        """
        self._foreign = None
        last, capture = self._last(stream)
        if self._collectives:
            self._wait_for_collectives(capture)
        if not _is_on(last, stream):
            here = self._behind(last, capture)
            if is_foreign(here):
                self._foreign = here, capture
                return
            self._note(_Last(stream, here, None), capture)
        if self._collectives:
            self._collectives.pop(capture, None)

    def join(self, stream: int) -> int:
        """Order what comes next on the current stream after the last launch, as `follow`, without being one.

        Returns:
            The number of the capture, or 0, for `add`.
        """
        last, capture = self._last(stream)
        if last is not None and not _is_on(last, stream):
            self._behind(last, capture)
        return capture

    def add(self, collective: Collective, group: object, capture: int) -> None:
        """Order the next launch after a collective that was started after `join`.

        Args:
            group: whose collectives follow one another.
        """
        self._collectives.setdefault(capture, {})[group] = collective
        if len(self._collectives) > _MOST_CAPTURES:  # a capture may end without a launch after its collectives
            del self._collectives[min(filter(None, self._collectives))]

    def forget_collectives(self) -> None:
        """Order nothing after those so far, which have ended."""
        self._collectives.clear()

    def _last(self, stream: int) -> tuple[_Last | None, int]:
        """Return the last launch of what the current stream is in, and the number of that capture, or 0."""
        if not torch.cuda.is_current_stream_capturing():
            return self._eager, 0
        capture = capture_of(stream)
        last = self._captured.get(capture)
        if last is None:
            self._forget_captures(stream)
        return last, capture

    def _wait_for_collectives(self, capture: int) -> None:
        try:
            for collective in self._collectives.get(capture, {}).values():
                collective.wait()
        except BaseException:  # it has ended; what comes later need not hear of it
            self._collectives.pop(capture)
            raise

    def _behind(self, last: _Last | None, capture: int) -> torch.cuda.Stream:
        """Let the current stream, which is returned, wait for a launch of the same capture, or eager as it is."""
        here = torch.cuda.current_stream(self._device)
        if last is not None:
            if not capture and last.event is None and capture_of(last.handle):
                # An event recorded there now would draw this stream into the capture.
                raise RuntimeError(
                    "the last launch outside of a CUDA graph was on a stream that is being captured now, and this "
                    "one on another stream cannot wait for it: launch before that capture begins, or after its end"
                )
            _wait(here, last)  # in a capture, it is still there: a stream leaves one with the capture's end alone
        return here

    def launched(self) -> None:
        """Take note of the launch that `follow` was called for, where its stream may be gone before the next one."""
        if self._foreign is None:
            return
        (stream, capture), self._foreign = self._foreign, None
        self._note(_Last(stream.cuda_stream, None, _recorded(stream)), capture)
        self._collectives.pop(capture, None)

    def _note(self, last: _Last, capture: int) -> None:
        if capture:
            self._captured[capture] = last
        else:
            self._eager = last

    def _forget_captures(self, stream: int) -> None:
        """Forget captures that are over, as `stream` has begun another one.

        A stream may be gone; this is known when its handle is met again. So there are at most as many as handles.
        """
        for number, last in list(self._captured.items()):
            is_over = last.handle == stream if last.event is not None else capture_of(last.handle) != number
            if is_over:
                del self._captured[number]


def is_foreign(stream: torch.cuda.Stream) -> bool:
    """Return whether a stream is none of torch's, which are never destroyed: its id in torch is then its handle."""
    return stream.cuda_stream != 0 and stream.stream_id == stream.cuda_stream


def in_order(orders: Iterable[StreamOrder], stream: int, start: Callable[[], Collective], group: object) -> Collective:
    """Start another library's collective after all launches so far, and order those that come after it.

    Args:
        orders: of all launches.
        stream: the handle of the current one.
        start: starts it there.
        group: whose collectives follow one another.
    """
    captures = [(order, order.join(stream)) for order in orders]
    collective = start()
    for order, capture in captures:
        order.add(collective, group, capture)
    return collective


def _is_on(last: _Last | None, stream: int) -> bool:
    """Return whether whatever comes on a stream comes after the launch."""
    return last is not None and last.handle == stream and last.event is None


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
        raise RuntimeError(f"the CUDA driver cannot say whether a stream is being captured: {result.name}")
    return 0 if status == driver.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_NONE else int(number)

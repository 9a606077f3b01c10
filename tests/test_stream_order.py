"""Launches from several streams are put in order, and never by an event that CUDA refuses.

The streams, events and captures here are a model: what precedes what, and CUDA's rules for events and captures
(programming guide, "Prohibited and Unhandled Operations"). That a driver keeps to these rules is not shown by it.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch

from persistent_ops.runtime import stream_order
from persistent_ops.runtime.stream_order import StreamOrder


class Refused(Exception):
    """What CUDA answers with an error, or with the end of a capture."""


class Stream:
    """A stream: what has been launched before its end, and the capture that it is in."""

    def __init__(self, handle: int) -> None:
        self.handle = handle
        self.capture = 0
        self.done: frozenset[int] = frozenset()  # launches that come before whatever is put on it next

    def wait_event(self, event: Event) -> None:
        if event.capture != self.capture:
            raise Refused(f"stream of capture {self.capture} waits for an event of capture {event.capture}")
        self.done |= event.done


class Event:
    """An event belongs to the capture in which it was recorded."""

    def record(self, stream: Stream) -> None:
        self.capture = stream.capture
        self.done = stream.done


class Cuda:
    """A device with a default stream, streams to choose from, and captures that end on the stream they began on."""

    def __init__(self) -> None:
        self.streams = [Stream(0), *(Stream(0x1000 + i) for i in range(4))]
        self.current = self.streams[0]
        self.captures = 0
        self.launches: dict[int, list[int]] = {}  # of each capture, and of 0: eager ones; in the order of the calls

    def begin_capture(self, stream: Stream) -> None:
        self.captures += 1
        stream.capture = self.captures
        stream.done = frozenset()

    def end_capture(self, number: int) -> None:
        for stream in self.streams:
            if stream.capture == number:
                stream.capture, stream.done = 0, frozenset()

    def fork(self, origin: Stream, stream: Stream) -> None:
        stream.capture, stream.done = origin.capture, origin.done

    def launch(self, order: StreamOrder) -> None:
        """Launch on the current stream, and check that all launches that matter come before."""
        order.follow(self.current.handle)
        earlier = self.launches.setdefault(self.current.capture, [])
        missing = set(earlier) - self.current.done
        assert not missing, f"nothing puts launches {missing} before this one on stream {self.current.handle:#x}"
        number = sum(map(len, self.launches.values()))
        earlier.append(number)
        self.current.done |= {number}


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[Cuda]:
    model = Cuda()
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: model.current.capture != 0)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: model.current)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    by_handle = {stream.handle: stream for stream in model.streams}
    monkeypatch.setattr(stream_order, "capture_of", lambda handle: by_handle[handle].capture)
    return model


@pytest.fixture
def order() -> StreamOrder:
    return StreamOrder(torch.device("cuda", 0))


def test_eager_launches_on_several_streams(cuda: Cuda, order: StreamOrder) -> None:
    for i in (0, 1, 1, 2, 0, 0, 2, 1):  # 0 is the default stream, whose handle is 0
        cuda.current = cuda.streams[i]
        cuda.launch(order)


def test_eager_launches_around_a_capture(cuda: Cuda, order: StreamOrder) -> None:
    cuda.launch(order)
    cuda.current = cuda.streams[1]
    cuda.begin_capture(cuda.current)
    cuda.launch(order)
    cuda.end_capture(1)
    cuda.current = cuda.streams[2]
    cuda.launch(order)


def test_streams_of_one_capture(cuda: Cuda, order: StreamOrder) -> None:
    cuda.begin_capture(cuda.streams[1])
    cuda.fork(cuda.streams[1], cuda.streams[2])
    for i in (1, 2, 2, 1, 2):
        cuda.current = cuda.streams[i]
        cuda.launch(order)


def test_a_capture_after_one_on_another_stream(cuda: Cuda, order: StreamOrder) -> None:
    for i in (1, 2):
        cuda.current = cuda.streams[i]
        cuda.begin_capture(cuda.current)
        cuda.launch(order)
        cuda.end_capture(cuda.current.capture)


def test_a_stream_that_is_in_another_capture_by_now(cuda: Cuda, order: StreamOrder) -> None:
    cuda.current = cuda.streams[1]
    cuda.begin_capture(cuda.current)
    cuda.launch(order)
    cuda.end_capture(1)
    cuda.begin_capture(cuda.current)
    cuda.current = cuda.streams[2]
    cuda.begin_capture(cuda.current)
    cuda.launch(order)


def test_two_captures_at_a_time(cuda: Cuda, order: StreamOrder) -> None:
    for stream in cuda.streams[1:3]:
        cuda.begin_capture(stream)
    for i in (1, 2, 2):
        cuda.current = cuda.streams[i]
        cuda.launch(order)


def test_last_eager_stream_is_being_captured(cuda: Cuda, order: StreamOrder) -> None:
    cuda.current = cuda.streams[1]
    cuda.launch(order)
    done = cuda.current.done
    cuda.begin_capture(cuda.current)
    cuda.launch(order)
    cuda.current = cuda.streams[2]
    for _ in range(2):
        with pytest.raises(RuntimeError, match="cannot wait for it: launch before that capture begins, or after"):
            cuda.launch(order)
    cuda.end_capture(1)
    cuda.streams[1].done = done
    cuda.launch(order)


@pytest.mark.parametrize("seed", range(20))
def test_any_order_of_launches_forks_and_captures(cuda: Cuda, order: StreamOrder, seed: int) -> None:
    """Launches in up to two captures at a time, in streams forked into them, and eager ones on two other streams."""
    draw = random.Random(seed)
    eager = cuda.streams[:2]
    kept: dict[int, Stream] = {}  # of each capture that is under way: the stream that it began on
    for _ in range(300):
        action = draw.randrange(6)
        free = [stream for stream in cuda.streams[2:] if stream.capture == 0]
        if action == 0 and len(kept) < 2 and free:
            origin = draw.choice(free)
            cuda.begin_capture(origin)
            kept[origin.capture] = origin
        elif action == 1 and kept and free:
            cuda.fork(draw.choice(list(kept.values())), draw.choice(free))
        elif action == 2 and kept:
            number = draw.choice(list(kept))
            cuda.end_capture(number)
            del kept[number]
        else:
            captured = [stream for stream in cuda.streams if stream.capture]
            cuda.current = draw.choice([*eager, *captured])
            cuda.launch(order)
    assert len(cuda.launches) > 10 and len(cuda.launches[0]) > 30

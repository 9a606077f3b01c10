"""Exchanges on one stream, readers on others: a region is filled after its readers, and read after its arrival.

Uses the model of streams, events and captures of test_stream_order.py, which implements CUDA's rules.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
from test_stream_order import Cuda, Event, Stream

from persistent_ops.ops.embedding.lookups import Region
from persistent_ops.runtime import stream_order
from persistent_ops.runtime.stream_order import Moment

_DEVICE = torch.device("cuda", 0)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[Cuda]:
    model = Cuda()
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: model.current)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(stream_order, "capture_of", model.capture_of)
    return model


class _Loop:
    """Exchanges that alternate between two regions, and their readers."""

    def __init__(self, cuda: Cuda) -> None:
        self._cuda = cuda
        self._count = 0
        self._regions = [_region(), _region()]
        self._readers: list[set[int]] = [set(), set()]  # of the region's current or last content
        self._sent = 0

    def _launch(self, stream: Stream) -> int:
        self._count += 1
        stream.done |= {self._count}
        return self._count

    def exchange(self, stream: Stream) -> tuple[int, Moment, int]:
        """Return the region, when it is filled, and the launch."""
        self._cuda.current = stream
        number = self._sent % 2
        self._sent += 1
        self._regions[number].order_behind_readers()
        missing = self._readers[number] - stream.done
        assert not missing, f"readers {missing} of the region may not have ended"
        self._regions[number].is_held = True
        self._readers[number] = set()
        launch = self._launch(stream)
        return number, Moment(_DEVICE), launch

    def read(self, stream: Stream, number: int, arrived: Moment, launch: int) -> None:
        self._cuda.current = stream
        arrived.order_behind()
        assert launch in stream.done, "it may not have arrived"
        self._readers[number].add(self._launch(stream))

    def release(self, stream: Stream, number: int) -> None:
        self._cuda.current = stream
        self._regions[number].release()


def _region() -> Region:
    region = Region.__new__(Region)
    region._world = SimpleNamespace(backend=SimpleNamespace(name="cuda", device=_DEVICE))  # type: ignore[assignment]
    region.forget()
    return region


@pytest.mark.parametrize("is_captured", [False, True])
def test_a_batch_ahead(cuda: Cuda, is_captured: bool) -> None:
    main, side = cuda.streams[1:3]
    if is_captured:
        cuda.begin_capture(main)
        cuda.fork(main, side)
    loop = _Loop(cuda)
    following = loop.exchange(side)
    for _ in range(8):
        lookups, following = following, loop.exchange(side)
        loop.read(main, *lookups)  # forward
        loop.read(main, *lookups)  # backward
        loop.release(main, lookups[0])


@pytest.mark.parametrize("seed", range(10))
def test_any_streams(cuda: Cuda, seed: int) -> None:
    """Each reader and each exchange is on some stream. The release comes after the last reader, on its stream."""
    draw = random.Random(seed)
    loop = _Loop(cuda)
    following = loop.exchange(draw.choice(cuda.streams))
    for _ in range(30):
        lookups, following = following, loop.exchange(draw.choice(cuda.streams))
        reader = draw.choice(cuda.streams)
        for _ in range(draw.randrange(3)):
            loop.read(reader, *lookups)
        loop.release(reader, lookups[0])


def test_a_third_batch_is_refused(cuda: Cuda) -> None:
    cuda.current = cuda.streams[1]
    loop = _Loop(cuda)
    loop.exchange(cuda.current)
    loop.exchange(cuda.current)
    with pytest.raises(RuntimeError, match="are still held"):
        loop.exchange(cuda.current)


def test_nothing_connects_captures_and_eager_launches(cuda: Cuda) -> None:
    """CUDA would refuse it. The streams that replay a graph order it."""
    loop = _Loop(cuda)
    main, side = cuda.streams[1:3]
    number, *_ = loop.exchange(side)
    loop.release(main, number)
    loop.exchange(side)
    cuda.begin_capture(side)
    loop._readers[0].clear()
    number, arrived, _ = loop.exchange(side)
    cuda.current = main
    arrived.order_behind()
    assert main.capture == 0
    loop.release(side, number)
    cuda.end_capture(1)
    cuda.current = main
    loop._regions[number].order_behind_readers()


def test_a_moment_on_a_stream_that_is_gone(cuda: Cuda) -> None:
    """The driver has given its handle to another graph."""
    cuda.current = cuda.create(0x7000)
    cuda.current.done |= {1}
    moment = Moment(_DEVICE)
    cuda.destroy(cuda.current)
    cuda.current = cuda.create(0x7000)
    moment.order_behind()
    assert cuda.current.done == {1}

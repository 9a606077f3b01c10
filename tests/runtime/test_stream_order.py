"""Launches from several streams are put in order, and never by an event that CUDA refuses.

The streams, events and captures here are a model: their order, and CUDA's rules for events and captures (programming
guide, "Prohibited and Unhandled Operations"). The tests do not show that a driver follows these rules.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

import persistent_ops as po
from persistent_ops.runtime import stream_order
from persistent_ops.runtime.stream_order import StreamOrder, in_order, is_foreign
from persistent_ops.runtime.world import current


class Refused(Exception):
    """An operation that CUDA answers with an error, or with the end of a capture."""


class Stream:
    """A stream: what has been launched before its end, and the capture that it is in.

    Args:
        handle: the driver's.
        stream_id: torch's number of it; None for a stream that torch was given by its handle.
    """

    def __init__(self, handle: int, stream_id: int | None = None) -> None:
        self.handle = self.cuda_stream = handle
        self.stream_id = handle if stream_id is None else stream_id
        self.is_destroyed = False
        self.capture = 0
        self.done: frozenset[int] = frozenset()  # launches that come before whatever is put on it next

    def __eq__(self, other: object) -> bool:
        """Compare as torch does."""
        return isinstance(other, Stream) and self.stream_id == other.stream_id

    def __hash__(self) -> int:
        return self.stream_id

    def wait_event(self, event: Event) -> None:
        assert not self.is_destroyed
        if event.capture != self.capture:
            raise Refused(f"stream of capture {self.capture} waits for an event of capture {event.capture}")
        self.done |= event.done


class Event:
    """An event belongs to the capture in which it was recorded."""

    def record(self, stream: Stream) -> None:
        assert not stream.is_destroyed, "what CUDA does with a handle that is gone is not defined"
        self.capture = stream.capture
        self.done = stream.done


class Cuda:
    """A device with a default stream, streams to choose from, and captures that end on the stream they began on."""

    def __init__(self) -> None:
        self.streams = [Stream(0, 0), *(Stream(0x1000 + 16 * i, 3 + 32 * i) for i in range(4))]
        self.foreign: dict[int, Stream] = {}  # streams that torch does not own, by their handles
        self.current = self.streams[0]
        self.captures = 0
        # Of each capture, and of 0, eager ones: launches and collectives in the order of the calls.
        self.launches: dict[int, list[int]] = {}
        self.collectives: dict[int, frozenset[int]] = {}  # of each capture: what is done after its last collective

    def create(self, handle: int) -> Stream:
        """Return a stream that torch does not own. It may have the handle of an earlier stream."""
        self.foreign[handle] = Stream(handle)
        return self.foreign[handle]

    def destroy(self, stream: Stream) -> None:
        self.foreign.pop(stream.handle).is_destroyed = True

    def capture_of(self, handle: int) -> int:
        return next(each.capture for each in [*self.streams, *self.foreign.values()] if each.handle == handle)

    def begin_capture(self, stream: Stream) -> None:
        self.captures += 1
        stream.capture = self.captures
        stream.done = frozenset()

    def end_capture(self, number: int) -> None:
        for stream in [*self.streams, *self.foreign.values()]:
            if stream.capture == number:
                stream.capture, stream.done = 0, frozenset()

    def fork(self, origin: Stream, stream: Stream) -> None:
        stream.capture, stream.done = origin.capture, origin.done

    def launch(self, order: StreamOrder) -> None:
        """Launch on the current stream, and check that all launches and collectives that matter come before."""
        order.follow(self.current.handle)
        self.current.done |= {self.next_behind(self.current.done)}
        order.launched()

    def collect(self, *orders: StreamOrder) -> None:
        """Start a collective from the current stream, and check that all launches and collectives come before."""
        in_order(orders, self.current.handle, lambda: Collective(self), "a group")

    def next_behind(self, done: frozenset[int]) -> int:
        """Return the number of the launch after `done`, and check that it follows all that matters."""
        earlier = self.launches.setdefault(self.current.capture, [])
        missing = set(earlier) - done
        assert not missing, f"nothing puts {missing} before this one on stream {self.current.handle:#x}"
        earlier.append(sum(map(len, self.launches.values())))
        return earlier[-1]


class Collective:
    """On the stream of its group, after earlier collectives and after the work on the stream that starts it."""

    def __init__(self, cuda: Cuda) -> None:
        self._cuda, self._capture = cuda, cuda.current.capture
        done = cuda.current.done | cuda.collectives.get(self._capture, frozenset())
        self._done = cuda.collectives[self._capture] = done | {cuda.next_behind(done)}

    def wait(self) -> None:
        current = self._cuda.current
        if current.capture != self._capture:
            raise Refused(f"stream of capture {current.capture} waits for a collective of capture {self._capture}")
        current.done |= self._done


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[Cuda]:
    model = Cuda()
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: model.current.capture != 0)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: model.current)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(stream_order, "capture_of", model.capture_of)
    return model


@pytest.fixture
def order() -> StreamOrder:
    return StreamOrder(torch.device("cuda", 0))


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


def test_captures_that_are_over_are_forgotten(cuda: Cuda, order: StreamOrder) -> None:
    for _ in range(50):
        for stream in (cuda.streams[1], cuda.streams[2], cuda.create(0x7000), cuda.create(0x8000)):
            cuda.current = stream
            cuda.begin_capture(stream)
            cuda.launch(order)
            cuda.end_capture(stream.capture)
    assert len(order._captured) <= 4


def test_a_launch_that_fails_leaves_the_order_as_it_was(cuda: Cuda, order: StreamOrder) -> None:
    cuda.current = cuda.streams[1]
    cuda.launch(order)
    cuda.current = cuda.create(0x7000)
    order.follow(0x7000)  # and nothing is launched
    cuda.destroy(cuda.current)
    cuda.current = cuda.streams[2]
    cuda.launch(order)


def test_collectives_come_behind_launches_of_each_order(cuda: Cuda, order: StreamOrder) -> None:
    """The workspaces' launches run beside one another."""
    other = StreamOrder(torch.device("cuda", 0))
    cuda.launch(order)
    cuda.launches[0].clear()  # the next one is beside it
    cuda.current = cuda.streams[1]
    cuda.launch(other)
    cuda.launches[0].insert(0, 0)
    cuda.current = cuda.streams[2]
    cuda.collect(order, other)
    for stream, each in ((0, order), (1, other)):
        cuda.current = cuda.streams[stream]
        before = cuda.launches[0][:]
        cuda.launch(each)
        cuda.launches[0][:] = before


def test_a_collective_that_has_failed_is_told_once(cuda: Cuda, order: StreamOrder) -> None:
    cuda.collect(order)
    cuda.launches[0].clear()
    with mock.patch.object(Collective, "wait", side_effect=RuntimeError("aborted")), pytest.raises(RuntimeError):
        order.follow(cuda.current.handle)
    cuda.launch(order)


def test_collectives_that_are_over_are_forgotten(cuda: Cuda, order: StreamOrder) -> None:
    """As after a recovery: aborted ones would raise."""
    cuda.collect(order)
    cuda.launches[0].clear()
    order.forget_collectives()
    cuda.current = cuda.streams[1]
    cuda.launch(order)
    assert cuda.current.done == frozenset(cuda.launches[0])


def test_a_collective_of_one_capture_is_not_awaited_in_another(cuda: Cuda, order: StreamOrder) -> None:
    cuda.launch(order)
    cuda.collect(order)
    for _ in range(100):
        for stream in cuda.streams[1:3]:
            cuda.current = stream
            cuda.begin_capture(stream)
            cuda.fork(stream, cuda.streams[3])
            cuda.launch(order)
            cuda.current = cuda.streams[3]
            cuda.collect(order)
            cuda.launch(order)
            cuda.collect(order)  # after which the capture has no launch
            cuda.end_capture(stream.capture)
    assert len(order._collectives) <= 64
    cuda.current = cuda.streams[4]
    cuda.launch(order)


def _calls_of_a_launch() -> list[str]:
    """Return what a workspace whose launches are asynchronous does for one."""
    po.init("host", heap_size=1 << 20)
    calls: list[str] = []

    def note(name: str) -> Callable[..., None]:
        return lambda *_, **__: calls.append(name)

    workspace: Any = current().workspace
    workspace._is_asynchronous = True
    workspace.order = SimpleNamespace(follow=note("follow"), launched=note("launched"))
    workspace.launch(SimpleNamespace(launch=note("launch"), admitted_grid=1), 1, 0, None)
    return calls


def _calls_of_a_collective() -> list[Any]:
    """Return what a world whose launches are asynchronous does for one of another library, and for a call within."""
    po.init("host", heap_size=1 << 20)
    calls: list[Any] = []
    world: Any = current()
    side = world.side_workspace("another")
    side.order = SimpleNamespace(join=lambda _: calls.append("join") or 7, add=lambda *given: calls.append(given))
    world.workspace.order = SimpleNamespace(
        join=lambda _: calls.append("join") or 0, add=lambda *given: calls.append(given)
    )

    def start() -> Any:
        with pytest.raises(RuntimeError, match="launch"):
            world.workspace.launch(SimpleNamespace(admitted_grid=1), 1, 0, None)
        calls.append("start")
        return "collective"

    with mock.patch.object(world.backend, "name", "cuda"):
        found = [world.in_order(start, "a group") for _ in range(2)]
    po.barrier()
    return [found, calls]


@pytest.mark.host
def test_collectives_of_other_libraries_come_behind_the_launches_of_all_workspaces() -> None:
    ((found, calls),) = po.launch(_calls_of_a_collective, 1, threads=True)
    one = ["join", "join", "start", ("collective", "a group", 0), ("collective", "a group", 7)]
    assert found == ["collective"] * 2 and calls == one * 2


@pytest.mark.host
def test_a_workspace_launches_in_this_order() -> None:
    assert po.launch(_calls_of_a_launch, 1, threads=True) == [["follow", "launch", "launched"]]


@pytest.mark.gpu
def test_streams_of_torch_s_own_are_told_from_others() -> None:
    from cuda.bindings import driver

    torch.cuda.init()
    ours = torch.cuda.current_stream(), torch.cuda.Stream(), torch.cuda.Stream(priority=-1)
    result, handle = driver.cuStreamCreate(driver.CUstream_flags.CU_STREAM_NON_BLOCKING)
    assert result == driver.CUresult.CUDA_SUCCESS
    with torch.cuda.stream(torch.cuda.ExternalStream(int(handle))):
        assert is_foreign(torch.cuda.current_stream())
    assert not any(map(is_foreign, ours))
    driver.cuStreamDestroy(handle)


@pytest.mark.parametrize("seed", range(20))
def test_any_order_of_launches_forks_and_captures(cuda: Cuda, order: StreamOrder, seed: int) -> None:
    """Launches and collectives in up to two captures at a time, in streams forked into them, and eager ones on others.

    Some are not torch's: they are destroyed when they are in no capture, and their handles given out again.
    """
    draw = random.Random(seed)
    eager = cuda.streams[:2]
    kept: dict[int, Stream] = {}  # of each capture that is under way: the stream that it began on
    for _ in range(300):
        action = draw.randrange(7)
        if action == 6:
            handle = draw.choice([0x7000, 0x8000])
            stream = cuda.foreign.get(handle)
            if stream is None:
                cuda.create(handle)
            elif stream.capture == 0:
                cuda.destroy(stream)
            continue
        foreign = [stream for stream in cuda.foreign.values() if stream.capture == 0]
        free = [stream for stream in cuda.streams[2:] if stream.capture == 0] + foreign
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
            captured = [stream for stream in [*cuda.streams, *cuda.foreign.values()] if stream.capture]
            cuda.current = draw.choice([*eager, *foreign, *captured])
            if draw.randrange(3) == 0:
                cuda.collect(order)
            else:
                cuda.launch(order)
    assert len(cuda.launches) > 10 and len(cuda.launches[0]) > 30

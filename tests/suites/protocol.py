"""Tests of every operator's protocol: PEs that are late, absent, dead, or call something else; distant epochs.

An operator's class of tests derives from `ProtocolSuite` and says how it is called.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
from timelines import problems_of_file, problems_of_timeline
from worlds import TRANSPORTS, dead_peer, error_of, gave_up, init_with_impatient_kernels, meet_in, run_pes

import persistent_ops as po
from persistent_ops.runtime.workspace import Workspace
from persistent_ops.timeline import PeTimeline, Timeline

__all__ = ["Mismatch", "ProtocolSuite", "Work"]

_ITERATIONS = 6  # of inputs
_EPOCHS = (0, 2**16 - 3, 2**31 - 3, 2**32 - 3, 2**40 - 4, 2**47)


@dataclass(frozen=True)
class Work:
    """A call of an operator that is about to be made.

    Attributes:
        run: makes it, on the current stream.
        is_right: whether its results are what they should be, once `po.check()` has returned.
        is_poisoned: whether no result of a given-up call looks valid; None if that cannot be seen.
        is_harmless: whether every result that looks valid is right; likewise None.
    """

    run: Callable[[], object]
    is_right: Callable[[], bool]
    is_poisoned: Callable[[], bool] | None = None
    is_harmless: Callable[[], bool] | None = None


@dataclass(frozen=True)
class Mismatch:
    """What PE 1 calls while the others call something else, and what the error must say on every PE."""

    other: Callable[[], object]
    told: Sequence[str] = ()


class ProtocolSuite:
    """The tests, for one operator.

    Attributes:
        operator: its name in messages.
        ways: in which it can be called.
        heap_bytes: of each PE.
        absences: ways and transports ("auto", "staged") in which a PE stays away.
        patience, gives_up_within: seconds for which kernels wait for that PE, and until everybody has given up.
        mismatches: by name; PE 1's call while the others call `meet`.
        first_call: text of the error if PE 1 calls something else during the others' first call.
        deaths, deaths_on_gpus: how PE 1 dies ("killed", "stopped"), in which way; on GPUs both.
        noticed_within: seconds until the survivors of a stopped PE know, whose kernels wait for 3.
        names_the_dead: whether all survivors name the dead PE, or one (a survivor may wait for another survivor).
        lateness: seconds by which a PE comes late to a launch of the host backend, which takes far less.
        transports: options of po.init, as pytest's parameters.
        run_pes: runs a program on PEs, as `worlds.run_pes` does.
    """

    operator: ClassVar[str]
    ways: ClassVar[Sequence[str]]
    heap_bytes: ClassVar[int] = 64 << 20
    absences: ClassVar[Sequence[tuple[str, str]]]
    patience: ClassVar[float] = 4.0
    gives_up_within: ClassVar[float] = 12.0  # far more PEs than cores may be spinning
    mismatches: ClassVar[Mapping[str, Mismatch]]
    first_call: ClassVar[str]
    deaths: ClassVar[Sequence[tuple[str, str]]]
    deaths_on_gpus: ClassVar[Sequence[tuple[str, str]]] = ()
    noticed_within: ClassVar[float] = 12.0
    names_the_dead: ClassVar[bool] = True
    lateness: ClassVar[float] = 0.1
    transports: ClassVar[Sequence[Any]] = TRANSPORTS
    run_pes = staticmethod(run_pes)

    # ---- of the operator -------------------------------------------------------------------------------------------

    @classmethod
    def work(cls, iteration: int, way: str) -> Work:
        """Prepare a call of this PE, for one of six inputs; collective."""
        raise NotImplementedError

    @classmethod
    def next_work(cls, iteration: int, way: str) -> Work:
        """Prepare a call as `work` does, when all earlier calls have ended."""
        return cls.work(iteration, way)

    @classmethod
    def meet(cls) -> object:
        """Make the call that the tests of mismatches use."""
        raise NotImplementedError

    @classmethod
    def warm_up(cls) -> None:
        """Compile what mismatches need, and let PEs agree on everything that is not compared there."""
        for way in cls.ways:
            assert cls.checked(0, way), way

    @classmethod
    def workspace(cls) -> Workspace:
        """Return the workspace of the launch."""
        return po.runtime.world.current().workspace

    # ---- programs of the PEs ---------------------------------------------------------------------------------------

    @classmethod
    def checked(cls, iteration: int, way: str, lateness: float = 0.0) -> bool:
        """Call the operator after a delay in seconds, and wait; return whether the result is right."""
        work = cls.next_work(iteration % _ITERATIONS, way)
        time.sleep(lateness)
        work.run()
        po.check()
        return work.is_right()

    @classmethod
    def _way(cls, number: int) -> str:
        return cls.ways[number % len(cls.ways)]

    @classmethod
    def _problems(cls, count: int, *, lateness: float = 0.0, what: str = "") -> list[str]:
        """Call it repeatedly, in all ways, with PEs that are late in turn; return what went wrong."""
        found = []
        for iteration in range(count):
            own_lateness = lateness if iteration % po.world_size() == po.rank() else 0.0
            if not cls.checked(iteration, cls._way(iteration // 2), own_lateness):
                found.append(f"{what}iteration {iteration}, {cls._way(iteration // 2)}")
        return found

    @classmethod
    def _late(cls, backend: str, options: dict[str, Any]) -> list[str]:
        po.init(backend, operator_timeout=30.0, heap_size=cls.heap_bytes, **options)
        problems = cls._problems(2 * max(len(cls.ways), 4), lateness=0.1)
        # The host does not wait in between, so PEs run ahead as far as the protocol permits.
        works = [cls.work(number % _ITERATIONS, cls._way(number // 2)) for number in range(24)]
        for number, work in enumerate(works):
            if number % 8 == 2 * po.rank():
                time.sleep(0.05)
            work.run()
        po.check()
        problems += [f"ahead, call {number}" for number, work in enumerate(works) if not work.is_right()]
        po.finalize()
        return problems

    @classmethod
    def _absent(cls, backend: str, way: str, transport: str, folder: Path) -> dict[str, Any]:
        init_with_impatient_kernels(backend, cls.patience, cls.heap_bytes, transport=transport)
        seen: dict[str, Any] = {"before": [cls.checked(0, each) for each in cls.ways]}
        work, next_work = cls.work(1, way), cls.work(2, way)
        if po.rank() == 0:  # PE 0 comes when the others have given up, however busy the machine is
            gave_up(folder, po.world_size() - 1)
        seen["error"] = error_of(lambda: [work.run(), po.check()])
        (folder / f"gave_up_{po.rank()}").touch()
        seen["poisoned"] = work.is_poisoned is None or work.is_poisoned()
        seen["harmless"] = work.is_harmless is None or work.is_harmless()
        # A late PE may have found all that its peers sent in that launch, but finds no data of the next one.
        seen["again"] = error_of(lambda: [next_work.run(), po.check()])[0]
        seen["barrier"] = error_of(po.barrier)[0]
        po.recover()
        seen["after"] = cls._problems(6)
        po.finalize()
        return seen

    @classmethod
    def _traced(cls, backend: str, options: dict[str, Any], folder: Path) -> tuple[list[bool], list[PeTimeline]]:
        """Trace calls to which PE 1 comes late."""
        po.init(backend, operator_timeout=30.0, heap_size=cls.heap_bytes, **options)
        right = [cls.checked(0, each) for each in cls.ways]
        lateness = cls.lateness if backend == "host" else 0.3  # dozens of processes that share a GPU run in turn there
        with po.trace(folder / "timeline.json") as timeline:
            for number in range(3):
                for way in cls.ways:
                    work = cls.next_work(number, way)
                    meet_in(folder, f"{way}_{number}")  # the PEs have prepared their calls in different times
                    time.sleep(lateness if po.rank() == 1 else 0.0)
                    work.run()
                    po.check()
                    right.append(work.is_right())
        right += [cls.checked(1, each) for each in cls.ways]
        po.finalize()
        return right, timeline.pes

    @classmethod
    def _traced_to_an_abort(cls, backend: str, way: str, folder: Path) -> tuple[list[Any], list[PeTimeline]]:
        """Trace a call that PE 0 does not make, and the calls after the recovery."""
        init_with_impatient_kernels(backend, cls.patience, cls.heap_bytes)  # PEs that share a GPU align clocks slowly
        seen: list[Any] = [cls.checked(0, each) for each in cls.ways]
        with po.trace() as timeline:
            work = cls.work(1, way)
            if po.rank() == 0:
                gave_up(folder, po.world_size() - 1)
            error = error_of(lambda: [work.run(), po.check()])[0]
            seen.append(error in (("", "PeerTimeoutError") if po.rank() == 0 else ("PeerTimeoutError",)))
            (folder / f"gave_up_{po.rank()}").touch()
            error_of(po.barrier)  # a late PE may have found all that its peers sent
            po.recover()
            seen += [cls.checked(2, each) for each in cls.ways]
        po.finalize()
        return seen, timeline.pes

    @classmethod
    def _mismatched(cls, backend: str) -> dict[str, tuple[str, str, float]]:
        po.init(backend, operator_timeout=60.0, heap_size=cls.heap_bytes)
        cls.warm_up()
        errors = {}
        for number, (kind, mismatch) in enumerate(cls.mismatches.items()):
            act = mismatch.other if po.rank() == 1 else cls.meet
            errors[kind] = error_of(lambda act=act: [act(), po.check()])  # type: ignore[misc]
            po.recover()
            assert cls.checked(number, cls._way(number)), kind
        po.finalize()
        return errors

    @classmethod
    def _first_call_mismatched(cls, backend: str) -> list[Any]:
        po.init(backend, operator_timeout=60.0, heap_size=cls.heap_bytes)
        heap = po.runtime.world.current().heap
        free = heap.free_list.free_bytes
        act = po.barrier if po.rank() == 1 else cls.meet
        name, text, seconds = error_of(lambda: [act(), po.check()])
        po.recover()
        heap.reclaim()  # a buffer for its result may wait for the next call
        is_clean = heap.free_list.free_bytes == free
        problems = cls._problems(3)
        po.finalize()
        return [name, cls.first_call in text, seconds < 30.0, is_clean, problems]

    @classmethod
    def _far_epochs(cls, backend: str, options: dict[str, Any]) -> list[str]:
        po.init(backend, operator_timeout=30.0, heap_size=cls.heap_bytes, **options)
        problems = []
        for epoch in _EPOCHS:
            if epoch:
                cls.workspace().set_epoch(epoch)
            problems += cls._problems(2 * max(len(cls.ways), 3), lateness=0.02, what=f"epoch {epoch}, ")
        po.finalize()
        return problems

    # ---- tests -----------------------------------------------------------------------------------------------------

    @classmethod
    def pytest_generate_tests(cls, metafunc: pytest.Metafunc) -> None:
        if "transport" in metafunc.fixturenames:
            marks = {"staged": pytest.mark.host, "auto": ()}
            metafunc.parametrize(
                ("way", "transport"),
                [pytest.param(*each, id="-".join(each), marks=marks[each[1]]) for each in cls.absences],
            )
        elif "how" in metafunc.fixturenames:
            deaths = [pytest.param(*each, id="-".join(each)) for each in cls.deaths]
            deaths += [pytest.param(*each, id="-".join(each), marks=pytest.mark.gpu) for each in cls.deaths_on_gpus]
            metafunc.parametrize(("how", "way"), deaths)
        elif "options" in metafunc.fixturenames:
            metafunc.parametrize("options", cls.transports)

    @pytest.mark.apart
    def test_late_pes(self, backend: str, options: dict[str, Any]) -> None:
        assert self.run_pes(self._late, 3, backend, options, timeout=200) == [[]] * 3

    def test_timeout_names_the_peer_and_recovery_works(
        self, backend: str, way: str, transport: str, tmp_path: Path
    ) -> None:
        seconds: list[float] = []
        for attempt in range(3):  # a busy machine only makes the time longer
            folder = tmp_path / str(attempt)
            folder.mkdir()
            late, *others = self.run_pes(self._absent, 3, backend, way, transport, folder, timeout=120)
            for seen in (late, *others):
                assert all(seen["before"]) and seen["after"] == [], seen
                assert seen["again"] == seen["barrier"] == "PeerTimeoutError", f"before po.recover(): {seen}"
            name, text, _ = late["error"]
            assert name == "" or (name == "PeerTimeoutError" and "gave up" in text), "it waits for nobody itself"
            assert late["harmless"]
            for seen in others:
                name, text, _ = seen["error"]
                assert name == "PeerTimeoutError" and "PE 0" in text and "recover" in text, text
                assert seen["poisoned"], "what never came is no NaN"
            seconds.append(max(seen["error"][2] for seen in others))
            if seconds[-1] < self.gives_up_within:
                break
        assert min(seconds) < self.gives_up_within, f"it gives up once, not one wait after the other: {seconds}"

    def test_timeline(self, backend: str, options: dict[str, Any], tmp_path: Path) -> None:
        results = self.run_pes(self._traced, 3, backend, options, tmp_path, timeout=200)
        assert all(all(right) for right, _ in results)
        assert [[pe.pe for pe in pes] for _, pes in results] == [[0, 1, 2], [1], [2]], "PE 0 has all"
        pes = results[0][1]
        problems = problems_of_timeline(pes, self.operator)
        assert not problems, problems[:5]
        assert all(pe.dropped == 0 for pe in pes)
        problems = problems_of_file(tmp_path / "timeline.json", pes)
        assert not problems, problems[:5]
        for summary in Timeline(pes).summary():
            if summary.operator == self.operator:
                assert summary.launches >= 3 * len(self.ways) and 0 <= summary.waiting <= 1
                assert summary.skew_us is not None and summary.skew_us > 20e3, "one PE is late"
                longest = next((peer for peer, *_ in summary.waits if peer != summary.pe), None)  # not for its own WGs
                assert (longest == 1) == (summary.pe != 1), f"it is PE 1 that is waited for: {summary}"

    def test_timeline_with_an_abort(self, backend: str, tmp_path: Path) -> None:
        way = self.absences[0][0]
        results = self.run_pes(self._traced_to_an_abort, 3, backend, way, tmp_path, timeout=200)
        assert all(all(seen) for seen, _ in results), results
        pes = results[0][1]
        problems = problems_of_timeline(pes, self.operator)
        assert not problems, problems[:5]
        for pe in pes[1:]:
            longest = max((span for launch in pe.launches for span in launch.spans), key=lambda s: s.end - s.begin)
            assert (
                longest.kind == "wait" and longest.peer == 0 and longest.end - longest.begin > 0.9e9 * self.patience
            ), longest

    def test_mismatch_is_named_on_every_pe(self, backend: str) -> None:
        for _ in range(3):  # a PE that only got the report may still lack data; not in three worlds
            found = self.run_pes(self._mismatched, 3, backend, timeout=250)
            if all(self.operator in text for errors in found for _, text, _ in errors.values()):
                break
        for rank, errors in enumerate(found):
            assert set(errors) == set(self.mismatches)
            for kind, (name, text, seconds) in errors.items():
                where = f"PE {rank}, {kind}: {name}: {text}"
                assert name == "ContractMismatchError" and "PE 1" in text and "recover" in text, where
                assert self.operator in text, where
                assert seconds < 30.0, f"a mismatch is not a time-out: {where}"
                if "says what differs" not in text:  # a PE that only got the report may not know what differs
                    assert all(each in text for each in self.mismatches[kind].told), where

    def test_the_first_call_meets_something_else(self, backend: str) -> None:
        """Agreements and allocations of the PEs in that call cause no hang."""
        results = self.run_pes(self._first_call_mismatched, 3, backend, timeout=200)
        assert results == [["ContractMismatchError", True, True, True, []]] * 3

    def test_far_epochs(self, backend: str, options: dict[str, Any]) -> None:
        assert self.run_pes(self._far_epochs, 2, backend, options, timeout=200) == [[]] * 2

    def test_dead_peer(self, backend: str, how: str, way: str, tmp_path: Path) -> None:
        seconds: list[float] = []
        is_named = False
        for attempt in range(3):
            folder = tmp_path / str(attempt)
            folder.mkdir()
            survivors = dead_peer(functools.partial(self.checked, way=way), backend, how, folder)
            assert all("PE " in survivor.text for survivor in survivors), survivors
            naming = ["PE 1" in survivor.text for survivor in survivors]
            assert all(naming) or not self.names_the_dead, survivors
            is_named |= any(naming) or not survivors
            seconds.append(max((survivor.seconds for survivor in survivors), default=0.0))
            if is_named and seconds[-1] < self.noticed_within:
                break
        assert is_named, "no survivor has named the dead"
        assert min(seconds) < self.noticed_within, seconds

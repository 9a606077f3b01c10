"""Steps of the protocol in device.py, each with a change of it that a test here notices.

See also: the faults of every operator in test_triton_protocol.py.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import re
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from device_mutations import mutated
from interpreters import interpreting, run_interpreters
from triton_cases import HEAP_BYTES, SHAPE, added, gather, misdirected, numbers_of, one_word, total
from worlds import error_of, init_with_impatient_kernels

import persistent_ops as po
import persistent_ops.triton as pot
from persistent_ops.runtime.operator import Operator
from persistent_ops.runtime.world import current
from persistent_ops.triton import device

Error = tuple[str, str, float]


class Change(NamedTuple):
    """A part of device.py that is another one; see `mutated`."""

    tag: str
    old: str
    new: str


_change: tuple[Change, Path] | None = None  # of the programs that run, and a folder


def run(program: Callable[..., Any], world: int, backend: str, patience: float = 30.0) -> list[Any]:
    """Run a program on PEs whose kernels wait for so many seconds, with a line of device.py changed where one is."""
    return run_interpreters(_run, world, backend, program, patience, _change, timeout=100)


def _run(backend: str, program: Callable[[], Any], patience: float, change: tuple[Change, Path] | None) -> Any:
    with contextlib.ExitStack() as stack:
        if change is not None:
            stack.enter_context(_changed(*change))
        init_with_impatient_kernels(backend, patience, HEAP_BYTES)
        try:
            return program()
        finally:
            po.finalize()


@contextlib.contextmanager
def _changed(change: Change, folder: Path) -> Iterator[None]:
    """Let kernels call device functions of which a part is another one."""
    own = folder / os.environ["PERSISTENT_OPS_RANK"]
    own.mkdir()
    module = mutated(own, *change)
    with pytest.MonkeyPatch.context() as patch:
        for name in device.__all__:
            patch.setattr(pot, name, getattr(module, name))
        yield


def _error_of_gather(numbers: torch.Tensor, **options: Any) -> Error:
    return error_of(lambda: [gather(numbers, **options), po.check()])


# ---- right launches --------------------------------------------------------------------------------------------------


def _late_with_other_outputs() -> list[bool]:
    """PE 1 is late, and its output has another place than PE 0's."""
    shape = (2 * SHAPE[0], SHAPE[1])
    out = [po.empty(shape), po.empty(shape)][po.rank()]
    found = []
    for iteration, epoch in enumerate((None, None, None, (1 << 47) - 2, None)):
        if epoch is not None:
            current().workspace.set_epoch(epoch)
        time.sleep(0.2 * po.rank())
        error = _error_of_gather(numbers_of(iteration), out=out, work_groups=2)
        found.append(not error[0] and torch.equal(out, numbers_of(iteration).flatten(0, 1)))
    return found


def test_a_late_pe_with_another_output(backend: str) -> None:
    """Past the epoch whose flags are negative where words have a sign."""
    assert run(_late_with_other_outputs, 2, backend, 3.0) == [[True] * 5] * 2


# ---- time-outs -------------------------------------------------------------------------------------------------------


class _Seen(NamedTuple):
    """What a PE sees of a launch in which PE 1 stores its tiles and does not say so.

    Attributes:
        error: of the launch.
        is_right: its output, or all of it is NaN.
        next_error: of PE 1's next launch.
        has_credit: whether PE 0's next launch, which the host would refuse, gave PE 1 credit.
        spans: of PE 0's launch in the timeline: its signals, and its waits that took as long as they may.
        is_right_again: after the recovery.
    """

    error: Error
    is_right: bool
    next_error: Error
    has_credit: bool
    spans: list[tuple[str, str, int]]
    is_right_again: bool


def _has_credit(numbers: torch.Tensor) -> bool:
    workspace = current().workspace
    if po.rank() == 0:
        with mock.patch.object(workspace, "raise_failure"):
            gather(numbers)
    (epoch, *_) = current().bootstrap.exchange("test", str(int(workspace._local[0])).encode())
    return po.rank() == 1 and any(workspace.credits.launched_by(0, int(epoch)))


def _silent() -> _Seen:
    numbers, meta = numbers_of(0), {"BM": 1, "BN": 64}  # twelve tiles
    want, out = numbers.flatten(0, 1), po.empty((2 * SHAPE[0], SHAPE[1])).zero_()
    with po.trace() as timeline:
        error = _error_of_gather(numbers, silent=po.rank() == 1, out=out, meta=meta, work_groups=1)
        is_right = bool(out.isnan().all() if error[0] else torch.equal(out, want))
        current().bootstrap.exchange("test", b"")
        next_error = _error_of_gather(numbers) if po.rank() == 1 else ("", "", 0.0)
        has_credit = _has_credit(numbers)
        po.recover()
    is_right_again = torch.equal(gather(numbers_of(1)), numbers_of(1).flatten(0, 1))
    launch = next(each for each in timeline.pes[0].launches if each.operator == "triton.all_gather")
    spans = [span for span in launch.spans if span.kind == "send" or span.end - span.begin > 0.99e9]
    told = [(span.kind, span.what, span.peer) for span in spans]
    return _Seen(error, is_right, next_error, has_credit, told, is_right_again)


def test_a_time_out_says_what_it_waited_for(backend: str) -> None:
    """In its error and in the timeline. The peers know, and the next launch takes part in nothing."""
    seen, of_silent = run(_silent, 2, backend, 1.0)
    name, text, seconds = seen.error
    assert name == "PeerTimeoutError" and 1.0 <= seconds < 6.0, "it gives up once, not with every tile"
    assert re.match(r"In triton.all_gather, PE 0 waited [\d.]+ s for PE 1: tile 0 of its rows \(expected", text), text
    assert seen.spans == [("send", "", 1)] * 12 + [("wait", "tile 0 of its rows", 1)]
    assert of_silent.error[0] == "" and of_silent.next_error[0] == "PeerTimeoutError"
    assert "PE 0 gave up on epoch " in of_silent.next_error[1], of_silent.next_error
    assert seen.is_right and of_silent.is_right and not of_silent.has_credit
    assert seen.is_right_again and of_silent.is_right_again


def _comes_late() -> Error:
    """PE 1 comes when PE 0 has given up; that one's kernel goes on, and would signal what it has loaded."""
    x = po.empty(SHAPE).copy_(numbers_of(0)[po.rank()])
    for rank in range(2):
        if po.rank() == rank:
            error = error_of(lambda: [added(x), po.check()])
        current().bootstrap.exchange("test", b"")
    po.recover()
    assert torch.equal(added(x), total(numbers_of(0)))
    return error


def test_no_signal_comes_from_a_launch_that_was_given_up(backend: str) -> None:
    (first, text, _), (second, other_text, _) = run(_comes_late, 2, backend, 1.0)
    assert first == second == "PeerTimeoutError", other_text
    assert "PE 1 has not called the operator" in text and "PE 0 gave up on epoch " in other_text, other_text


def _without_a_name() -> Error:
    error = error_of(lambda: [one_word(3, 0, 1 - po.rank(), out_shape=(1,), out_dtype=torch.float32), po.check()])
    po.recover()
    return error


def test_a_wait_without_a_name(backend: str) -> None:
    (name, text, _), silent = run(_without_a_name, 2, backend, 1.0)
    assert name == "PeerTimeoutError" and "for PE 1: phase 16, index 3 (expected" in text, text
    assert silent[:2] == ("", "")


def _prepares() -> Error:
    """PE 1 makes ready for the launch for longer than PE 0 waits."""
    gather(numbers_of(0))
    if po.rank() == 1:
        with current().preparing():
            time.sleep(2.5)
    return _error_of_gather(numbers_of(0))


def test_time_in_which_a_peer_prepares_does_not_count(backend: str) -> None:
    (first, text, seconds), second = run(_prepares, 2, backend, 1.5)
    assert (first, second[0]) == ("", ""), text
    assert seconds > 2.0, "nobody waited longer than the time-out, so nothing was tested"


# ---- peers that end --------------------------------------------------------------------------------------------------


def _dies(folder: Path) -> None:
    """PE 1 dies when it has stored its tiles, before it signals."""
    numbers = numbers_of(0)
    out = po.empty(numbers.flatten(0, 1).shape)
    assert torch.equal(gather(numbers), numbers.flatten(0, 1))
    if po.rank() == 1:
        gather(numbers, silent=True)
        po.check()
        os.kill(os.getpid(), signal.SIGKILL)
    name, text, _ = _error_of_gather(numbers, out=out)
    (folder / "partial").write_text(f"{name}|{bool(out.isnan().all())}|{text}")
    (folder / "partial").rename(folder / "survivor")


def test_a_peer_that_is_killed_is_named(backend: str) -> None:
    with tempfile.TemporaryDirectory() as name, interpreting(backend):
        dies, survivor = functools.partial(_dies, Path(name)), Path(name, "survivor")
        with pytest.raises(po.PersistentOpsError, match="PE 1 of 2 was killed by SIGKILL"):
            po.launch(_run, 2, backend, dies, 60.0, _change, timeout=100)
        assert survivor.exists(), "PE 0 has not noticed"
        error, is_poisoned, text = survivor.read_text().split("|")
    assert (error, is_poisoned) == ("PeerLostError", "True")
    tile = "0" if backend == "host" else r"\d"  # on GPUs programs run side by side, and any one may be the first
    assert re.search(rf"for PE 1: tile {tile} of its rows \(expected", text) and "PE 1 has ended" in text, text


# ---- other calls -----------------------------------------------------------------------------------------------------


def _differing() -> Error:
    """PE 1 passes fewer columns, to outputs of one shape."""
    out = po.empty((2 * SHAPE[0], SHAPE[1]))
    error = _error_of_gather(numbers_of(0, (6, 80 - 8 * po.rank())), out=out)
    po.recover()
    return error


def test_contracts_are_compared(backend: str) -> None:
    for name, text, _ in run(_differing, 2, backend, 3.0):
        assert name == "ContractMismatchError" and "N is " in text and "80 on PE 0" in text and "72 on PE 1" in text


_BESIDE = Operator("test's call beside one in Triton", (), has_kernel=False)


def _in_different_calls() -> Error:
    world = current()
    beside = world.side_workspace("test")
    for _ in range(2):
        gather(numbers_of(0, (3, 80)))
    if po.rank() == 0:
        error = _error_of_gather(numbers_of(0))
    else:
        error = error_of(lambda: [world.meet(_BESIDE.contract(world.team), beside), po.check()])
    po.recover()
    return error


def test_pes_that_wait_for_each_other_in_different_calls_learn_of_it(backend: str) -> None:
    for name, text, seconds in run(_in_different_calls, 2, backend, 60.0):
        assert name == "ContractMismatchError" and seconds < 30.0, text
        assert "PE 0 in triton.all_gather(M=6, N=80, " in text and f"PE 1 in {_BESIDE.name}" in text, text


# ---- words that no PE has --------------------------------------------------------------------------------------------


def _word(index: int, *, signals: bool, waits: bool) -> float | tuple[str, str]:
    out = po.empty((1,)).zero_()
    error = error_of(lambda: [one_word(index, int(signals), int(waits), out=out), po.check()])
    return error[:2] if error[0] else float(out)


def _words() -> tuple[int, list[float], list[tuple[str, str]]]:
    count = current().workspace.max_ready_words
    wrong = [
        _word(index, signals=is_signal, waits=not is_signal)
        for index, is_signal in itertools.product((count, -1, 1 << 40), (True, False))
    ]
    return count, [_word(index, signals=True, waits=True) for index in (0, 1, count - 1)], wrong  # type: ignore[return-value]


def test_an_index_that_no_word_has(backend: str) -> None:
    for rank, (count, right, wrong) in enumerate(run(_words, 3, backend)):
        assert right == [1.0] * 3, "the words have come"
        for found, (index, peer) in zip(wrong, itertools.product((count, -1, 1 << 40), (1, -1)), strict=True):
            told = f"signal or wait with index {index}, for PE {(rank + peer) % 3}: expected 0 to {count - 1}"
            assert found[0] == "IndexError" and found[1].startswith(told), found


def _misdirected(backend: str) -> list[tuple[str, str]]:
    init_with_impatient_kernels(backend, 1.5, HEAP_BYTES)
    wrong, errors = current().workspace.max_ready_words, []
    for pe, index in ((1 - po.rank(), wrong), (2, 0), (-1, 0)):
        call = functools.partial(misdirected, pe, index, out_shape=(1,), out_dtype=torch.float32)
        errors.append(error_of(lambda call=call: [call(), po.check()])[:2])
        po.recover()
    po.finalize()
    return errors


def test_a_time_out_says_what_else_this_pe_has_found(backend: str) -> None:
    for errors in run_interpreters(_misdirected, 2, backend, timeout=100):
        assert [name for name, _ in errors] == ["PeerTimeoutError"] * 3
        found = [text.partition(" This PE has also found: IndexError: signal or wait ")[2] for _, text in errors]
        assert found[0].startswith("with index") and found[1:] == [f"for PE {pe}: expected 0 to 1" for pe in (2, -1)]


# ---- mutations -------------------------------------------------------------------------------------------------------

_LATE, _TIME_OUT = test_a_late_pe_with_another_output, test_a_time_out_says_what_it_waited_for
_CHANGES: dict[str, tuple[Callable[[str], None], Change]] = {
    "epochs_have_a_sign": (_LATE, Change("flag-epoch", "& _EPOCHS", "& -1")),
    "puts_where_its_own_output_is": (
        _LATE,
        Change("granted-output", "tl.load(_words(grant + _GRANT_OUTPUT), volatile=True)", "launch.output"),
    ),
    "departures_are_not_reset": (_LATE, Change("departed-reset", ", 0)", ", departed + 1)")),
    "the_epoch_does_not_advance": (_LATE, Change("epoch-advance", ", launch.epoch)", ", launch.epoch - 1)")),
    "waits_longer": (_TIME_OUT, Change("wait-bound", "> _field(launch, _TIMEOUT)", "> 8 * _field(launch, _TIMEOUT)")),
    "waits_after_it_gave_up": (_TIME_OUT, Change("wait-gives-up", "is_aborted(launch) or ", "")),
    "hears_of_no_peer_that_gave_up": (_TIME_OUT, Change("wait-gives-up", " or _peer_gave_up(launch)", "")),
    "tells_no_peer": (_TIME_OUT, Change("abort-tells-peers", "launch, other, accuser", "launch, launch.rank, accuser")),
    "leaves_the_output": (_TIME_OUT, Change("poison", "is_aborted(launch)", "launch.size < 0")),
    "grants_credit_after_a_time_out": (_TIME_OUT, Change("takes-part", "aborted >= epoch", "aborted >= 0")),
    "signals_what_it_gave_up": (
        test_no_signal_comes_from_a_launch_that_was_given_up,
        Change("signal-unless-aborted", "_local(launch, _ABORT)", "_always(launch)"),
    ),
    "counts_time_of_preparations": (
        test_time_in_which_a_peer_prepares_does_not_count,
        Change("wait-preparing", "_SAID_PREPARING", "0"),
    ),
    "waits_for_a_peer_that_has_ended": (test_a_peer_that_is_killed_is_named, Change("wait-lost", "_SAID_LOST", "0")),
    "compares_no_contract": (
        test_contracts_are_compared,
        Change("contracts-compared", "is_other", "(launch.size < 0)"),
    ),
    "keeps_no_contract": (
        test_pes_that_wait_for_each_other_in_different_calls_learn_of_it,
        Change("own-contract", "launch.epoch % _COPIES", "(launch.epoch + 1) % _COPIES"),
    ),
    "refuses_the_last_word": (test_an_index_that_no_word_has, Change("word-in-range", "< limit", "< limit - 1")),
}


def test_changes_have_their_places(tmp_path: Path) -> None:
    for _, change in _CHANGES.values():
        mutated(tmp_path, *change)


@pytest.mark.slow
@pytest.mark.host
@pytest.mark.parametrize("name", _CHANGES)
def test_a_mutation_is_noticed(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    test, change = _CHANGES[name]
    monkeypatch.setattr(f"{__name__}._change", (change, tmp_path))
    with pytest.raises(AssertionError) as caught:
        test("host")
    assert "Traceback" not in str(caught.value), "the program has failed for another reason"

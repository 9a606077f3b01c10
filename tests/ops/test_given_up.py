"""PEs that have given up, left or refused something: their results, recoveries, traces, threads and memory."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from worlds import error_of, in_world, run_pes

import persistent_ops as po
from persistent_ops.runtime.world import current

_OLD = 5.0


# ---- calls of several launches ---------------------------------------------------------------------------------------


def _sum(out: torch.Tensor) -> None:
    po.all_reduce(torch.ones_like(out), out=out, algorithm="one_shot")


def _norm(out: torch.Tensor) -> None:
    x = torch.ones(len(out), out.shape[1])
    po.all_reduce_rms_norm(x, torch.ones(x.shape[1]), out=torch.empty_like(x), norm_out=out, algorithm="one_shot")


def _product(out: torch.Tensor) -> None:
    po.gemv_all_reduce(torch.ones(len(out), 2), torch.ones(2), out=out)


_CALLS: dict[str, tuple[Callable[[torch.Tensor], None], tuple[int, ...]]] = {
    "all_reduce": (_sum, (10 << 20,)),
    "all_reduce_rms_norm": (_norm, (30_000, 40)),
    "gemv_all_reduce": (_product, (200_000,)),
}


def _given_up(name: str) -> list[int]:
    """Return how many elements keep their old values after a call with a late peer, and after each next call."""
    current().workspace.timeout = 1.0  # of kernels; on the host PEs wait without limit
    call, shape = _CALLS[name]
    with torch.inference_mode():  # such tensors can be written to only in inference mode
        out, old = torch.zeros(shape), []
    call(out)
    po.barrier()
    for _ in range(2):
        with torch.inference_mode():
            out.fill_(_OLD)
        if po.rank() == 0:
            with pytest.raises(po.PeerTimeoutError):
                call(out)
        old.append(int((out == _OLD).sum()))
    time.sleep(2.0 * po.rank())
    po.recover()
    call(out)
    return [*old, int((out == _OLD).sum())]


@pytest.mark.slow
@pytest.mark.host
@pytest.mark.parametrize("name", _CALLS)
def test_what_no_launch_comes_to_is_no_result(name: str) -> None:
    """The second call is refused before anything is launched."""
    first, _ = in_world(_given_up, 2, "host", name, heap_size=32 << 20)
    assert first[0] == 0 and first[1] == torch.Size(_CALLS[name][1]).numel() and first[2] == 0


# ---- late for a first call -------------------------------------------------------------------------------------------


def _late(call: Callable[[], torch.Tensor]) -> list[Any]:
    current().workspace.timeout = 1.0
    if po.rank() == 1:
        time.sleep(2.5)
    told = error_of(call)[0]
    po.recover()
    current().workspace.timeout = 60.0
    return [told, call().tolist()]


def _first_sum() -> torch.Tensor:
    return po.all_reduce(torch.ones(4))


def _first_product() -> torch.Tensor:
    return po.gemv_all_reduce(torch.ones(2, 2), torch.ones(2))


def _first_exchanged_product() -> torch.Tensor:
    return po.gemm_all_reduce(torch.ones(2, 8).bfloat16(), torch.ones(8, 8).bfloat16())[1, :2].float()


def _first_sparse_sum() -> torch.Tensor:
    return po.sparse_all_reduce(torch.eye(4).to_sparse(1)).to_dense()[3]


def _first_exchange() -> torch.Tensor:
    offsets = torch.arange(5)
    return po.embedding_all_to_all([torch.ones(4, 2)], torch.arange(4), offsets)[0]


def _first_allocation() -> torch.Tensor:
    return po.empty(3).zero_()


def _first_replicas() -> torch.Tensor:
    config = po.nn.TableConfig("t", 4, 2, ["f"])
    po.nn.ShardedEmbeddingBagCollection([config], max_batch=2, placement="replicated")
    return torch.zeros(1)


def _first_timeline() -> torch.Tensor:
    with po.trace(None) as timeline:
        po.all_reduce(torch.ones(3))
    return torch.tensor([float(len(timeline.pes[0].launches) > 0)]) if po.rank() == 0 else torch.ones(1)


@pytest.mark.slow
@pytest.mark.host
@pytest.mark.parametrize(
    ("call", "wanted"),
    [
        (_first_sum, [2.0] * 4),
        (_first_product, [4.0] * 2),
        (_first_exchanged_product, [16.0] * 2),
        (_first_sparse_sum, [0.0, 0.0, 0.0, 2.0]),
        (_first_exchange, [1.0] * 4),
        (_first_allocation, [0.0] * 3),
        (_first_replicas, [0.0]),
        (_first_timeline, [1.0]),
    ],
)
def test_a_world_recovers_behind_a_late_first_call(call: Callable[[], torch.Tensor], wanted: list[float]) -> None:
    found = in_world(_late, 2, "host", call)
    assert found == [["PeerTimeoutError", wanted]] * 2


# ---- who recovers before its peers -----------------------------------------------------------------------------------


def _recovers_first() -> list[Any]:
    _first_sum()
    if po.rank() == 1:
        time.sleep(1.5)
    x = torch.ones(4, dtype=torch.float32 if po.rank() else torch.float64)  # PE 0 alone refuses its dtype
    told = error_of(lambda: po.all_reduce(x))[0]
    po.recover()
    return [told, _first_sum().tolist()]


@pytest.mark.host
def test_a_pe_that_recovers_first_waits_for_an_operator_that_waits_for_it() -> None:
    found = in_world(_recovers_first, 2, "host", operator_timeout=5.0)
    assert found == [["TypeError", [2.0] * 4], ["PeerTimeoutError", [2.0] * 4]]


def _lost(backend: str) -> list[str]:
    po.init(backend, operator_timeout=2.0, heap_size=16 << 20)
    try:
        _first_sum()
        if po.rank() == 1:
            time.sleep(3.0)  # it waits in an operator while PE 0 gives up its recovery
            told = error_of(_first_sum)[0]
            time.sleep(2.0)  # it leaves after PE 0 has given up, on a busy machine too
            return [told]
        errors = [error_of(po.recover)]
        errors += [error_of(call) for call in (_first_sum, _first_allocation, po.check, po.recover, po.barrier)]
        return [f"{name}: {text}" for name, text, *_ in errors]
    finally:
        po.finalize()


@pytest.mark.host
def test_a_world_that_does_not_recover_is_not_used() -> None:
    """Two PEs could launch different things then, which must not be mistaken for the same."""
    (recovery, *refused), (other,) = run_pes(_lost, 2, "host", timeout=60)
    assert recovery.startswith("BootstrapError: rank 1 of 2 did not reach 'recover'")
    assert all(text.startswith("BootstrapError: the world is lost, since po.recover()") for text in refused), refused
    assert other in ("PeerLostError", "PeerTimeoutError")


def _interrupted(monkeypatch: pytest.MonkeyPatch, names: list[str]) -> list[list[str]]:
    """Recover with an interrupt in a method of the backend, once for each method. Then recover again, and sum."""
    found = []
    for name in names:
        po.init("host", heap_size=16 << 20)
        _first_sum()
        with monkeypatch.context() as patch:
            patch.setattr(current().backend, name, _raise_interrupt)
            told = ["KeyboardInterrupt" if _is_interrupted(po.recover) else ""]
        told += [error_of(call)[0] for call in (po.recover, _first_sum)]
        po.finalize()
        found.append(told)
    return found


def _raise_interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def _is_interrupted(call: Callable[[], None]) -> bool:
    try:
        call()
    except KeyboardInterrupt:
        return True
    return False


def test_an_interrupt_loses_a_world_from_its_first_exchange_on(monkeypatch: pytest.MonkeyPatch) -> None:
    waits, exchanges = _interrupted(monkeypatch, ["synchronize", "quiet"])
    assert waits == ["KeyboardInterrupt", "", ""]
    assert exchanges == ["KeyboardInterrupt", "BootstrapError", "BootstrapError"]


# ---- traces ----------------------------------------------------------------------------------------------------------


def _traced(path: Any) -> list[str]:
    told = []
    for where in (path, None, None):

        def trace(where: Any = where) -> None:
            with po.trace(where):
                po.all_reduce(torch.ones(3))

        told.append(error_of(trace)[0])
    return told


@pytest.mark.parametrize(("path", "kind"), [("a\0b", "ValueError"), (5, "TypeError")])
def test_a_path_that_is_none_leaves_nobody_behind(path: Any, kind: str) -> None:
    assert in_world(_traced, 2, "host", path) == [[kind, "", ""], ["RuntimeError", "", ""]]


# ---- threads ---------------------------------------------------------------------------------------------------------


def _twice() -> tuple[str, str]:
    po.init("host", heap_size=16 << 20)
    po.finalize()
    return error_of(lambda: po.init("host"))[:2]


def test_a_thread_has_one_world() -> None:
    for kind, text in po.launch(_twice, 2, threads=True, timeout=100):
        assert kind == "RuntimeError" and text.startswith("a PE that is a thread has one world in a launch")


def _leaves(code: object) -> int:
    po.init("host", heap_size=16 << 20)
    if po.rank() == 1:
        raise SystemExit(code)
    po.barrier()
    return 7


@pytest.mark.parametrize(("code", "told"), [(None, 0), (0, 0), (3, 3)])
def test_a_pe_that_exits_returns_nothing(code: object, told: int) -> None:
    with pytest.raises(po.PersistentOpsError, match=f"PE 1 of 2 exited with code {told} before it returned a result"):
        po.launch(_leaves, 2, code, threads=True, timeout=100)


# ---- memory ----------------------------------------------------------------------------------------------------------


def _freed_in_parts() -> list[str]:
    whole, none = po.empty(1000), po.empty(0)
    told = [error_of(lambda part=part: po.free(part))[0] for part in (whole[:1], whole[:0], whole[1:])]
    other = po.empty(1000)
    other.fill_(7.0)
    whole.fill_(1.0)
    assert (other == 7.0).all()
    for each in (whole, none, other):
        po.free(each)
    return told


def test_a_part_of_a_tensor_is_not_given_back() -> None:
    assert in_world(_freed_in_parts, 2, "host") == [["NotSymmetricError"] * 3] * 2

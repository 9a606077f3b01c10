"""A mismatch first names what differs, in the caller's words. Internal details appear only if nothing else differs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from worlds import error_of, in_world

import persistent_ops as po
from persistent_ops.ops.all_reduce_plan import OPERATOR, Tuning
from persistent_ops.runtime.world import current

pytestmark = pytest.mark.host

INTERNALS = ("work_groups", "threads", "warp_blocks", "first_element", "blocks_of_launch", "epoch", "hash")


def _is_odd() -> bool:
    return po.rank() == 1


def _shape() -> None:
    po.all_reduce(torch.ones(7 if _is_odd() else 6))


def _dtype() -> None:
    po.all_reduce(torch.ones(6, dtype=torch.bfloat16 if _is_odd() else torch.float32))


def _option() -> None:
    po.all_reduce(torch.ones(6), algorithm="two_shot" if _is_odd() else "one_shot")


def _optional_tensor() -> None:
    weight, x = torch.ones(4, 8), torch.ones(8)
    po.gemv_all_reduce(weight, x, bias=torch.ones(4) if _is_odd() else None)


def _list() -> None:
    split = [1, 3] if _is_odd() else [2, 2]
    offsets = torch.arange(5)
    with torch.no_grad():
        po.embedding_all_to_all([torch.ones(3, 4)], torch.zeros(4, dtype=torch.int64), offsets, batch_per_rank=split)


def _other_operator() -> None:
    if _is_odd():
        po.gemv_all_reduce(torch.ones(6, 8), torch.ones(8))
    else:
        po.all_reduce(torch.ones(6))


def _number_of_calls() -> None:
    for _ in range(1 + _is_odd()):
        po.all_reduce(torch.ones(6))
    po.barrier()


def _tuning() -> None:
    OPERATOR.tune(current(), Tuning(work_groups=2 if _is_odd() else 1))
    try:
        po.all_reduce(torch.ones(4096), algorithm="two_shot")
    finally:
        OPERATOR.tune(current(), None)


def _errors(call: Callable[[], None]) -> list[Any]:
    po.all_reduce(torch.ones(2))  # sets aside what PEs have to agree on
    po.gemv_all_reduce(torch.ones(2, 8), torch.ones(8))
    name, text, _ = error_of(call)
    po.recover()
    return [name, text, float(po.all_reduce(torch.ones(1)))]


@pytest.mark.parametrize(
    ("call", "begin", "told"),
    [
        (_shape, "called all_reduce with different arguments: the number of elements of x", ("6", "7")),
        (_dtype, "called all_reduce with different arguments: the dtype of x is ", ("float32", "bfloat16")),
        (_option, "called all_reduce with different arguments: algorithm is ", ("one_shot", "two_shot")),
        (_optional_tensor, "called gemv_all_reduce with different arguments: bias is ", ("None", "a tensor")),
        (_list, "called embedding_all_to_all with different arguments: batch_per_rank is ", ("[2, 2]", "[1, 3]")),
        (_other_operator, "made different calls: ", ("all_reduce(rows=1, width=6, ", "gemv_all_reduce(rows=6, ")),
        (_number_of_calls, "made different calls: ", ("barrier()", "all_reduce(rows=1, width=6, ")),
    ],
)
def test_a_mismatch_names_what_the_caller_passed(call: Callable[[], None], begin: str, told: tuple[str, str]) -> None:
    for rank, (name, text, after) in enumerate(in_world(_errors, 2, "host", call)):
        assert name == "ContractMismatchError" and after == 2
        own, other = (told[rank], told[1 - rank])
        assert text.startswith(f"PE {rank} and PE {1 - rank} {begin}"), text
        assert own in text.partition(f" on PE {rank}, ")[0], text
        assert other in text.partition(f" on PE {rank}, ")[2] or "another list on PE " in text, text
        assert not [each for each in INTERNALS if each in text], text
        assert text.endswith("all PEs must call po.recover() before the next call."), text


def test_what_no_caller_passed_is_named_where_nothing_else_differs() -> None:
    for rank, (name, text, after) in enumerate(in_world(_errors, 2, "host", _tuning)):
        assert name == "ContractMismatchError" and after == 2
        own, other = (2, 1) if rank == 1 else (1, 2)
        assert "launched all_reduce from different plans in epoch " in text
        assert f"work_groups is {own} on PE {rank}, {other} on PE {1 - rank}" in text, text

"""The blocks of slots that workers take, and the owners of rows: pure functions, the same on every PE."""

from __future__ import annotations

import ctypes
from collections import Counter
from pathlib import Path

import pytest
from host_driver.build import load_shim
from hypothesis import given, settings, strategies as st


@pytest.fixture(scope="module")
def shim(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    library = load_shim("slots_shim.cpp", Path(tmp_path_factory.mktemp("slots")))
    library.blocks_of_worker.argtypes = [ctypes.c_uint32] * 3 + [ctypes.c_int64] * 2 + [ctypes.c_void_p]
    library.owner.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_int64]
    return library


def _blocks(
    shim: ctypes.CDLL, worker: int, num_workers: int, num_slots: int, num_shares: int, row_bytes: int
) -> tuple[int, int, int, int]:
    found = (ctypes.c_int64 * 4)()
    shim.blocks_of_worker(worker, num_workers, num_slots, num_shares, row_bytes, found)
    return tuple(found)  # type: ignore[return-value]


ROW_BYTES = st.sampled_from([0, 2, 512, 3000, 8192, 1 << 20])


@given(
    num_workers=st.integers(1, 40),
    num_slots=st.integers(0, 3000),
    shares=st.sampled_from([1, 2, 8]),
    row_bytes=ROW_BYTES,
)
@settings(deadline=None, max_examples=60)
def test_every_slot_is_in_one_block(
    shim: ctypes.CDLL, num_workers: int, num_slots: int, shares: int, row_bytes: int
) -> None:
    seen: Counter[int] = Counter()
    for worker in range(num_workers):
        first, stride, slots, count = _blocks(shim, worker, num_workers, num_slots, shares * num_slots, row_bytes)
        assert slots == 1 or (slots <= 32 and (shares == 1 or slots * row_bytes <= 8192))
        for block in range(count):
            begin = first + block * stride
            assert begin < num_slots
            seen.update(range(begin, min(begin + slots, num_slots)))
    assert seen == Counter(range(num_slots))


@pytest.mark.parametrize("row_bytes", [4, 8192])
@pytest.mark.parametrize(("num_workers", "num_slots"), [(1, 2**31), (2, 2**31 - 1), (2112, 2**31), (2112, 384_000)])
def test_progress_can_count_the_blocks(shim: ctypes.CDLL, num_workers: int, num_slots: int, row_bytes: int) -> None:
    workers = {0, num_workers // 2, num_workers - 1}
    counts = [_blocks(shim, worker, num_workers, num_slots, 2 * num_slots, row_bytes)[3] for worker in workers]
    assert max(counts) <= 65000 and max(counts) - min(counts) <= 1


def _owner(shim: ctypes.CDLL, contributors: int, num_words: int, slot: int) -> int:
    words = (ctypes.c_uint64 * num_words)(*((contributors >> 64 * word) % 2**64 for word in range(num_words)))
    return int(shim.owner(words, num_words, slot))


@given(contributors=st.integers(1, 2**192 - 1), slot=st.integers(0, 2**31 - 1))
@settings(deadline=None)
def test_owner_is_a_contributor(shim: ctypes.CDLL, contributors: int, slot: int) -> None:
    assert contributors >> _owner(shim, contributors, 3, slot) & 1


@pytest.mark.parametrize("contributors", [0b1, 0b1010, 0b11111111, 2**63 + 1, 2**64 - 1, 2**64, 2**191 + 2**64 + 1])
def test_contributors_own_in_turn(shim: ctypes.CDLL, contributors: int) -> None:
    pes = [pe for pe in range(192) if contributors >> pe & 1]
    for num_words in (1, 3) if contributors < 2**64 else (3,):
        assert [_owner(shim, contributors, num_words, slot) for slot in range(2 * len(pes))] == 2 * pes

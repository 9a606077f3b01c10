"""A product and a shift give the same result as a division."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest
from host_driver.build import load_shim
from hypothesis import given, settings, strategies as st

from persistent_ops.runtime.compile.description import describe

MOST = 2**31 - 1
POWERS = [2**power for power in range(31)]
NUMBERS = sorted({0, MOST, *POWERS, *(power - 1 for power in POWERS), *(power + 1 for power in POWERS)})
DIVISORS = [number for number in NUMBERS if number > 0]


@pytest.fixture(scope="module")
def shim(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return load_shim("divisor_shim.cpp", Path(tmp_path_factory.mktemp("divisor")))


def _divided(shim: ctypes.CDLL, number: int, divisor: int) -> tuple[int, int]:
    return shim.quotient(number, divisor), shim.remainder_of(number, divisor)


def test_around_powers_of_two(shim: ctypes.CDLL) -> None:
    for divisor in DIVISORS:
        for number in NUMBERS:
            assert _divided(shim, number, divisor) == divmod(number, divisor)


@given(number=st.integers(0, MOST), divisor=st.integers(1, MOST))
@settings(deadline=None, max_examples=500)
def test_any_numbers(shim: ctypes.CDLL, number: int, divisor: int) -> None:
    assert _divided(shim, number, divisor) == divmod(number, divisor)


@given(divisor=st.integers(1, MOST), quotient=st.integers(1, MOST))
@settings(deadline=None, max_examples=500)
def test_beside_multiples(shim: ctypes.CDLL, divisor: int, quotient: int) -> None:
    multiple = divisor * min(quotient, MOST // divisor)
    for number in (multiple - 1, multiple):
        assert _divided(shim, number, divisor) == divmod(number, divisor)


@given(divisor=st.integers(1, MOST))
@settings(deadline=None)
def test_products_fit_64_bits(divisor: int) -> None:
    queries = describe("sched/divisor.cuh").queries
    multiplier, shift = queries["divisor_multiplier"](divisor), queries["divisor_shift"](divisor)
    assert 0 <= multiplier * divisor - 2**shift < divisor
    assert multiplier * MOST < 2**63


def test_nothing_is_divided_by_zero() -> None:
    """A plan of zero rows has a divisor."""
    assert describe("sched/divisor.cuh").queries["divisor_multiplier"](0) == 0

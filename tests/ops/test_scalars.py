"""fp16, bf16 and fp8 on the host backend convert as in torch: exactly, or rounded to nearest, ties to even."""

from __future__ import annotations

import ctypes

import pytest
import torch
from embedding_backward_cases import philox
from host_driver.build import load_shim

DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16}


@pytest.fixture(scope="module")
def shim(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return load_shim("scalar_shim.cpp", tmp_path_factory.mktemp("scalars"))


def convert(function: object, source: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    result = torch.empty(source.shape, dtype=dtype)
    function(  # type: ignore[operator]
        ctypes.c_void_p(source.data_ptr()), ctypes.c_void_p(result.data_ptr()), ctypes.c_int64(source.numel())
    )
    return result


def check_equal(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Same bits, signed zeros included; any NaN for a NaN."""
    bits = torch.int16 if found.element_size() == 2 else torch.int32
    is_nan = expected.isnan()
    assert torch.equal(found.isnan(), is_nan)
    differs = (found.view(bits) != expected.view(bits)) & ~is_nan
    where = differs.nonzero().flatten()[:5]
    assert where.numel() == 0, f"at {where.tolist()}: {found[where].tolist()}, expected {expected[where].tolist()}"


def all_halves(dtype: torch.dtype) -> torch.Tensor:
    return torch.arange(65536).to(torch.int16).view(dtype)


@pytest.mark.parametrize("name", DTYPES)
def test_every_half_widens_exactly(shim: ctypes.CDLL, name: str) -> None:
    halves = all_halves(DTYPES[name])
    check_equal(convert(getattr(shim, f"widen_{name}"), halves, torch.float32), halves.float())


@pytest.mark.parametrize("name", DTYPES)
def test_every_half_survives_the_way_there_and_back(shim: ctypes.CDLL, name: str) -> None:
    halves = all_halves(DTYPES[name])
    wide = convert(getattr(shim, f"widen_{name}"), halves, torch.float32)
    check_equal(convert(getattr(shim, f"narrow_{name}"), wide, DTYPES[name]), halves)


def float_samples(dtype: torch.dtype) -> torch.Tensor:
    """Floats at, half way between, and next to half way between neighboring halves; and floats of every exponent."""
    halves = all_halves(dtype).float()
    bits = halves.view(torch.int32).long()
    lost = 13 if dtype == torch.float16 else 16  # bits of a float's mantissa that a normal half does not keep
    near = [bits + (1 << lost - 1) + step for step in (-1, 0, 1)] + [bits - 1, bits, bits + 1]
    # Subnormal halves are further apart: their middles are sums of neighbors.
    ordered = halves[halves.isfinite()].sort().values.double()
    middles = ((ordered[1:] + ordered[:-1]) / 2).float().view(torch.int32).long()
    near += [middles - 1, middles, middles + 1]
    generator = torch.Generator().manual_seed(0)
    near.append(torch.randint(-(2**31), 2**31, (1 << 20,), generator=generator))
    return torch.cat(near).to(torch.int32).view(torch.float32)


@pytest.mark.parametrize("name", DTYPES)
def test_floats_round_as_torch_rounds(shim: ctypes.CDLL, name: str) -> None:
    samples = float_samples(DTYPES[name])
    assert samples.isnan().any()
    assert samples.isinf().any()
    check_equal(convert(getattr(shim, f"narrow_{name}"), samples, DTYPES[name]), samples.to(DTYPES[name]))


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("float16", 65504.0, 65504.0),  # the largest
        ("float16", 65519.996, 65504.0),  # the last float that rounds to it
        ("float16", 65520.0, float("inf")),
        ("float16", -65520.0, float("-inf")),
        ("float16", 2.0**-24, 2.0**-24),  # the smallest subnormal
        ("float16", 2.0**-25, 0.0),  # a tie, to even
        ("float16", 2.0**-25 * 1.0001, 2.0**-24),
        ("float16", 1 + 2.0**-11, 1.0),  # ties
        ("float16", 1 + 3 * 2.0**-11, 1 + 2 * 2.0**-10),
        ("bfloat16", 1 + 2.0**-8, 1.0),
        ("bfloat16", 1 + 3 * 2.0**-8, 1 + 2 * 2.0**-7),
        ("bfloat16", 3.39e38, 3.3895313892515355e38),  # the largest
        ("bfloat16", 3.4028234663852886e38, float("inf")),  # the largest float
        ("bfloat16", 2.0**-133, 2.0**-133),  # the smallest subnormal
        ("bfloat16", 2.0**-134, 0.0),
    ],
)
def test_known_roundings(shim: ctypes.CDLL, name: str, value: float, expected: float) -> None:
    found = convert(getattr(shim, f"narrow_{name}"), torch.tensor([value], dtype=torch.float32), DTYPES[name])
    assert found.double().item() == expected


@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.parametrize("bits", [0x7F800001, 0x7FC00000, 0x7FFFFFFF, -1])
def test_nan_stays_nan(shim: ctypes.CDLL, name: str, bits: int) -> None:
    nan = torch.tensor([bits], dtype=torch.int32).view(torch.float32)
    assert convert(getattr(shim, f"narrow_{name}"), nan, DTYPES[name]).isnan().all()


# ---- stochastic rounding ---------------------------------------------------------------------------------------------

_RANDOM_VALUES = 1 << 16


def round_with(shim: ctypes.CDLL, name: str, values: torch.Tensor, random: torch.Tensor) -> torch.Tensor:
    """Round each value with each random number: `[values, random numbers]`."""
    pairs = torch.cartesian_prod(values.double(), random.double())
    source, numbers = pairs[:, 0].float().contiguous(), pairs[:, 1].to(torch.int32).contiguous()
    result = torch.empty(source.shape, dtype=DTYPES[name])
    pointers = [ctypes.c_void_p(tensor.data_ptr()) for tensor in (source, numbers, result)]
    getattr(shim, f"narrow_stochastically_{name}")(*pointers, ctypes.c_int64(source.numel()))
    return result.view(len(values), len(random))


@pytest.mark.parametrize("name", DTYPES)
def test_the_mean_of_all_stochastic_roundings_is_the_value(shim: ctypes.CDLL, name: str) -> None:
    """Exact where only 16 bits follow the last place. Each result is a neighbor."""
    generator = torch.Generator().manual_seed(2)
    least = {"float16": 2.0**-14, "bfloat16": 2.0**-126}[name]
    normal = torch.randn(24, generator=generator) * torch.logspace(-3, 3, 24)
    subnormal = torch.rand(8, generator=generator) * least
    exact = torch.tensor([0.0, 1.0, -1.5, least, -least / 8])
    values = torch.cat([normal, subnormal, exact])
    found = round_with(shim, name, values, torch.arange(_RANDOM_VALUES)).double()
    error = (found.mean(1) - values.double()).abs()
    behind = 2.0**-40 if name == "float16" else 0.0  # finer digits do not count
    assert torch.all(error[values.abs() >= least] == 0), error
    assert torch.all(error <= behind), error
    for rounded, value in zip(found, values.double(), strict=True):
        kinds = rounded.unique()
        assert len(kinds) <= 2 and kinds[0] <= value <= kinds[-1]
        if len(kinds) == 2:
            between = all_halves(DTYPES[name]).double()
            assert not ((between > kinds[0]) & (between < kinds[1])).any(), "they are no neighbors"


@pytest.mark.parametrize("name", DTYPES)
def test_stochastic_rounding_keeps_what_it_must(shim: ctypes.CDLL, name: str) -> None:
    """Numbers of 16 bits, infinities and NaN stay. Values above the largest number sometimes become infinite."""
    random = torch.tensor([0, 1, 32768, 65535])
    halves = all_halves(DTYPES[name])
    for column in round_with(shim, name, halves.float(), random).t():
        check_equal(column.contiguous(), halves)
    largest = torch.finfo(DTYPES[name]).max
    step = {"float16": 32.0, "bfloat16": 2.0**120}[name]
    beyond = round_with(shim, name, torch.tensor([largest + step / 2]), random)[0]
    assert beyond.tolist() == [largest, largest, float("inf"), float("inf")]


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        ((0, 0, 0, 0), 0, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, 2**64 - 1, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            0x299F31D0_A4093822,
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_known_draws(shim: ctypes.CDLL, counter: tuple[int, ...], key: int, words: tuple[int, ...]) -> None:
    """The vectors that the authors of Philox publish with their library."""
    found = (ctypes.c_uint32 * 4)()
    shim.draw((ctypes.c_uint32 * 4)(*counter), (ctypes.c_uint64 * 1)(key), found, ctypes.c_int64(1))
    assert tuple(found) == words
    assert tuple(int(word) for word in philox(counter, key)) == words


def test_floats_round_to_float8_as_torch_rounds_and_saturate(shim: ctypes.CDLL) -> None:
    dtype = torch.float8_e4m3fn
    every = torch.arange(256).to(torch.uint8).view(dtype).float()
    ordered = every[every.isfinite()].sort().values.double()
    middles = ((ordered[1:] + ordered[:-1]) / 2).float().view(torch.int32).long()
    random = torch.randint(-(2**31), 2**31, (1 << 20,), generator=torch.Generator().manual_seed(0))
    near = [middles - 1, middles, middles + 1, every.view(torch.int32).long(), random]
    samples = torch.cat(near).to(torch.int32).view(torch.float32)
    found = convert(shim.narrow_float8_e4m3fn, samples, dtype)
    assert torch.equal(found.float().isnan(), samples.isnan())
    there = ~samples.isnan()
    expected = samples.clamp(-448, 448).to(dtype)
    assert torch.equal(found.view(torch.uint8)[there], expected.view(torch.uint8)[there])

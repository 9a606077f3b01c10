"""Operators in Triton: exact bits, arguments, other operators beside them, gradients, torch.compile, tuning."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
import triton
import triton.language as tl
from arguments import Arguments, ArgumentSuite, Function, Wrong, given_as
from bits import BitsSuite, CaseWorld, Outcome, Trial, difference
from interpreters import interpreting, run_interpreters
from kept_pes import in_processes
from triton.tools.tensor_descriptor import TensorDescriptor
from triton_cases import all_gather, sum_of_all
from worlds import error_of, run_pes

import persistent_ops as po
import persistent_ops.triton as pot
from persistent_ops.runtime.world import current


@dataclass(frozen=True)
class Case:
    """A call of one operator.

    Attributes:
        shape: of what each PE passes.
        tile: of all_gather: rows and columns; of sum_of_all: elements.
    """

    name: str
    shape: tuple[int, int]
    tile: tuple[int, int]
    dtype: torch.dtype = torch.float32
    is_sum: bool = False

    def numbers(self, iteration: int) -> torch.Tensor:
        """Return what the PEs pass, `[world, M, N]`; the interpreter rounds sums to bf16 toward zero."""
        rng = torch.Generator().manual_seed(iteration)
        numbers = 8 * torch.randn((po.world_size(), *self.shape), generator=rng)
        is_whole = self.is_sum and self.dtype == torch.bfloat16
        return (numbers.round() if is_whole else numbers).to(self.dtype)

    def expected(self, iteration: int) -> torch.Tensor:
        numbers = self.numbers(iteration)
        if not self.is_sum:
            return numbers.flatten(0, 1)
        total = torch.zeros(self.shape)
        for part in numbers:
            total += part.float()
        return total.to(self.dtype)


CASES = [
    Case("gather, an element", (1, 1), (1, 16)),
    Case("gather, fp16", (5, 37), (2, 16), torch.float16),
    Case("gather, bf16", (3, 64), (4, 32), torch.bfloat16),
    Case("gather", (9, 100), (4, 64)),
    Case("sum, an element", (1, 1), (1, 128), is_sum=True),
    Case("sum, bf16", (4, 96), (1, 64), torch.bfloat16, is_sum=True),
    Case("sum, fp16", (7, 51), (1, 128), torch.float16, is_sum=True),
    Case("sum", (3, 333), (1, 256), is_sum=True),
]


def call(case: Case, x: torch.Tensor, **options: Any) -> torch.Tensor:
    """Call a case's operator; `x` of a sum is of `po.empty`."""
    (rows, columns), (height, width) = case.shape, case.tile
    if case.is_sum:
        return sum_of_all(x, rows * columns, **{"out_shape": case.shape, "meta": {"BLOCK": width}, **options})
    shape, meta = (po.world_size() * rows, columns), {"BM": height, "BN": width}
    return all_gather(x, rows, columns, 0, **{"out_shape": shape, "meta": meta, **options})


# ---- bits ------------------------------------------------------------------------------------------------------------


class Called(Trial):
    """With grids of 1 and 3; with three into a tensor of the caller's."""

    def __init__(self, case: Case) -> None:
        self._case = case
        self._x = po.empty(case.shape, dtype=case.dtype)
        self._out = po.empty(case.expected(0).shape, dtype=case.dtype)

    def ways(self, turn: int) -> Sequence[int]:
        return (1, 3)

    def call(self, turn: int, iteration: int, way: int) -> Outcome:
        self._x.copy_(self._case.numbers(iteration)[po.rank()])
        out = {"out": self._out} if way == 3 else {}
        found = call(self._case, self._x, work_groups=way, **out)
        assert way == 1 or found is self._out
        return Outcome([found], difference(found, self._case.expected(iteration)))


class TestBits(BitsSuite):
    trial = Called
    halved_by = None
    run_pes = staticmethod(run_interpreters)
    worlds: ClassVar = {str(size): CaseWorld(size, CASES[1::2] if size == 3 else CASES) for size in (1, 2, 3, 4)}
    test_bits_of_kernels_as_users_compile_them = None  # no C++ compiler makes them


# ---- programs in a world ---------------------------------------------------------------------------------------------


def _in_a_world(backend: str, program: Callable[..., Any], options: dict[str, Any], *args: Any) -> Any:
    po.init(backend, **{"operator_timeout": 30.0, "heap_size": 8 << 20, **options})
    try:
        result = program(*args)
        po.check()
        return result
    finally:
        po.finalize()


def in_world(program: Callable[..., Any], world: int, backend: str, *args: Any, **options: Any) -> list[Any]:
    """Run a program as `worlds.in_world` does, on PEs that interpret."""
    return run_interpreters(_in_a_world, world, backend, program, options, *args, timeout=100)


_GATHER, _SUM = Case("gather", (5, 64), (4, 32)), Case("sum", (3, 50), (1, 64), is_sum=True)


def _given(case: Case, iteration: int) -> torch.Tensor:
    return po.empty(case.shape, dtype=case.dtype).copy_(case.numbers(iteration)[po.rank()])


def _is_right(case: Case, iteration: int) -> bool:
    return difference(call(case, _given(case, iteration)), case.expected(iteration)) is None


# ---- arguments -------------------------------------------------------------------------------------------------------


def _good() -> Arguments:
    x = torch.arange(320.0, device=po.device()).view(5, 64)
    return {"x": x, "M": 5, "N": 64, "silent": 0, "out_shape": (5, 64), "meta": {"BM": 4, "BN": 32}}


def _called(by_position: Sequence[Any] = (), left_out: str = "", **arguments: Any) -> torch.Tensor:
    return all_gather(*by_position, **{name: value for name, value in arguments.items() if name != left_out})


def _wrong(error: type[Exception], text: str, **arguments: Any) -> Wrong:
    return Wrong("all_gather", given_as(**arguments), error, text)


def _made(error: type[Exception], text: str, name: str, make: Callable[[torch.Tensor], Any]) -> Wrong:
    return Wrong("all_gather", lambda given: {name: make(given["x"])}, error, text)


class TestArguments(ArgumentSuite):
    run_pes = staticmethod(run_interpreters)
    test_damaged_tensor = None  # nothing is declared
    functions: ClassVar = {"all_gather": Function(_called, _good, lambda given, found: torch.equal(found, given["x"]))}
    wrong: ClassVar = {
        "too many": _wrong(TypeError, "^all_gather: expected 4 arguments, got 5", by_position=[0] * 5),
        "twice": _wrong(TypeError, "^all_gather: unexpected argument x; expected", by_position=[0]),
        "unknown": _wrong(TypeError, "^all_gather: unexpected argument rows; expected", rows=3),
        "missing": _wrong(TypeError, r"^all_gather: missing arguments \['silent'\]", left_out="silent"),
        "constexpr": _wrong(TypeError, "^all_gather: BM is a constexpr; pass it in meta", BM=4),
        "float in the contract": _wrong(TypeError, "^M: expected a whole number of 64 bits, as it is", M=5.0),
        "bool in the contract": _wrong(TypeError, "^M: expected a whole number of 64 bits, as it is", M=True),
        "too large for the contract": _wrong(TypeError, "^M: expected a whole number of 64 bits, as it is", M=1 << 63),
        "too large": _wrong(TypeError, "^silent: expected a whole number of 64 bits", silent=1 << 63),
        "text": _wrong(TypeError, "^silent: expected a tensor, a number or a tensor descriptor, got str", silent="no"),
        "sparse": _made(TypeError, "^x: expected a plain dense tensor, got layout", "x", torch.Tensor.to_sparse),
        "device": _made(ValueError, "^x: expected a tensor on .*, got one on meta", "x", lambda x: x.to("meta")),
        "gradient": _made(
            NotImplementedError,
            "is forward only: call it under torch.no_grad",
            "x",
            lambda x: x.clone().requires_grad_(),
        ),
        "gradient of a descriptor": _made(
            NotImplementedError,
            "is forward only",
            "x",
            lambda x: TensorDescriptor.from_tensor(x.clone().requires_grad_(), [4, 32]),
        ),
        "descriptor of one dimension": _made(
            NotImplementedError,
            "^x: expected a descriptor of two",
            "x",
            lambda x: TensorDescriptor.from_tensor(x[0], [32]),
        ),
        "descriptor of another device": _made(
            ValueError, "^x: expected a tensor on", "x", lambda x: TensorDescriptor.from_tensor(x.to("meta"), [4, 32])
        ),
        "no shape": _wrong(TypeError, "missing argument out_shape", out_shape=None),
        "empty": _wrong(ValueError, r"^out_shape: expected at least one element, got \[0, 64\]", out_shape=(0, 64)),
        "negative": _wrong(ValueError, "^out_shape: expected at least one element, got", out_shape=(-5, -64)),
        "no list": _wrong(TypeError, "^out_shape: expected whole numbers, got 5", out_shape=5),
        "fractions": _wrong(TypeError, "^out_shape: expected whole numbers", out_shape=(5.0, 64)),
        "no room": _wrong(po.SymmetricHeapError, "no room", out_shape=(1 << 20, 64)),
        "dtype": _wrong(TypeError, "^out_dtype: expected one of .*, got torch.int32", out_dtype=torch.int32),
        "no tensor as out": _wrong(TypeError, "^out: expected a tensor, got list", out=[1.0]),
        "out elsewhere": _made(po.NotSymmetricError, "^out: expected", "out", torch.empty_like),
        "out that is not contiguous": _made(
            ValueError,
            "^out: expected a contiguous tensor at a multiple of 16 bytes",
            "out",
            lambda x: po.empty((64, 5)).t(),
        ),
        "out between": _made(
            ValueError,
            "^out: expected a contiguous tensor at a multiple of 16 bytes",
            "out",
            lambda x: po.empty((321,))[1:],
        ),
        "no work-groups": _wrong(ValueError, "^work_groups: expected at least 1, got 0", work_groups=0),
        "a fraction of work-groups": _wrong(
            TypeError, "^work_groups: expected a whole number, got 1.5", work_groups=1.5
        ),
        "too many work-groups": _wrong(ValueError, "^work_groups: .* must be resident as a whole", work_groups=1 << 14),
        "sm_margin": _wrong(ValueError, "^sm_margin: expected at least 0, got -1", sm_margin=-1),
    }


@triton.jit
def _other_arguments(x, out):
    pass


@triton.jit
def _reserved(team, out, sm_margin):
    pass


@triton.jit
def _kernel(team, out, a, b, c, d, e, f, g, h, i, B: tl.constexpr):
    pass


@pytest.mark.parametrize(
    ("kernel", "options", "error", "text"),
    [
        (len, {}, TypeError, "operator: expected a kernel of triton.jit"),
        (_other_arguments, {}, TypeError, r"_other_arguments: expected \(team, out, ...\), got \['x', 'out'\]"),
        (_reserved, {}, TypeError, r"_reserved: \['sm_margin'\] are arguments of the operator"),
        (_kernel, {"contract": ("a", "z")}, ValueError, r"contract: expected arguments of the kernel, .*, got \['z'\]"),
        (_kernel, {"contract": ("B",)}, ValueError, "contract: expected arguments of the kernel"),
        (_kernel, {"contract": tuple("abcdefghi")}, ValueError, "contract: expected at most 8 names, got 9"),
        (_kernel, {"phases": {15: ""}}, ValueError, r"phases: expected numbers from 16 to 65535, got \[15\]"),
        (_kernel, {"phases": {1 << 16: ""}}, ValueError, r"phases: expected numbers from 16 to 65535, got \[65536\]"),
        (_kernel, {"phases": {16: "{tile}"}}, ValueError, "phases: expected no field but {index}, got '{tile}'"),
    ],
)
def test_what_no_operator_is_made_of(kernel: Any, options: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        pot.operator(**options)(kernel)


def _in_a_thread(backend: str) -> tuple[str, str, float]:
    po.init(backend, heap_size=8 << 20)
    error = error_of(lambda: call(_GATHER, _given(_GATHER, 0)))
    po.finalize()
    return error


def _threads_in_an_interpreter() -> list[Any]:
    return po.launch(_in_a_thread, 2, "host", threads=True, timeout=60)


@pytest.mark.host
def test_threads_and_processes_that_do_not_interpret_are_refused() -> None:
    ((name, text, _),) = run_pes(_in_a_thread, 1, "host", timeout=60)
    assert name == "NotImplementedError" and "set TRITON_INTERPRET=1 before triton is imported" in text
    with interpreting():
        (errors,) = in_processes(_threads_in_an_interpreter, 1, timeout=60)
    for rank, (name, text, _) in enumerate(errors):
        assert name == "NotImplementedError" and text.startswith(f"PE {rank} is a thread, and Triton's interpreter"), (
            text
        )


def _staged() -> tuple[str, str, float]:
    return error_of(lambda: call(_GATHER, _given(_GATHER, 0)))


@pytest.mark.host
def test_pes_that_do_not_reach_each_other_are_refused(backend: str) -> None:
    for name, text, _ in in_world(_staged, 2, backend, transport="staged"):
        assert name == "NotImplementedError" and "some PEs do not reach each other's memory" in text


# ---- other operators, gradients, torch.compile -----------------------------------------------------------------------


def _beside_others() -> list[str]:
    """Launch operators of the package and of Triton, which take turns on one workspace."""
    world, rank, problems = po.world_size(), po.rank(), []
    table = torch.arange(32.0, device=po.device()).view(4, 8) + 100 * rank
    lookups = torch.arange(world, device=po.device()) % 4, torch.arange(world + 1, device=po.device())
    looked_up = torch.cat([torch.arange(8.0) + 8 * (rank % 4) + 100 * pe for pe in range(world)])
    x = torch.arange(1.0, 41.0, device=po.device())
    for iteration in range(3):
        case = (_GATHER, _SUM)[iteration % 2]
        found = {
            "Triton": _is_right(case, iteration),
            "all_reduce": torch.equal(po.all_reduce(x * (rank + 1)).cpu(), x.cpu() * (world * (world + 1) // 2)),
            "the other in Triton": _is_right((_SUM, _GATHER)[iteration % 2], iteration),
            "gemv_all_reduce": torch.equal(
                po.gemv_all_reduce(x.view(5, 8), x[:8]).cpu(), world * (x.view(5, 8) @ x[:8]).cpu()
            ),
            "Triton again": _is_right(case, iteration + 1),
            "embedding_all_to_all": torch.equal(po.embedding_all_to_all([table], *lookups).cpu().flatten(), looked_up),
        }
        problems += [f"{name}, iteration {iteration}" for name, is_right in found.items() if not is_right]
    return problems


def test_operators_of_both_kinds_take_turns(backend: str) -> None:
    assert in_world(_beside_others, 3, backend) == [[]] * 3


def _compiled() -> list[Any]:
    x = _GATHER.numbers(0)[po.rank()].to(po.device())
    launch, launches = current().workspace.launch, []
    current().workspace.launch = lambda *args, **how: [launches.append(1), launch(*args, **how)][1]

    def function(x: torch.Tensor) -> torch.Tensor:
        return call(_GATHER, 2 * x) + 1

    found = []
    for backend in ("eager", "aot_eager"):
        torch._dynamo.reset()
        compiled = torch.compile(function, backend=backend)
        for _ in range(2):
            launches.clear()
            result = compiled(x)
            found.append((difference(result.cpu(), 2 * _GATHER.expected(0) + 1), len(launches)))
    with torch.no_grad():
        found.append((difference(call(_GATHER, x.clone().requires_grad_()).cpu(), _GATHER.expected(0)), len(launches)))
    return found


def test_torch_compile_calls_once_and_no_grad_is_enough(backend: str) -> None:
    assert in_world(_compiled, 2, backend) == [[*[(None, 1)] * 4, (None, 2)]] * 2


# ---- tensor descriptors, tuning --------------------------------------------------------------------------------------


@pot.operator()
@triton.jit
def _copied(team, out, x, BM: tl.constexpr, BN: tl.constexpr):
    launch = pot.begin(team, out)
    rows, cols = tl.program_id(0) * BM + tl.arange(0, BM), tl.arange(0, BN)
    tl.store(out + rows[:, None] * BN + cols[None, :], x.load([tl.program_id(0) * BM, 0]))
    pot.await_all_credits(launch)
    pot.leave(launch, out, tl.num_programs(0) * BM * BN * 4)


def _described() -> bool:
    x = torch.arange(128.0, device=po.device()).view(8, 16) + po.rank()
    descriptor = TensorDescriptor.from_tensor(x, [4, 16])
    return torch.equal(_copied(descriptor, out_shape=(8, 16), meta={"BM": 4, "BN": 16}, work_groups=2), x)


@pytest.mark.host
def test_a_tensor_descriptor(backend: str) -> None:
    assert in_world(_described, 2, backend) == [True, True]


_METAS = ({"BM": 3, "BN": 16}, {"BM": 1, "BN": 16}, {"BM": 8, "BN": 64})


def _tuned() -> tuple[Any, ...]:
    """The first configuration cannot be compiled. The second one has twenty tiles in place of one; on the host, where
    programs run one after the other, it is the slower one."""
    x = _GATHER.numbers(0)[po.rank()].to(po.device())
    arguments, shape = (x, *_GATHER.shape, 0), (po.world_size() * 5, 64)
    refused = error_of(lambda: pot.tune(all_gather, _METAS[:1], *arguments, out_shape=shape))
    before, chosen = all_gather.meta, pot.tune(all_gather, _METAS, *arguments, out_shape=shape, rounds=3)
    try:
        is_right = difference(all_gather(*arguments, out_shape=shape).cpu(), _GATHER.expected(0)) is None
        return refused[:2], before, chosen, all_gather.meta, is_right
    finally:
        all_gather.meta = None


def test_pe_0_chooses_a_configuration_for_all(backend: str) -> None:
    found = in_world(_tuned, 2, backend)
    for (name, text), before, chosen, meta, is_right in found:
        assert (
            name == "RuntimeError" and "tune: no configuration of <Triton operator all_gather> can be launched" in text
        )
        assert "power of 2" in text
        assert (before, meta, is_right) == (None, chosen, True)
        assert chosen in _METAS[1 + (backend == "host") :] and chosen == found[0][2]

"""Exact bits, which every operator must return: for every case, in many worlds, repeatedly, while results are held.

An operator's class of tests derives from `BitsSuite`, and defines in a `Trial` how it is called and what it must
return.
"""

from __future__ import annotations

import functools
import os
import zlib
from collections.abc import Hashable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ClassVar, NamedTuple

import pytest
import torch
from serially import serially
from worlds import run_pes

import persistent_ops as po

__all__ = [
    "NUM_ITERATIONS",
    "SMALLEST",
    "UNIT",
    "BitsSuite",
    "CaseWorld",
    "Outcome",
    "Trial",
    "bits",
    "check",
    "difference",
]

NUM_ITERATIONS = 6  # of inputs
UNIT = {torch.float32: 2.0**-24, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}  # of one rounding, relative
SMALLEST = {torch.float32: 2.0**-149, torch.float16: 2.0**-24, torch.bfloat16: 2.0**-133}
Results = list[dict[str, tuple[str | None, int]]]


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return a floating-point tensor as integers: -0.0 differs from 0.0, and NaN equals itself."""
    return tensor.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[tensor.element_size()])


@serially
def difference(found: torch.Tensor, want: torch.Tensor) -> str | None:
    """Return where two results differ in bits, or None; they may be on any devices."""
    if (found.shape, found.dtype) != (want.shape, want.dtype):
        return f"got {found.dtype} {list(found.shape)}, expected {want.dtype} {list(want.shape)}"
    found, want = found.contiguous(), want.to(found.device).contiguous()
    if torch.equal(bits(found), bits(want)):
        return None
    wrong = (bits(found) != bits(want)).nonzero()
    place = tuple(int(i) for i in wrong[0])
    return (
        f"{len(wrong)} of {found.numel()} elements differ, the first at {list(place)}: {float(found[place])} instead "
        f"of {float(want[place])}"
    )


# ---- a case on a PE --------------------------------------------------------------------------------------------------


class Outcome(NamedTuple):
    """The result of a call.

    Attributes:
        outputs: that the operator returned, on its device.
        problem: what is wrong with them, or with the memory that they are in; or None.
    """

    outputs: Sequence[torch.Tensor]
    problem: str | None


class Trial:
    """A case on this PE, to be called in step with its peers.

    Attributes:
        held: turns whose outputs stay alive to the end.
    """

    held: ClassVar[Sequence[int]] = range(NUM_ITERATIONS + 1)

    def ways(self, turn: int) -> Sequence[Hashable]:
        """Return how the operator is called in a turn, one way after the other."""
        raise NotImplementedError

    def call(self, turn: int, iteration: int, way: Any) -> Outcome:
        """Call it with the inputs of an iteration."""
        raise NotImplementedError

    def close(self) -> None:
        """Restore the PE's state."""


def check(trial: Trial) -> tuple[str | None, int]:
    """Call an operator with the inputs of all iterations, and once more with the first ones.

    Returns:
        What is wrong, or None; and a number computed from the bits of all outputs.
    """
    problem, held = None, []
    calls: list[tuple[str, Hashable, list[torch.Tensor]]] = []
    for turn, iteration in enumerate((*range(NUM_ITERATIONS), 0)):
        for way in trial.ways(turn):
            outputs, found = trial.call(turn, iteration, way)
            call = f"turn {turn}, iteration {iteration}, {way}"
            calls.append((call, (iteration, way), [output.clone() for output in outputs]))
            for output in outputs:
                if output.is_floating_point():
                    output.fill_(float("nan"))  # memory that is used again must be written again
                    held += [output] if turn in trial.held else []
            if problem is None and found is not None:
                problem = f"{call}: {found}"
    po.check()
    if problem is None and not all(bool(output.float().isnan().all()) for output in held):
        problem = "a result changed while it was held"
    trial.close()
    digest = 0
    first: dict[Hashable, int] = {}
    for call, inputs, outputs in calls:  # now, as a PE that waits for its GPU waits until it is its turn there
        number = functools.reduce(_crc, outputs, 0)
        digest = zlib.crc32(number.to_bytes(4, "little"), digest)
        if problem is None and first.setdefault(inputs, number) != number:
            problem = f"{call}: other bits than before"
    return problem, digest


def _crc(number: int, tensor: torch.Tensor) -> int:
    return zlib.crc32(tensor.cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes(), number)


# ---- cases in worlds -------------------------------------------------------------------------------------------------


class CaseWorld(NamedTuple):
    """A world in which cases are run.

    Attributes:
        size: number of PEs.
        cases: what is run, each with a `name` and a `dtype`.
        options: of po.init.
        tuning: of the operator, for all cases.
    """

    size: int
    cases: Sequence[Any]
    options: Mapping[str, Any] = {}
    tuning: Mapping[str, Any] = {}


_APART = (2, 5, 8)  # worlds that deserve a GPU for each PE; the last two need several
_PARTS = 4  # of a world's cases, on GPUs: there each PE waits for the compiler


class BitsSuite:
    """The tests, for one operator.

    Attributes:
        trial: makes a case's trial on a PE.
        worlds: by name; each is launched when the first of its cases is asked for, on GPUs in parts.
        halved_by: a dtype of about half of the cases. A world of one PE runs these cases and the others side by side;
            None: it does not, as they take little time to compile.
        heap_bytes: of each PE.
        is_the_same_on_all_pes: whether all PEs get the same result.
        run_pes: runs a program on PEs, as `worlds.run_pes` does.
    """

    trial: ClassVar[type[Trial]]
    worlds: ClassVar[Mapping[str, CaseWorld]]
    halved_by: ClassVar[torch.dtype | None]
    heap_bytes: ClassVar[int] = 128 << 20
    is_the_same_on_all_pes: ClassVar[bool] = True
    run_pes = staticmethod(run_pes)

    _found: ClassVar[dict[tuple[type, str, str, int | None], Results | Exception]] = {}

    # ---- of the operator -------------------------------------------------------------------------------------------

    @classmethod
    def tune(cls, **tuning: Any) -> None:
        """Give the operator a tuning in this PE's world."""
        raise NotImplementedError

    # ---- programs of the PEs ---------------------------------------------------------------------------------------

    @classmethod
    def _run(cls, backend: str, name: str, names: Sequence[str]) -> dict[str, tuple[str | None, int]]:
        world = cls.worlds[name]
        po.init(backend, operator_timeout=30.0, heap_size=cls.heap_bytes, **world.options)
        try:
            if world.tuning:
                cls.tune(**world.tuning)
            return {case.name: check(cls.trial(case)) for case in world.cases if case.name in names}  # type: ignore[call-arg]
        finally:
            po.finalize()

    # ---- tests -----------------------------------------------------------------------------------------------------

    @classmethod
    def pytest_generate_tests(cls, metafunc: pytest.Metafunc) -> None:
        if "case" not in metafunc.fixturenames:
            return
        params = []
        # Worlds of 3 find the same defects as the others, except in few cases: the rest is left to `make test-all`.
        quick = max((world.size for world in cls.worlds.values() if world.size <= 3), default=0)
        chosen = next((name for name, world in cls.worlds.items() if world.size == quick), "")
        for name, world in cls.worlds.items():
            is_host = world.options or world.tuning
            marks = [pytest.mark.gpu] if world.size > 4 else [pytest.mark.host] if is_host else []
            if not is_host and world.size in _APART:
                marks.append(pytest.mark.apart)
            if name != chosen:
                marks.append(pytest.mark.slow)
            for number, case in enumerate(world.cases):
                part = cls._part(world, number)
                params.append(pytest.param(name, case, part, id=f"{name}.{part}-{case.name}", marks=marks))
        metafunc.parametrize(("name", "case", "part"), params)

    @classmethod
    def _part(cls, world: CaseWorld, number: int) -> int:
        return number * _PARTS // len(world.cases)

    def test_bits(self, backend: str, name: str, case: Any, part: int) -> None:
        """Fail where a PE of the world found a case's result wrong, or PEs have different bits."""
        _skip_without_gpus_for(self.worlds[name].size)
        key = type(self), backend, name, part if backend == "cuda" else None
        if key not in self._found:
            self._found[key] = self._launched(backend, name, part)
        found = self._found[key]
        if isinstance(found, Exception):
            raise found
        results = [of_pe[case.name] for of_pe in found]
        for rank, (problem, _) in enumerate(results):
            assert problem is None, f"PE {rank}: {problem}"
        if self.is_the_same_on_all_pes:
            assert len({digest for _, digest in results}) == 1, "the PEs have different bits"

    @pytest.mark.slow
    @pytest.mark.host
    def test_bits_of_kernels_as_users_compile_them(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Fail where a third of a world's cases have other bits with -O3 than with the other tests' flags.

        Some warnings that guess which values are possible are wrong with -O3.
        """
        name, world = next((name, world) for name, world in self.worlds.items() if world.size > 1)
        names = [case.name for case in world.cases[::3]]
        compiler = os.environ["PERSISTENT_OPS_CXX"]  # conftest.py has set it
        found = []
        for flags in ("", " -O3 -Wno-error"):
            monkeypatch.setenv("PERSISTENT_OPS_CXX", compiler + flags)
            found.append(self.run_pes(self._run, world.size, "host", name, names, timeout=280))
        for rank, of_pe in enumerate(found[1]):
            assert [problem for problem, _ in of_pe.values() if problem is not None] == [], f"PE {rank}"
        assert found[0] == found[1], "the bits depend on the compiler's optimization"

    def test_cases_have_names_of_their_own(self) -> None:
        for world in self.worlds.values():
            assert len({case.name for case in world.cases}) == len(world.cases) > 0

    def _launched(self, backend: str, name: str, part: int) -> Results | Exception:
        """Run a world's cases, on GPUs a part of them.

        An error of the launch is kept too, so that the world is not launched again for every case.
        """
        world = self.worlds[name]

        def launch(chosen: Sequence[Any]) -> Results:
            names = [case.name for case in chosen]
            return self.run_pes(self._run, world.size, backend, name, names, timeout=280)

        try:
            if backend == "cuda":
                return launch([c for number, c in enumerate(world.cases) if self._part(world, number) == part])
            if world.size > 1 or self.halved_by is None:
                return launch(world.cases)
            # The compiler takes most of the time here. The kernels are compiled for all other worlds too.
            halves = ([c for c in world.cases if (c.dtype == self.halved_by) == is_in] for is_in in (True, False))
            with ThreadPoolExecutor(2) as pool:
                first, second = pool.map(launch, halves)
            return [first[0] | second[0]]
        except Exception as error:
            return error


def _skip_without_gpus_for(world: int) -> None:
    """PEs may share GPUs, equally many on each, but then take turns. More than four PEs per GPU are too slow."""
    count = torch.cuda.device_count()
    if world > 4 and count < world and (count < 2 or world % count):
        pytest.skip(f"{world} PEs need {world} GPUs, or a smaller number that divides it; this machine has {count}")

"""Wrong arguments, which every operator must refuse: by name, with one wording, repeatedly, and without a launch.

An operator's class of tests derives from `ArgumentSuite`. It says how its functions are called correctly. It also lists
the tensors that they must declare, so that a missing declaration is noticed. The suite damages every property of each
of these tensors. The class lists other wrong arguments itself.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar, NamedTuple

import pytest
import torch
from worlds import run_pes

import persistent_ops as po
from persistent_ops.runtime.tensor_specs import TensorSpec, TensorSpecs

__all__ = ["ArgumentSuite", "Arguments", "Function", "Outcome", "Wrong", "changed", "given_as", "outcome_of"]

Arguments = dict[str, Any]
Outcome = tuple[list[str], str]


class Function(NamedTuple):
    """A function whose arguments may be wrong.

    Attributes:
        call: the function, with all arguments by name.
        good: arguments of a call that works in a world of one PE, on the world's device.
        is_right: whether the result of such a call is right.
        specs: of the tensor arguments, each of which is damaged.
        required: the arguments that may not be None.
    """

    call: Callable[..., Any]
    good: Callable[[], Arguments]
    is_right: Callable[[Arguments, Any], bool]
    specs: TensorSpecs = TensorSpecs()
    required: tuple[str, ...] = ()


class Wrong(NamedTuple):
    """A wrong call.

    Attributes:
        function: the name of the called function.
        changes: the arguments that differ from the good ones.
        error: the class of the exception.
        text: part of its message.
    """

    function: str
    changes: Callable[[Arguments], Arguments]
    error: type[Exception]
    text: str


def changed(name: str, change: Callable[[Any], Any]) -> Callable[[Arguments], Arguments]:
    return lambda given: {name: change(given[name])}


def given_as(**arguments: Any) -> Callable[[Arguments], Arguments]:
    return lambda given: arguments


def outcome_of(action: Callable[[], Any]) -> Outcome:
    """Return the names of an exception's classes, and its text."""
    try:
        action()
    except Exception as error:
        return [cls.__name__ for cls in type(error).__mro__], str(error)
    return [], "no error"


# ---- damages of what is declared -------------------------------------------------------------------------------------

_DTYPES = (torch.float64, torch.int16, torch.complex64, torch.float8_e4m3fn, torch.float16)


def _specs_of(function: Function) -> tuple[TensorSpec, ...]:
    return function.specs._specs


def _damages(function: Function, name: str, tensor: torch.Tensor) -> Iterator[tuple[Any, type[Exception], str]]:
    """Return the replacements of a tensor, each with the error and its text."""
    specs = _specs_of(function)
    (at,) = (number for number, spec in enumerate(specs) if spec.name == name)
    spec, sizes = specs[at], tuple(tensor.shape)
    yield [1.0], TypeError, f"^{name}: expected a tensor, got list"
    if name in function.required:
        yield None, TypeError, f"^{name}: expected a tensor, got NoneType"
    for dtype in _DTYPES:
        if isinstance(spec.dtypes, str):
            expected, is_taken = rf"(the )?{spec.dtypes}'s? dtype torch\.\w+(, or .*)?", dtype == tensor.dtype
        else:
            expected = "(, | or )".join(str(each).removeprefix("torch.") for each in spec.dtypes)
            is_taken = dtype in spec.dtypes
        if not is_taken:
            yield tensor.to(dtype), TypeError, rf"^{name}: expected {expected}, got {dtype}"
    shapes = [(*sizes[:-1], sizes[-1] + 1), (*sizes, 1), ()]
    if spec.shape == "one":
        shapes = shapes[:1]
    elif "..." in spec.shape and sum("..." in each.shape for each in specs) == 1:  # no other tensor has these sizes
        shapes = shapes[2:]
    # Sizes that no earlier tensor has are right. A later tensor reports that they differ from its own.
    names = "|".join(each.name for each in specs[at:])
    for shape in shapes:
        yield tensor.new_zeros(shape), ValueError, rf"^({names}): expected .*got (shape )?(\[.*\]|\d+\b)"
    spread = tensor.new_zeros((*sizes, 2))[..., 0]
    if spec.is_contiguous and not spread.is_contiguous():
        yield spread, ValueError, rf"^{name}: expected a contiguous tensor, got strides \("
    yield tensor.to("meta"), ValueError, rf"^{name}: expected a tensor on (cpu|cuda:\d+), got one on meta"


# ---- tests -----------------------------------------------------------------------------------------------------------


class ArgumentSuite:
    """The tests, for one operator.

    Attributes:
        functions: by name.
        wrong: calls that no declaration excludes, by name.
        run_pes: runs a program on PEs, as `worlds.run_pes` does.
    """

    functions: ClassVar[Mapping[str, Function]]
    wrong: ClassVar[Mapping[str, Wrong]]
    run_pes = staticmethod(run_pes)

    @classmethod
    def pytest_generate_tests(cls, metafunc: pytest.Metafunc) -> None:
        if "wrong" in metafunc.fixturenames:
            metafunc.parametrize("wrong", cls.wrong)
        if "argument" in metafunc.fixturenames:
            pairs = [(name, spec.name) for name, function in cls.functions.items() for spec in _specs_of(function)]
            metafunc.parametrize(("function", "argument"), pairs)

    @classmethod
    def _attempts(cls, name: str, good: Arguments, arguments: Arguments) -> list[Outcome]:
        """Call wrongly, again, and after a right call. No call is affected by an earlier one."""
        function = cls.functions[name]
        outcomes = [outcome_of(lambda: function.call(**arguments)) for _ in range(2)]
        is_right = function.is_right(good, function.call(**good))
        po.check()
        assert is_right, f"{name}: the world has suffered of {arguments}"
        return [*outcomes, outcome_of(lambda: function.call(**arguments))]

    @classmethod
    def _run(cls, backend: str) -> tuple[dict[str, list[Outcome]], dict[tuple[str, str], list[str]]]:
        """Return the results of the wrong calls, and the problems of calls with damaged tensors."""
        po.init(backend, operator_timeout=20.0, heap_size=32 << 20)
        goods = {name: function.good() for name, function in cls.functions.items()}
        outcomes = {
            name: cls._attempts(wrong.function, good := goods[wrong.function], {**good, **wrong.changes(good)})
            for name, wrong in cls.wrong.items()
        }
        problems = {}
        for name, good in goods.items():
            for spec in _specs_of(cls.functions[name]):
                found = problems[name, spec.name] = []
                for damaged, error, text in _damages(cls.functions[name], spec.name, good[spec.name]):
                    attempts = cls._attempts(name, good, {**good, spec.name: damaged})
                    found += [f"{text}: {attempt}" for attempt in attempts if not _is_as(attempt, error, text)]
        po.finalize()
        return outcomes, problems

    def test_wrong_argument(self, backend: str, wrong: str) -> None:
        expected = self.wrong[wrong]
        for number, outcome in enumerate(_found(type(self), backend)[0][wrong]):
            assert _is_as(outcome, expected.error, expected.text), f"attempt {number}: {outcome}"

    def test_damaged_tensor(self, backend: str, function: str, argument: str) -> None:
        problems = _found(type(self), backend)[1][function, argument]
        assert not problems, "\n".join(problems)


def _is_as(outcome: Outcome, error: type[Exception], text: str) -> bool:
    return error.__name__ in outcome[0] and re.search(text, outcome[1]) is not None


@functools.cache
def _found(suite: type[ArgumentSuite], backend: str) -> Any:
    return suite.run_pes(suite._run, 1, backend, timeout=200)[0]

"""Operators' declarations of their tensors: the wording of errors, and that valid tensors are checked only once.

The classes derived from `ArgumentSuite` show that every operator's declaration is checked.
"""

from __future__ import annotations

import pytest
import torch

from persistent_ops.runtime.tensor_specs import TensorSpec, TensorSpecs

_CPU = torch.device("cpu")
_SPECS = TensorSpecs(
    TensorSpec("weight", "M K", (torch.float32, torch.float16, torch.bfloat16)),
    TensorSpec("x", "N? K", "weight"),
    TensorSpec("out", "N? M", "weight"),
    TensorSpec("rows", "2 n", (torch.int64,), is_contiguous=False),
    TensorSpec("scale", "one", (torch.float32,)),
    TensorSpec("batch", "... K", "weight"),
    TensorSpec("other", "... M", "weight"),
)


def _good() -> dict[str, torch.Tensor | None]:
    return {
        "weight": torch.ones(6, 8),
        "x": torch.ones(3, 8),
        "out": torch.ones(3, 6),
        "rows": torch.ones(2, 5, dtype=torch.int64),
        "scale": torch.ones(1, 1),
        "batch": torch.ones(4, 2, 8),
        "other": torch.ones(4, 2, 6),
    }


WRONG = {
    "weight: expected float32, float16 or bfloat16, got torch.int32": torch.ones(6, 8, dtype=torch.int32),
    "weight: expected shape [M, K], got [8]": torch.ones(8),
    "weight: expected a contiguous tensor, got strides (1, 6); pass weight.contiguous()": torch.ones(8, 6).t(),
    "weight: expected a tensor on cpu, got one on meta": torch.ones(6, 8, device="meta"),
    "x: expected weight's dtype torch.float32, got torch.float16": torch.ones(3, 8).half(),
    "x: expected shape [8] or [N, 8], got [3, 7]": torch.ones(3, 7),
    "x: expected shape [8] or [N, 8], got [1, 3, 8]": torch.ones(1, 3, 8),
    "x: expected shape [8] or [N, 8], got []": torch.ones(()),
    "out: expected shape [3, 6], got [6]": torch.ones(6),
    "out: expected shape [3, 6], got [2, 6]": torch.ones(2, 6),
    "rows: expected int64, got torch.int32": torch.ones(2, 5, dtype=torch.int32),
    "rows: expected shape [2, n], got [3, 5]": torch.ones(3, 5, dtype=torch.int64),
    "scale: expected one element, got shape [2]": torch.ones(2),
    "batch: expected shape [..., 8], got [4, 2, 7]": torch.ones(4, 2, 7),
    "other: expected shape [4, 2, 6], got [2, 6]": torch.ones(2, 6),
}


@pytest.mark.parametrize("text", WRONG)
def test_what_is_refused_is_named(text: str) -> None:
    given = _good() | {text.partition(":")[0]: WRONG[text]}
    for _ in range(2):  # what was right between them does not make it so
        with pytest.raises(TypeError if "dtype" in text or "int" in text else ValueError) as caught:
            _SPECS.check(_CPU, *given.values())
        assert str(caught.value) == text
        assert _SPECS.check(_CPU, *_good().values()).items() >= {"M": 6, "K": 8, "N": 3, "n": 5}.items()


def test_what_is_missing_is_missing_in_all() -> None:
    alone = _good() | {"x": torch.ones(8), "out": torch.ones(6), "rows": None, "scale": torch.ones(())}
    assert _SPECS.check(_CPU, *alone.values()) == {"M": 6, "K": 8}
    with pytest.raises(ValueError, match=r"^out: expected shape \[6\], got \[1, 6\]$"):
        _SPECS.check(_CPU, *(alone | {"out": torch.ones(1, 6)}).values())
    strided = _good() | {"rows": torch.ones(5, 2, dtype=torch.int64).t()}
    assert _SPECS.check(None, *strided.values())["n"] == 5


def test_no_more_calls_are_known_than_some() -> None:
    specs = TensorSpecs(TensorSpec("x", "n"))
    assert [specs.check(_CPU, torch.ones(count))["n"] for count in range(1200)] == list(range(1200))
    assert len(specs._known) <= 512

"""The dtypes of tensors as the kernels' configurations name them (cuda/platform/scalar.cuh)."""

from __future__ import annotations

import torch

__all__ = ["INDEX_TYPES", "SCALARS", "fill_nan"]

SCALARS = {
    torch.float32: "po::DType::kFloat32",
    torch.float16: "po::DType::kFloat16",
    torch.bfloat16: "po::DType::kBFloat16",
}
INDEX_TYPES = {torch.int32: "po::IndexType::kInt32", torch.int64: "po::IndexType::kInt64"}
_NAN_OF_FLOAT8 = 0x7F  # e4m3fn


def fill_nan(tensor: torch.Tensor) -> None:
    """Make all of a tensor NaN, as kernels leave what did not arrive."""
    with torch.inference_mode():  # in which tensors of either kind may be written to
        if tensor.element_size() == 1:
            tensor.view(torch.uint8).fill_(_NAN_OF_FLOAT8)
        else:
            tensor.fill_(torch.nan)

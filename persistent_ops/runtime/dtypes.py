"""The dtypes of tensors as the kernels' configurations name them (cuda/platform/scalar.cuh)."""

from __future__ import annotations

import torch

__all__ = ["INDEX_TYPES", "SCALARS"]

SCALARS = {
    torch.float32: "po::DType::kFloat32",
    torch.float16: "po::DType::kFloat16",
    torch.bfloat16: "po::DType::kBFloat16",
}
INDEX_TYPES = {torch.int32: "po::IndexType::kInt32", torch.int64: "po::IndexType::kInt64"}

"""The options of the decode loop."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from .config import SIZES, ModelConfig, config_of_folder

__all__ = ["DTYPES", "Options"]

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_MAX_BATCH = 16  # vectors that the fused operator takes
_SLOTS_MULTIPLE = 64


@dataclass(frozen=True)
class Options:
    """Options of the decode loop; the command line has one for each.

    Attributes:
        model: a name of SIZES, or a Hugging Face folder; None for "8B" on GPUs and "tiny" on the host backend.
        cut: 1, or how many times as large a world is whose PEs' shares are run; for random weights.
        layers: decoder layers to run; None for all of the model, or as many as fit.
        prompt: tokens of the prompt, the same in each sequence; None for `prompt_length` random ones in each.
        prompt_length: of random prompts.
        tokens: to generate after the first, which the prefill gives.
        batch: sequences, 1 to 16.
        rounds: times that each method generates them.
        dtype: "fp32", "bf16" or "fp16"; None for bf16 on GPUs and fp32 on the host backend.
        backend: "auto", "cuda" or "host".
        seed: of random weights and prompts.
        is_compiled: whether torch.compile makes the small kernels; None for GPUs where Triton can compile.
        algorithm: of po.gemv_all_reduce.
        wire_dtype: None, or "own" for the weights' dtype, in which the fused sums travel.
        prefetch: whether fused products ask for weights before the kernel before them has ended.
        reference: whether one PE computes the whole model alone; None for the tiny one only.
        timeout: seconds that the PEs wait for each other.
        trace: file for a timeline of all launches, or None.
    """

    model: str | None = None
    cut: int = 1
    layers: int | None = None
    prompt: tuple[int, ...] | None = None
    prompt_length: int = 32
    tokens: int = 64
    batch: int = 1
    rounds: int = 5
    dtype: str | None = None
    backend: str = "auto"
    seed: int = 0
    is_compiled: bool | None = None
    algorithm: str = "auto"
    wire_dtype: str | None = None
    prefetch: bool = False
    reference: bool | None = None
    timeout: float = 120.0
    trace: str | None = None

    def __post_init__(self) -> None:
        for name in ("cut", "layers", "prompt_length", "tokens", "batch", "rounds"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        if self.batch > _MAX_BATCH:
            raise ValueError(f"batch must be at most {_MAX_BATCH}, the vectors of one fused call; got {self.batch}")
        if self.prompt is not None and not self.prompt:
            raise ValueError("prompt must have at least one token")
        choices = (("backend", ("auto", "cuda", "host")), ("dtype", (None, *DTYPES)), ("wire_dtype", (None, "own")))
        for name, known in (*choices, ("algorithm", ("auto", "one_shot", "two_shot"))):
            if getattr(self, name) not in known:
                raise ValueError(f"{name} must be one of {', '.join(map(str, known))}, got {getattr(self, name)!r}")
        if self.reference and self.model in SIZES and self.model != "tiny":
            raise ValueError(
                "reference needs weights that do not depend on the number of PEs: --model tiny, or a model folder"
            )

    def model_config(self, backend: str) -> ModelConfig:
        """Return the model.

        Raises:
            ValueError: it is neither a known size nor a folder that can be read, or it has too few layers.
        """
        config = self._whole_model(self.model or ("8B" if backend == "cuda" else "tiny"))
        if self.layers is not None and self.layers > config.num_layers:
            raise ValueError(f"layers: {config.name} has {config.num_layers}, got {self.layers}")
        return config

    def _whole_model(self, name: str) -> ModelConfig:
        if name in SIZES:
            return SIZES[name].cut(self.cut)
        if self.cut != 1:
            raise ValueError(f"cut: only a named model is cut, got the model {name!r}")
        if not Path(name).is_dir():
            raise ValueError(f"model must be one of {', '.join(SIZES)} or a model folder, got {name!r}")
        return config_of_folder(Path(name))

    @property
    def folder(self) -> Path | None:
        """Return the folder with the weights, or None where they are drawn."""
        return None if self.model is None or self.model in SIZES else Path(self.model)

    def torch_dtype(self, backend: str) -> torch.dtype:
        """Return the dtype of weights and activations on the backend that was taken."""
        return DTYPES[self.dtype or ("bf16" if backend == "cuda" else "fp32")]

    @property
    def num_prompt_tokens(self) -> int:
        """Return the length of the prompts."""
        return self.prompt_length if self.prompt is None else len(self.prompt)

    @property
    def slots(self) -> int:
        """Return the length of the cache: prompt, first token and generated ones, rounded up."""
        needed = self.num_prompt_tokens + 1 + self.tokens
        return -(-needed // _SLOTS_MULTIPLE) * _SLOTS_MULTIPLE

    def prompts(self, vocab: int) -> torch.Tensor:
        """Return the prompts, `[batch, T]`, the same on every PE; ValueError for a token outside the vocabulary."""
        if self.prompt is None:
            generator = torch.Generator().manual_seed(self.seed)
            return torch.randint(0, vocab, (self.batch, self.prompt_length), generator=generator)
        if not all(0 <= token < vocab for token in self.prompt):
            raise ValueError(f"prompt: expected tokens from 0 to {vocab - 1}, got {list(self.prompt)}")
        return torch.tensor(self.prompt).expand(self.batch, -1).contiguous()

"""Shapes of the models that the decode loop knows, and their distribution over the PEs."""

from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from persistent_ops.nn import balanced_splits

__all__ = ["SIZES", "ModelConfig", "Partition", "RopeScaling", "config_of_folder"]

_ARCHITECTURES = ("llama", "mistral")
_MAX_VOCAB = 1 << 24  # a token travels beside its logit as an fp32 number, which holds whole numbers up to here


@dataclass(frozen=True)
class RopeScaling:
    """Llama 3.1's stretch of the rotary frequencies: long wavelengths by `factor`, short ones not, a ramp between."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_positions: int


@dataclass(frozen=True)
class ModelConfig:
    """A Llama-shaped decoder.

    Attributes:
        name: for the report.
        hidden: width of the residual stream.
        intermediate: width inside the SwiGLU.
        num_layers: decoder layers of the whole model.
        num_heads: query heads.
        num_kv_heads: key and value heads; they divide the query heads.
        head_dim: elements of a head; even.
        vocab: number of tokens.
        rope_theta: base of the rotary frequencies.
        rope_scaling: their stretch, or None.
        norm_eps: of RMSNorm.
        tied_embeddings: whether the vocabulary head is the embedding.
    """

    name: str
    hidden: int
    intermediate: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab: int
    rope_theta: float = 500_000.0
    rope_scaling: RopeScaling | None = None
    norm_eps: float = 1e-5
    tied_embeddings: bool = False

    def __post_init__(self) -> None:
        for name in ("hidden", "intermediate", "num_layers", "num_heads", "num_kv_heads", "head_dim", "vocab"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} must be a whole number of at least 1, got {value!r}")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_kv_heads must divide num_heads, got {self.num_kv_heads} and {self.num_heads}")
        if self.head_dim % 2:
            raise ValueError(f"head_dim must be even, for rotary embeddings; got {self.head_dim}")
        if self.vocab >= _MAX_VOCAB:
            raise ValueError(f"vocab must be below {_MAX_VOCAB}, got {self.vocab}")

    def cut(self, parts: int) -> ModelConfig:
        """Return a model of which one PE has the same part as of this one in a world `parts` times as large.

        Raises:
            ValueError: heads or SwiGLU do not divide by `parts`.
        """
        if parts == 1:
            return self
        if self.num_kv_heads % parts or self.intermediate % parts:
            raise ValueError(
                f"cut: {self.num_kv_heads} key and value heads and a SwiGLU of {self.intermediate} do not divide by "
                f"{parts}"
            )
        return dataclasses.replace(
            self,
            name=f"{self.name} cut by {parts}",
            intermediate=self.intermediate // parts,
            num_heads=self.num_heads // parts,
            num_kv_heads=self.num_kv_heads // parts,
            vocab=-(-self.vocab // parts),
        )

    @property
    def group(self) -> int:
        """Return the number of query heads that share a key and value head."""
        return self.num_heads // self.num_kv_heads


# The shapes of Llama 3, as published in their configurations.
SIZES = {
    "tiny": ModelConfig("tiny", 64, 176, 3, 8, 4, 8, 259, rope_theta=10_000.0),
    "8B": ModelConfig("8B", 4096, 14336, 32, 32, 8, 128, 128_256),
    "70B": ModelConfig("70B", 8192, 28672, 80, 64, 8, 128, 128_256),
    "405B": ModelConfig("405B", 16384, 53248, 126, 128, 8, 128, 128_256),
}


def _checked(document: dict[str, Any], path: Path) -> dict[str, Any]:
    """Return the configuration if this decoder computes it; ValueError names the unsupported part."""
    kind = document.get("model_type")
    if kind not in _ARCHITECTURES:
        raise ValueError(f"{path}: model_type must be one of {', '.join(_ARCHITECTURES)}, got {kind!r}")
    for name in ("attention_bias", "mlp_bias", "sliding_window", "quantization_config"):
        if document.get(name):
            raise ValueError(f"{path}: {name} is {document[name]!r}, which this decoder does not support")
    if document.get("hidden_act", "silu") != "silu":
        raise ValueError(f"{path}: hidden_act must be 'silu', got {document['hidden_act']!r}")
    return document


def _rope_scaling(rope: dict[str, Any], path: Path) -> RopeScaling | None:
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return None
    if kind != "llama3":
        raise ValueError(f"{path}: rotary scaling must be 'default' or 'llama3', got {kind!r}")
    return RopeScaling(
        factor=float(rope["factor"]),
        low_freq_factor=float(rope["low_freq_factor"]),
        high_freq_factor=float(rope["high_freq_factor"]),
        original_positions=int(rope["original_max_position_embeddings"]),
    )


def config_of_folder(folder: Path) -> ModelConfig:
    """Read a Hugging Face config.json.

    Args:
        folder: which holds it.

    Raises:
        ValueError: it is missing, cannot be read, lacks an entry or describes a model that is not Llama-shaped.
    """
    path = folder / "config.json"
    try:
        document = json.loads(path.read_bytes())
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}; expected a Hugging Face model folder") from error
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    if not isinstance(document, dict):
        raise ValueError(f"{path}: expected an object, got {type(document).__name__}")
    document = _checked(document, path)
    # Older configurations have rope_theta and rope_scaling, newer ones hold both in rope_parameters.
    rope = document.get("rope_parameters") or document.get("rope_scaling") or {}
    try:
        heads, hidden = int(document["num_attention_heads"]), int(document["hidden_size"])
        return ModelConfig(
            name=folder.resolve().name,
            hidden=hidden,
            intermediate=int(document["intermediate_size"]),
            num_layers=int(document["num_hidden_layers"]),
            num_heads=heads,
            num_kv_heads=int(document.get("num_key_value_heads") or heads),
            head_dim=int(document.get("head_dim") or hidden // heads),
            vocab=int(document["vocab_size"]),
            rope_theta=float(rope.get("rope_theta") or document.get("rope_theta") or 10_000.0),
            rope_scaling=_rope_scaling(rope, path),
            norm_eps=float(document["rms_norm_eps"]),
            tied_embeddings=bool(document.get("tie_word_embeddings", False)),
        )
    except KeyError as error:
        raise ValueError(f"{path} lacks {error}") from error


@dataclass(frozen=True)
class Partition:
    """The division of the model: one share per PE, in rank order.

    Attributes:
        kv_heads: key and value heads, each with its group of query heads.
        intermediate: of the SwiGLU.
        vocab: rows of the vocabulary head.
    """

    kv_heads: tuple[int, ...]
    intermediate: tuple[int, ...]
    vocab: tuple[int, ...]

    @classmethod
    def of(cls, config: ModelConfig, world_size: int) -> Partition:
        """Share a model out.

        Raises:
            ValueError: there are more PEs than key and value heads, or tokens.
        """
        if world_size > config.num_kv_heads:
            raise ValueError(
                f"{config.name} has {config.num_kv_heads} key and value heads, which {world_size} PEs cannot share; "
                f"run it on at most {config.num_kv_heads}"
            )
        if world_size > config.vocab:
            raise ValueError(f"{config.name} has {config.vocab} tokens, which {world_size} PEs cannot share")
        # Whole cache lines of a weight's row where the width allows it.
        unit = math.gcd(config.intermediate, 64)
        return cls(
            kv_heads=balanced_splits(config.num_kv_heads, world_size),
            intermediate=balanced_splits(config.intermediate, world_size, multiple=unit),
            vocab=balanced_splits(config.vocab, world_size),
        )

    def layer_elements(self, config: ModelConfig) -> int:
        """Return the weight elements of one layer on the PE that has most of them."""
        attention = (2 * config.group + 2) * max(self.kv_heads) * config.head_dim * config.hidden
        return attention + 3 * max(self.intermediate) * config.hidden + 2 * config.hidden

"""A Llama-shaped decoder, tensor-parallel over the PEs, and the state that decoding keeps for a sequence."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn import functional as F

import persistent_ops.nn as po_nn

from .config import ModelConfig, Partition
from .kernels import Kernels, rope_tables
from .methods import Method, Peers
from .weights import WeightSource

__all__ = ["Decoder", "Layer", "Sequences", "build_decoder"]


@dataclass(frozen=True)
class Layer:
    """One decoder layer's share on this PE.

    Attributes:
        attention_norm: `[hidden]`.
        qkv: hidden -> queries, keys and values of this PE's heads.
        out: those heads' features -> hidden; row-parallel.
        mlp_norm: `[hidden]`.
        gate_up: hidden -> this PE's share of gate, then of up.
        down: that share -> hidden; row-parallel.
    """

    attention_norm: torch.Tensor
    qkv: torch.nn.Module
    out: torch.nn.Module
    mlp_norm: torch.Tensor
    gate_up: torch.nn.Module
    down: torch.nn.Module


class Sequences:
    """N sequences of equal length under way, in tensors that stay where they are, as a CUDA graph needs them.

    Args:
        num_layers: of the decoder.
        batch: N.
        kv_heads: key and value heads of this PE.
        head_dim: elements of a head.
        slots: length of the cache, and so of the longest sequence.
        device: of the tensors.
        dtype: of keys and values.

    Attributes:
        tokens: `[N]`, the tokens to feed next.
        position: `[1]`, where they stand.
        history: `[slots, N]`, the tokens generated so far, by position.
        cache: `[layers, 2, N, kv_heads, slots, head_dim]`, keys and values.
        slots: 0 .. slots-1.
    """

    def __init__(
        self,
        *,
        num_layers: int,
        batch: int,
        kv_heads: int,
        head_dim: int,
        slots: int,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self.tokens = torch.zeros(batch, dtype=torch.int64, device=device)
        self.position = torch.zeros(1, dtype=torch.int64, device=device)
        self.history = torch.zeros(slots, batch, dtype=torch.int64, device=device)
        self.cache = torch.zeros(num_layers, 2, batch, kv_heads, slots, head_dim, device=device, dtype=dtype)
        self.slots = torch.arange(slots, device=device)
        self._start: tuple[torch.Tensor, ...] = ()

    @property
    def _changing(self) -> tuple[torch.Tensor, ...]:
        return self.tokens, self.position, self.history, self.cache

    def begin(self, tokens: torch.Tensor, position: int) -> None:
        """Go to a position with these tokens to feed, and remember all this as the start."""
        self.tokens.copy_(tokens)
        self.position.fill_(position)
        self.history[position] = tokens
        self._start = tuple(tensor.clone() for tensor in self._changing)

    def rewind(self) -> None:
        """Go back to the start."""
        for tensor, start in zip(self._changing, self._start, strict=True):
            tensor.copy_(start)

    def advance(self, tokens: torch.Tensor) -> None:
        """Append tokens `[N]`, on the device alone."""
        self.tokens.copy_(tokens)
        self.position.add_(1)
        self.history.index_copy_(0, self.position, tokens[None])


class Decoder:
    """The layers of one PE; the residual stream and the embedding are the same on every PE.

    Args:
        config: of the model.
        layers: as many as are run.
        embedding: `[vocab, hidden]`.
        final_norm: `[hidden]`.
        head: `[V_r, hidden]`, for the logits of this PE's tokens.
        first_token: of those.
        peers: who shares the vocabulary.
        slots: longest sequence.
    """

    def __init__(
        self,
        config: ModelConfig,
        layers: list[Layer],
        embedding: torch.Tensor,
        final_norm: torch.Tensor,
        head: torch.Tensor,
        *,
        first_token: int,
        peers: Peers,
        slots: int,
    ) -> None:
        self.config = config
        self.layers = layers
        self.first_token = first_token
        self._embedding = embedding
        self._final_norm = final_norm
        self._head = head
        self._peers = peers
        self._rope = rope_tables(config, slots, embedding.device)
        self._norms = [layer.attention_norm for layer in layers] + [final_norm]

    def _hidden(
        self, tokens: torch.Tensor, positions: torch.Tensor, sequences: Sequences, method: Method, kernels: Kernels
    ) -> torch.Tensor:
        """Run tokens `[N, T]` through the layers; returns `[N*T, hidden]` after the final norm."""
        residual = F.embedding(tokens.flatten(), self._embedding)
        normed = kernels.norm(residual, self._norms[0])
        for number, layer in enumerate(self.layers):
            qkv = method.open(layer.qkv, normed)
            attended = kernels.attend(qkv, sequences.cache[number], positions, sequences.slots, self._rope)
            residual, normed = method.close(kernels, layer.out, attended, residual, layer.mlp_norm)
            inner = kernels.swiglu(method.open(layer.gate_up, normed))
            residual, normed = method.close(kernels, layer.down, inner, residual, self._norms[number + 1])
        return normed

    def _choose(self, normed: torch.Tensor, kernels: Kernels) -> tuple[torch.Tensor, torch.Tensor]:
        """Return this PE's logits, fp32, and the most likely tokens of all, for rows `[N, hidden]`."""
        logits = F.linear(normed, self._head).float()  # by all methods alike
        candidates = self._peers.gather(kernels.best(logits, self.first_token))
        return logits, kernels.best_of_all(candidates)

    def prefill(self, prompt: torch.Tensor, sequences: Sequences, method: Method, kernels: Kernels) -> None:
        """Run prompts `[N, T]` in one go and leave the sequences at their first own token."""
        batch, length = prompt.shape
        positions = torch.arange(length, device=prompt.device)
        normed = self._hidden(prompt, positions, sequences, method, kernels)
        _, tokens = self._choose(normed.view(batch, length, -1)[:, -1].contiguous(), kernels)
        sequences.begin(tokens, length)

    def step(self, sequences: Sequences, method: Method, kernels: Kernels) -> torch.Tensor:
        """Feed one token of each sequence and append the next; returns this PE's logits `[N, V_r]`, fp32."""
        normed = self._hidden(sequences.tokens[:, None], sequences.position, sequences, method, kernels)
        logits, tokens = self._choose(normed, kernels)
        sequences.advance(tokens)
        return logits

    def step_without_layers(self, sequences: Sequences, kernels: Kernels) -> torch.Tensor:
        """Do the work of a step outside of its layers. Its time is subtracted to get the time of the layers."""
        residual = F.embedding(sequences.tokens, self._embedding)
        logits, tokens = self._choose(kernels.norm(residual, self._final_norm), kernels)
        sequences.advance(tokens)
        return logits


def _filled(layer: torch.nn.Module, weight: torch.Tensor) -> torch.nn.Module:
    layer.load_state_dict({"weight": weight}, assign=True)
    return layer.requires_grad_(False)


@dataclass(frozen=True)
class _Builder:
    """Makes layers of one PE's share of the weights; see `build_decoder`."""

    config: ModelConfig
    partition: Partition
    source: WeightSource
    rank: int
    column: Callable[..., torch.nn.Module]
    row: Callable[..., torch.nn.Module]

    def share(self, splits: tuple[int, ...]) -> tuple[int, int]:
        """Return begin and end of this PE's share."""
        first = sum(splits[: self.rank])
        return first, first + splits[self.rank]

    def rows(self, name: str, size: int, splits: tuple[int, ...]) -> torch.Tensor:
        """Return this PE's rows of a weight `[size, hidden]`."""
        first, last = self.share(splits)
        return self.source.read(name, (size, self.config.hidden), dim=0, first=first, last=last)

    def column_layer(self, parts: list[tuple[str, int, tuple[int, ...]]]) -> torch.nn.Module:
        """Put the shares of several weights into one layer, so that they are one matrix product."""
        weight = torch.cat([self.rows(*part) for part in parts])
        splits = tuple(map(sum, zip(*(part[2] for part in parts), strict=True)))
        return _filled(self.column(self.config.hidden, sum(splits), bias=False, splits=splits, device="meta"), weight)

    def row_layer(self, name: str, size: int, splits: tuple[int, ...]) -> torch.nn.Module:
        """Make a layer of this PE's columns of a weight `[hidden, size]`."""
        first, last = self.share(splits)
        weight = self.source.read(name, (self.config.hidden, size), dim=1, first=first, last=last)
        return _filled(self.row(size, self.config.hidden, bias=False, splits=splits, device="meta"), weight)

    def layer(self, number: int) -> Layer:
        """Make one layer of the model."""
        config, partition = self.config, self.partition
        kv_size, q_size = (heads * config.head_dim for heads in (config.num_kv_heads, config.num_heads))
        kv_splits = tuple(heads * config.head_dim for heads in partition.kv_heads)
        q_splits = tuple(size * config.group for size in kv_splits)
        prefix = f"model.layers.{number}"
        attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
        qkv = [("q", q_size, q_splits), ("k", kv_size, kv_splits), ("v", kv_size, kv_splits)]
        inner = config.intermediate, partition.intermediate
        return Layer(
            attention_norm=self.source.read(f"{prefix}.input_layernorm.weight", (config.hidden,)),
            qkv=self.column_layer([(f"{attention}.{name}_proj.weight", *sizes) for name, *sizes in qkv]),
            out=self.row_layer(f"{attention}.o_proj.weight", q_size, q_splits),
            mlp_norm=self.source.read(f"{prefix}.post_attention_layernorm.weight", (config.hidden,)),
            gate_up=self.column_layer([(f"{mlp}.{name}_proj.weight", *inner) for name in ("gate", "up")]),
            down=self.row_layer(f"{mlp}.down_proj.weight", *inner),
        )


def build_decoder(
    config: ModelConfig,
    source: WeightSource,
    *,
    num_layers: int,
    slots: int,
    peers: Peers,
    column: Callable[..., torch.nn.Module] = po_nn.ColumnParallelLinear,
    row: Callable[..., torch.nn.Module] = po_nn.RowParallelLinear,
) -> Decoder:
    """Read this PE's share of a model and build the decoder.

    Args:
        config: of the model.
        source: of the weights.
        num_layers: how many of the model's layers to build.
        slots: longest sequence.
        peers: whose shares make up the model; one without peers builds all of it.
        column: makes a column-parallel layer, called with in_features, out_features, bias, splits and device.
        row: makes a row-parallel layer, the same.

    Raises:
        ValueError: there are too many PEs for the model, or a weight is missing or of another shape.
    """
    builder = _Builder(config, Partition.of(config, peers.size), source, peers.rank, column, row)
    head = "model.embed_tokens.weight" if config.tied_embeddings else "lm_head.weight"
    vocab = builder.partition.vocab
    return Decoder(
        config,
        [builder.layer(number) for number in range(num_layers)],
        source.read("model.embed_tokens.weight", (config.vocab, config.hidden)),
        source.read("model.norm.weight", (config.hidden,)),
        builder.rows(head, config.vocab, vocab),
        first_token=builder.share(vocab)[0],
        peers=peers,
        slots=slots,
    )

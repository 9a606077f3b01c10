"""The work of one PE of the decode loop: load its part, prefill, record a step per method, compare, measure."""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import math
import os
import shutil
import statistics
import sys
import sysconfig
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from program import traced, where_it_ran

import persistent_ops as po
import persistent_ops.nn as po_nn
from persistent_ops.testing.machine import memory_of_pe, share_cores, shares_gpu
from persistent_ops.testing.pes import gather
from persistent_ops.testing.timing import in_turn, seconds_of

from .config import SIZES, ModelConfig, Partition
from .kernels import Kernels
from .methods import FlashInfer, Fused, FusedNorm, FusedSums, Method, Peers, SymmetricMemory, Unfused
from .model import Decoder, Sequences, build_decoder
from .options import Options
from .weights import FolderWeights, RandomWeights, WeightSource

__all__ = ["run_pe"]

_WARM_UP_STEPS = 3
_SHARE_OF_FREE_MEMORY = 0.85  # the rest is for activations, graphs and communicators


@dataclasses.dataclass(frozen=True)
class _Runner:
    """One way to generate: `step` runs or replays one token, `logits` gives this PE's of the last one."""

    step: Callable[[], object]
    logits: Callable[[], torch.Tensor]


class _Pe:
    """One PE's model and sequences, and everything that is done with them."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.device = po.device()
        self.on_gpu = po.backend() == "cuda"
        self.config = options.model_config(po.backend())
        self.dtype = options.torch_dtype(po.backend())
        self.peers = Peers(po.rank(), po.world_size(), is_staged=shares_gpu())
        self.has_graphs = self.on_gpu and not shares_gpu()
        compiled = options.is_compiled
        if compiled is None:
            compiled = self.on_gpu and _can_compile()
        self.is_compiled = compiled
        self.kernels = Kernels(self.config, is_compiled=compiled)
        self.partition = Partition.of(self.config, po.world_size())
        self.num_layers = self._num_layers()
        self.notes: list[str] = []

    def exchange(self, value: Any) -> list[Any]:
        """Return every PE's value (of JSON types), in rank order; collective."""
        return gather(value, timeout=self.options.timeout)

    @property
    def has_reference(self) -> bool:
        wanted = self.options.reference
        return self.config == SIZES["tiny"] if wanted is None else wanted

    # ---- model -----------------------------------------------------------------------------------------------------

    def _num_layers(self) -> int:
        """Return how many layers are run: those asked for, or as many as fit on every PE."""
        config, wanted = self.config, self.options.layers
        if wanted is not None:
            return wanted
        free = memory_of_pe() or sys.maxsize
        size = self.dtype.itemsize
        outside = (config.vocab + max(self.partition.vocab)) * config.hidden * size
        # Keys and values are there twice: the sequences', and the copy of their start.
        keys = 4 * self.options.batch * max(self.partition.kv_heads) * self.options.slots * config.head_dim * size
        # One layer more is held while its weights are put together.
        fitting = (
            int(free * _SHARE_OF_FREE_MEMORY - outside) // (self.partition.layer_elements(config) * size + keys) - 1
        )
        fitting = min(self.exchange(fitting))
        if fitting < 1 and config.num_layers > 1:
            raise ValueError(f"model: not one layer of {config.name} fits into {free >> 20} MiB beside its embedding")
        return max(1, min(fitting, config.num_layers))

    def _source(self, *, is_whole: bool) -> WeightSource:
        folder = self.options.folder
        if folder is not None:
            return FolderWeights(folder, self.device, self.dtype)
        rank = None if is_whole or self.config == SIZES["tiny"] else po.rank()
        return RandomWeights(self.options.seed, self.device, self.dtype, rank)

    def build(self) -> Decoder:
        """Build this PE's share of the model."""
        row = functools.partial(
            po_nn.RowParallelLinear,
            algorithm=self.options.algorithm,
            wire_dtype=None if self.options.wire_dtype is None else self.dtype,
            prefetch_weight=self.options.prefetch,
        )
        return build_decoder(
            self.config,
            self._source(is_whole=False),
            num_layers=self.num_layers,
            slots=self.options.slots,
            peers=self.peers,
            row=row,
            column=functools.partial(po_nn.ColumnParallelLinear, prefetch_weight=self.options.prefetch),
        )

    def sequences(self, kv_heads: int) -> Sequences:
        """Make the sequences' memory."""
        return Sequences(
            num_layers=self.num_layers,
            batch=self.options.batch,
            kv_heads=kv_heads,
            head_dim=self.config.head_dim,
            slots=self.options.slots,
            device=self.device,
            dtype=self.dtype,
        )

    def prompts(self) -> torch.Tensor:
        return self.options.prompts(self.config.vocab).to(self.device)

    def generated(self, sequences: Sequences) -> list[list[int]]:
        """Return the generated tokens, one list per sequence; the first is the prefill's."""
        first = self.options.num_prompt_tokens
        return sequences.history[first : first + 1 + self.options.tokens].t().tolist()

    # ---- reference -------------------------------------------------------------------------------------------------

    def reference(self) -> tuple[list[list[int]], torch.Tensor] | None:
        """Let rank 0 compute the whole model alone; returns the tokens and the first step's logits, on every PE."""
        if not self.has_reference:
            return None
        answer: Any = None
        if po.rank() == 0:

            def whole(inputs: int, outputs: int, *, bias: bool, splits: object, device: str) -> torch.nn.Linear:
                return torch.nn.Linear(inputs, outputs, bias=bias, device=device)

            alone = Peers(0, 1)
            source = self._source(is_whole=True)
            decoder = build_decoder(
                self.config,
                source,
                num_layers=self.num_layers,
                slots=self.options.slots,
                peers=alone,
                column=whole,
                row=whole,
            )
            sequences = self.sequences(self.config.num_kv_heads)
            kernels, method = Kernels(self.config, is_compiled=False), Unfused(alone)
            decoder.prefill(self.prompts(), sequences, method, kernels)
            logits = decoder.step(sequences, method, kernels)
            for _ in range(self.options.tokens - 1):
                decoder.step(sequences, method, kernels)
            answer = (self.generated(sequences), logits.tolist())
        tokens, values = self.exchange(answer)[0]
        return tokens, torch.tensor(values, dtype=torch.float32)

    # ---- methods ---------------------------------------------------------------------------------------------------

    def methods(self) -> dict[str, Method]:
        """Return the subjects of the comparison, by label; note those that cannot run here."""
        product = "cuBLAS" if self.on_gpu else "matmul"
        fused: dict[str, Method] = {"fused": Fused(), "fused sums": FusedSums(), "fused norm": FusedNorm()}
        if po.world_size() == 1:
            return {**fused, product: Unfused(self.peers)}
        collective = {"nccl": "NCCL", "gloo": "gloo"}[dist.get_backend()]
        found: dict[str, Method] = {**fused, f"{product} + {collective}": Unfused(self.peers)}
        if not (self.has_graphs and po.local_world_size() == po.world_size()):
            if self.on_gpu:
                self.notes.append("torch's symmetric memory needs one GPU per PE, all on one host: left out")
            return found
        makers: dict[str, Callable[[], Method]] = {
            "cuBLAS + one_shot": lambda: self._symmetric_memory("one_shot"),
            "cuBLAS + two_shot": lambda: self._symmetric_memory("two_shot"),
        }
        if importlib.util.find_spec("flashinfer"):
            makers["cuBLAS + FlashInfer"] = self._flashinfer
        for label, make in makers.items():
            problem, method = "", None
            try:
                method = make()
            except Exception as error:  # another library's, of any version
                problem = (str(error) or type(error).__name__).splitlines()[0]
            problems = [each for each in self.exchange(problem) if each]
            if problems or method is None:
                self.notes.append(f"{label} cannot run here: {problems[0]}")
            else:
                found[label] = method
        return found

    def _symmetric_memory(self, kind: str) -> Method:
        batch, hidden = self.options.batch, self.config.hidden
        method = SymmetricMemory(kind, batch=batch, hidden=hidden, device=self.device, dtype=self.dtype)
        method.probe()
        return method

    def _flashinfer(self) -> Method:
        batch, hidden = self.options.batch, self.config.hidden
        method = FlashInfer(batch=batch, hidden=hidden, dtype=self.dtype)
        method.probe(torch.empty(batch, hidden, dtype=self.dtype, device=self.device))
        return method

    def record(self, step: Callable[[], torch.Tensor], sequences: Sequences) -> _Runner:
        """Warm a step up and capture it in a CUDA graph; without graphs it is called as it is."""
        sequences.rewind()
        last: list[torch.Tensor] = []
        if not self.has_graphs:
            for _ in range(min(_WARM_UP_STEPS, self.options.tokens)):
                step()
            po.check()

            def run() -> None:
                last[:] = [step()]

            return _Runner(run, lambda: last[0])
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(min(_WARM_UP_STEPS, self.options.tokens)):
                step()
        torch.cuda.current_stream().wait_stream(side)
        po.check()
        graph = torch.cuda.CUDAGraph()
        # NCCL's watchdog thread asks for its events meanwhile, which the default mode forbids to all threads.
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            logits = step()
        return _Runner(graph.replay, lambda: logits)

    def generate(self, runner: _Runner, sequences: Sequences) -> tuple[list[list[int]], torch.Tensor]:
        """Generate from the start; returns the tokens and this PE's logits of the first step, on the CPU."""
        sequences.rewind()
        runner.step()
        logits = runner.logits().cpu()
        for _ in range(self.options.tokens - 1):
            runner.step()
        po.check()
        return self.generated(sequences), logits

    def seconds_per_step(self, runner: _Runner, sequences: Sequences) -> float:
        """Return this PE's seconds per token, all PEs beginning together."""
        sequences.rewind()

        def steps() -> None:
            for _ in range(self.options.tokens):
                runner.step()

        return seconds_of(steps) / self.options.tokens

    def prefill(self, decoder: Decoder, sequences: Sequences) -> dict[str, Any]:
        """Run the prompts twice; the first run warms up. Return the paths taken and the time."""
        seconds = 0.0
        for _ in range(2):
            po.barrier()
            begin = time.perf_counter()
            decoder.prefill(self.prompts(), sequences, Fused(), Kernels(self.config, is_compiled=False))
            po.check()
            seconds = time.perf_counter() - begin
        rows = self.options.batch * self.options.num_prompt_tokens
        return {"rows": rows, "path": str(decoder.layers[0].down.last_path), "seconds": max(self.exchange(seconds))}

    def relative_difference(self, actual: torch.Tensor, expected: torch.Tensor) -> float:
        """Return the norm of the difference of all PEs' logits over the norm of the expected ones; collective.

        It is infinite where a logit is not finite.
        """
        error = float((actual.double() - expected.double()).square().sum())
        size = float(expected.double().square().sum())
        errors, sizes = zip(*self.exchange([error, size]), strict=True)
        result = math.sqrt(sum(errors) / sum(sizes)) if sum(sizes) > 0 else math.inf
        return result if math.isfinite(result) else math.inf


def _can_compile() -> bool:
    """Return whether torch.compile has its tools for GPUs: Triton, a C compiler and Python's headers for it."""
    has_headers = Path(sysconfig.get_paths()["include"], "Python.h").is_file()
    has_compiler = any(shutil.which(name) for name in (os.environ.get("CC") or "gcc", "cc", "clang"))
    return importlib.util.find_spec("triton") is not None and has_headers and has_compiler


def _equal_leading(actual: list[list[int]], expected: list[list[int]]) -> int:
    """Return how many leading tokens are equal in every sequence."""
    columns = list(zip(zip(*actual, strict=True), zip(*expected, strict=True), strict=True))
    return next((number for number, (a, b) in enumerate(columns) if a != b), len(columns))


@torch.no_grad()
def run_pe(options: Options) -> dict[str, Any]:
    """Run the decode loop on this PE. Collective.

    Args:
        options: the same on every PE.

    Returns:
        What was run and measured, the same on every PE; what JSON can carry. `methods` has one entry per method:
        label, tokens (one list per sequence), equal_tokens (leading ones equal to the fused method's), difference (of
        the first step's logits, relative to the fused ones), seconds (per token, one list per PE of one per round),
        is_repeatable (each round gave the same tokens).

    Raises:
        ValueError: the model does not fit the PEs or their memory, or cannot be read.
        PersistentOpsError: of po.init() and the operator.
    """
    po.init(backend=options.backend, operator_timeout=options.timeout)
    try:
        share_cores()
        with po.process_group(), traced(options.trace):
            return _measure(_Pe(options))
    finally:
        po.finalize()


def _measure(pe: _Pe) -> dict[str, Any]:
    reference = pe.reference()
    decoder = pe.build()
    sequences = pe.sequences(pe.partition.kv_heads[po.rank()])
    prefill = pe.prefill(decoder, sequences)
    methods = pe.methods()
    runners = {
        label: pe.record(functools.partial(decoder.step, sequences, method, pe.kernels), sequences)
        for label, method in methods.items()
    }
    outside = pe.record(functools.partial(decoder.step_without_layers, sequences, pe.kernels), sequences)
    results = {label: pe.generate(runner, sequences) for label, runner in runners.items()}
    fused_tokens, fused_logits = next(iter(results.values()))

    subjects = {**runners, "": outside}
    seconds: dict[str, list[float]] = {label: [] for label in subjects}
    repeatable = dict.fromkeys(runners, True)
    for label in in_turn(subjects, pe.options.rounds):
        seconds[label].append(pe.seconds_per_step(subjects[label], sequences))
        if label in runners:
            repeatable[label] &= pe.generated(sequences) == results[label][0]

    reports = []
    for label, (tokens, logits) in results.items():
        answers = pe.exchange([tokens, seconds[label], repeatable[label]])
        reports.append(
            {
                "label": label,
                "tokens": tokens,
                "equal_tokens": _equal_leading(tokens, fused_tokens),
                "difference": pe.relative_difference(logits, fused_logits),
                "seconds": [answer[1] for answer in answers],
                "is_repeatable": all(answer[2] for answer in answers) and all(a[0] == tokens for a in answers),
            }
        )
    compared = None
    if reference is not None:
        tokens, logits = reference
        own = logits[:, decoder.first_token : decoder.first_token + fused_logits.shape[1]]
        compared = {
            "tokens": tokens,
            "equal_tokens": _equal_leading(fused_tokens, tokens),
            "difference": pe.relative_difference(fused_logits, own),
        }
    return {**_description(pe), "prefill": prefill, "methods": reports, "reference": compared} | {
        "outside_seconds": max(statistics.median(each) for each in pe.exchange(seconds[""])),
        "notes": pe.notes,
    }


def _description(pe: _Pe) -> dict[str, Any]:
    """Return the description of the run: hardware, versions and model."""
    config: ModelConfig = pe.config
    return {
        **where_it_ran(),
        "model": dataclasses.asdict(config),
        "layers": pe.num_layers,
        "dtype": str(pe.dtype).removeprefix("torch."),
        "options": {**dataclasses.asdict(pe.options), "model": config.name},
        "has_graphs": pe.has_graphs,
        "is_compiled": pe.is_compiled,
    }

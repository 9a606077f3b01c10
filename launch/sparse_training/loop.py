"""The work of one PE of the training: read, train, save, compare, measure."""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import math
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from program import traced, where_it_ran
from torch.nn.parallel import DistributedDataParallel

import persistent_ops as po
from persistent_ops.testing.machine import share_cores
from persistent_ops.testing.pes import gather
from persistent_ops.testing.progress import progress_bar

from . import checkpoint
from .batches import Batches
from .model import WordVectors, neighbors
from .options import Options
from .overlap import seconds_per_pass
from .text import Corpus, read_corpus

__all__ = ["read_text", "run_pe"]

_LOSS_STEPS = 10  # between sums of the losses over the PEs, which the host waits for
_NEIGHBORS = 5


def read_text(options: Options) -> Corpus:
    """Return the text; ValueError where it cannot be read, or is too short."""
    return read_corpus(
        options.text,
        max_bytes=options.max_bytes,
        min_count=options.min_count,
        max_words=options.max_words,
        keep=options.keep,
        seed=options.seed,
        least=2 * options.window + 1,
    )


class _Pe:
    """One PE's tables and everything that is done with them."""

    def __init__(self, options: Options, corpus: Corpus) -> None:
        self.options = options
        self.device = po.device()
        self.corpus = corpus
        self.identity = {**options.identity(), "text": corpus.digest()}
        self.batches = Batches(corpus, options, self.device)
        self.model = self.new_model()
        self.optimizer = self.new_optimizer(self.model)
        self.module = DistributedDataParallel(self.model)
        self.module.register_comm_hook(None, po.nn.ddp_sparse_hook)
        self.step = 0
        self.losses: list[float] = []
        self.norms: list[float] = []

    def exchange(self, value: Any) -> list[Any]:
        """Return every PE's value (of JSON types), in rank order; collective."""
        return gather(value, timeout=self.options.timeout)

    def new_model(self) -> WordVectors:
        options = self.options
        return WordVectors(len(self.corpus.words), options.dim, seed=options.seed, device=self.device)

    def new_optimizer(self, model: WordVectors) -> torch.optim.SparseAdam:
        return torch.optim.SparseAdam(list(model.parameters()), lr=self.options.learning_rate)

    # ---- state -----------------------------------------------------------------------------------------------------

    def save(self) -> None:
        """Let rank 0 write a checkpoint; all PEs have the same state."""
        if po.rank() == 0:
            state = (self.model.state_dict(), self.optimizer.state_dict())
            checkpoint.save(
                self.options.checkpoint_path, checkpoint.Checkpoint(self.identity, self.step, self.losses, *state)
            )

    def resume(self) -> None:
        """Take the checkpoint's state."""
        found = checkpoint.load(self.options.checkpoint_path, self.identity, self.device)
        self.model.load_state_dict(found.model)
        self.optimizer.load_state_dict(found.optimizer)
        self.step, self.losses = found.step, list(found.losses)

    def bits(self) -> str:
        """Return a digest of this PE's tables."""
        state = hashlib.sha256()
        for parameter in self.model.parameters():
            state.update(parameter.detach().cpu().numpy().tobytes())
        return state.hexdigest()

    # ---- training --------------------------------------------------------------------------------------------------

    def backward(self, step: int) -> torch.Tensor:
        """Run one pass over this PE's share of a batch; return its share of the loss."""
        loss = self.module(self.batches.share(step, po.rank(), po.world_size())) / self.options.batch
        # DDP takes the mean over the PEs, and the batch's loss is the sum.
        (loss * po.world_size()).backward()
        return loss.detach()

    def train(self, show: Callable[[int, float], None]) -> tuple[int, float]:
        """Train until the last step; return how many steps were timed, and their seconds. The first are not."""
        options = self.options
        shares: list[torch.Tensor] = []
        begin, first_timed = time.perf_counter(), self.step
        num_untimed = _LOSS_STEPS  # in these, kernels are compiled and memory is found
        for step in range(self.step, options.steps):
            self.optimizer.zero_grad()
            shares.append(self.backward(step))
            if len(self.norms) < options.check_steps:
                self.norms.append(_gradient_norm(self.model))
            self.optimizer.step()
            self.step = step + 1
            is_last = self.step == options.steps
            if is_last or len(shares) == _LOSS_STEPS or self.step % options.checkpoint_every == 0:
                sums = torch.stack(shares).double()
                dist.all_reduce(sums)
                self._keep(sums.tolist())
                shares.clear()
                show(self.step, self.losses[-1])
                if num_untimed and self.step - first_timed >= num_untimed and not is_last:
                    begin, first_timed, num_untimed = time.perf_counter(), self.step, 0
            if is_last or self.step % options.checkpoint_every == 0:
                self.save()
        po.check()
        return self.step - first_timed, time.perf_counter() - begin

    def _keep(self, losses: list[float]) -> None:
        """Take losses into the history; raise for one that is not finite, before a checkpoint replaces a good one."""
        for step, loss in enumerate(losses, start=len(self.losses) + 1):
            if not math.isfinite(loss):
                raise ValueError(
                    f"the loss of step {step} is {loss}: the training has diverged; lower the learning rate"
                )
        self.losses += losses

    def one_process(self) -> dict[str, list[float]]:
        """Let rank 0 go the next steps alone, with the whole batch: without DDP, and without the operator.

        Returns:
            Its losses and the norms of its gradients; on every PE.
        """
        losses, norms = [], []
        if po.rank() == 0:
            model = self.new_model()
            model.load_state_dict(self.model.state_dict())
            optimizer = self.new_optimizer(model)
            optimizer.load_state_dict(copy.deepcopy(self.optimizer.state_dict()))  # it takes tensors over as they are
            for step in range(self.step, min(self.step + self.options.check_steps, self.options.steps)):
                optimizer.zero_grad()
                loss = model(self.batches.share(step, 0, 1)) / self.options.batch
                loss.backward()
                losses.append(float(loss.detach()))
                norms.append(_gradient_norm(model))
                optimizer.step()
        return dict(self.exchange({"losses": losses, "norms": norms})[0])

    def neighbors(self) -> dict[str, list[tuple[str, float]]]:
        """Return the nearest words of each requested word that the text has."""
        numbers = {word: number for number, word in enumerate(self.corpus.words)}
        found = {}
        for word in self.options.words:
            if word in numbers:
                nearest = neighbors(self.model.context.weight.detach(), numbers[word], _NEIGHBORS)
                found[word] = [(self.corpus.words[row], cosine) for row, cosine in nearest]
        return found


def _gradient_norm(model: WordVectors) -> float:
    values = [p.grad.coalesce().values() for p in model.parameters() if p.grad is not None]
    return sum(float(each.double().square().sum()) for each in values) ** 0.5


def run_pe(options: Options) -> dict[str, Any]:
    """Train on this PE. Collective.

    Args:
        options: the same on every PE.

    Returns:
        What was done and measured, what JSON can carry: `losses` of all steps; `first_step` of this run; `norms` of
        its first gradients; `one_process`, what one process has instead; `same_bits`, whether the PEs' tables are
        equal; `timed_steps` and `seconds` of training; `passes`, seconds per forward and backward pass (see
        `overlap.seconds_per_pass`); `neighbors` by word; and what was run on what.

    Raises:
        ValueError: the text or the checkpoint does not do.
        PersistentOpsError: see the package.
    """
    po.init(options.backend, operator_timeout=options.timeout)
    try:
        share_cores()
        with po.process_group(), traced(options.trace):
            report = _run(_Pe(options, read_text(options)))
            return {**report, "group": dist.get_backend()}
    finally:
        po.finalize()


def _run(pe: _Pe) -> dict[str, Any]:
    options = pe.options
    if len(set(pe.exchange(pe.identity["text"]))) > 1:
        raise ValueError("text: the PEs read different ones; pass --text with a file that all hosts have")
    if options.is_resumed:
        pe.resume()
    first_step = pe.step
    if first_step >= options.steps:
        raise ValueError(f"--steps: the checkpoint has {first_step} already; pass more than that")
    one_process = pe.one_process()
    with progress_bar("training", first_step=pe.step, last_step=pe.options.steps) as show:
        timed_steps, seconds = pe.train(show)
    passes = seconds_per_pass(pe, options.overlap_steps) if options.overlap_steps else None
    return {
        **where_it_ran(),
        "options": dataclasses.asdict(options),
        "source": pe.corpus.source,
        "num_bytes": pe.corpus.num_bytes,
        "num_words": len(pe.corpus.stream),
        "vocabulary": len(pe.corpus.words),
        "first_step": first_step,
        "losses": pe.losses,
        "norms": pe.norms,
        "one_process": one_process,
        "same_bits": len(set(pe.exchange(pe.bits()))) == 1,
        "timed_steps": timed_steps,
        "seconds": max(pe.exchange(seconds)),
        "passes": passes,
        "neighbors": pe.neighbors(),
    }

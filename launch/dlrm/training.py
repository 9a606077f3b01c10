"""The training loop: batches, forward, backward, both optimizers, evaluations, checkpoints. One process or several."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import persistent_ops as po

from . import checkpoint
from .ahead import Sender
from .batches import Batches, Position
from .captured_step import CapturedStep
from .dense_optimizer import count_steps, load_optimizer, optimizer_state, rate_of, set_rate
from .embedding import EmbeddingModule
from .metrics import all_predictions, auroc
from .model import DenseModel
from .records import Batch
from .schedule import Schedule

__all__ = ["History", "Plan", "Training"]

_UNTIMED_STEPS = 10  # in which kernels are compiled and memory is found


@dataclass(frozen=True)
class Plan:
    """The length of a training, and what happens on the way.

    Attributes:
        epochs: to train until.
        most_steps: to stop at, if that is earlier; None for all.
        evaluate_every: steps between evaluations; 0 for one at the end alone.
        checkpoint_every: steps between checkpoints; 0 for one at the end alone.
        folder: of the checkpoints, which all PEs must see; None for no checkpoints.
        losses_every: steps between sums of the losses over the PEs, for which the host waits.
    """

    epochs: int = 1
    most_steps: int | None = None
    evaluate_every: int = 0
    checkpoint_every: int = 0
    folder: Path | None = None
    losses_every: int = 10

    def __post_init__(self) -> None:
        for name, least in (("epochs", 1), ("evaluate_every", 0), ("checkpoint_every", 0), ("losses_every", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be at least {least}, got {getattr(self, name)}")
        if self.most_steps is not None and self.most_steps < 1:
            raise ValueError(f"most_steps must be at least 1, got {self.most_steps}")


@dataclass
class History:
    """The result of a training, the same on every PE.

    Attributes:
        losses: the mean binary cross-entropy of each step's global batch.
        evaluations: of each, "step" (how many were done), "auc" and "loss" over all samples that evaluate.
    """

    losses: list[float] = field(default_factory=list)
    evaluations: list[dict[str, float]] = field(default_factory=list)


class Training:
    """A DLRM and its way through the batches.

    The dense part is under DistributedDataParallel where torch.distributed has several PEs; the tables are the
    embedding module's. `EmbeddingModule` says how gradients are scaled. All methods are collective.

    Args:
        model: the dense part, the same on every PE.
        embedding: gives the pooled embeddings, and has the tables' optimizer.
        optimizer: of the dense part.
        batches: to train with.
        evaluation: samples that evaluate; None for no evaluations. Without a seed, its order is the source's.
        device: of all tensors.
        identity: what else decides the losses, such as learning rates; a checkpoint with another is refused.
        schedule: of the rates of both optimizers, whose rates so far are the base; None to leave them as they are.
        precision: of the dense part's products, torch.float32 or torch.bfloat16 (autocast).
        is_compiled: whether the dense part goes through torch.compile; evaluations do not.
        is_captured: whether steps with whole batches are replays of a CUDA graph, after the first steps
            (`CapturedStep`). The optimizer's rates are tensors on the device then, and its step can be captured; all is
            done on one stream, see `own_stream`; and `close` comes before the process group's end.
        watch: waits for the steps where the host wants losses, and raises what launches have reported, neither of which
            a replay does; None where torch and the operators do.
        beside_launches: called with the DistributedDataParallel where there is one: has its collectives and the
            embedding's launches go side by side. None where the embedding makes none.

    Attributes:
        batches, device: see above.
        history: of the training, also of what was done before it was resumed.
        step: steps so far.
        position: of the next batch.
        timed_steps, seconds: of `run`, without the first steps, evaluations and checkpoints; in a captured training
            replays alone, without the one that follows its capture.
        num_replays: steps that were replays of a CUDA graph.

    Raises:
        ValueError: the samples have other columns than the model.
    """

    def __init__(
        self,
        model: DenseModel,
        embedding: EmbeddingModule,
        optimizer: torch.optim.Optimizer,
        batches: Batches,
        *,
        evaluation: Batches | None = None,
        device: torch.device | None = None,
        identity: dict[str, Any] | None = None,
        schedule: Schedule | None = None,
        precision: torch.dtype = torch.float32,
        is_compiled: bool = False,
        is_captured: bool = False,
        watch: po.nn.StepWatchdog | None = None,
        beside_launches: Callable[[DistributedDataParallel], Any] | None = None,
    ) -> None:
        for source in (batches.source, *([] if evaluation is None else [evaluation.source])):
            if (source.num_dense, len(source.num_rows)) != (model.sizes.num_dense, len(model.sizes.dims)):
                raise ValueError(
                    f"the model is one of {model.sizes.num_dense} dense columns and {len(model.sizes.dims)} features, "
                    f"and the samples have {source.num_dense} and {len(source.num_rows)}"
                )
        self._model = model
        self._embedding = embedding
        self._optimizer = optimizer
        self.batches = batches
        self._evaluation = evaluation
        self.device = device or torch.device("cpu")
        self._identity = {"batches": batches.identity(), "sizes": model.sizes.identity(), **(identity or {})}
        self._world_size = dist.get_world_size() if dist.is_initialized() else 1
        self._schedule = schedule
        self._base_rates = [rate_of(group) for group in self._rate_groups()]
        self._precision = precision
        self._dense: Any = model
        if self._world_size > 1:
            constants: Any = [name for name, _ in model.named_buffers()]
            model._ddp_params_and_buffers_to_ignore = constants  # torch 2.13 has renamed the option for it
            self._dense = DistributedDataParallel(model)
            if beside_launches is not None:
                beside_launches(self._dense)
        if is_compiled:
            self._dense = torch.compile(self._dense)
        self._captured: CapturedStep | None = None
        if is_captured:
            hotness, batch_size = sum(batches.source.hotness), batches.batch_size
            self._captured = CapturedStep(self._step, batch_size=batch_size, lookups_per_sample=hotness)
        self._watch = watch
        # A graph has the exchange of its own batch's lookups.
        self._sender = Sender(None if is_captured else embedding, self._world_size, self.device)
        self._shares: list[torch.Tensor] = []
        self.history = History()
        self.step = 0
        self.position: Position = (0, 0)
        self.timed_steps, self.seconds = 0, 0.0
        self._untimed = _UNTIMED_STEPS

    @property
    def num_replays(self) -> int:
        return 0 if self._captured is None else self._captured.num_replays

    def run(self, plan: Plan, show: Callable[[int, float], None] | None = None) -> History:
        """Train until the plan's end.

        Args:
            plan: of the training; a resumed training continues to its end.
            show: called now and then with the number of steps and the last loss.

        Raises:
            ValueError: the plan's end is already past, a loss is not finite, or the data is malformed.
        """
        end = self._end(plan)
        if self.position >= end:
            raise ValueError(f"the plan ends with step {self._step_of(end)}, and {self.step} have been done")
        with contextlib.closing(self.batches.stream(self.position, end, self.device)) as stream:
            while self.position < end:
                self._run_span(stream, self._steps_until_due(plan, end), plan, show)
                self._look_up(plan, is_last=self.position == end)
        return self.history

    def steps(self, batches: Iterable[tuple[Batch, int]]) -> Iterator[torch.Tensor]:
        """Make a step with each batch; the next one comes to the device meanwhile, and its lookups to the tables.

        Args:
            batches: this PE's samples, and how many the global batch has.

        Yields:
            This PE's share of the loss, after each step.
        """
        coming = iter(batches)
        sent = self._sender.send_next(coming)
        while sent is not None:
            self._set_rates()
            self._optimizer.zero_grad()
            self._embedding.optimizer.zero_grad()
            sent.await_copy()
            if self._captured is not None:
                share = self._captured.run(sent.batch, sent.batch_size)
                following = self._sender.send_next(coming)
            else:
                pooled = self._embedding(sent.lookups)
                following = self._sender.send_next(coming)
                share = self._learn(sent.batch, sent.batch_size, pooled)
            self.step += 1
            if self._watch is not None:
                self._watch.launched(self.step)
            yield share
            sent = following

    def evaluate(self) -> dict[str, float]:
        """Return loss and AUC over the samples that evaluate, for any batches and any number of PEs.

        Raises:
            ValueError: there are no such samples, or a prediction is NaN.
        """
        if self._evaluation is None:
            raise ValueError("evaluation: the training has no samples to evaluate with")
        modes = self._model.training, self._embedding.training
        self._model.train(False)
        self._embedding.train(False)
        scores, labels = [], []
        stream = self._evaluation.stream((0, 0), (1, 0), self.device)
        try:
            with torch.no_grad(), self._autocast(), contextlib.closing(stream):
                for batch, size in self._sized(stream, self._evaluation, (0, 0), self._evaluation.num_batches):
                    split = po.nn.balanced_splits(size, self._world_size)
                    lookups = self._embedding.input_dist(batch.values, batch.lengths, batch_per_rank=split)
                    scores.append(self._model(batch.dense, self._embedding(lookups)).float())
                    labels.append(batch.labels)
        finally:
            self._model.train(modes[0])
            self._embedding.train(modes[1])
        # Logits rank as probabilities do, and keep apart what rounds to the same probability.
        logits, clicks = all_predictions(torch.cat(scores), torch.cat(labels))
        loss = F.binary_cross_entropy_with_logits(logits.double(), clicks.double())
        return {"step": self.step, "auc": auroc(logits, clicks), "loss": float(loss)}

    def save(self, folder: Path) -> None:
        """Write a checkpoint; see `checkpoint.save`."""
        self._sum_losses()
        if self._captured is not None:
            count_steps(self._optimizer, self.step)
        progress = checkpoint.Progress(
            identity=self._identity,
            step=self.step,
            epoch=self.position[0],
            batch=self.position[1],
            losses=self.history.losses,
            evaluations=self.history.evaluations,
            model=self._model.state_dict(),
            optimizer=optimizer_state(self._optimizer),
        )
        checkpoint.save(folder, progress, self._embedding)

    def resume(self, folder: Path) -> None:
        """Go on from the latest checkpoint of a folder; ValueError where there is none, or one of another training."""
        found = checkpoint.load(folder, self._identity, self._embedding)
        self.close()  # loading makes new tensors of the optimizer's states
        self._model.load_state_dict(found.model)
        load_optimizer(self._optimizer, found.optimizer)
        self.step, self.position = found.step, (found.epoch, found.batch)
        self.history = History(list(found.losses), list(found.evaluations))
        self._shares.clear()

    def close(self) -> None:
        """Release the CUDA graph: NCCL's part of it must not outlive the process group. A later step captures again.

        Steps that are still under way after an error are waited for or ended.
        """
        if self._watch is not None:
            self._watch.close()
        if self._captured is not None:
            self._captured.close()

    def take_over(self, other: Training) -> None:
        """Take over the dense part of another training, and its optimizer's states; position and rates stay.

        They are copied to where they lie, which is where a graph reads them.
        """
        self._model.load_state_dict(other._model.state_dict())
        for own, given in zip(self._model.parameters(), other._model.parameters(), strict=True):
            for name, state in other._optimizer.state[given].items():
                self._optimizer.state[own][name].copy_(state)

    def wait(self) -> None:
        """Wait for the steps under way, and raise their errors."""
        if self._watch is not None:
            self._watch.wait()

    # ---- steps -------------------------------------------------------------------------------------------------------

    def _run_span(
        self,
        stream: Generator[Batch, None, None],
        num_steps: int,
        plan: Plan,
        show: Callable[[int, float], None] | None,
    ) -> None:
        """Make steps between which nothing but losses is looked at."""
        begin = time.perf_counter()
        for share in self.steps(self._sized(stream, self.batches, self.position, num_steps)):
            self._shares.append(share)
            self.position = self.batches.after(self.position)
            num_steps -= 1
            if num_steps == 0 or len(self._shares) >= plan.losses_every or self._changes_kind():
                summed = self._sum_losses()  # the host waits here
                now = time.perf_counter()
                if self._are_timed(summed):
                    self.timed_steps += summed
                    self.seconds += now - begin
                begin = now
                if show is not None:
                    show(self.step, self.history.losses[-1])

    def _changes_kind(self) -> bool:
        """Return whether one of the last step and the next is a replay: steps that are timed together are alike."""
        if self._captured is None:
            return False
        return self._captured.was_replay != self._captured.would_replay(self.batches.size(self.position[1]))

    def _are_timed(self, num_steps: int) -> bool:
        """Return whether the last steps, so many and all of a kind, are of the kind whose time is reported."""
        if self._captured is not None:
            return self._captured.was_replay
        self._untimed -= num_steps
        return self._untimed + num_steps <= 0

    def _step(self, batch: Batch, batch_size: int) -> torch.Tensor:
        """Make a step with a batch whose lookups have not been sent; return this PE's share of the loss."""
        split = po.nn.balanced_splits(batch_size, self._world_size)
        lookups = self._embedding.input_dist(batch.values, batch.lengths, batch_per_rank=split)
        return self._learn(batch, batch_size, self._embedding(lookups))

    def _learn(self, batch: Batch, batch_size: int, pooled: torch.Tensor) -> torch.Tensor:
        """Go forward through the dense part, backward through all, and update; return this PE's share of the loss."""
        with self._autocast():
            logits = self._dense(batch.dense, pooled)
        # A sum over no samples is 0, a mean is NaN: a PE may have none.
        loss = F.binary_cross_entropy_with_logits(logits.float(), batch.labels, reduction="sum") / batch_size
        (loss * self._world_size).backward()  # DDP takes the mean over the PEs
        self._optimizer.step()
        self._embedding.optimizer.step()
        return loss.detach()

    def _autocast(self) -> contextlib.AbstractContextManager[Any]:
        if self._precision == torch.float32:
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, dtype=self._precision)

    def _rate_groups(self) -> list[dict[str, Any]]:
        return [*self._optimizer.param_groups, *self._embedding.optimizer.param_groups]

    def _set_rates(self) -> None:
        if self._schedule is not None:
            for group, base in zip(self._rate_groups(), self._base_rates, strict=True):
                set_rate(group, self._schedule.rate(base, self.step))

    @staticmethod
    def _sized(
        stream: Generator[Batch, None, None], batches: Batches, position: Position, count: int
    ) -> Iterator[tuple[Batch, int]]:
        """Yield so many batches of a stream, each with the size of the global one."""
        for _ in range(count):
            yield next(stream), batches.size(position[1])
            position = batches.after(position)

    # ---- in between --------------------------------------------------------------------------------------------------

    def _steps_until_due(self, plan: Plan, end: Position) -> int:
        """Return the steps until something is due for which no lookups may be under way."""
        left = self._step_of(end) - self._step_of(self.position)
        every = [plan.evaluate_every if self._evaluation is not None else 0]
        every += [plan.checkpoint_every if plan.folder is not None else 0]
        return min([left, *(each - self.step % each for each in every if each)])

    def _look_up(self, plan: Plan, *, is_last: bool) -> None:
        """Evaluate and save if either is due after a step."""
        if self._evaluation is not None and _is_due(self.step, plan.evaluate_every, is_last):
            self.history.evaluations.append(self.evaluate())
        if plan.folder is not None and _is_due(self.step, plan.checkpoint_every, is_last):
            self.save(plan.folder)

    def _sum_losses(self) -> int:
        """Move the losses that are still on the device into the history; return how many."""
        if not self._shares:
            return 0
        self.wait()
        sums = torch.stack(self._shares).double()
        if self._world_size > 1:
            dist.all_reduce(sums)
        self._shares.clear()
        first = len(self.history.losses)
        self.history.losses += sums.tolist()
        for step, loss in enumerate(self.history.losses[first:], start=first + 1):
            if not math.isfinite(loss):
                raise ValueError(
                    f"the loss of step {step} is {loss}: the training has diverged; lower the learning rate"
                )
        return len(sums)

    def _end(self, plan: Plan) -> Position:
        steps = plan.epochs * self.batches.num_batches
        return divmod(min(steps, plan.most_steps or steps), self.batches.num_batches)

    def _step_of(self, position: Position) -> int:
        return position[0] * self.batches.num_batches + position[1]


def _is_due(step: int, every: int, is_last: bool) -> bool:
    return is_last or (every > 0 and step % every == 0)

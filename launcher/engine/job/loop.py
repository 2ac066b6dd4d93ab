"""The training loop, read top to bottom: batch, loss, backward, step; now and then evaluate and save.

Ranks agree at every step boundary by one small message (loss, stop, save), so that all take the same
branch: a stop signal that reached one rank stops all of them after the same step.
"""

from __future__ import annotations

import json
import math
import signal
import sys
import time
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import Any, TextIO

import torch

from ...contract.errors import UsageError
from ...contract.folder import RunFolder
from ...contract.launch import LaunchSpec
from ...contract.plain import dumps, to_plain, write_atomically
from ...contract.records import Outcome
from ...contract.train import TrainConfig
from ..chance import mix
from ..ranks import Ranks
from ..saving import checkpoint
from ..update.optim import learning_rate
from ..watching.track import FirstSteps
from ..zero import StepInfo
from .place import Place
from .policy import Policy, wrap
from .sources import Batches, Loss, make_batches, make_loss, make_model, to_device


@dataclass
class Progress:
    """How far training is: ``step`` steps done, which consumed ``samples`` global samples."""

    step: int = 0
    samples: int = 0
    checkpoint: int | None = None
    train_loss: float | None = None
    heldout_loss: float | None = None

    def losses(self) -> dict[str, float | None]:
        """For files: JSON has no NaN, which a loss is where a step was skipped for it; None stands there."""
        known = {"train_loss": self.train_loss, "heldout_loss": self.heldout_loss}
        return {name: loss if loss is not None and math.isfinite(loss) else None for name, loss in known.items()}


class Trainer:
    """One attempt on one rank."""

    def __init__(self, spec: LaunchSpec, config: TrainConfig, place: Place) -> None:
        self.spec, self.config, self.place = spec, config, place
        self.run_dir = Path(spec.run_dir)
        folder = RunFolder(PurePosixPath(spec.run_dir))
        self.attempt = folder.attempt(spec.attempt)
        self.checkpoints = Path(folder.checkpoints)
        self.first_steps = FirstSteps(place.device)
        self.batches: Batches = make_batches(config, self.run_dir)
        self.loss: Loss = make_loss(config)
        zero = config.zero
        ranks = Ranks.connect(
            config.tensor, replicas=zero.replicas, timeout_s=place.timeout_s, same_host=zero.same_host
        )
        self.policy: Policy = wrap(lambda: make_model(config, ranks.tensor), config, place.device, ranks)
        self.world = ranks.world
        self.comm = self.policy.comm
        self.global_batch = config.batch.global_batch(self.comm.size)
        self.progress = Progress()
        self.stop_asked = False
        self.background = self.policy.saves_in_background() if config.checkpoint.background else None
        self._taken: int | None = None  # the step that was saved last, whole or under way
        self._saved_at = time.monotonic()

    def train(self) -> Outcome:
        """Trains to the last step or to an agreed stop; returns what rank 0 writes as the outcome."""
        self._resume()
        signal.signal(getattr(signal, f"SIG{self.spec.stop_signal}"), self._on_stop)
        metrics_path = Path(self.attempt.metrics_of(self.place.rank))
        metrics_path.parent.mkdir(parents=True, exist_ok=True)
        stopped = False
        began, first_step = time.perf_counter(), self.progress.step
        with open(metrics_path, "a", encoding="utf-8") as metrics:
            reporter = Reporter(self, metrics, began)
            while self.progress.step < self.config.steps and not stopped:
                stopped = self._one_step(reporter)
            self.first_steps.close()
            if self._taken != self.progress.step:
                self._save()
            if self.background is not None:
                self._is_whole(self.background.finish())
        trained_s = time.perf_counter() - began
        steps = self.progress.step - first_step
        tokens = steps * self.global_batch * self.batches.tokens_per_sample
        memory, losses = self.policy.memory(), self.progress.losses()
        return Outcome(
            outcome="stopped" if stopped and self.progress.step < self.config.steps else "done",
            step=self.progress.step,
            checkpoint=self.progress.checkpoint,
            train_loss=losses["train_loss"],
            heldout_loss=losses["heldout_loss"],
            bigram_entropy=self._bigram,
            tokens_per_s=tokens / trained_s if steps else None,
            trained_s=trained_s,
            parameters=self.policy.parameters(),
            state_bytes={k: memory[k] for k in ("parameters", "gradients", "optimizer")},
            reason="it was asked to save and end: its time was nearly over, or somebody asked" if stopped else "",
            skipped=self.policy.skipped,
        )

    @cached_property
    def _bigram(self) -> float | None:
        """Rank 0's, counted when it is first told of: nobody waits for it before the first step."""
        return self.batches.bigram() if self.comm.rank == 0 and self.batches.heldout_batches else None

    def _on_stop(self, *_: Any) -> None:
        self.stop_asked = True

    def _one_step(self, reporter: Reporter) -> bool:
        """One optimizer step with all that follows it; True when the ranks agreed to stop."""
        config, progress = self.config, self.progress
        started = time.perf_counter()
        self.first_steps.begin()
        before = traffic_of(self.policy.ranks)
        loss = self._micro_steps()
        self.policy.lr = learning_rate(config.optimizer, progress.step + 1, config.steps)
        info = self.policy.step()
        progress.step += 1
        progress.samples += self.global_batch
        durable = self.background is not None and self.background.durable_here()
        row = torch.tensor([loss, self.stop_asked, self._save_due(), durable], dtype=torch.float64)
        rows = self.world.gather_small(row.to(self.place.device), f"end of step {progress.step}").cpu()
        progress.train_loss = float(rows[:: self.config.tensor, 0].sum()) / self.comm.size
        stop, save = bool(rows[:, 1].any()), bool(rows[0, 2])
        if self.background is not None and bool(rows[:, 3].all()):
            self._is_whole(self.background.publish())
        reporter.step(info, time.perf_counter() - started, before)
        last = progress.step == config.steps
        if config.evaluate and (last or progress.step % config.evaluate.every == 0) and self.batches.heldout_batches:
            progress.heldout_loss = self._evaluate()
            reporter.evaluated(progress.heldout_loss, self._bigram)
        if save and not last:
            self._save()
        return stop

    def _micro_steps(self) -> float:
        """Forward and backward of every micro-batch; returns this rank's mean loss."""
        config = self.config
        total = torch.zeros((), dtype=torch.float64, device=self.place.device)
        micro, accumulation = config.batch.micro, config.batch.accumulation
        for number in range(accumulation):
            first = self.progress.samples + (number * self.comm.size + self.comm.rank) * micro
            batch = to_device(self.batches.train(first, micro), self.place.device)
            torch.manual_seed(mix(config.seed, self.progress.step, number, self.comm.rank))
            loss = self.loss(self.policy.model, batch)
            self.policy.backward(loss)
            total += loss.detach()
        return float(total) / accumulation

    @torch.no_grad()
    def _evaluate(self) -> float:
        """The mean held-out loss over a number of samples that does not depend on the world size.

        Every rank runs as many forwards as every other, because at stage 3 they gather together."""
        model, comm = self.policy.model, self.comm
        count, micro = self.batches.heldout_batches, self.config.batch.micro
        chunks = [list(range(i, min(i + micro, count))) for i in range(0, count, micro)]
        model.eval()
        total = torch.zeros(2, dtype=torch.float64, device=self.place.device)
        for turn in range(-(-len(chunks) // comm.size)):
            mine = turn * comm.size + comm.rank
            chunk = chunks[min(mine, len(chunks) - 1)]
            loss = self.loss(model, to_device(self.batches.heldout(chunk), self.place.device))
            if mine < len(chunks):
                total += torch.stack([loss.double() * len(chunk), torch.full_like(loss, len(chunk)).double()])
        model.train()
        summed = comm.gather_small(total, "held-out loss").sum(0)
        return float(summed[0] / summed[1])

    # --- checkpoints -----------------------------------------------------------------------------------

    def _save_due(self) -> bool:
        every = self.config.checkpoint
        if every.every_steps is not None:
            return self.progress.step % every.every_steps == 0
        return every.every_s is not None and time.monotonic() - self._saved_at >= every.every_s

    def _save(self) -> None:
        spec, place = self.spec, self.place
        model = to_plain(self.config.gpt or self.config.factory)
        about = checkpoint.About(
            run=spec.run,
            attempt=spec.attempt,
            samples=self.progress.samples,
            global_batch=self.global_batch,
            seed=self.config.seed,
            node=place.node,
            writes_manifest=self._writes_manifest,
            model=model,
            data_state=self.batches.state(self.progress.samples),
            shared=spec.shared,
            extra=self.progress.losses(),
        )
        step = self._taken = self.progress.step
        self._saved_at = time.monotonic()
        if self.background is None:
            self.policy.save(self.checkpoints, step, about)
            self._is_whole(step)
            return
        self._is_whole(self.background.finish())
        started = time.perf_counter()
        self.background.begin(self.checkpoints, step, about)
        say(place, f"step {step}  copied for a checkpoint in {time.perf_counter() - started:.3f} s, written meanwhile")

    def _is_whole(self, step: int | None) -> None:
        """After the manifest of ``step`` was written."""
        if step is None:
            return
        self.progress.checkpoint = step
        if self.config.checkpoint.keep is not None and self._writes_manifest:
            checkpoint.prune(self.checkpoints, self.config.checkpoint.keep)

    @property
    def _writes_manifest(self) -> bool:
        return self.place.rank == 0 if self.spec.shared else self.place.local_rank == 0

    def _resume(self) -> None:
        if self.spec.resume_step is None:
            if self.config.weights is not None:
                self._begin_with(self.run_dir / "code" / self.config.weights)
            return
        manifest = self.policy.load(self.checkpoints, self.spec.resume_step)
        if manifest.global_batch and manifest.global_batch != self.global_batch:
            raise UsageError(
                f"the checkpoint was made with a global batch of {manifest.global_batch}, this attempt has "
                f"{self.global_batch}",
                hint="change batch.accumulation so that the product stays the same",
            )
        self._taken = manifest.step
        self.batches.restore(manifest.samples, manifest.data_state)
        extra = manifest.extra or {}
        self.progress = Progress(
            manifest.step, manifest.samples, manifest.step, extra.get("train_loss"), extra.get("heldout_loss")
        )
        say(self.place, f"resumed from step {manifest.step} (saved by {len(manifest.shards)} ranks)")

    def _begin_with(self, weights: Path) -> None:
        started = time.perf_counter()
        count = self.policy.load_weights(weights)
        took = time.perf_counter() - started
        say(
            self.place, f"began with the weights in {weights} ({count / 2**20:,.1f} MiB read by rank 0 in {took:.1f} s)"
        )


def traffic_of(ranks: Ranks) -> dict[str, Any]:
    """What was communicated so far, under the names of the metrics: by the ranks that a unit is partitioned over; a
    tensor group's, and that between replicas, are told apart."""
    shard, others = ranks.shard.traffic, {}
    if ranks.degree > 1:
        others["tensor"] = ranks.tensor.traffic
    if ranks.replica.size > 1:
        others["replica"] = ranks.replica.traffic
    found = {
        "exposed_wait_s": shard.waited_s + sum(t.waited_s for t in others.values()),
        "volume_elements": shard.volume_elements,
        "sent_bytes": shard.sent_bytes,
    }
    for name, traffic in others.items():
        found[f"{name}_volume_elements"] = traffic.volume_elements
        found[f"{name}_sent_bytes"] = traffic.sent_bytes
    return found


class Reporter:
    """The progress line on rank 0 and the metrics file of every rank."""

    def __init__(self, trainer: Trainer, metrics: TextIO, began: float) -> None:
        self.trainer, self.metrics, self.began = trainer, metrics, began
        self.first = trainer.progress.step
        self._said_at = 0.0

    def step(self, info: StepInfo, seconds: float, before: Any) -> None:
        trainer = self.trainer
        traffic = traffic_of(trainer.policy.ranks)
        tokens = trainer.global_batch * trainer.batches.tokens_per_sample
        memory = trainer.policy.memory()
        gpu = trainer.place.device.type == "cuda"
        row = {
            "step": trainer.progress.step,
            "loss": trainer.progress.losses()["train_loss"],
            "step_time_s": seconds,
            "tokens_per_s": tokens / seconds,
            **{key: value - before[key] for key, value in traffic.items()},
            "skipped": info.skipped,
            "state_bytes": {k: memory[k] for k in ("parameters", "gradients", "optimizer")},
            "peak_allocated_bytes": torch.cuda.max_memory_allocated() if gpu else trainer.first_steps.end(),
            "peak_reserved_bytes": torch.cuda.max_memory_reserved() if gpu else None,
        }
        self.metrics.write(json.dumps(row) + "\n")
        self.metrics.flush()
        if info.skipped:
            why = info.why or "a gradient is too large for fp16, the loss scale is halved"
            say(trainer.place, f"step {trainer.progress.step} is skipped, {trainer.policy.skipped} by now: {why}")
        self._progress_line(tokens)

    def _progress_line(self, tokens: int) -> None:
        progress, steps = self.trainer.progress, self.trainer.config.steps
        now = time.perf_counter()
        if now - self._said_at < 1.0 and progress.step not in (self.first + 1, steps):
            return
        self._said_at = now
        done, elapsed = progress.step - self.first, now - self.began
        left = elapsed / done * (steps - progress.step)
        say(
            self.trainer.place,
            f"step {progress.step}/{steps}  loss {progress.train_loss:.4f}  {done * tokens / elapsed:,.0f} tokens/s  "
            f"eta {clock(left)}",
        )

    def evaluated(self, loss: float, bigram: float | None) -> None:
        beside = "" if bigram is None else f"  (bigram entropy {bigram:.4f})"
        say(self.trainer.place, f"step {self.trainer.progress.step}  held-out loss {loss:.4f}{beside}")


def say(place: Place, line: str) -> None:
    """A line of rank 0's log."""
    if place.rank == 0:
        sys.stdout.write(line + "\n")
        sys.stdout.flush()


def clock(seconds: float) -> str:
    """1:05 · 2:03:04"""
    whole = max(0, round(seconds))
    hours, minutes = whole // 3600, whole // 60 % 60
    return f"{hours}:{minutes:02d}:{whole % 60:02d}" if hours else f"{minutes}:{whole % 60:02d}"


def write_outcome(path: Path, outcome: Outcome, place: Place) -> None:
    if place.rank == 0:
        write_atomically(path, dumps(outcome), durable=True)

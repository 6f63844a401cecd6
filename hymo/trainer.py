"""`Trainer`: a thin shell that holds a training state, a compiled step and data, and calls the pure functions."""

import os
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import NamedTuple, TypeVar

import torch
from torch.distributed.checkpoint.api import CheckpointException

from hymo import tree
from hymo.accounting import flops_per_token, peak_flops
from hymo.backend import choose_backend
from hymo.batch import Batch
from hymo.checkpoint import Provenance, check_continues, find_latest, load_checkpoint, save_checkpoint
from hymo.config import HyMoConfig, TrainingConfig
from hymo.evaluate import Evaluation, compute_validation_loss
from hymo.handle import HyMo, build_hymo
from hymo.jit import jit, require_compiler
from hymo.model import model_spec
from hymo.optim import build_optimizer
from hymo.progress import MetricsLog, Progress
from hymo.run_data import RunData, open_run_data
from hymo.run_folder import CHECKPOINTS, METRICS, choose_folder, fresh, held, resolve
from hymo.step import Metrics, TrainState, init_train_state, train_step

T = TypeVar("T")

SUSPECTED_LEAK = 0.5
"""Bits per byte on held-out text that no model of natural text reaches: below, training has seen it."""


class TrainingStopped(RuntimeError):
    """Training ended before its last step; the message says why and what is left, `exit_code` whose fault it is."""

    def __init__(self, message: str, *, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class Unread(NamedTuple):
    """A step whose numbers are still on the device."""

    step: int
    samples: int
    metrics: Metrics


def check_available(config: HyMoConfig, device: torch.device) -> None:
    """Raises ValueError naming the first thing that a run of `config` would need and that is not there."""
    ranks = os.environ.get("WORLD_SIZE", "1")
    if ranks != "1":
        raise ValueError(f"WORLD_SIZE: training on several ranks is not available yet, expected 1, got {ranks!r}")
    if config.run.trackers:
        raise ValueError(f"run.trackers: not available yet, got {', '.join(config.run.trackers)}; [] works")
    config.training.rows_per_step()
    choose_backend(config.training, device)
    require_compiler(config.training.compile, device)


class Trainer:
    """Trains a model in a run's folder, to which it writes metrics and checkpoints.

    Args:
        config: of the run.
        model: to begin with, left as it is; None for a new one from `training.seed`.
        data: opened; None for what `config.data` names.
        folder: of the run; None for that of `config.run`, which must hold no run yet, held until `close`.
        device: where to train.

    Attributes:
        state: all that training carries from step to step.
        step: optimiser steps done, as `state` has it on the device.
        samples: rows of data seen, likewise.

    Raises:
        ValueError: if there is no `folder` or `data`, and what the configuration names cannot be used.
    """

    def __init__(
        self,
        config: HyMoConfig,
        model: HyMo | None = None,
        *,
        data: RunData | None = None,
        folder: Path | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        self.device = torch.device(device)
        self.step = self.samples = 0
        with ExitStack() as closing, ExitStack() as begin:
            if folder is None:
                folder = closing.enter_context(held(choose_folder(config.run)))
                config = resolve(config, folder)
                begin.enter_context(fresh(folder))
            data = open_run_data(config, folder) if data is None else data
            closing.callback(data.close)
            self.config, self._data, self._folder = config, data, folder
            self._build(model)
            self._closing = closing.pop_all()

    def _build(self, model: HyMo | None) -> None:
        """What is made of the configuration: state, compiled step, loader and log."""
        config, training, spec = self.config, self.config.training, model_spec(self.config.model)
        self._backend = choose_backend(training, self.device)
        optimizer = build_optimizer(config.optimizer, config.scheduler, spec)
        pure = partial(train_step, cfg=config, spec=spec, optimizer=optimizer, backend=self._backend)
        self._compiled = jit(pure, compile=training.compile, donate=True)
        # A step writes into the state's storage, which must not be the caller's.
        params = build_hymo(config).params if model is None else tree.map(torch.clone, model.params)
        self.state: TrainState = init_train_state(_to(params, self.device), spec=spec, optimizer=optimizer)
        self._loader = self._data.loader(config)
        self._progress = Progress(
            MetricsLog(self._folder / METRICS),
            config.scheduler.total_steps,
            rows=training.rows_per_step(),
            row_tokens=training.max_seq_len,
            flops=flops_per_token(config.model, training.max_seq_len) * training.tokens_per_step(),
            peak=_peak(training, self.device),
        )

    @property
    def model(self) -> HyMo:
        """The model as trained so far; it shares the state's storage, into which the next step writes."""
        return HyMo(self.config.model, self.state.params, self._backend)

    @property
    def provenance(self) -> Provenance:
        """What the state is made with, as checkpoints record it."""
        return Provenance(self.config, self._data.tokenizer.fingerprint, self._loader.fingerprint)

    def train_step(self, batch: Batch) -> Metrics:
        """One optimiser step on leaves of shape (micro-batches, rows, tokens); its metrics stay on the device."""
        self.state, metrics = self._compiled(self.state, _to(batch, self.device))
        self.step += 1
        self.samples += batch.tokens.shape[0] * batch.tokens.shape[1]
        return metrics

    def train(self, max_steps: int | None = None) -> Evaluation | None:
        """Trains to the end of the schedule, or `max_steps` further; evaluates and saves on the way and at the end.

        Numbers of a step are read while the next one runs, so that the device never waits for the host. Returns the
        evaluation at the end, or None if there was no step left.

        Raises:
            TrainingStopped: if too many steps in a row are not finite, a shard turns out to be damaged, or an
                evaluation is better than is possible.
        """
        training, total = self.config.training, self.config.scheduler.total_steps
        last = total if max_steps is None else min(total, self.step + max_steps)
        unread: Unread | None = None
        evaluation: Evaluation | None = None
        self._progress.go_on(self.step)
        while self.step < last:
            with self._progress.timed_step():
                metrics = self.train_step(self._next_batch())
                self._read(unread)
                unread = Unread(self.step, self.samples, metrics)
            is_last = self.step == last
            evaluates = is_last or self.step % training.eval_interval == 0
            saves = is_last or self.step % training.save_interval == 0
            if evaluates or saves:
                self._read(unread)
                unread = None
            evaluation = self.evaluate() if evaluates else None
            leaks = evaluation is not None and evaluation.bits_per_byte < SUSPECTED_LEAK
            if saves or leaks:
                self.save()
            if leaks:
                raise TrainingStopped(
                    f"suspected leak: below {SUSPECTED_LEAK} bits/byte after step {self.step}; is the validation text"
                    " among the training text?",
                    exit_code=1,
                )
        return evaluation

    def evaluate(self) -> Evaluation:
        """Scores the validation data, prints and records the result."""
        evaluation = compute_validation_loss(
            self.state.params,
            self._data.validation_batches(self.config),
            cfg=self.config.model,
            token_bytes=self._data.tokenizer.token_bytes(),
            sources=[source.name for source in self._data.validation],
            backend=self._backend,
            compile=self.config.training.compile,
        )
        self._progress.tell_evaluation(self.step, evaluation)
        return evaluation

    def save(self) -> Path:
        """Publishes the state in the run's folder and returns its place.

        Raises:
            TrainingStopped: if the state is not finite.
            OSError: if it cannot be written.
        """
        try:
            return save_checkpoint(self._folder / CHECKPOINTS, self.state, meta=self.provenance)
        except ValueError as error:
            raise TrainingStopped(str(error), exit_code=1) from error
        except CheckpointException as error:
            ((cause, _),) = error.failures.values()
            raise cause from error

    def load(self, path: str | Path) -> int:
        """Goes on from a checkpoint: state and data are as they were there. Returns its step.

        Raises:
            ValueError: if it is not complete, was made with another model, optimiser, tokenizer or data, or is further
                than `scheduler.total_steps`.
        """
        meta, total = check_continues(path, self.provenance), self.config.scheduler.total_steps
        if meta.step > total:
            raise ValueError(f"scheduler.total_steps: expected at least the {meta.step} steps done, got {total}")
        self.state = load_checkpoint(path, self.state)
        self.step, self.samples = meta.step, meta.samples
        self._loader.close()
        self._loader = self._data.loader(self.config, meta.samples)
        return meta.step

    def close(self) -> None:
        """Stops reading ahead, closes the shards and lets go of the folder."""
        self._loader.close()
        self._closing.close()

    def _next_batch(self) -> Batch:
        try:
            return next(self._loader).batch
        except ValueError as error:
            raise TrainingStopped(f"{error}; stopped after step {self.step}", exit_code=2) from error

    def _read(self, unread: Unread | None) -> None:
        """Reports a step if it is due or was skipped, and ends the run if too many in a row were."""
        if unread is None:
            return
        skipped, budget = int(unread.metrics.skipped), self.config.training.nan_skip_budget
        interval, total = self.config.training.log_interval, self.config.scheduler.total_steps
        if skipped or unread.step in (1, total) or unread.step % interval == 0:
            self._progress.tell_step(unread.step, unread.samples, metrics=unread.metrics)
        if skipped > budget:
            good = find_latest(self._folder / CHECKPOINTS)
            raise TrainingStopped(
                f"training.nan_skip_budget: loss or gradient were not finite {skipped} times in a row up to step"
                f" {unread.step}, {budget} are allowed; the last good checkpoint is {good or 'none yet'}",
                exit_code=1,
            )


def _peak(training: TrainingConfig, device: torch.device) -> float | None:
    """What model FLOPs are measured against: the peak of a GPU in bf16, if that is what it computes in."""
    is_measured = device.type == "cuda" and training.precision == "bfloat16"
    return peak_flops(torch.cuda.get_device_name(device)) if is_measured else None


def _to(values: T, device: torch.device) -> T:
    return tree.map(lambda leaf: leaf.to(device), values)

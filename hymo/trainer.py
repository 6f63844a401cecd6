"""`Trainer`: a thin shell that holds a training state, a compiled step and data, and calls the pure functions."""

import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import asdict
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import torch
from torch.distributed.checkpoint.api import CheckpointException

from hymo import tree
from hymo.accounting import flops_per_token, peak_flops
from hymo.backend import Backend, choose_backend
from hymo.batch import Batch
from hymo.checkpoint import Provenance, check_continues, find_latest, folder_name, load_checkpoint
from hymo.config import HyMoConfig, RunConfig, TrainingConfig, derive_config
from hymo.data import BatchLoader, SourcedBatch
from hymo.distributed import ALONE, Ranks, world_size
from hymo.evaluate import Evaluation, compute_validation_loss
from hymo.handle import HyMo, build_hymo
from hymo.jit import jit, require_compiler
from hymo.model import model_spec
from hymo.optim import build_optimizer
from hymo.profiler import Profiler
from hymo.progress import MetricsLog, Progress
from hymo.run_data import RunData, open_run_data
from hymo.run_folder import CHECKPOINTS, METRICS, choose_folder, fresh, held, resolve
from hymo.saver import Saver
from hymo.sharding import own_shards, placements, shard_params, sharded_backend, whole_params, whole_views
from hymo.step import Metrics, TrainState, init_train_state, stacks_of, train_step
from hymo.tracker import Tracker, open_trackers, require_trackers

SUSPECTED_LEAK = 0.5
"""Bits per byte on held-out text that no model of natural text reaches: below, training has seen it."""


class TrainingStopped(RuntimeError):
    """Training ended before its last step; the message says why and what is left, `exit_code` whose fault it is."""

    def __init__(self, message: str, *, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class Unread(NamedTuple):
    """A step whose numbers are on their way to the host; they are there once `wait` returns."""

    step: int
    samples: int
    metrics: Metrics
    wait: Callable[[], None]


def check_available(config: HyMoConfig, device: torch.device) -> None:
    """Raises ValueError naming the first thing that a run of `config` would need and that is not there."""
    require_trackers(config.run.trackers)
    config.training.rows_per_step(world_size())
    choose_backend(config.training, device)
    require_compiler(config.training.compile, device)


class Trainer:
    """Trains a model in a run's folder, to which it writes metrics and checkpoints.

    Of several ranks each has a trainer and calls the same methods in the same order; the lead alone prints and logs.

    Args:
        config: of the run.
        model: to begin with, left as it is; None for a new one from `training.seed`.
        data: opened; None for what `config.data` names.
        folder: of the run; None for that of `config.run`, which must hold no run yet, held until `close`. Several ranks
            are given `data` and `folder`.
        device: where to train.
        ranks: among which the state and the rows of a step are split.
        stop: asked between steps and between batches of an evaluation; what it returns, if not None, is why training
            is to save and stop.

    Attributes:
        step: optimiser steps done, as `state` has it on the device.
        samples: rows of data seen, likewise.
        run: name of the run that no other has; a continued run keeps it.

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
        ranks: Ranks = ALONE,
        stop: Callable[[], str | None] = lambda: None,
    ) -> None:
        self.device = torch.device(device)
        self.step = self.samples = 0
        self.run = uuid.uuid4().hex[:8]
        self._ranks, self._stop = ranks, stop
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
        config, training, ranks = self.config, self.config.training, self._ranks
        spec = self._spec = model_spec(config.model)
        self._backend = choose_backend(training, self.device)
        sharded = sharded_backend(self._backend, getattr(torch, training.precision), ranks)
        optimizer = build_optimizer(config.optimizer, config.scheduler, spec, ranks=ranks)
        # The group of several ranks ends with their run; alone, the next run of the process may take the same step.
        compiled = _compiled_step if ranks.world > 1 else _last_compiled_step
        self._compiled = compiled(derive_config(config, training={"seed": 0}, run=RunConfig()), sharded, ranks)
        self._sharded_backend = sharded
        # A step writes into the state's storage, which must not be the caller's.
        params = build_hymo(config).params if model is None else tree.map(torch.clone, model.params)
        if ranks.world > 1:
            params = shard_params(params, spec, ranks)
        init = partial(init_train_state, spec=spec, optimizer=optimizer, backend=sharded)
        self._stacks = stacks_of(spec, sharded)
        self._joined = init(tree.map(lambda leaf: leaf.to(self.device), params))
        self._placed = placements(spec, init) if ranks.world > 1 else None
        self._loader = self._open_loader()
        self._saver = Saver(self._folder / CHECKPOINTS, training, ranks=ranks, told=self._tell_saved)
        self._saved_step: int | None = None
        self._progress = Progress(
            MetricsLog(self._folder / METRICS),
            config.scheduler.total_steps,
            rows=training.rows_per_step(ranks.world),
            row_tokens=training.max_seq_len,
            # Of one device, as is the peak.
            flops=flops_per_token(config.model, training.max_seq_len) * training.rows_per_rank * training.max_seq_len,
            peak=_peak(training, self.device),
        )
        self._profiler = Profiler(config.run.profile, self._folder, rank=ranks.rank)
        self._tracker: Tracker | None = None

    @property
    def state(self) -> TrainState:
        """All that training carries from step to step, in the storage into which the next step writes.

        Of several ranks, this one's part.
        """
        # Detached: whoever looks for the base of a view would find the whole stack.
        return tree.map(torch.Tensor.detach, self._stacks.split(self._joined))

    @property
    def model(self) -> HyMo:
        """The model as trained so far; it shares the state's storage, into which the next step writes.

        Of several ranks, which must all ask for it, a whole copy.
        """
        return HyMo(self.config.model, whole_params(self.state.params, self._spec, self._ranks), self._backend)

    @property
    def provenance(self) -> Provenance:
        """What the state is made with, as checkpoints record it."""
        return Provenance(self.config, self._data.tokenizer.fingerprint, self._loader.fingerprint, self.run)

    def train_step(self, batch: Batch) -> Metrics:
        """One optimiser step on leaves of shape (micro-batches, rows, tokens); its metrics stay on the device."""
        self._joined, metrics = self._compiled(self._joined, _sent(batch, self.device))
        self.step += 1
        self.samples += batch.tokens.shape[0] * batch.tokens.shape[1] * self._ranks.world
        return metrics

    def train(self, max_steps: int | None = None) -> Evaluation | None:
        """Trains to the end of the schedule, or `max_steps` further; evaluates and saves on the way and at the end.

        Numbers of a step are read while the next one runs, so that the device never waits for the host. Returns the
        evaluation at the end, or None if there was no step left.

        Raises:
            TrainingStopped: if too many steps in a row are not finite, a shard turns out to be damaged, an evaluation
                is better than is possible, or, once the state is saved, `stop` asks for it.
        """
        training, total = self.config.training, self.config.scheduler.total_steps
        last = total if max_steps is None else min(total, self.step + max_steps)
        unread: Unread | None = None
        evaluation: Evaluation | None = None
        is_due = False
        if self._ranks.is_lead:
            self._progress.go_on(self.step, tracker=self._open_tracker())
        while self.step < last:
            with self._profiler.step(self.step + 1), self._progress.timed_step():
                batch = self._next_batch()
                if batch is None:
                    self._read(unread)
                    self._save_and_stop()
                    break
                metrics, wait = _fetched(self.train_step(batch))
                self._read(unread)
                unread = Unread(self.step, self.samples, metrics, wait)
            is_last = self.step == last
            evaluates = is_last or self.step % training.eval_interval == 0
            if training.save_interval is not None:
                is_due = is_due or is_last or self.step % training.save_interval == 0
            saves = False
            if evaluates or is_due:
                # A checkpoint from among skipped steps would push out one from before what led to them.
                skipped = self._read(unread)
                saves = is_due and (is_last or not skipped)
                unread = None
            evaluation = self.evaluate() if evaluates else None
            leaks = evaluation is not None and evaluation.bits_per_byte < SUSPECTED_LEAK
            if saves or leaks:
                self.save()
                is_due = False
            if leaks:
                self._finish_saving()
                raise TrainingStopped(
                    f"suspected leak: below {SUSPECTED_LEAK} bits/byte after step {self.step}; is the validation text"
                    " among the training text?",
                    exit_code=1,
                )
        self._finish_saving()
        return evaluation

    def evaluate(self) -> Evaluation:
        """Scores the validation data, prints and records the result.

        Raises:
            TrainingStopped: if `stop` asks for it, once the state is saved.
        """
        batches = self._data.validation_batches(self.config, rank=self._ranks.rank, world=self._ranks.world)
        try:
            evaluation = compute_validation_loss(
                self.state.params,
                self._unless_asked(batches),
                cfg=self.config.model,
                token_bytes=self._data.tokenizer.token_bytes(),
                sources=[source.name for source in self._data.validation],
                backend=self._sharded_backend,
                compile=self.config.training.compile,
                ranks=self._ranks,
            )
        except _Asked:
            self._save_and_stop()
        if self._ranks.is_lead:
            self._progress.tell_evaluation(self.step, evaluation)
        return evaluation

    def save(self) -> Path:
        """Publishes the state in the run's folder and returns its place, where `async_save` will have put it soon.

        Raises:
            TrainingStopped: if the state is not finite.
            OSError: if it cannot be written.
        """
        placed, state = self._placed, self.state
        whole = state if placed is None else whole_views(state, placed, self._ranks)
        self._saving(lambda: self._saver.save(whole, self.provenance))
        self._saved_step = self.step
        return self._folder / CHECKPOINTS / folder_name(self.step)

    def load(self, path: str | Path) -> int:
        """Goes on from a checkpoint: state and data are as they were there. Returns its step.

        Raises:
            ValueError: if it is not complete, was made with another model, optimiser, tokenizer or data, or is further
                than `scheduler.total_steps`.
        """
        ranks, total = self._ranks, self.config.scheduler.total_steps
        meta = ranks.together(lambda: check_continues(path, self.provenance))
        if meta.step > total:
            raise ValueError(f"scheduler.total_steps: expected at least the {meta.step} steps done, got {total}")
        if self._placed is None:
            loaded = load_checkpoint(path, self.state)
        else:
            whole = load_checkpoint(path, whole_views(self.state, self._placed, ranks), ranks=ranks)
            loaded = own_shards(whole, like=self.state)
        self._joined = self._stacks.join(loaded)
        self.step, self.samples, self.run = meta.step, meta.samples, meta.provenance.run
        self._saved_step = None
        self._loader.close()
        self._loader = self._open_loader()
        rows = self.config.training.rows_per_step(ranks.world)
        if rows != meta.rows and ranks.is_lead:
            print(
                f"{rows} rows a step from here on, {meta.rows} before: data goes on with the next sample,"
                " the schedule counts steps"
            )
        return meta.step

    def close(self) -> None:
        """Stops reading ahead, lets a checkpoint be finished, closes shards and trackers, and lets go of the folder."""
        self._loader.close()
        self._saver.close()
        self._profiler.close()
        if self._tracker is not None:
            self._tracker.close()
        self._closing.close()

    def _open_tracker(self) -> Tracker:
        """The trackers, opened when the run begins: they are told after which step."""
        if self._tracker is None:
            config = self.config
            self._tracker = open_trackers(
                config.run.trackers, self._folder, run=config.run.name, config=asdict(config), step=self.step
            )
        return self._tracker

    def _open_loader(self) -> BatchLoader:
        return self._data.loader(self.config, self.samples, rank=self._ranks.rank, world=self._ranks.world)

    def _next_batch(self) -> Batch | None:
        """The next step's rows on this rank; None if training is to stop."""
        found = self._agreed(lambda: next(self._loader))
        return None if found is _ASKED else found.batch

    def _unless_asked(self, batches: Iterator[SourcedBatch]) -> Iterator[SourcedBatch]:
        """The batches of this rank, of which all have as many, until one is asked to stop."""
        while (found := self._agreed(lambda: next(batches, None))) is not None:
            if found is _ASKED:
                raise _Asked
            yield found

    def _agreed(self, read: Callable[[], Any]) -> Any:
        """What `read` returns, or `_ASKED` if a rank is asked to stop. All ranks find the same.

        Raises:
            TrainingStopped: if the data of a rank is damaged.
        """
        found: Any = None
        failure: ValueError | None = None
        try:
            found = read()
        except ValueError as error:
            failure = error
        code = self._ranks.worst(2 if failure else 1 if self._stop() else 0)
        if code == 2:
            self._finish_saving()
            try:
                self._ranks.together(lambda: _raise_if(failure))
            except ValueError as error:
                raise TrainingStopped(f"{error}; stopped after step {self.step}", exit_code=2) from error
        return _ASKED if code else found

    def _save_and_stop(self) -> NoReturn:
        if self._saved_step != self.step:
            self.save()
        self._finish_saving()
        reasons = [reason for reason in self._ranks.everywhere(self._stop()) if reason]
        raise TrainingStopped(
            f"stopped by {reasons[0]} after step {self.step}; --resume goes on from {folder_name(self.step)}",
            exit_code=0,
        )

    def _finish_saving(self) -> None:
        self._saving(self._saver.wait)

    def _saving(self, job: Callable[[], None]) -> None:
        try:
            job()
        except ValueError as error:
            raise TrainingStopped(str(error), exit_code=1) from error
        except CheckpointException as error:
            cause, _ = next(iter(error.failures.values()))
            raise cause from error

    def _tell_saved(self, path: Path) -> None:
        if self._ranks.is_lead:
            print(f"saved {path.name}", flush=True)

    def _read(self, unread: Unread | None) -> int:
        """Reports a step if it is due or was skipped, and ends the run if too many in a row were; returns how many."""
        if unread is None:
            return 0
        unread.wait()
        skipped, budget = int(unread.metrics.skipped), self.config.training.nan_skip_budget
        interval, total = self.config.training.log_interval, self.config.scheduler.total_steps
        if self._ranks.is_lead and (skipped or unread.step in (1, total) or unread.step % interval == 0):
            self._progress.tell_step(unread.step, unread.samples, metrics=unread.metrics)
        if skipped > budget:
            self._finish_saving()
            good = find_latest(self._folder / CHECKPOINTS)
            raise TrainingStopped(
                f"training.nan_skip_budget: loss or gradient were not finite {skipped} times in a row up to step"
                f" {unread.step}, {budget} are allowed; the last good checkpoint is {good or 'none yet'}",
                exit_code=1,
            )
        return skipped


def _compiled_step(config: HyMoConfig, backend: Backend, ranks: Ranks) -> Callable[..., tuple[TrainState, Metrics]]:
    spec = model_spec(config.model)
    optimizer = build_optimizer(config.optimizer, config.scheduler, spec, ranks=ranks)
    pure = partial(train_step, cfg=config, spec=spec, optimizer=optimizer, backend=backend, ranks=ranks)
    # Of several ranks nobody has tried what NCCL does in a graph.
    replay = config.training.cuda_graph and config.training.compile == "inductor" and ranks.world == 1
    return jit(pure, compile=config.training.compile, donate=True, replay=replay)


_last_compiled_step = lru_cache(maxsize=1)(_compiled_step)
"""Runs that differ in seed and folder alone are, one after the other in a process, compiled once."""

_ASKED = object()
"""In place of data: training is to stop."""


class _Asked(Exception):
    """An evaluation was left because training is to stop."""


def _raise_if(failure: ValueError | None) -> None:
    if failure:
        raise failure


def _peak(training: TrainingConfig, device: torch.device) -> float | None:
    """What model FLOPs are measured against: the peak of a GPU in bf16, if that is what it computes in."""
    is_measured = device.type == "cuda" and training.precision == "bfloat16"
    return peak_flops(torch.cuda.get_device_name(device)) if is_measured else None


def _sent(batch: Batch, device: torch.device) -> Batch:
    """The batch on the device; the host does not wait until it is there."""
    if device.type != "cuda":
        return batch
    return tree.map(lambda leaf: leaf if leaf.is_cuda else leaf.pin_memory().to(device, non_blocking=True), batch)


def _fetched(metrics: Metrics) -> tuple[Metrics, Callable[[], None]]:
    """Metrics on the host, and what waits for them: asking for a number would wait for all that is launched by then."""
    if not metrics.loss.is_cuda:
        return metrics, lambda: None
    copies = tree.map(
        lambda leaf: torch.empty_like(leaf, device="cpu", pin_memory=True).copy_(leaf, non_blocking=True), metrics
    )
    done = torch.cuda.Event()  # type: ignore[no-untyped-call]
    done.record()
    return copies, done.synchronize

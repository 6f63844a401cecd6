"""Checkpoints at once, or beside training: then from a copy of the state, by a thread, never two at a time."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path

import torch

from hymo import tree
from hymo.checkpoint import Provenance, save_checkpoint
from hymo.config import TrainingConfig
from hymo.distributed import Ranks
from hymo.step import TrainState


class Saver:
    """Publishes checkpoints in a folder, as `training.keep_last`, `keep_every` and `async_save` say.

    Args:
        told: hears of each checkpoint when it is published.
    """

    def __init__(self, folder: Path, training: TrainingConfig, *, ranks: Ranks, told: Callable[[Path], None]) -> None:
        self._publish = partial(
            save_checkpoint, folder, keep_last=training.keep_last, keep_every=training.keep_every, ranks=ranks
        )
        self._told = told
        self._thread = ThreadPoolExecutor(1, "hymo-saver") if training.async_save else None
        self._pending: Future[None] | None = None

    def save(self, state: TrainState, meta: Provenance) -> None:
        """Saves, or begins to, once what was begun before is done. Raises like `save_checkpoint`, for both."""
        self.wait()
        if self._thread is None:
            self._save(state, meta)
        else:
            # The next step writes into the state's storage.
            self._pending = self._thread.submit(self._save, tree.map(torch.clone, state), meta)

    def wait(self) -> None:
        """Returns when nothing is being written. Raises like `save_checkpoint`, for what was begun before."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def close(self) -> None:
        """Returns when nothing is being written, whether or not that succeeds."""
        if self._thread is not None:
            self._thread.shutdown()

    def _save(self, state: TrainState, meta: Provenance) -> None:
        self._told(self._publish(state, meta=meta))

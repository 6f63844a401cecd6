"""What each rank does in the tests of whole runs: importable, since every rank is a process of its own."""

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pretrain
import torch
from torch import Tensor

from hymo import tree
from hymo.batch import Batch
from hymo.checkpoint import load_checkpoint
from hymo.config import HyMoConfig
from hymo.data import BatchLoader
from hymo.distributed import joined
from hymo.run_data import RunData, open_run_data
from hymo.sharding import whole_views
from hymo.trainer import Trainer, TrainingStopped

PHASES = ("start", "step", "evaluation", "save")


class Ran(NamedTuple):
    """What a trainer did on one rank.

    Args:
        state: at the end, whole, by path.
        rows: tokens of every row of every step, over all ranks in their order.
        stopped: message and exit code if it did not come to its end.
    """

    state: dict[str, Tensor]
    rows: list[Tensor]
    stopped: tuple[str, int] | None


def train(
    config: HyMoConfig, folder: Path, *, load: Path | None = None, steps: int | None = None, fault: str | None = None
) -> Ran:
    """Trains on the ranks that there are, from a checkpoint or anew; `fault` befalls the last rank alone."""
    shards = 1 if config.training.sharding == "none" else config.training.shard_ranks
    with joined("cpu", shards=shards) as (ranks, _):
        ranks.led(lambda: folder.mkdir(exist_ok=True))
        trainer = Trainer(config, data=open_run_data(config, folder), folder=folder, ranks=ranks)
        if load:
            trainer.load(load)
        seen: list[Tensor] = []
        compiled = trainer._compiled
        is_struck = ranks.rank == ranks.world - 1

        def step(state: Any, batch: Batch) -> Any:
            seen.append(torch.cat(ranks.everywhere(batch.tokens.flatten(0, 1))))
            if not (is_struck and fault == "not finite" and trainer.step >= 2):
                return compiled(state, batch)
            table = state.params.table.clone()
            state.params.table.fill_(torch.inf)
            after, metrics = compiled(state, batch)
            after.params.table.copy_(table)
            return after, metrics

        def damaged(loader: BatchLoader) -> Any:
            if trainer.step == 2:
                raise ValueError("source prose: token id 60000 at position 7 is not in 0 to 511")
            return take(loader)

        def damaged_validation(*_: Any, **__: Any) -> Any:
            yield from taken
            raise ValueError("source code: token id 60000 at position 9 is not in 0 to 511")

        def full(*_: object) -> None:
            raise OSError(28, "No space left on device")

        trainer._compiled, take = step, BatchLoader.__next__
        if is_struck and fault == "damaged data":
            BatchLoader.__next__ = damaged  # type: ignore[method-assign]
        if is_struck and fault == "damaged validation":
            taken = list(trainer._data.validation_batches(config, rank=ranks.rank, world=ranks.world))[:1]
            RunData.validation_batches = damaged_validation  # type: ignore[method-assign]
        if is_struck and fault == "full disk":
            torch.distributed.checkpoint.filesystem._write_item = full
        stopped = None
        try:
            trainer.train(max_steps=steps)
        except TrainingStopped as error:
            stopped = str(error), error.exit_code
        except OSError as error:
            stopped = str(error), 1
        placed = trainer._placed
        views = trainer.state if placed is None else whole_views(trainer.state, placed, ranks)
        whole = {
            name: (leaf.full_tensor() if hasattr(leaf, "full_tensor") else leaf).clone()
            for name, leaf in tree.paths(views).items()
        }
        trainer.close()
        return Ran(whole, seen, stopped)


def stored(config: HyMoConfig, checkpoint: Path) -> dict[str, Tensor]:
    """The state in a checkpoint, as one process reads it."""
    folder = checkpoint.parent.parent
    trainer = Trainer(config, data=open_run_data(config, folder), folder=folder)
    state = load_checkpoint(checkpoint, trainer.state)
    trainer.close()
    return tree.paths(state)


def run(arguments: list[str], log: Path, *, signalled: str | None = None) -> int:
    """The recipe, its output in `log`; the last rank gets SIGTERM in the phase `signalled`. Returns the exit code."""
    for stream, number in ((sys.stdout, 1), (sys.stderr, 2)):
        stream.flush()
        os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    sys.stdout = os.fdopen(1, "w", buffering=1)
    sys.stderr = os.fdopen(2, "w", buffering=1)
    if signalled and os.environ.get("RANK", "0") == str(int(os.environ.get("WORLD_SIZE", "1")) - 1):
        _signal_in(signalled)
    return pretrain.main(arguments)


def _signal_in(phase: str) -> None:
    """Makes this process get SIGTERM once: at the start, in the third step, in the first evaluation or second save."""

    def struck(function: Callable[..., Any], call: int) -> Callable[..., Any]:
        calls = iter(range(1, 10**6))

        def wrapper(*args: Any, **options: Any) -> Any:
            if next(calls) == call:
                os.kill(os.getpid(), signal.SIGTERM)
            return function(*args, **options)

        return wrapper

    match phase:
        case "start":
            pretrain.open_run_data = struck(pretrain.open_run_data, 1)
        case "step":
            Trainer.train_step = struck(Trainer.train_step, 3)  # type: ignore[method-assign]
        case "evaluation":
            sys.modules["hymo.evaluate"].label_bytes = struck(sys.modules["hymo.evaluate"].label_bytes, 1)
        case "save":
            sys.modules["hymo.checkpoint"].save = struck(sys.modules["hymo.checkpoint"].save, 2)

"""Trackers: where the lines of metrics.jsonl go as well, behind one small protocol.

A tracker is a convenience. One that fails is told of once and then left out; training goes on, and metrics.jsonl has
everything.
"""

import importlib
import importlib.util
import json
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol, runtime_checkable
from uuid import uuid4

from hymo.run_folder import TRACKERS, write_whole

_PACKAGES = {"wandb": "wandb", "tensorboard": "tensorboard"}


@runtime_checkable
class Tracker(Protocol):
    """Takes the records of a run, as they stand in metrics.jsonl."""

    def log(self, record: Mapping[str, Any]) -> None:
        """Takes one record, which has a `kind` and a `step`."""

    def close(self) -> None:
        """Lets what was taken reach its place."""


def require_trackers(names: Sequence[str]) -> None:
    """Raises ValueError naming the first tracker whose package is not installed."""
    for name in names:
        if importlib.util.find_spec(_PACKAGES[name]) is None:
            raise ValueError(f'run.trackers: {name} is not installed; `pip install "hymo[{name}]"` would work')


def open_trackers(names: Sequence[str], folder: Path, *, run: str, config: Mapping[str, Any], step: int = 0) -> Tracker:
    """The trackers of a run as one, which never raises.

    Args:
        names: of `run.trackers`; with none, what comes back does nothing.
        folder: of the run; what they keep goes to `trackers` there, W&B's run id included, so that a run that is
            resumed is the same one there.
        run: its name.
        config: of the run, as plain dictionaries.
        step: done so far; what was tracked of later steps, before a run was set back, is dropped where it can be.
    """

    def make(name: str) -> Tracker:
        place = folder / TRACKERS / name
        place.mkdir(parents=True, exist_ok=True)
        return _MAKERS[name](place, run, config, step)

    return _Guarded(names, make)


def scalars(record: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    """The numbers of a record by path, `train/loss` or `eval/sources/code/loss`; those of lists by index."""
    prefix = prefix or str(record["kind"])
    for name, value in record.items():
        path = f"{prefix}/{name}"
        match value:
            case bool():
                yield path, float(value)
            case int() | float() if name not in ("step", "kind"):
                yield path, float(value)
            case Mapping():
                yield from scalars(value, path)
            case list() | tuple():
                yield from scalars({str(index): each for index, each in enumerate(value)}, path)


class _Guarded:
    """Several trackers; each is dropped, with one warning, when it fails."""

    def __init__(self, names: Sequence[str], make: Callable[[str], Tracker]) -> None:
        self._open: dict[str, Tracker] = {}
        for name in names:
            with self._guard(name):
                self._open[name] = make(name)

    def log(self, record: Mapping[str, Any]) -> None:
        for name, tracker in list(self._open.items()):
            with self._guard(name):
                tracker.log(record)

    def close(self) -> None:
        for name, tracker in list(self._open.items()):
            with self._guard(name):
                tracker.close()
        self._open.clear()

    @contextmanager
    def _guard(self, name: str) -> Iterator[None]:
        try:
            yield
        # Whatever a network or a package does must not end a run of weeks.
        except Exception as error:
            self._open.pop(name, None)
            reason = next(iter(str(error).splitlines()), "") or type(error).__name__
            warnings.warn(f"tracker {name} failed and is left out: {reason}", RuntimeWarning, stacklevel=4)


class _TensorBoard:
    """Scalars as TensorBoard's event files."""

    def __init__(self, place: Path, run: str, config: Mapping[str, Any], step: int) -> None:
        module = importlib.import_module("torch.utils.tensorboard")
        self._writer = module.SummaryWriter(str(place), purge_step=step + 1 if step else None)
        if not step:
            self._writer.add_text("config", f"```\n{json.dumps(config, indent=1)}\n```", 0)

    def log(self, record: Mapping[str, Any]) -> None:
        for name, value in scalars(record):
            self._writer.add_scalar(name, value, record["step"])

    def close(self) -> None:
        self._writer.close()


class _WandB:
    """Scalars in a run of Weights & Biases; project and entity are those of its own environment variables."""

    def __init__(self, place: Path, run: str, config: Mapping[str, Any], step: int) -> None:
        path = place / "run_id"
        if not path.exists():
            write_whole(path, uuid4().hex)
        self._run = importlib.import_module("wandb").init(
            id=path.read_text(encoding="utf-8").strip(), name=run, config=dict(config), dir=str(place), resume="allow"
        )
        # Its own counter only ever grows; a run that was set back counts again.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def log(self, record: Mapping[str, Any]) -> None:
        self._run.log({"step": record["step"], **dict(scalars(record))})

    def close(self) -> None:
        self._run.finish()


_MAKERS: dict[str, Callable[[Path, str, Mapping[str, Any], int], Tracker]] = {
    "tensorboard": _TensorBoard,
    "wandb": _WandB,
}

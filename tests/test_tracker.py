"""Trackers get what metrics.jsonl gets, and cannot harm a run."""

import sys
import warnings
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from hymo.tracker import open_trackers, require_trackers, scalars

TRAIN = {
    "kind": "train",
    "step": 3,
    "loss": 2.5,
    "mtp": [3.0, 4.0],
    "finite": True,
    "mfu": None,
    "load": [[0.25, 0.75]],
    "skipped": 0,
}
EVAL = {"kind": "eval", "step": 4, "bits_per_byte": 1.5, "sources": {"code": {"loss": 2.0, "tokens": 7}}}


class WandB:
    """As much of the package as is used, and what it was given."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.options: list[dict[str, Any]] = []
        self.logged: list[Mapping[str, Any]] = []
        self.metrics: list[Any] = []
        self.finished = 0
        self.error: Exception | None = None
        monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=self.init))

    def init(self, **options: Any) -> "WandB":
        self.options.append(options)
        return self

    def define_metric(self, name: str, **options: Any) -> None:
        self.metrics.append((name, options))

    def log(self, values: Mapping[str, Any]) -> None:
        if self.error:
            raise self.error
        self.logged.append(values)

    def finish(self) -> None:
        self.finished += 1


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch) -> WandB:
    return WandB(monkeypatch)


def test_the_numbers_of_a_record_have_paths() -> None:
    assert dict(scalars(TRAIN)) == {
        "train/loss": 2.5,
        "train/mtp/0": 3.0,
        "train/mtp/1": 4.0,
        "train/finite": 1.0,
        "train/load/0/0": 0.25,
        "train/load/0/1": 0.75,
        "train/skipped": 0.0,
    }
    assert dict(scalars(EVAL)) == {
        "eval/bits_per_byte": 1.5,
        "eval/sources/code/loss": 2.0,
        "eval/sources/code/tokens": 7.0,
    }


def test_a_resumed_run_is_the_same_one_to_wandb(wandb: WandB, tmp_path: Path) -> None:
    for step in (0, 4):
        tracker = open_trackers(["wandb"], tmp_path, run="trial", config={"model": {"dim": 8}}, step=step)
        tracker.log(TRAIN)
        tracker.close()
    first, second = wandb.options
    assert first == second
    assert (first["name"], first["config"], first["resume"]) == ("trial", {"model": {"dim": 8}}, "allow")
    assert first["id"] == (tmp_path / "trackers" / "wandb" / "run_id").read_text()
    assert wandb.logged[0] == {"step": 3, **dict(scalars(TRAIN))}
    assert ("*", {"step_metric": "step"}) in wandb.metrics
    assert wandb.finished == 2
    open_trackers(["wandb"], tmp_path / "other", run="trial", config={}).close()
    assert wandb.options[2]["id"] != first["id"]


def test_a_tracker_that_fails_warns_once_and_is_left_out(wandb: WandB, tmp_path: Path) -> None:
    tracker = open_trackers(["wandb"], tmp_path, run="trial", config={})
    tracker.log(TRAIN)
    wandb.error = ConnectionError("network is down\nfor good")
    with pytest.warns(RuntimeWarning, match=r"^tracker wandb failed and is left out: network is down$") as told:
        tracker.log(TRAIN)
    assert len(told) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tracker.log(TRAIN)
        tracker.close()
    assert len(wandb.logged) == 1
    assert wandb.finished == 0


def test_a_tracker_that_cannot_begin_does_not_stop_the_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def init(**options: Any) -> None:
        raise PermissionError("not logged in")

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init))
    with pytest.warns(RuntimeWarning, match="tracker wandb failed and is left out: not logged in"):
        tracker = open_trackers(["wandb"], tmp_path, run="trial", config={})
    tracker.log(TRAIN)
    tracker.close()


def test_without_trackers_nothing_is_written(tmp_path: Path) -> None:
    tracker = open_trackers([], tmp_path, run="trial", config={})
    tracker.log(TRAIN)
    tracker.close()
    assert not list(tmp_path.iterdir())


def test_a_package_that_is_missing_is_named_before_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r'run.trackers: wandb is not installed; `pip install "hymo\[wandb\]"`'):
        require_trackers(["wandb"])
    require_trackers([])


class Writer:
    """TensorBoard's, which needs its package."""

    made: ClassVar[list["Writer"]] = []

    def __init__(self, place: str, *, purge_step: int | None) -> None:
        self.place, self.purge_step = place, purge_step
        self.values: dict[tuple[str, int], float] = {}
        self.texts: list[str] = []
        Writer.made.append(self)

    def add_scalar(self, name: str, value: float, step: int) -> None:
        self.values[name, step] = value

    def add_text(self, name: str, text: str, step: int) -> None:
        self.texts.append(text)

    def close(self) -> None:
        self.place += " closed"


def test_tensorboard_gets_scalars_and_forgets_steps_that_were_undone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(Writer, "made", [])
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", SimpleNamespace(SummaryWriter=Writer))
    for step in (0, 2):
        tracker = open_trackers(["tensorboard"], tmp_path, run="trial", config={"a": 1}, step=step)
        tracker.log(TRAIN)
        tracker.log(EVAL)
        tracker.close()
    first, second = Writer.made
    assert first.place == second.place == f"{tmp_path / 'trackers' / 'tensorboard'} closed"
    assert (first.purge_step, second.purge_step) == (None, 3)
    assert first.values["train/loss", 3] == 2.5
    assert first.values["eval/sources/code/loss", 4] == 2.0
    assert len(first.texts) == 1
    assert not second.texts


def test_tensorboard_itself_can_read_it(tmp_path: Path) -> None:
    events: Any = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    tracker = open_trackers(["tensorboard"], tmp_path, run="trial", config={"a": 1})
    tracker.log(TRAIN)
    tracker.close()
    read = events.EventAccumulator(str(tmp_path / "trackers" / "tensorboard"))
    read.Reload()
    assert [(each.step, each.value) for each in read.Scalars("train/loss")] == [(3, 2.5)]

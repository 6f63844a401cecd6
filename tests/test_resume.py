"""Nothing is lost: runs that are stopped, killed or moved to other ranks end as if nothing had happened."""

import json
import random
import re
import shutil
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pretrain
import pytest
import run_programs as programs
import torch
from several_ranks import CONTEXT, on_ranks
from test_pretrain import write_config
from tiny_run import prepare, run_config

from hymo import tree
from hymo.checkpoint import find_latest, load_params, read_meta, save_checkpoint
from hymo.config import HyMoConfig
from hymo.model import model_spec
from hymo.run_data import open_run_data
from hymo.run_folder import holds_run
from hymo.trainer import Trainer

TIMES = ("tokens_per_second", "seconds", "eta_seconds")


@pytest.fixture(autouse=True)
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare(tmp_path_factory.mktemp("corpus") / "data")


def config(data: Path, *, rows: int, parts: int = 1, **training: Any) -> HyMoConfig:
    """Eight steps of `rows` x `parts` rows a rank, split over the ranks, saved after the fourth."""
    common = {"sharding": "fsdp2", "save_interval": 4, "eval_interval": 100}
    return run_config(
        data,
        training={**common, "micro_batch_size": rows, "gradient_accumulation_steps": parts, **training},
        scheduler={"total_steps": 8},
    )


def records(folder: Path) -> list[dict[str, Any]]:
    """The log without its times."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if name not in TIMES} for line in lines]


def losses(folder: Path) -> dict[int, float]:
    return {line["step"]: line["loss"] for line in records(folder) if line["kind"] == "train"}


def assert_same(found: dict[str, torch.Tensor], true: dict[str, torch.Tensor]) -> None:
    assert found.keys() == true.keys()
    for name, x in found.items():
        assert torch.equal(x, true[name]), name


FOUR_RANKS = pytest.param(4, 1, 1, marks=pytest.mark.heavy)


@pytest.fixture(scope="module")
def two_ranks(data: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, programs.Ran]:
    """Eight steps of four rows on two ranks."""
    folder = tmp_path_factory.mktemp("two")
    return folder, on_ranks(2, partial(programs.train, config(data, rows=2), folder))[0]


@pytest.mark.parametrize(("world", "rows", "parts"), [(2, 2, 1), (1, 4, 1), (1, 2, 2), FOUR_RANKS])
def test_any_ranks_go_on_with_the_same_samples_to_the_same_losses(
    data: Path, tmp_path: Path, two_ranks: tuple[Path, programs.Ran], world: int, rows: int, parts: int
) -> None:
    folder, true = two_ranks
    halfway = folder / "checkpoints" / "step_00000004"
    other = config(data, rows=rows, parts=parts)
    found = on_ranks(world, partial(programs.train, other, tmp_path, load=halfway))[0]
    assert len(true.rows) == 8
    for ours, expected in zip(found.rows, true.rows[4:], strict=True):
        assert torch.equal(ours, expected)
    for step, value in losses(tmp_path).items():
        assert value == pytest.approx(losses(folder)[step], abs=1e-5), step
    assert list(losses(tmp_path)) == [5, 6, 7, 8]
    assert (found.state["step"], found.state["samples"]) == (8, 32)
    if world == 2:
        assert_same(found.state, true.state)


def test_what_two_ranks_saved_one_and_three_load(
    data: Path, tmp_path: Path, two_ranks: tuple[Path, programs.Ran]
) -> None:
    folder, true = two_ranks
    last = folder / "checkpoints" / "step_00000008"
    assert {path.name for path in last.iterdir()} == {".metadata", "meta.json", "__0_0.distcp", "__1_0.distcp"}
    one = config(data, rows=4)
    assert_same(programs.stored(one, last), true.state)
    for found in on_ranks(3, partial(programs.train, config(data, rows=1), tmp_path, load=last)):
        assert_same(found.state, true.state)
    weights = tree.paths(load_params(last, model_spec(one.model)))
    assert_same(
        {f"params.{name}": leaf for name, leaf in weights.items()},
        {name: leaf for name, leaf in true.state.items() if name.startswith("params.")},
    )


def test_other_rows_a_step_go_on_with_the_next_sample_and_it_is_said(
    data: Path, tmp_path: Path, two_ranks: tuple[Path, programs.Ran], capsys: pytest.CaptureFixture[str]
) -> None:
    folder, _ = two_ranks
    halfway = folder / "checkpoints" / "step_00000004"
    found = programs.train(config(data, rows=8), tmp_path, load=halfway, steps=1)
    told = "8 rows a step from here on, 4 before: data goes on with the next sample, the schedule counts steps"
    assert told in capsys.readouterr().out
    assert (found.state["step"], found.state["samples"]) == (5, 24)
    assert torch.equal(found.rows[0], torch.cat(two_ranks[1].rows[4:6]))


def test_an_epoch_is_whole_wherever_it_is_interrupted(data: Path, tmp_path: Path) -> None:
    """At its first step, in the middle and at its last, on one rank and on three."""
    cfg = config(data, rows=1)
    opened = open_run_data(cfg, tmp_path)
    first = next(n for n in range(10**4) if opened.mixture.draw(n)[:2] == (0, 1))
    second = next(n for n in range(10**4) if opened.mixture.draw(n)[:2] == (0, 2))
    epoch = [draw for draw in map(opened.mixture.draw, range(first, second)) if draw[:2] == (0, 1)]
    assert sorted(draw.window for draw in epoch) == list(range(opened.mixture.windows[0]))

    def samples(seen: int, world: int) -> list[torch.Tensor]:
        loaders = [opened.loader(cfg, seen, rank=rank, world=world) for rank in range(world)]
        rows = [next(loader).batch.tokens[0, 0] for _ in range(6 // world) for loader in loaders]
        for loader in loaders:
            loader.close()
        return rows

    for seen in (first - 1, first, (first + second) // 2, second - 1, second):
        true = [opened.mixture.draw(n) for n in range(seen, seen + 6)]
        expected = [opened.train[draw.source].read(draw.window * 32, 32) for draw in true]
        for world in (1, 3):
            assert all(map(torch.equal, samples(seen, world), expected)), (seen, world)
    opened.close()


def test_a_checkpoint_beside_training_is_that_of_its_step(
    data: Path, tmp_path: Path, two_ranks: tuple[Path, programs.Ran]
) -> None:
    found = on_ranks(2, partial(programs.train, config(data, rows=2, async_save=True, save_interval=1), tmp_path))[0]
    assert_same(found.state, two_ranks[1].state)
    last = tmp_path / "checkpoints" / "step_00000008"
    assert_same(programs.stored(config(data, rows=4), last), two_ranks[1].state)
    folders = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert folders == ["latest", "step_00000007", "step_00000008"]


def test_closing_lets_a_checkpoint_beside_training_be_finished(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def slow(*args: Any, **options: Any) -> Path:
        time.sleep(0.3)
        return save_checkpoint(*args, **options)

    monkeypatch.setattr("hymo.saver.save_checkpoint", slow)
    cfg = config(data, rows=4, async_save=True)
    trainer = Trainer(cfg, data=open_run_data(cfg, tmp_path), folder=tmp_path)
    trainer.save()
    assert find_latest(tmp_path / "checkpoints") is None
    trainer.close()
    assert find_latest(tmp_path / "checkpoints") == tmp_path / "checkpoints" / "step_00000000"


@pytest.mark.parametrize(
    ("fault", "message", "code"),
    [
        ("not finite", r"nan_skip_budget: .* 3 times in a row up to step 5, 2 are allowed.*step_00000002", 1),
        ("damaged data", r"token id 60000 at position 7 is not in 0 to 511; stopped after step 2", 2),
        ("damaged validation", r"token id 60000 at position 9 is not in 0 to 511; stopped after step 8", 2),
        ("full disk", r"No space left on device", 1),
    ],
)
def test_what_befalls_one_rank_ends_all_and_keeps_the_last_good_checkpoint(
    data: Path, tmp_path: Path, fault: str, message: str, code: int
) -> None:
    # Beside training a checkpoint may still be on its way when the data fails.
    beside = fault == "damaged data"
    cfg = config(data, rows=2, save_interval=2, nan_skip_budget=2, async_save=beside)
    for found in on_ranks(2, partial(programs.train, cfg, tmp_path, fault=fault)):
        assert found.stopped is not None
        assert re.search(message, found.stopped[0])
        assert found.stopped[1] == code
    kept = {"not finite": 2, "damaged data": 2, "damaged validation": 6, "full disk": None}[fault]
    newest = find_latest(tmp_path / "checkpoints")
    assert (newest and read_meta(newest).step) == kept
    if fault == "not finite":
        before = programs.train(config(data, rows=2, parts=2), tmp_path / "alone", steps=2).state
        assert newest is not None
        good = programs.stored(config(data, rows=4), newest)
        assert_same(*({k: v for k, v in each.items() if k.count(".")} for each in (good, before)))


# The recipe, on ranks and as a process that is killed


ONE_RANK = "training.gradient_accumulation_steps=2"


@pytest.fixture(scope="module")
def trial(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A configuration of six steps of four rows on two ranks, or on one with `ONE_RANK`."""
    training = {"micro_batch_size": 2, "gradient_accumulation_steps": 1, "sharding": "fsdp2", "save_interval": 2}
    return write_config(
        tmp_path_factory.mktemp("trial") / "trial.yaml",
        data,
        training={**training, "eval_interval": 2},
        scheduler={"total_steps": 6},
        data={"val_tokens": 256},
    )


def arguments(trial: Path, folder: Path, *more: str) -> list[str]:
    return [str(trial), f"run.output_dir={folder}", *more]


@pytest.fixture(scope="module")
def whole(trial: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run on one rank that nothing has stopped."""
    place = tmp_path_factory.mktemp("whole")
    assert on_ranks(1, partial(programs.run, arguments(trial, place / "run", ONE_RANK), place / "log")) == [0]
    return place / "run"


@pytest.fixture(scope="module")
def shared(trial: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same of a run on two ranks, to be copied."""
    place = tmp_path_factory.mktemp("shared")
    assert on_ranks(2, partial(programs.run, arguments(trial, place / "run"), place / "log")) == [0, 0]
    return place / "run"


@pytest.mark.heavy
@pytest.mark.parametrize("world", [2, 3, 4])
def test_the_tiny_model_learns_the_same_on_any_ranks(tmp_path: Path, world: int) -> None:
    """From the same micro-batches: otherwise a router meets a tie that rounding decides after some steps."""
    tiny = [str(pretrain.TINY), f"data.folder={tmp_path / 'data'}", "training.log_interval=1", "data.val_tokens=1024"]
    given = [*tiny, "scheduler.total_steps=50", "training.compile=none", f"training.micro_batch_size={12 // world}"]
    for ranks, parts in ((1, world), (world, 1)):
        place = [f"run.output_dir={tmp_path / str(ranks)}", f"training.gradient_accumulation_steps={parts}"]
        assert on_ranks(ranks, partial(programs.run, [*given, *place], tmp_path / "log"), timeout=900) == [0] * ranks
    assert len(losses(tmp_path / "1")) == 50
    assert losses(tmp_path / str(world)) == losses(tmp_path / "1")


@pytest.mark.parametrize("phase", programs.PHASES)
def test_a_signal_in_any_phase_saves_and_exits_0_and_the_run_goes_on(
    trial: Path, tmp_path: Path, whole: Path, phase: str
) -> None:
    world = 2 if phase in ("step", "evaluation") else 1
    given = arguments(trial, tmp_path / "place", *([ONE_RANK] if world == 1 else []))
    place, log = tmp_path / "place", tmp_path / "log"
    assert on_ranks(world, partial(programs.run, given, log, signalled=phase)) == [0] * world
    step = {"start": 0, "step": 3, "evaluation": 2, "save": 4}[phase]
    assert f"pretrain: stopped by SIGTERM after step {step}; --resume goes on from step_{step:08d}\n" in log.read_text()
    assert read_meta(place / "checkpoints" / f"step_{step:08d}").samples == 4 * step
    assert on_ranks(world, partial(programs.run, [*given, "--resume"], log)) == [0] * world
    assert f"going on after step {step}\n" in log.read_text()
    assert_same(_state(place), _state(whole))
    if world == 1:
        assert records(place) == records(whole)


@pytest.mark.parametrize(
    ("file", "said"), [("__1_0.distcp", r"has \d+ bytes, \d+ expected"), (".metadata", "is damaged, its sha256 is .*")]
)
def test_a_damaged_file_is_refused_by_name_and_the_checkpoint_before_is_used(
    trial: Path, tmp_path: Path, whole: Path, shared: Path, file: str, said: str
) -> None:
    place, log = shutil.copytree(shared, tmp_path / "place"), tmp_path / "log"
    damaged = place / "checkpoints" / "step_00000006" / file
    content = damaged.read_bytes()
    damaged.write_bytes(content[:-1] if file.endswith("distcp") else b"\xff" * len(content))
    assert on_ranks(2, partial(programs.run, arguments(trial, place, "--resume"), log)) == [0, 0]
    told = log.read_text()
    assert re.search(rf"step_00000006: {re.escape(file)} {said}; .*: passed over\n", told)
    assert "going on after step 4\n" in told
    assert_same(_state(place), _state(whole))


def _state(folder: Path) -> dict[str, torch.Tensor]:
    checkpoint = find_latest(folder / "checkpoints")
    assert checkpoint is not None
    return programs.stored(read_meta(checkpoint).provenance.config, checkpoint)


@pytest.mark.parametrize("kills", [3, pytest.param(25, marks=pytest.mark.heavy)])
def test_a_run_that_is_killed_again_and_again_ends_as_if_it_had_not_been(
    trial: Path, tmp_path: Path, kills: int
) -> None:
    """It saves after every step; SIGKILL comes anywhere, and in between a few steps are made."""
    rng, steps = random.Random(kills), 5 * kills
    each = [ONE_RANK, f"scheduler.total_steps={steps}", "training.save_interval=1", "training.eval_interval=1000"]
    place, killed = tmp_path / "place", 0
    while killed < kills:
        log = tmp_path / f"log{killed}"
        resume = ["--resume"] if holds_run(place) else []
        process = CONTEXT.Process(target=programs.run, args=(arguments(trial, place, *each, *resume), log))
        process.start()
        wanted, begun = rng.choice([0, 1, 2, 3]), time.monotonic()
        while wanted and (not log.exists() or log.read_text().count("\nsaved ") < wanted):
            assert process.is_alive(), log.read_text()
            assert time.monotonic() - begun < 60
            time.sleep(0.01)
        # About two steps, or what a start takes.
        time.sleep(rng.uniform(0.0, 0.1 if wanted else 1.0))
        process.kill()
        process.join()
        killed += 1
        reported = re.findall(r"^saved step_(\d+)$", log.read_text() if log.exists() else "", re.MULTILINE)
        newest = find_latest(place / "checkpoints")
        if newest is not None:
            assert int(newest.name.removeprefix("step_")) >= int(reported[-1] if reported else 0)
            assert int(_state(place)["step"]) == read_meta(newest).step
        else:
            assert not reported
    log = tmp_path / "last"
    resume = ["--resume"] if holds_run(place) else []
    assert on_ranks(1, partial(programs.run, arguments(trial, place, *each, *resume), log)) == [0]
    assert on_ranks(1, partial(programs.run, arguments(trial, tmp_path / "whole", *each), log)) == [0]
    assert records(place) == records(tmp_path / "whole")
    assert_same(_state(place), _state(tmp_path / "whole"))

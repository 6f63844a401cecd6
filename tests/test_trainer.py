import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from tiny_run import open_trainer, prepare, run_config

from hymo import tree
from hymo.backend import (
    AUTO,
    COMPILED,
    COMPILED_ONCE,
    EAGER,
    EAGER_ON_GPU,
    STACKED,
    TRITON,
    Backend,
    choose_backend,
    inline,
    keep,
)
from hymo.batch import Batch
from hymo.checkpoint import find_latest
from hymo.config import TrainingConfig
from hymo.handle import build_hymo
from hymo.progress import MetricsLog, clock
from hymo.run_data import open_run_data
from hymo.run_folder import held
from hymo.trainer import Trainer, TrainingStopped, _last_compiled_step, check_available

CPU = torch.device("cpu")
TIMES = ("tokens_per_second", "seconds", "eta_seconds")


@pytest.fixture(autouse=True)
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare(tmp_path_factory.mktemp("corpus") / "data")


def records(folder: Path) -> list[dict[str, Any]]:
    """The log without its times."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if name not in TIMES} for line in lines]


def assert_bitwise_equal(first: Any, second: Any) -> None:
    for (name, a), b in zip(tree.paths(first).items(), tree.leaves(second), strict=True):
        assert torch.equal(a, b), name


def poison(trainer: Trainer, monkeypatch: pytest.MonkeyPatch, *, steps: set[int]) -> None:
    """Makes the gradient of these steps not finite, by an embedding that is infinite while they run."""
    compiled = trainer._compiled

    def step(state: Any, batch: Batch) -> Any:
        if trainer.step + 1 not in steps:
            return compiled(state, batch)
        table = state.params.table.clone()
        state.params.table.fill_(float("inf"))
        after, metrics = compiled(state, batch)
        after.params.table.copy_(table)
        return after, metrics

    monkeypatch.setattr(trainer, "_compiled", step)


class Finished(NamedTuple):
    """A run of six steps that nothing interrupted."""

    trainer: Trainer
    folder: Path


@pytest.fixture(scope="module")
def whole(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Finished:
    folder = tmp_path_factory.mktemp("whole")
    trainer = open_trainer(run_config(data), folder)
    trainer.train()
    return Finished(trainer, folder)


def test_two_runs_from_one_seed_are_bitwise_equal(data: Path, tmp_path: Path, whole: Finished) -> None:
    again = open_trainer(run_config(data), tmp_path)
    again.train()
    assert records(tmp_path) == records(whole.folder)
    assert_bitwise_equal(again.state, whole.trainer.state)


def test_another_seed_is_another_run(data: Path, tmp_path: Path) -> None:
    first = open_trainer(run_config(data), tmp_path / "a")
    second = open_trainer(run_config(data, training={"seed": 7}), tmp_path / "b")
    assert not torch.equal(first.state.params.table, second.state.params.table)
    assert not torch.equal(next(first._loader).batch.tokens, next(second._loader).batch.tokens)


def test_runs_that_differ_in_seed_and_folder_share_their_step(data: Path, tmp_path: Path) -> None:
    changes: list[dict[str, Any]] = [
        {},
        {"training": {"seed": 7, "precision": "bfloat16"}, "run": {"name": "other"}},
        {"training": {"precision": "bfloat16"}, "optimizer": {"adamw_lr": 1e-3}},
    ]
    first, second, third = (
        open_trainer(run_config(data, **{"training": {"precision": "bfloat16"}, **each}), tmp_path / str(i))
        for i, each in enumerate(changes)
    )
    assert first._compiled is second._compiled
    assert first._sharded_backend is second._sharded_backend
    assert third._compiled is not first._compiled


@pytest.mark.heavy
def test_a_run_after_another_is_bitwise_what_it_is_alone(data: Path, tmp_path: Path) -> None:
    def trained(seed: int, folder: str) -> Trainer:
        training = {"seed": seed, "compile": "aot_eager", "save_interval": None, "eval_interval": 100}
        trainer = open_trainer(run_config(data, training=training, scheduler={"total_steps": 3}), tmp_path / folder)
        trainer.train()
        trainer.close()
        return trainer

    first, second = trained(0, "first"), trained(7, "second")
    assert first._compiled is second._compiled
    _last_compiled_step.cache_clear()
    alone = trained(7, "alone")
    assert alone._compiled is not second._compiled
    assert records(tmp_path / "alone") == records(tmp_path / "second") != records(tmp_path / "first")
    assert_bitwise_equal(alone.state, second.state)


def test_a_run_without_checkpoints_saves_when_it_is_asked_to_stop(data: Path, tmp_path: Path) -> None:
    config = run_config(data, training={"save_interval": None})
    quiet = open_trainer(config, tmp_path / "quiet")
    assert quiet.train() is not None
    assert find_latest(tmp_path / "quiet" / "checkpoints") is None
    stopped = open_trainer(config, tmp_path / "stopped")
    stopped.train(max_steps=2)
    stopped._stop = lambda: "SIGTERM"
    with pytest.raises(TrainingStopped, match=r"--resume goes on from step_0*2$"):
        stopped.train()
    assert find_latest(tmp_path / "stopped" / "checkpoints") is not None


def test_three_and_three_steps_are_six(data: Path, tmp_path: Path, whole: Finished) -> None:
    first = open_trainer(run_config(data), tmp_path)
    first.train(max_steps=3)
    first.close()
    second = open_trainer(run_config(data), tmp_path)
    latest = find_latest(tmp_path / "checkpoints")
    assert latest is not None
    assert second.load(latest) == second.step == 3
    second.train()
    assert_bitwise_equal(second.state, whole.trainer.state)
    assert records(tmp_path) == records(whole.folder)


def folder_size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("*.distcp"))


def test_a_run_goes_on_whether_or_not_its_state_is_joined(
    data: Path, tmp_path: Path, whole: Finished, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A checkpoint of a GPU, which joins, is one of a CPU, which does not, and the other way round."""

    def opened(folder: str, *, joined: bool) -> Trainer:
        backend = EAGER._replace(stacked=STACKED if joined else 0)
        monkeypatch.setattr("hymo.trainer.choose_backend", lambda *_: backend)
        return open_trainer(run_config(data), tmp_path / folder)

    sizes: set[int] = set()
    for folder, joined in (("joined first", True), ("joined then", False)):
        first = opened(folder, joined=joined)
        first.train(max_steps=3)
        first.close()
        stored = tmp_path / folder / "checkpoints" / "step_00000003"
        sizes.add(folder_size(stored))
        second = opened(folder, joined=not joined)
        second.load(stored)
        assert_bitwise_equal(second.state, first.state)
        model = second.model
        second.train()
        for (name, a), b in zip(tree.paths(second.state).items(), tree.leaves(whole.trainer.state), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}")
        # Steps write into the model that was asked for before them.
        assert_bitwise_equal(model.params, second.state.params)
        second.close()
    assert len(sizes) == 1


@pytest.mark.heavy
def test_a_compiled_run_resumes_bitwise(data: Path, tmp_path: Path) -> None:
    config = run_config(data, training={"compile": "aot_eager", "eval_interval": 100}, scheduler={"total_steps": 4})
    first = open_trainer(config, tmp_path)
    first.train(max_steps=2)
    first.train()
    second = open_trainer(config, tmp_path)
    second.load(tmp_path / "checkpoints" / "step_00000002")
    second.train()
    assert_bitwise_equal(second.state, first.state)


def test_a_resumed_run_may_cut_its_step_in_other_micro_batches(data: Path, tmp_path: Path, whole: Finished) -> None:
    other = {"micro_batch_size": 1, "gradient_accumulation_steps": 4}
    second = open_trainer(run_config(data, training=other), tmp_path)
    second.load(whole.folder / "checkpoints" / "step_00000004")
    second.train()
    for ours, theirs in zip(records(tmp_path), records(whole.folder)[-3:], strict=True):
        assert ours["step"] == theirs["step"]
        assert ours["loss"] == pytest.approx(theirs["loss"], abs=1e-4)
    assert second.samples == whole.trainer.samples == 24


def test_the_log_forgets_what_came_after_the_checkpoint(data: Path, tmp_path: Path) -> None:
    config = run_config(data)
    open_trainer(config, tmp_path).train(max_steps=5)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "train", "st')
    trainer = open_trainer(config, tmp_path)
    trainer.load(tmp_path / "checkpoints" / "step_00000004")
    trainer.train()
    steps = [record["step"] for record in records(tmp_path) if record["kind"] == "train"]
    assert steps == [1, 2, 3, 4, 5, 6]


def test_the_log_has_every_due_step_and_evaluation(data: Path, tmp_path: Path) -> None:
    config = run_config(data, training={"log_interval": 4, "eval_interval": 5, "save_interval": 4})
    trainer = open_trainer(config, tmp_path)
    evaluation = trainer.train()
    written = records(tmp_path)
    assert [(record["kind"], record["step"]) for record in written] == [
        ("train", 1),
        ("train", 4),
        ("eval", 5),
        ("train", 6),
        ("eval", 6),
    ]
    assert written[2]["tokens"] == 128
    assert set(written[2]["sources"]) == {"prose", "code"}
    assert evaluation is not None
    assert evaluation.bits_per_byte == written[-1]["bits_per_byte"]
    first = written[0]
    assert (first["samples"], first["tokens"], first["finite"], first["skipped"]) == (4, 4 * 32, True, 0)
    assert first["loss"] == pytest.approx(torch.log(torch.tensor(512.0)).item(), abs=0.1)
    assert first["total"] == pytest.approx(first["loss"] + 0.3 * first["mtp"][0], rel=1e-5)
    assert "main" not in first
    assert len(first["load"]) == 1
    assert sum(first["load"][0]) == pytest.approx(1.0)
    saved = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert saved == ["latest", "step_00000004", "step_00000006"]


def test_progress_lines_say_what_matters(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    open_trainer(run_config(data), tmp_path).train(max_steps=3)
    lines = capsys.readouterr().out.splitlines()
    assert [lines.pop(2), lines.pop()] == ["saved step_00000002", "saved step_00000003"]
    assert len(lines) == 4
    for word in ("step 2/6", "loss 6.", "lr ", "grad ", "tok/s", "experts max/mean", "left"):
        assert word in lines[1]
    assert "mfu" not in lines[1]
    assert "tok/s" not in lines[0]
    assert lines[3].startswith("eval at step 3: ")
    assert "bits/byte (prose " in lines[3]


def test_training_lowers_the_loss(data: Path, tmp_path: Path) -> None:
    config = run_config(data, scheduler={"total_steps": 15}, training={"eval_interval": 15, "save_interval": 15})
    trainer = open_trainer(config, tmp_path)
    before = trainer.evaluate()
    after = trainer.train()
    assert after is not None
    assert after.bits_per_byte < 0.95 * before.bits_per_byte


def test_a_skipped_step_is_told_and_training_goes_on(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer = open_trainer(run_config(data, training={"log_interval": 100}), tmp_path)
    poison(trainer, monkeypatch, steps={3, 4})
    trainer.train()
    skipped = [(r["step"], r["skipped"], r["finite"]) for r in records(tmp_path) if r["kind"] == "train"]
    assert skipped == [(1, 0, True), (3, 1, False), (4, 2, False), (6, 0, True)]
    assert [r["grad_norm"] for r in records(tmp_path) if r["kind"] == "train" and not r["finite"]] == [None, None]
    assert capsys.readouterr().out.count("NOT FINITE, skipped") == 2
    assert int(trainer.state.step) == 6
    assert int(trainer.state.samples) == 24


def test_too_many_skipped_steps_end_the_run_and_keep_the_good_checkpoint(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = run_config(data, training={"nan_skip_budget": 1, "save_interval": 2}, scheduler={"total_steps": 20})
    trainer = open_trainer(config, tmp_path)
    poison(trainer, monkeypatch, steps=set(range(3, 20)))
    with pytest.raises(
        TrainingStopped, match=r"nan_skip_budget: .* 2 times in a row up to step 4, 1 are allowed"
    ) as stop:
        trainer.train()
    assert stop.value.exit_code == 1
    assert "step_00000002" in str(stop.value)
    assert find_latest(tmp_path / "checkpoints") == tmp_path / "checkpoints" / "step_00000002"


def test_no_checkpoint_is_made_among_skipped_steps_but_after_the_first_good_one(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = {"nan_skip_budget": 5, "save_interval": 2, "eval_interval": 100, "keep_last": 10}
    trainer = open_trainer(run_config(data, training=training, scheduler={"total_steps": 9}), tmp_path)
    poison(trainer, monkeypatch, steps={3, 4, 5, 6})
    trainer.train()
    kept = sorted(path.name for path in (tmp_path / "checkpoints").glob("step_*"))
    assert kept == [f"step_{step:08d}" for step in (2, 7, 8, 9)]


def test_a_shard_damaged_after_the_start_stops_the_run(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = open_trainer(run_config(data), tmp_path)

    def fail(self: object) -> None:
        raise ValueError("source prose: token id 60000 at position 7 is not in 0 to 511")

    monkeypatch.setattr(type(trainer._loader), "__next__", fail)
    with pytest.raises(TrainingStopped, match=r"token id 60000 at position 7 .*; stopped after step 0") as stop:
        trainer.train()
    assert stop.value.exit_code == 2


def test_the_model_that_was_given_stays_as_it_is(data: Path, tmp_path: Path) -> None:
    config = run_config(data)
    model = build_hymo(config, seed=3)
    before = tree.map(torch.clone, model.params)
    trainer = Trainer(config, model, data=open_run_data(config, tmp_path), folder=tmp_path)
    assert_bitwise_equal(trainer.model.params, before)
    trainer.train(max_steps=1)
    assert_bitwise_equal(model.params, before)
    assert not torch.equal(trainer.model.params.table, before.table)


def test_a_configuration_and_a_model_are_enough(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config = run_config(data)
    trainer = Trainer(config, build_hymo(config))
    folder = tmp_path / "runs" / "trial-1"
    assert trainer.config.run.output_dir == str(folder)
    trainer.train(max_steps=1)
    with pytest.raises(ValueError, match="in use by another process"), held(folder):
        pass
    trainer.close()
    with held(folder):
        assert find_latest(folder / "checkpoints") == folder / "checkpoints" / "step_00000001"
    with pytest.raises(ValueError, match="already holds a run"):
        Trainer(trainer.config)
    for wrong in ({"data": {"folder": "nowhere"}}, {"model": {"vocab_size": 700}}):
        with pytest.raises(ValueError, match=r"nowhere|vocab_size"):
            Trainer(run_config(data, **wrong))
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["trial-1"]


def test_what_is_better_than_possible_is_saved_and_stops_the_run(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = open_trainer(run_config(data, training={"save_interval": 100}), tmp_path)
    evaluate = trainer.evaluate
    monkeypatch.setattr(trainer, "evaluate", lambda: evaluate()._replace(bits_per_byte=0.499))
    with pytest.raises(TrainingStopped, match=r"suspected leak: below 0.5 bits/byte after step 3") as stop:
        trainer.train()
    assert stop.value.exit_code == 1
    assert find_latest(tmp_path / "checkpoints") == tmp_path / "checkpoints" / "step_00000003"
    monkeypatch.setattr(trainer, "evaluate", lambda: evaluate()._replace(bits_per_byte=0.5))
    trainer.train()
    assert trainer.step == 6


def test_a_state_that_is_not_finite_is_not_saved(data: Path, tmp_path: Path) -> None:
    trainer = open_trainer(run_config(data), tmp_path)
    good = trainer.save()
    trainer.state.params.table.fill_(float("nan"))
    with pytest.raises(TrainingStopped, match=r"params.table is not finite") as stop:
        trainer.save()
    assert stop.value.exit_code == 1
    assert find_latest(tmp_path / "checkpoints") == good


def test_a_checkpoint_beyond_the_schedule_is_refused(data: Path, tmp_path: Path, whole: Finished) -> None:
    shorter = open_trainer(run_config(data, scheduler={"total_steps": 5}), tmp_path)
    with pytest.raises(ValueError, match=r"scheduler.total_steps: expected at least the 6 steps done, got 5"):
        shorter.load(whole.folder / "checkpoints" / "step_00000006")


def test_a_checkpoint_of_another_run_is_refused(data: Path, tmp_path: Path) -> None:
    first = open_trainer(run_config(data), tmp_path / "a")
    path = first.save()
    other = open_trainer(
        run_config(prepare(tmp_path / "other", vocab_size=250), model={"vocab_size": 506}), tmp_path / "b"
    )
    with pytest.raises(ValueError, match=r"made with model.vocab_size 512, this run has 506"):
        other.load(path)
    weighted = [{"name": "prose", "weight": 0.9}, {"name": "code", "weight": 0.1}]
    other = open_trainer(run_config(data, data={"sources": weighted}), tmp_path / "b")
    with pytest.raises(ValueError, match=r"made with data [0-9a-f]{64}, this run has [0-9a-f]{64}"):
        other.load(path)


def test_precision_decides_what_layers_compute_in(data: Path, tmp_path: Path) -> None:
    trainer = open_trainer(run_config(data, training={"precision": "bfloat16"}), tmp_path)
    trainer.train(max_steps=2)
    assert {leaf.dtype for leaf in tree.leaves(trainer.state.params)} == {torch.float32}
    exact = open_trainer(run_config(data), tmp_path / "exact")
    exact.train(max_steps=1)
    loss, reference = records(tmp_path)[0]["loss"], records(tmp_path / "exact")[0]["loss"]
    assert loss != reference
    assert loss == pytest.approx(reference, abs=0.02)


def test_kernels_that_are_not_there_are_an_error() -> None:
    with pytest.raises(ValueError, match=r"triton is not available, it needs an NVIDIA GPU.*auto and eager work"):
        choose_backend(TrainingConfig(backend="triton"), CPU)
    auto, eager = (choose_backend(TrainingConfig(backend=name, precision="float32"), CPU) for name in ("auto", "eager"))
    assert auto == eager


def test_a_gpu_takes_kernels_unless_told_otherwise() -> None:
    pytest.importorskip("triton", reason="Triton is an extra")

    def chosen(**keys: Any) -> Backend:
        backend = choose_backend(TrainingConfig(**{"precision": "bfloat16", **keys}), "cuda")
        compiled = keys.get("compile", "inductor") == "inductor"
        found = backend.region, backend.once, backend.stacked
        assert found == ((COMPILED, COMPILED_ONCE, STACKED) if compiled else (inline, inline, 0))
        return backend._replace(lend=keep, gather=keep, region=inline, once=inline, stacked=0)

    assert chosen() == chosen(precision="float32") == chosen(compile="aot_eager") == AUTO
    assert chosen(backend="triton") == TRITON
    assert chosen(backend="eager") == chosen(backend="eager", precision="float32") == EAGER_ON_GPU
    with pytest.raises(ValueError, match=r"triton has no attention in training\.precision float32"):
        chosen(backend="triton", precision="float32")


def test_what_is_not_there_is_found_before_training(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_available(run_config(data), CPU)
    with pytest.raises(ValueError, match=r"run\.trackers: wandb is not installed"):
        check_available(run_config(data, run={"trackers": ["wandb"]}), CPU)
    with pytest.raises(ValueError, match=r"training\.global_batch_size: .* = 4, got 64"):
        check_available(run_config(data, training={"global_batch_size": 64}), CPU)
    for ranks in ("abc", "0", "-1", "²"):
        monkeypatch.setenv("WORLD_SIZE", ranks)
        with pytest.raises(ValueError, match=rf"WORLD_SIZE: expected a number of at least 1.*, got '{ranks}'"):
            check_available(run_config(data), CPU)
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(ValueError, match=r"training\.global_batch_size: .* = 12, got 4"):
        check_available(run_config(data, training={"global_batch_size": 4}), CPU)


def test_the_log_is_json_whatever_is_in_it(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path / "metrics.jsonl")
    log.append({"step": 1, "seconds": 2.0, "loss": float("nan"), "mtp": [1.0, float("inf")]})
    (line,) = log.path.read_text().splitlines()
    assert json.loads(line) == {"step": 1, "seconds": 2.0, "loss": None, "mtp": [1.0, None]}
    assert log.rewind(1) == 2.0
    assert log.rewind(0) == 0.0
    assert log.path.read_text() == ""


@pytest.mark.parametrize(
    "damage",
    [b"5", b"[1]", b"null", b"{}", b'{"step": 1}', b'{"step": "1", "seconds": 1}', b"\xff\xfe", b'{"step": 1, "se'],
)
def test_a_line_of_the_log_that_is_no_record_is_dropped(tmp_path: Path, damage: bytes) -> None:
    good = b'{"step": 1, "seconds": 2.0}\n'
    (tmp_path / "metrics.jsonl").write_bytes(damage + b"\n" + good + damage)
    assert MetricsLog(tmp_path / "metrics.jsonl").rewind(1) == 2.0
    assert (tmp_path / "metrics.jsonl").read_bytes() == good


@pytest.mark.parametrize(
    ("seconds", "shown"), [(0.4, "0:00"), (61.0, "1:01"), (3599.6, "1:00:00"), (90_061.0, "25:01:01")]
)
def test_clock_shows_minutes_and_hours(seconds: float, shown: str) -> None:
    assert clock(seconds) == shown

import io
import json
import math
import os
import re
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib import util
from pathlib import Path
from typing import Any, NamedTuple

import evaluate
import pytest
import torch
from command_line import execute
from tiny_run import prepare, run_config

from hymo.batch import Batch
from hymo.config_yaml import load_config, to_yaml
from hymo.jit import _compiler_error
from hymo.run_folder import held
from hymo.trainer import Trainer

ROOT = Path(__file__).parent.parent
RECIPE = ROOT / "recipes" / "pretrain.py"
TIMES = ("tokens_per_second", "seconds", "eta_seconds")
FILES = {
    ".lock",
    "checkpoints",
    "config.yaml",
    "metrics.jsonl",
    "report.html",
    "run.json",
    "sample.txt",
    "tokenizer.json",
}


class Outcome(NamedTuple):
    """What one call of the recipe left behind."""

    code: int
    out: str
    error: str


Run = Callable[..., Outcome]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare(tmp_path_factory.mktemp("corpus") / "data")


@pytest.fixture(scope="module")
def recipe() -> Any:
    """The recipe as a module of its own, which writes short samples."""
    spec = util.spec_from_file_location("pretrain", RECIPE)
    assert spec is not None
    assert spec.loader is not None
    recipe = util.module_from_spec(spec)
    spec.loader.exec_module(recipe)
    recipe.SAMPLE_TOKENS = 8  # type: ignore[attr-defined]
    return recipe


@pytest.fixture
def run(
    recipe: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Iterator[Run]:
    """Calls the recipe in a folder of its own."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")

    def call(*arguments: str | Path) -> Outcome:
        code = recipe.main([str(argument) for argument in arguments])
        out, error = capsys.readouterr()
        return Outcome(code, out, error)

    yield call
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def config(data: Path, tmp_path: Path) -> Path:
    """A configuration of four steps."""
    return write_config(tmp_path / "trial.yaml", data)


def write_config(path: Path, prepared: Path, **changes: Any) -> Path:
    training = {"micro_batch_size": 4, "gradient_accumulation_steps": 1, "eval_interval": 2}
    both = {"scheduler": {"total_steps": 4}, "training": training, **changes}
    path.write_text(to_yaml(run_config(prepared, **both)))
    return path


def trained(recipe: Any, folder: Path, data: Path, *, steps: int) -> Path:
    """`folder` with a run in it that has come to its end."""
    config = write_config(folder.with_suffix(".yaml"), data)
    assert recipe.main([str(config), f"run.output_dir={folder}", f"scheduler.total_steps={steps}"]) == 0
    torch.use_deterministic_algorithms(False)
    return folder


@pytest.fixture(scope="module")
def halfway(recipe: Any, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of two steps, to be copied."""
    return trained(recipe, tmp_path_factory.mktemp("halfway") / "run", data, steps=2)


@pytest.fixture(scope="module")
def finished(recipe: Any, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of four steps, to be copied."""
    return trained(recipe, tmp_path_factory.mktemp("finished") / "run", data, steps=4)


def records(folder: Path) -> list[dict[str, Any]]:
    """The log without its times."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if name not in TIMES} for line in lines]


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def assert_refused(outcome: Outcome, *parts: str) -> None:
    """Exit code 2, one line that has all `parts`, and nothing written where the recipe was called."""
    assert outcome.code == 2, outcome.error
    assert len(outcome.error.splitlines()) == 1, outcome.error
    for part in parts:
        assert part in outcome.error
    assert not names(Path.cwd())


def test_a_run_leaves_all_that_is_needed_to_read_it(run: Run, config: Path) -> None:
    outcome = run(config)
    assert (outcome.code, outcome.error) == (0, "")
    folder = Path("runs/trial-1")
    assert names(folder) == FILES
    assert load_config(folder / "config.yaml").run.output_dir == str(folder.absolute())
    identity = json.loads((folder / "run.json").read_text())
    assert identity.keys() == {"name", "command", "versions", "parameters", "baselines"}
    assert set(identity["baselines"]) == {"order0_bits_per_byte", "xz_bits_per_byte"}
    last = records(folder)[-1]
    assert (last["kind"], last["step"]) == ("eval", 4)
    assert f"validation: {last['bits_per_byte']:.3f} bits/byte (order-0 entropy " in outcome.out
    sample = (folder / "sample.txt").read_text()
    assert sample.strip()
    assert sample.rstrip("\n") in outcome.out


def test_each_run_gets_a_folder_of_its_own(run: Run, config: Path, halfway: Path) -> None:
    shutil.copytree(halfway, "runs/trial-1")
    assert run(config, "scheduler.total_steps=2").code == 0
    assert names(Path("runs")) == {"trial-1", "trial-2"}
    assert records(Path("runs/trial-1")) == records(Path("runs/trial-2"))
    samples = [(Path("runs") / name / "sample.txt").read_text() for name in ("trial-1", "trial-2")]
    assert samples[0] == samples[1]


def start(folder: Path, *arguments: str, **environment: str) -> None:
    """Runs the recipe in a process of its own."""
    both = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}", "OMP_NUM_THREADS": "1", **environment}
    command = [sys.executable, str(RECIPE), *arguments]
    done = subprocess.run(command, cwd=folder, env=both, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_run_that_was_killed_goes_on_as_if_nothing_happened(finished: Path, tmp_path: Path) -> None:
    # What is there when a run dies after its third step: the second's checkpoint and half a line.
    killed = shutil.copytree(finished, tmp_path / "killed")
    shutil.rmtree(killed / "checkpoints" / "step_00000004")
    metrics = killed / "metrics.jsonl"
    lines = metrics.read_text().splitlines(keepends=True)
    metrics.write_text("".join(lines[:4]) + lines[4][:50])
    start(tmp_path, "killed/config.yaml", "--resume", PYTHONIOENCODING="ascii")
    assert records(killed) == records(finished)
    assert [record["step"] for record in records(finished)] == [1, 2, 2, 3, 4, 4]


def test_a_dry_run_tells_the_costs_and_touches_nothing(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def allocate(*arguments: object, **options: object) -> None:
        raise AssertionError("a dry run drew weights")

    monkeypatch.setattr("hymo.params.ParamSpec.draw", allocate)
    outcome = run("--dry-run", "scheduler.total_steps=7")
    assert outcome.code == 0
    assert "tiny: " in outcome.out, "the default configuration"
    assert re.search(r"^steps +7 ", outcome.out, re.MULTILINE)
    assert not names(Path.cwd())


def test_a_folder_with_a_run_wants_to_be_resumed_or_overwritten(
    run: Run, config: Path, tmp_path: Path, halfway: Path
) -> None:
    folder = shutil.copytree(halfway, tmp_path / "place")
    place, before = f"run.output_dir={folder}", records(folder)
    assert_refused(run(config, place), str(folder), "already holds a run", "--resume", "--overwrite")
    assert records(folder) == before
    assert run(config, place, "--resume").code == 0
    assert records(folder)[:3] == before
    assert [record["step"] for record in records(folder)] == [1, 2, 2, 3, 4, 4]
    assert run(config, place, "scheduler.total_steps=1", "--overwrite").code == 0
    assert [record["step"] for record in records(folder)] == [1, 1]
    assert names(folder / "checkpoints") == {"latest", "step_00000001"}


def test_overwriting_that_fails_keeps_the_old_run(run: Run, config: Path, tmp_path: Path, halfway: Path) -> None:
    folder = shutil.copytree(halfway, tmp_path / "place")
    place, before = f"run.output_dir={folder}", contents(folder)
    assert_refused(run(config, place, "--overwrite", "data.folder=nowhere"), "nowhere", "no such file")
    assert contents(folder) == before
    (folder / "thesis.tex").write_text("mine")
    assert_refused(run(config, place, "--overwrite"), "thesis.tex", "move it away first")
    assert (folder / "thesis.tex").read_text() == "mine"


def test_a_run_stopped_before_its_first_checkpoint_begins_anew(
    run: Run, config: Path, tmp_path: Path, halfway: Path
) -> None:
    folder = shutil.copytree(halfway, tmp_path / "place")
    shutil.rmtree(folder / "checkpoints")
    outcome = run(config, f"run.output_dir={folder}", "--resume", "scheduler.total_steps=2")
    assert outcome.code == 0
    assert "going on after step 0" in outcome.out
    assert records(folder) == records(halfway)


def test_an_interrupted_run_goes_on(
    run: Run, config: Path, tmp_path: Path, finished: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place, steps = f"run.output_dir={tmp_path / 'place'}", iter(range(3))
    next_batch = Trainer._next_batch

    def interrupted(trainer: Trainer) -> Batch:
        if next(steps, None) is None:
            raise KeyboardInterrupt
        return next_batch(trainer)

    with monkeypatch.context() as patched:
        patched.setattr(Trainer, "_next_batch", interrupted)
        outcome = run(config, place)
    told = "pretrain: interrupted after step 3; --resume goes on from step_00000002\n"
    assert (outcome.code, outcome.error) == (130, told)
    assert "going on after step 2" in run(config, place, "--resume").out
    assert records(tmp_path / "place") == records(finished)


def test_resuming_with_another_model_is_refused(run: Run, config: Path, tmp_path: Path, halfway: Path) -> None:
    place = f"run.output_dir={shutil.copytree(halfway, tmp_path / 'place')}"
    before = (tmp_path / "place" / "config.yaml").read_bytes()
    outcome = run(config, place, "--resume", "model.logit_softcap=30")
    assert_refused(outcome, "made with model.logit_softcap 15.0, this run has 30.0")
    assert (tmp_path / "place" / "config.yaml").read_bytes() == before
    assert_refused(run(config, place, "--resume", "training.seed=7"), "made with training.seed 42, this run has 7")


def test_training_that_diverges_is_one_line_and_exit_code_1(
    run: Run, config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hymo.step.clip", lambda grads, norm, limit: grads)
    monkeypatch.setattr("hymo.step.tree.global_norm", lambda grads: torch.tensor(float("nan")))
    outcome = run(config, "training.nan_skip_budget=1")
    assert outcome.code == 1
    assert outcome.error.count("\n") == 1
    assert outcome.error.startswith("pretrain: training.nan_skip_budget")


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["training.sed=7"], ["training.sed: unknown key", "did you mean 'seed'?"]),
        (["optimizer.muon_lr=abc"], ["optimizer.muon_lr: expected float", "'abc'"]),
        (["training.micro_batch_size=0"], ["training.micro_batch_size: expected int in [1, ", "got 0"]),
        (["model.n_heads=6", "model.n_kv_groups=4"], ["model.n_kv_groups: expected a divisor of n_heads (6), got 4"]),
        (["model.qk_rope_head_dim=7"], ["model.qk_rope_head_dim: expected an even number, got 7"]),
        (["training.max_seq_len=64"], ["training.max_seq_len: expected at most model.max_seq_len (32), got 64"]),
        (["model.vocab_size=700"], ["model.vocab_size: expected 512, that of the tokenizer, got 700"]),
        (["seed"], ["seed: expected section.key=value"]),
        (["training.global_batch_size=64"], ["training.global_batch_size", "= 4, got 64"]),
        (["data.folder=nowhere"], ["nowhere", "no such file"]),
        (["data.folder=null"], ["data.tokenizer", "got null"]),
        (["data.tokenizer=nowhere.json"], ["nowhere.json: no such file"]),
        (["data.validation=nowhere/*.bin"], ["nowhere/*.bin", "no token shards"]),
        (["data.sources=[{name: poems, weight: 1}]"], ["no source 'poems'", "'prose'"]),
        (["training.backend=triton"], ["training.backend", "triton", "eager"]),
        (["run.trackers=[wandb]"], ["run.trackers", "wandb is not installed"]),
        (["--resume"], ["--resume: expected run.output_dir=FOLDER"]),
        (["--overwrite"], ["--overwrite: expected run.output_dir=FOLDER"]),
        (["--resume", "--overwrite"], ["--overwrite: not allowed with argument --resume"]),
        (["--resume", "run.output_dir=nowhere"], ["nowhere holds no run"]),
        (["--fast"], ["unrecognized arguments: --fast"]),
        (["--over"], ["unrecognized arguments: --over"]),
        (["training.global_batch_size=7"], ["training.global_batch_size: expected", "= 4, got 7"]),
    ],
)
def test_what_is_asked_wrongly_is_one_line(run: Run, config: Path, arguments: list[str], parts: list[str]) -> None:
    assert_refused(run(config, *arguments), *parts)


def test_a_wrong_line_of_a_file_is_named(run: Run, data: Path, tmp_path: Path) -> None:
    path = write_config(tmp_path / "trial.yaml", data)
    lines = path.read_text().splitlines()
    number = next(i for i, line in enumerate(lines) if "muon_lr" in line)
    path.write_text("\n".join([*lines[:number], "  muon_lr: fast", *lines[number + 1 :]]))
    assert_refused(run(path), "optimizer.muon_lr: expected float", "'fast'", f"trial.yaml:{number + 1}")


def test_every_problem_has_a_line(run: Run, config: Path) -> None:
    outcome = run(config, "training.sed=7", "optimizer.muon_lr=abc")
    assert outcome.code == 2
    assert len(outcome.error.splitlines()) == 2


def test_a_missing_configuration_suggests_the_nearest(run: Run, config: Path) -> None:
    assert_refused(run(config.with_name("trail.yaml")), "trail.yaml: no such file", "did you mean", "trial.yaml")


def test_shards_of_another_tokenizer_are_refused(run: Run, config: Path, tmp_path: Path) -> None:
    other = prepare(tmp_path / "other", vocab_size=250)
    outcome = run(config, f"data.tokenizer={other / 'tokenizer.json'}", "model.vocab_size=506")
    assert_refused(outcome, "tokenizer", json.loads((other / "manifest.json").read_text())["tokenizer"])


def test_a_token_id_out_of_range_is_refused(run: Run, data: Path, config: Path, tmp_path: Path) -> None:
    damaged = shutil.copytree(data, tmp_path / "damaged")
    shard = damaged / "prose_train_00000.bin"
    content = bytearray(shard.read_bytes())
    content[1024 + 14 : 1024 + 16] = (60_000).to_bytes(2, "little")
    shard.write_bytes(content)
    outcome = run(config, f"data.folder={damaged}")
    assert_refused(outcome, "prose", "token id 60000 at position 7", "0 to 511")


def test_a_text_shorter_than_a_row_is_refused(run: Run, config: Path) -> None:
    longer = ["model.max_seq_len=65536", "training.max_seq_len=65536", "data.val_tokens=65536"]
    assert_refused(run(config, *longer), "source prose", "65537")


def test_a_file_in_place_of_the_folder_is_refused(run: Run, config: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    assert_refused(run(config, f"run.output_dir={tmp_path / 'file'}"), "expected a folder", "which is a file")
    assert_refused(run(config, f"run.output_dir={tmp_path / 'file' / 'inside'}"), "inside", "Not a directory")


def test_no_compiler_for_inductor_is_one_line(run: Run, config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> None:
        raise FileNotFoundError

    monkeypatch.setattr("torch._inductor.cpp_builder.get_cpp_compiler", missing)
    _compiler_error.cache_clear()
    outcome = run(config, "training.compile=inductor")
    _compiler_error.cache_clear()
    assert_refused(outcome, "training.compile: inductor", "C++ compiler", "`aot_eager` and `none` work")


def test_an_environment_that_no_launcher_makes_is_refused(
    run: Run, config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "abc")
    assert_refused(run(config), "WORLD_SIZE: expected a number of at least 1", "got 'abc'")
    monkeypatch.setenv("WORLD_SIZE", "3")
    asked = run(config, "training.sharding=fsdp2", "training.shard_ranks=2")
    assert_refused(asked, "training.shard_ranks: expected a divisor of the 3 ranks, got 2; 1, 3 work")


def test_our_own_mistakes_keep_their_traceback(run: Run, config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def mistake(*arguments: object, **options: object) -> None:
        raise ValueError("ours")

    monkeypatch.setattr("hymo.trainer.init_train_state", mistake)
    with pytest.raises(ValueError, match="ours"):
        run(config)
    assert not names(Path.cwd())


@pytest.mark.parametrize(
    "arguments",
    [
        ["model.n_layers=1", "model.mla_offset=1"],
        ["model.max_seq_len=1", "training.max_seq_len=1", "model.mtp_depth=0", "model.mtp_loss_weights=[]"],
    ],
    ids=["no experts", "one position"],
)
def test_a_model_at_the_edge_trains_to_its_report(run: Run, config: Path, arguments: list[str]) -> None:
    outcome = run(config, *arguments, "scheduler.total_steps=2")
    assert (outcome.code, outcome.error) == (0, "")
    folder = Path("runs/trial-1")
    assert names(folder) == FILES
    has_experts = "model.n_layers=1" not in arguments
    train = [record for record in records(folder) if record["kind"] == "train"]
    assert [bool(record["load"]) for record in train] == [has_experts] * 2
    assert [record["bias_range"] is not None for record in train] == [has_experts] * 2
    assert ("experts max/mean" in outcome.out) == has_experts


def test_a_run_that_was_moved_goes_on_where_it_is(run: Run, halfway: Path) -> None:
    before = contents(halfway)
    shutil.copytree(halfway, "copy")
    shutil.copytree(halfway, "first")
    assert run("copy/config.yaml", "--resume", "scheduler.total_steps=4").code == 0
    assert contents(halfway) == before
    assert records(Path("copy"))[-1]["step"] == 4
    assert load_config("copy/config.yaml").run.output_dir == str(Path("copy").absolute())
    # What the command line says stands above it.
    assert run("copy/config.yaml", "--resume", "scheduler.total_steps=3", "run.output_dir=first").code == 0
    assert records(Path("first"))[-1]["step"] == 3


@pytest.mark.parametrize("flag", ["--resume", "--overwrite"])
def test_a_run_has_one_writer(run: Run, config: Path, tmp_path: Path, halfway: Path, flag: str) -> None:
    place, folder = f"run.output_dir={tmp_path / 'place'}", tmp_path / "place"
    with held(folder):
        assert_refused(run(config, place), str(folder), "in use by another process")
    assert not folder.exists()
    shutil.copytree(halfway, folder)
    with held(folder):
        assert_refused(run(config, place, flag), str(folder), "in use by another process")
    assert run(config, place, flag, "scheduler.total_steps=3").code == 0


@pytest.mark.parametrize(
    ("name", "is_folder", "part"),
    [("checkpoints", False, "to be a folder, it is a file"), ("metrics.jsonl", True, "to be a file, it is a folder")],
)
def test_a_file_of_the_wrong_kind_is_named(
    run: Run, config: Path, tmp_path: Path, name: str, is_folder: bool, part: str
) -> None:
    place, path = f"run.output_dir={tmp_path / 'place'}", tmp_path / "place" / name
    path.parent.mkdir()
    (path.parent / "config.yaml").touch()
    path.mkdir() if is_folder else path.touch()
    assert_refused(run(config, place, "--resume"), str(path), part)


def test_a_log_that_is_damaged_does_not_hinder(run: Run, config: Path, tmp_path: Path, halfway: Path) -> None:
    folder = shutil.copytree(halfway, tmp_path / "place")
    log = folder / "metrics.jsonl"
    log.write_bytes(b"5\n\xff\xfe\n" + log.read_bytes())
    assert run(config, f"run.output_dir={folder}", "--resume", "scheduler.total_steps=3").code == 0
    assert records(folder)[:3] == records(halfway)
    assert records(folder)[3]["step"] == 3


def test_a_full_disk_is_one_line_and_exit_code_1(run: Run, config: Path, tmp_path: Path, halfway: Path) -> None:
    folder = shutil.copytree(halfway, tmp_path / "place")
    place = f"run.output_dir={folder}"
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, hard))
    try:
        outcome = run(config, place, "--resume")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert outcome.code == 1
    assert outcome.error.count("\n") == 1, outcome.error
    assert "File too large" in outcome.error
    assert "going on after step 2" in run(config, place, "--resume").out
    assert records(folder)[-1]["step"] == 4


@pytest.mark.parametrize(
    "error", [MemoryError(), RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory\nmore")]
)
def test_too_little_memory_is_one_line_and_leaves_nothing(
    run: Run, config: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def allocate(*arguments: object, **options: object) -> None:
        raise error

    monkeypatch.setattr("hymo.trainer.init_train_state", allocate)
    outcome = run(config)
    assert outcome.code == 1
    assert outcome.error.count("\n") == 1
    assert outcome.error.startswith("pretrain: memory is not enough: ")
    assert not names(Path.cwd())


def test_a_link_to_a_folder_stays_one(run: Run, config: Path, tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "disk")
    place = f"run.output_dir={tmp_path / 'link'}"
    assert run(config, place, "scheduler.total_steps=1").code == 0
    assert run(config, place, "scheduler.total_steps=2", "--overwrite").code == 0
    assert (tmp_path / "link").is_symlink()
    assert names(tmp_path / "disk") == FILES
    assert records(tmp_path / "disk")[-1]["step"] == 2


def test_overwriting_that_was_killed_is_named(run: Run, config: Path, tmp_path: Path, halfway: Path) -> None:
    folder = shutil.copytree(halfway, tmp_path / "place")
    place = f"run.output_dir={folder}"
    (folder / ".replaced").mkdir()
    (folder / "config.yaml").rename(folder / ".replaced" / "config.yaml")
    for flags in ([], ["--resume"], ["--overwrite"]):
        assert_refused(run(config, place, *flags), str(folder / ".replaced"), "delete it, or move what is in it back")
    shutil.rmtree(folder / ".replaced")
    assert run(config, place, "--overwrite", "scheduler.total_steps=1").code == 0
    assert names(folder) == FILES


@pytest.mark.parametrize("content", [[], ["mine.txt"]])
def test_a_run_that_cannot_begin_leaves_its_folder_as_it_was(
    run: Run, config: Path, tmp_path: Path, content: list[str]
) -> None:
    folder = tmp_path / "place"
    folder.mkdir()
    for name in content:
        (folder / name).touch()
    weighted = "data.sources=[{name: poems, weight: 1}]"
    assert_refused(run(config, f"run.output_dir={folder}", weighted), "poems")
    assert names(folder) - {".lock"} == set(content)
    assert folder.exists()


def test_a_finished_run_says_so_and_stays(run: Run, config: Path, tmp_path: Path, finished: Path) -> None:
    folder = shutil.copytree(finished, tmp_path / "place")
    place = f"run.output_dir={folder}"
    outcome = run(config, place, "--resume")
    assert (outcome.code, outcome.error) == (0, "")
    assert outcome.out == "done at step 4; a higher scheduler.total_steps goes on\n"
    settings = (folder / "config.yaml").read_bytes()
    refused = run(config, place, "--resume", "scheduler.total_steps=3")
    assert_refused(refused, "scheduler.total_steps: expected at least the 4 steps done, got 3")
    assert records(folder) == records(finished)
    assert (folder / "config.yaml").read_bytes() == settings
    # Killed between its last checkpoint and its report.
    (folder / "report.html").unlink()
    assert run(config, place, "--resume").code == 0
    assert names(folder) == FILES


def test_a_checkpoint_that_is_passed_over_is_told(run: Run, config: Path, tmp_path: Path, finished: Path) -> None:
    folder = shutil.copytree(finished, tmp_path / "place")
    newest = folder / "checkpoints" / "step_00000004"
    (newest / ".metadata").unlink()
    outcome = run(config, f"run.output_dir={folder}", "--resume")
    assert f"checkpoint {newest}: .metadata has None bytes, " in outcome.out
    assert "move that folder away to use the checkpoint before it: passed over\ngoing on after step 2\n" in outcome.out


def test_a_run_without_a_whole_checkpoint_does_not_begin_anew(
    run: Run, config: Path, tmp_path: Path, halfway: Path
) -> None:
    folder = shutil.copytree(halfway, tmp_path / "place")
    checkpoints = folder / "checkpoints"
    (checkpoints / "step_00000002" / "meta.json").unlink()
    outcome = run(config, f"run.output_dir={folder}", "--resume")
    assert outcome.code == 2
    assert outcome.error == f"pretrain: --resume: not one checkpoint in {checkpoints} is whole\n"


def test_a_reader_that_leaves_ends_a_recipe_quietly(tmp_path: Path, config: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(RECIPE), str(config), "--dry-run"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, stdout=writer, stderr=subprocess.PIPE, text=True)
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, "")


def test_a_letter_that_the_terminal_does_not_have_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr("sys.stdout", terminal)
    assert execute("print", lambda: print("h\u00e9llo \ufffd")) == 0
    assert terminal.buffer.getvalue() == b"h?llo ?\n"


def test_a_figure_that_is_not_finite_is_null(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(evaluate, "score", lambda *given: {"loss": math.nan, "sources": {"prose": {"loss": math.inf}}})
    monkeypatch.setattr("sys.argv", ["evaluate.py", "trial"])
    assert evaluate.main() == 0
    assert json.loads(capsys.readouterr().out) == {"loss": None, "sources": {"prose": {"loss": None}}}


def test_an_interrupted_run_without_a_checkpoint_promises_none(
    run: Run, config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(trainer: Trainer) -> Batch:
        raise KeyboardInterrupt

    monkeypatch.setattr(Trainer, "_next_batch", interrupted)
    outcome = run(config)
    assert (outcome.code, outcome.error) == (
        130,
        "pretrain: interrupted after step 0; there is no checkpoint yet\n",
    )

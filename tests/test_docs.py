"""What docs/ says can be typed, can be."""

import os
import re
import shlex
import subprocess
from dataclasses import fields
from pathlib import Path

import pytest
from torch.distributed.run import get_args_parser

from hymo.config_yaml import load_config
from hymo.data import preparation
from hymo.section import Section

ROOT = Path(__file__).parents[1]
LAUNCH, DATA = ((ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8") for name in ("launch", "data"))
SBATCH = ROOT / "docs" / "hymo.sbatch"


def commands(text: str) -> list[str]:
    return [line for block in re.findall(r"```bash\n(.*?)```", text, re.DOTALL) for line in block.splitlines()]


def run(*command: str, folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    both = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}", "OMP_NUM_THREADS": "1", **environment}
    return subprocess.run(command, cwd=folder, env=both, capture_output=True, text=True, check=False, timeout=120)


def test_launch_commands_are_configurations_of_as_many_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    launches = [shlex.split(line)[1:] for line in commands(LAUNCH) if line.startswith("torchrun")]
    for words, ranks in zip(launches, (8, 16, 4), strict=True):
        asked = get_args_parser().parse_args(words)
        assert int(asked.nnodes.split(":")[0]) * int(asked.nproc_per_node) == ranks
        assert asked.training_script == "recipes/pretrain.py"
        config, *rest = asked.training_script_args
        keys = [each for each in rest if not each.startswith("--")]
        begun = config if config.startswith("recipes/") else "recipes/configs/hymo_750m.yaml"
        # The last one resumes on half as many ranks what the first one began.
        assert load_config(begun, keys).training.rows_per_step(ranks) in (256, 512)
    assert "--resume" in launches[2]


@pytest.fixture
def slurm(tmp_path: Path) -> Path:
    """A cluster of one task: `srun` runs it, `scontrol` writes down what it is told, `python` does what it must."""
    programs = {
        "srun": '[[ $1 == --kill-on-bad-exit=1 ]] && shift\nSLURM_PROCID=5 SLURM_LOCALID=1 exec "$@"',
        "scontrol": 'if [[ $1 == show ]]; then echo node7; echo node8; else echo "$@" >> scontrol.log; fi',
        "python": 'echo "$RANK $LOCAL_RANK $WORLD_SIZE $MASTER_ADDR $MASTER_PORT $*" >> python.log\n. ./behave',
    }
    for name, text in programs.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    (tmp_path / "a folder").mkdir()
    return tmp_path


def submit(slurm: Path, behave: str) -> tuple[int, list[str], list[str]]:
    """Exit code of the job, what the task was started with, and what the controller was told."""
    (slurm / "behave").write_text(behave)
    for name in ("python.log", "scontrol.log"):
        (slurm / name).write_text("")
    arguments = ["a folder", "recipes/configs/hymo_750m.yaml", "data.folder=a b"]
    environment = {"SLURM_JOB_ID": "42", "SLURM_NTASKS": "16", "SLURM_JOB_NODELIST": "node[7-8]"}
    path = f"{slurm}:{os.environ['PATH']}"
    done = run("bash", str(SBATCH), *arguments, folder=slurm, PATH=path, **environment)
    return done.returncode, *((slurm / name).read_text().splitlines() for name in ("python.log", "scontrol.log"))


def test_a_job_that_was_stopped_is_queued_again_and_resumes(slurm: Path) -> None:
    # Stopped by the signal: it saved and left no report.
    code, started, told = submit(slurm, "touch 'a folder/config.yaml'")
    assert (code, told) == (0, ["requeue 42"])
    arguments = "recipes/pretrain.py recipes/configs/hymo_750m.yaml data.folder=a b run.output_dir=a folder"
    assert started == [f"5 1 16 node7 29500 {arguments}"]
    code, started, told = submit(slurm, "touch 'a folder/report.html'")
    assert (code, told) == (0, [])
    assert started == ["5 1 16 node7 29500 recipes/pretrain.py a folder/config.yaml --resume"]


def test_a_job_that_fails_is_not_queued_again(slurm: Path) -> None:
    code, _, told = submit(slurm, "exit 3")
    assert (code, told) == (3, [])


def test_a_job_that_is_signalled_as_a_whole_waits_for_its_processes(slurm: Path) -> None:
    code, _, told = submit(slurm, "kill -TERM $PPID\nsleep 0.3\ntouch saved")
    assert (code, told) == (0, ["requeue 42"])
    assert (slurm / "saved").exists()


def test_the_script_asks_slurm_for_the_signal_and_the_launch_page_names_it() -> None:
    asked = re.findall(r"^#SBATCH (.*)$", SBATCH.read_text(), re.MULTILINE)
    assert {"--signal=TERM@120", "--requeue", "--open-mode=append"} <= set(asked)
    assert commands(LAUNCH)[-1].split()[:2] == ["sbatch", "docs/hymo.sbatch"]


def test_the_data_page_prepares_as_the_readme_does() -> None:
    own, mixture = (shlex.split(line) for line in commands(DATA))
    readme = [shlex.split(line) for line in commands((ROOT / "README.md").read_text(encoding="utf-8"))]
    # There it is run.
    assert own in [words[: len(own)] for words in readme]
    assert (ROOT / mixture[2]).name == "mixture.yaml"
    assert (ROOT / mixture[2]).is_file()


def test_every_key_of_a_preparation_is_on_the_data_page() -> None:
    sections = [each for each in vars(preparation).values() if isinstance(each, type) and issubclass(each, Section)]
    keys = {key.name for section in sections for key in fields(section)}
    assert len(keys) > 30
    assert not [key for key in keys if f"`{key}`" not in DATA]


def test_the_snippet_of_the_data_page_runs() -> None:
    (snippet,) = re.findall(r"```python\n(.*?)```", DATA, re.DOTALL)
    exec(compile(snippet, "docs/data.md", "exec"), {})

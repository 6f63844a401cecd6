"""What the README says can be typed, and is true."""

import os
import re
import runpy
import shlex
import sys
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import pytest
from several_ranks import CONTEXT

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
SNIPPETS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
BLOCKS = re.findall(r"```bash\n(.*?)```", README, re.DOTALL)
COMMANDS = [line.split("#")[0].strip() for block in BLOCKS for line in block.splitlines()]
# Kept small enough for the default suite: the long ones are run whole by .ci/run.
SHORTER = ["scheduler.total_steps=2", "training.max_seq_len=64", "training.compile=none", "data.val_tokens=64"]


def run(*arguments: str, folder: Path, logs: tuple[Path, Path]) -> str:
    """What the program prints, in a process that has imported torch already; `logs` take both its streams."""
    process = CONTEXT.Process(target=_program, args=(arguments, folder, logs), daemon=True)
    process.start()
    process.join(120)
    if process.exitcode is None:
        process.kill()
    assert process.exitcode == 0, (arguments, logs[1].read_text())
    return logs[0].read_text()


def _program(arguments: tuple[str, ...], folder: Path, logs: tuple[Path, Path]) -> None:
    os.chdir(folder)
    for number, log in enumerate(logs, start=1):
        os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    sys.stdout = os.fdopen(1, "w", buffering=1)
    sys.stderr = os.fdopen(2, "w", buffering=1)
    sys.argv = list(arguments)
    sys.path.insert(0, str(Path(arguments[0]).resolve().parent))
    runpy.run_path(arguments[0], run_name="__main__")


@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")
def test_snippets_run_one_after_another(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(ROOT)
    names: dict[str, Any] = {}
    assert len(SNIPPETS) == 3
    for snippet in SNIPPETS:
        smaller = snippet.replace('"aot_eager"', '"none"').replace("(1, 8, 257)", "(1, 2, 65)")
        exec(compile(smaller, "README", "exec"), names)
    printed = capsys.readouterr().out
    nats = float(re.findall(r"([\d.]+) nats", printed)[0])
    assert abs(nats - 7.74) < 0.2
    assert names["o"].shape == (2, 512, 4, 32)


def test_commands_work_in_their_order(tmp_path: Path) -> None:
    install = 'python -m pip install -e ".[dev]" && '
    first, tests, *rest = COMMANDS
    assert first == install + "python recipes/pretrain.py"
    assert tests == install + "python -m pytest"
    assert [shlex.split(command)[1] for command in rest] == [
        "recipes/pretrain.py",
        "recipes/pretrain.py",
        "recipes/pretrain.py",
        "recipes/evaluate.py",
        "recipes/generate.py",
        "recipes/prepare_data.py",
        "recipes/pretrain.py",
        "recipes/export.py",
    ]
    (tmp_path / "recipes").symlink_to(ROOT / "recipes")
    (tmp_path / "texts").mkdir()
    for name, text in list(topics.items())[:40]:
        (tmp_path / "texts" / f"{name}.txt").write_text(text)
    for number, command in enumerate(rest):
        words = shlex.split(command)[1:]
        if "run.output_dir=own" in words:
            words += SHORTER
        if "recipes/prepare_data.py" in words:
            words += ["--workers", "1"]
        if "run.output_dir=trial" in words:
            words = [word for word in words if not word.startswith("scheduler.total_steps")] + SHORTER
        if "recipes/generate.py" in words:
            words += ["--max-new-tokens", "5"]
        assert run(*words, folder=tmp_path, logs=(tmp_path / f"{number}.out", tmp_path / f"{number}.err"))
    assert (tmp_path / "trial" / "report.html").is_file()
    assert (tmp_path / "exported" / "model.safetensors").is_file()


def test_places_that_are_named_exist() -> None:
    named = re.findall(r"`((?:hymo|kernels|recipes|tests|benchmarks|docs)/[\w./]*)`", README)
    assert len(named) > 20
    for name in named:
        assert (ROOT / name).exists(), name


def test_every_module_of_hymo_is_on_the_map_or_in_a_folder_that_is() -> None:
    table = README.split("## Where things are")[1].split("## Measured")[0]
    inner = [
        "__init__",
        "section",
        "config_reference",
        "chart",
        "footprint",
        "progress",
        "run_data",
        "run_folder",
        "handle",
    ]
    for path in (ROOT / "hymo").glob("*.py"):
        assert path.stem in inner or f"`hymo/{path.name}`" in table, path.name

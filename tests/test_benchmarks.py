"""The benchmarks run: a table cannot be made again by a command that has stopped working."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
COMMANDS = [
    ["step.py", "training.gradient_accumulation_steps=1", "--runs", "1", "--compile", "none"],
    ["scan.py", "--impl", "chunk", "recurrent", "--shape", "1x64x1x16x16", "--runs", "1"],
    ["data.py", "--help"],
    ["tune.py", "--help"],
]


@pytest.mark.heavy
@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command[0])
def test_a_benchmark_runs(command: list[str]) -> None:
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(ROOT / "benchmarks" / command[0]), *command[1:]],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout

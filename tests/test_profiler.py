"""A trace holds the steps that were asked for."""

import json
from pathlib import Path

import torch

from hymo.profiler import Profiler


def matmuls(path: Path) -> int:
    return sum(event.get("name") == "aten::mm" for event in json.loads(path.read_text())["traceEvents"])


def test_a_trace_holds_the_steps_asked_for_and_no_other(tmp_path: Path) -> None:
    profiler = Profiler((2, 3), tmp_path)
    a = torch.ones(4, 4)
    for step in range(1, 6):
        with profiler.step(step):
            for _ in range(step):
                a @ a
    profiler.close()
    assert {path.name for path in tmp_path.rglob("*")} == {"profile", "steps_2_3.json", "steps_2_3.txt"}
    assert matmuls(tmp_path / "profile" / "steps_2_3.json") == 5
    assert "aten::mm" in (tmp_path / "profile" / "steps_2_3.txt").read_text()


def test_a_run_that_ends_in_the_middle_leaves_its_trace(tmp_path: Path) -> None:
    profiler = Profiler((1, 9), tmp_path, rank=3)
    with profiler.step(1):
        torch.ones(4, 4) @ torch.ones(4, 4)
    profiler.close()
    profiler.close()
    assert matmuls(tmp_path / "profile" / "steps_1_9_rank_3.json") == 1


def test_nothing_is_asked_nothing_is_written(tmp_path: Path) -> None:
    profiler = Profiler(None, tmp_path)
    with profiler.step(1):
        pass
    profiler.close()
    assert not list(tmp_path.iterdir())

"""Replay: what is recorded, when it is recorded anew, and that a replayed step is the step."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from hymo import replay, tree
from hymo.backend import choose_backend
from hymo.jit import jit
from hymo.replay import Recording, Run, replayed
from tests.configs import micro_batches, setup, smallest_config


class Tape:
    """Stands in for a CUDA graph: it runs the program again, on the tensors that it was recorded with."""

    def __init__(self, program: Run, kept: list[Tensor], given: list[Tensor], results: list[Tensor]) -> None:
        self.program, self.kept, self.given, self.results = program, kept, given, results

    def replay(self) -> None:
        found = self.program(self.kept + self.given)[len(self.kept) :]
        for result, new in zip(self.results, found, strict=True):
            result.copy_(new)


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> list[Recording]:
    """All recordings that are made."""
    made: list[Recording] = []

    def record(program: Run, leaves: Sequence[Tensor], fixed: int) -> Recording:
        kept, given = list(leaves[:fixed]), [replay.copied(leaf) for leaf in leaves[fixed:]]
        results = [torch.empty_like(x) for x in program([replay.copied(x) for x in leaves])[fixed:]]
        tape: Any = Tape(program, kept, given, results)
        made.append(Recording(tuple(leaf.data_ptr() for leaf in kept), given, results, tape))
        return made[-1]

    monkeypatch.setattr(replay, "record", record)
    return made


def step(leaves: list[Tensor]) -> list[Tensor]:
    """Adds to a donated total, and tells the product of both."""
    total, x = leaves
    total += x
    return [total, total * x]


def test_the_second_call_records_and_later_ones_replay(recorded: list[Recording]) -> None:
    run, total, results = replayed(step, 1), torch.zeros(2), []
    for i in range(1, 5):
        same, product = run([total, torch.full((2,), float(i))])
        assert same is total
        results.append(product)
        assert len(recorded) == (i > 1)
    assert total.tolist() == [10.0, 10.0]
    # Each call's results are its own, and stay.
    assert [float(x[0]) for x in results] == [1.0, 6.0, 18.0, 40.0]


@pytest.mark.parametrize("place", ["slice", "expanded", "transposed"])
def test_what_is_given_is_replayed_with_the_strides_it_has(recorded: list[Recording], place: str) -> None:
    """A program is compiled for strides."""
    lie = {"slice": lambda x: x[:, :-1], "expanded": lambda x: x[:, :1].expand(3, 4), "transposed": lambda x: x.T}[
        place
    ]
    seen, given = set(), [lie(torch.arange(12.0).view(3, 4) + i) for i in range(4)]

    def program(leaves: list[Tensor]) -> list[Tensor]:
        seen.add(leaves[0].stride())
        return [leaves[0] * 2]

    run = replayed(program, 0)
    for x in given:
        assert torch.equal(run([x])[0], x * 2)
    assert seen == {given[0].stride()}


def test_an_argument_that_has_moved_is_recorded_anew(recorded: list[Recording]) -> None:
    run, total, x = replayed(step, 1), torch.zeros(2), torch.ones(2)
    for _ in range(3):
        run([total, x])
    moved = total.clone()
    run([moved, x])
    run([moved, torch.full((2,), 2.0)])
    assert len(recorded) == 2
    assert moved.tolist() == [6.0, 6.0]
    assert total.tolist() == [3.0, 3.0]


def test_a_cpu_replays_nothing(recorded: list[Recording]) -> None:
    run = jit(lambda x: (x + 1,), compile="none", donate=True, replay=True)
    x = torch.zeros(2)
    for _ in range(3):
        (x,) = run(x)
    assert x.tolist() == [3.0, 3.0]
    assert recorded == []


@pytest.mark.gpu
@pytest.mark.parametrize("accumulation", [1, 3])
def test_a_replayed_step_is_the_step_to_the_bit(accumulation: int) -> None:
    training = {"gradient_accumulation_steps": accumulation, "precision": "bfloat16", "compile": "inductor"}
    parts = setup(smallest_config(training=training))
    backend = choose_backend(parts.cfg.training, "cuda")
    after: dict[bool, Any] = {}
    for replays in (False, True):
        state, told = tree.map(lambda x: x.cuda(), parts.state(backend=backend)), []
        run = jit(parts.pure(backend), compile="inductor", donate=True, replay=replays)
        for i in range(5):
            # As if a checkpoint had been loaded.
            state = tree.map(torch.clone, state) if i == 3 else state
            batch = tree.map(lambda x: x.cuda(), micro_batches(parts.cfg, i))
            state, metrics = run(state, batch)
            told.append(metrics)
        after[replays] = state, told
    for found, wanted in zip(tree.leaves(after[True]), tree.leaves(after[False]), strict=True):
        assert torch.equal(found, wanted)


@pytest.mark.gpu
def test_a_program_that_waits_for_the_gpu_is_an_error() -> None:
    def waits(leaves: list[Tensor]) -> list[Tensor]:
        (total,) = leaves
        return [total.add_(1 if float(total[0]) < 9 else 2)]

    run, total = replayed(waits, 1), torch.zeros(2, device="cuda")
    run([total])
    with pytest.raises(RuntimeError, match="captur"):
        run([total])

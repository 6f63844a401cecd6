"""Where the kernels for Hopper cut a sequence: a model of the choice, and the kernels' own."""

import itertools
import random

import pytest
import torch

from hymo_kernels.host.gated_delta_call import FORGOTTEN
from tests.kernels.cuts import BACKWARD, FORWARD, Walk, costs, cuts_of, lines, piece_begin

walks = pytest.mark.parametrize("walk", [FORWARD, BACKWARD], ids=["forward", "backward"])


def a_line(chunks: int, draw: random.Random, growth: float = 0.3) -> list[float]:
    """From heads that forget in a chunk to heads that never do, some of which grow, with documents or without."""
    rate, growth = 10 ** draw.uniform(-3, 1.5), draw.choice([0.0, 0.0, growth])
    line = [growth * draw.random() - rate * draw.random() for _ in range(chunks)]
    for _ in range(draw.choice([0, 1, 5, 20])):
        line[draw.randrange(chunks)] = float("-inf")
    return torch.tensor(line).tolist()


def even_cuts(chunks: int, length: int) -> list[int]:
    return [min(part * length, chunks) for part in range(-(-chunks // length) + 1)]


@walks
@pytest.mark.parametrize("length", [1, 2, 8, 32, 57])
def test_the_pieces_are_the_sequence_whatever_its_heads_forget(length: int, walk: Walk) -> None:
    draw = random.Random(length)
    for chunks in (1, 2, 7, 8, 33, 64, 200):
        for _ in range(5):
            cuts = cuts_of(a_line(chunks, draw), length, walk)
            assert (cuts[0], cuts[-1]) == (0, chunks)
            assert all(begin < end for begin, end in itertools.pairwise(cuts)), cuts


@walks
def test_of_two_pieces_the_slower_is_never_slower_than_of_halves(walk: Walk) -> None:
    draw = random.Random(0)
    gained = 0
    for _ in range(300):
        length = draw.choice([8, 20, 32])
        line = a_line(length + draw.randint(1, length), draw, growth=0.0)
        even = max(costs(line, even_cuts(len(line), length), walk))
        balanced = max(costs(line, cuts_of(line, length, walk), walk))
        assert balanced <= even
        gained += balanced < even
    assert gained > 10


@walks
@pytest.mark.parametrize("fall", [float("-inf"), -80.0, -FORGOTTEN])
def test_heads_that_forget_within_a_chunk_are_cut_evenly(fall: float, walk: Walk) -> None:
    for chunks, length in ((64, 32), (512, 64), (5, 1)):
        assert cuts_of([fall] * chunks, length, walk) == even_cuts(chunks, length)


@pytest.mark.parametrize(
    ("document", "forward", "backward"),
    [
        (None, 47, 28),  # At most half a piece later; the backward walks over all that follows.
        (24, 36, 28),
        (36, 37, 31),
        (32, 33, 32),
    ],
)
def test_heads_that_keep_all_are_cut_by_what_both_pieces_cost(
    document: int | None, forward: int, backward: int
) -> None:
    line = [-0.01] * 64
    if document is not None:
        line[document] = float("-inf")
    assert (cuts_of(line, 32, FORWARD)[1], cuts_of(line, 32, BACKWARD)[1]) == (forward, backward)


@walks
def test_the_slowest_program_of_a_model_gains(walk: Walk) -> None:
    """4 rows of 4,096 tokens in documents of 600 and 14 heads, each in two pieces."""
    before, after = 0, 0
    for seed in range(5):
        generator = torch.Generator().manual_seed(seed)
        forget = [line for _ in range(4) for line in lines(64, 14, 600, generator)]
        before += max(max(costs(line, [0, 32, 64], walk)) for line in forget)
        after += max(max(costs(line, cuts_of(line, 32, walk), walk)) for line in forget)
    assert after < 0.97 * before


@pytest.mark.gpu
@walks
@pytest.mark.parametrize("length", [1, 8, 32, 57])
def test_the_kernel_cuts_like_the_model(length: int, walk: Walk) -> None:
    from tests.kernels.cuts_kernel import cuts_kernel

    draw = random.Random(length)
    for chunks in (7, 64, 200):
        forget = [a_line(chunks, draw) for _ in range(40)]
        parts = -(-chunks // length) + 2  # one begins beyond the end
        begins = torch.zeros(len(forget), parts, dtype=torch.int32, device="cuda")
        line = torch.tensor(forget, device="cuda")
        cuts_kernel[(begins.numel(),)](line, begins, chunks, length, parts, FORGOTTEN, *walk, num_warps=8)
        assert begins.tolist() == [[piece_begin(each, part, length, walk) for part in range(parts)] for each in forget]

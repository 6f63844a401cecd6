from collections import Counter, defaultdict

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from hymo.data import Mixture
from hymo.data.mixture import apportion, permute, rank_samples, window_count

CASES = settings(max_examples=40, deadline=None, derandomize=True)
SEEDS = st.integers(-(2**70), 2**70)
TEN = Mixture((0.5, 0.14, 0.1, 0.03, 0.02, 0.08, 0.05, 0.04, 0.03, 0.01), tuple(range(3, 23, 2)), 42)


@CASES
@given(size=st.integers(1, 600), key=st.text(max_size=8))
@example(size=1, key="")
@example(size=257, key="x")
def test_a_permutation_reaches_every_number_once(size: int, key: str) -> None:
    assert sorted(permute(i, size=size, key=key) for i in range(size)) == list(range(size))


def test_a_permutation_reaches_far_beyond_32_bits() -> None:
    images = [permute(i, size=10**13, key="k") for i in range(200)]
    assert len(set(images)) == 200
    assert 4e12 < sum(images) / 200 < 6e12


@CASES
@given(seed=SEEDS, windows=st.lists(st.integers(1, 40), min_size=1, max_size=4))
def test_each_epoch_visits_every_window_once(seed: int, windows: list[int]) -> None:
    mixture = Mixture((1.0,) * len(windows), tuple(windows), seed)
    seen = defaultdict(list)
    for number in range(250):
        draw = mixture.draw(number)
        seen[draw.source, draw.epoch].append(draw.window)
    for (source, epoch), drawn in seen.items():
        assert len(set(drawn)) == len(drawn)
        if (source, epoch + 1) in seen:
            assert sorted(drawn) == list(range(windows[source]))


def test_epochs_and_seeds_differ_in_order() -> None:
    orders = {
        tuple(Mixture((1.0,), (50,), seed).draw(50 * epoch + i).window for i in range(50))
        for seed in (1, 2)
        for epoch in (0, 1, 2)
    }
    assert len(orders) == 6


def test_every_block_has_its_exact_shares() -> None:
    assert TEN.slots == (50, 14, 10, 3, 2, 8, 5, 4, 3, 1)
    for block in (0, 1, 7):
        counts = Counter(TEN.draw(100 * block + i).source for i in range(100))
        assert tuple(counts[source] for source in range(10)) == TEN.slots


@pytest.mark.parametrize(
    ("weights", "slots"),
    [
        ((0.3, 0.7), (30, 70)),
        ((0.29, 0.57, 0.14), (29, 57, 14)),
        ((0.125, 0.875), (125, 875)),
        ((1.0, 1.0, 1.0), (334, 333, 333)),
        ((2.0, 6.0), (25, 75)),
        ((1.0, 0.0), (100, 0)),
        ((1.0, 1e-5), (1_000, 0)),
        ((1.0, 3e-3), (997, 3)),
    ],
)
def test_shares_are_apportioned_by_largest_remainder(weights: tuple[float, ...], slots: tuple[int, ...]) -> None:
    assert Mixture(weights, (10,) * len(weights), 0).slots == slots


@CASES
@given(weights=st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=8), slots=st.integers(1, 1000))
def test_apportioned_slots_sum_and_are_off_by_less_than_one(weights: list[float], slots: int) -> None:
    counts = apportion(weights, slots)
    assert sum(counts) == slots
    assert all(abs(c - w * slots / sum(weights)) < 1 + 1e-6 for c, w in zip(counts, weights, strict=True))


def test_a_source_of_no_or_tiny_weight_is_drawn_never_or_seldom() -> None:
    mixture = Mixture((0.0, 1.0, 1e-9, 2e-3), (0, 5, 5, 1), 7)
    counts = Counter(mixture.draw(number).source for number in range(2_000))
    assert counts == {1: 1_996, 3: 4}
    assert mixture.shares[2] == 0


@pytest.mark.parametrize("world", [1, 2, 4, 8])
@pytest.mark.parametrize("start", [0, 37 * 64, 991])
def test_any_number_of_ranks_draws_the_same_global_order(world: int, start: int) -> None:
    resumed = Mixture(TEN.weights, TEN.windows, TEN.seed)
    drawn = [
        resumed.draw(number)
        for step in range(3)
        for rank in range(world)
        for number in rank_samples(start + 64 * step, 64 // world, rank=rank, world=world)
    ]
    assert drawn == [TEN.draw(number) for number in range(start, start + 3 * 64)]


def test_the_fingerprint_tells_mixtures_apart() -> None:
    same = Mixture((1.0, 3.0), (5, 6), 1).fingerprint
    assert same == Mixture((0.25, 0.75), (5, 6), 1).fingerprint
    others = [Mixture((1.0, 2.0), (5, 6), 1), Mixture((1.0, 3.0), (5, 7), 1), Mixture((1.0, 3.0), (5, 6), 2)]
    assert len({same, *(other.fingerprint for other in others)}) == 4


@pytest.mark.parametrize(
    ("weights", "windows", "reason"),
    [
        ((1.0,), (1, 2), "1 weights for 2 sources"),
        ((), (), "0 weights"),
        ((-0.1, 1.0), (1, 1), "at least 0"),
        ((float("nan"), 1.0), (1, 1), "finite"),
        ((0.0, 0.0), (1, 1), "not all 0"),
        ((0.5, 0.5), (3, 0), "source 1 has weight 0.5 but no whole window"),
    ],
)
def test_a_mixture_that_cannot_be_drawn_is_refused(
    weights: tuple[float, ...], windows: tuple[int, ...], reason: str
) -> None:
    with pytest.raises(ValueError, match=reason):
        Mixture(weights, windows, 0)


def test_a_rank_outside_the_world_is_refused() -> None:
    with pytest.raises(ValueError, match="rank 2 is not one of 2 ranks"):
        rank_samples(0, 4, rank=2, world=2)


@pytest.mark.parametrize(("tokens", "count"), [(0, 0), (1, 0), (8, 0), (9, 1), (16, 1), (17, 2)])
def test_windows_share_one_token_with_their_neighbour(tokens: int, count: int) -> None:
    assert window_count(tokens, 8) == count

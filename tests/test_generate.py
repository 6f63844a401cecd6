"""Generation: decoding is the forward pass, rows do not know of each other, and sampling follows its definition."""

import math
from functools import cache, partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from configs import smallest_config, tiny_config, windows
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hymo import tree
from hymo.backend import EAGER, with_compute_dtype
from hymo.batch import document_position
from hymo.config import DELIMITER, ModelConfig
from hymo.generate import Generation, advance, generate, gumbel, sample, stream
from hymo.layers.gdn import gdn, gdn_state
from hymo.layers.mla import mla, mla_state
from hymo.model import ModelParams, ModelState, forward, init_state, model_spec
from hymo.params import initialize

KINDS: dict[str, dict[str, Any]] = {
    "gated_delta": {},
    "delta": {"gdn_rule": "delta", "gdn_allow_neg_eigval": True},
    "gated_linear": {"gdn_rule": "gated_linear", "gdn_n_key_heads": 4},
    "skip_and_feed_forward": {"gdn_value_skip": True, "gdn_ffn_dim": 32, "gdn_conv": 1},
    "untied_without_rotation": {"tie_embeddings": False, "gdn_rope_fraction": 0.0},
    "attention_last": {"mla_offset": 3},
}
kinds = pytest.mark.parametrize("kind", KINDS)
few = settings(max_examples=8, deadline=None)
seeds = st.integers(0, 2**16)


@cache
def model(kind: str = "gated_delta", **changes: Any) -> tuple[ModelConfig, ModelParams]:
    cfg = tiny_config(model=KINDS[kind] | changes).model
    return cfg, initialize(model_spec(cfg), 0)


def continued(kind: str, tokens: Tensor, cuts: list[int]) -> tuple[Tensor, ModelState]:
    """Logits and state after `tokens`, given in the pieces between `cuts`."""
    cfg, params = model(kind)
    state, logits = init_state(cfg, tokens.shape[0], tokens.shape[1]), []
    bounds = [0, *sorted(cuts), tokens.shape[1]]
    for start, end in pairwise(bounds):
        if end > start:
            piece, after = forward(params, tokens[:, start:end], cfg=cfg, state=state)
            assert after is not None
            state = after
            logits.append(piece)
    return torch.cat(logits, dim=1), state


@kinds
def test_decoding_token_by_token_equals_one_forward_pass(kind: str) -> None:
    cfg, params = model(kind)
    tokens = windows(1, 2, 24, document=9)
    logits, _ = continued(kind, tokens, list(range(24)))
    torch.testing.assert_close(logits, forward(params, tokens, cfg=cfg)[0], atol=1e-4, rtol=0)


@kinds
@pytest.mark.parametrize("layer", [0, 3])
def test_each_layer_decodes_token_by_token_as_in_one_pass(kind: str, layer: int) -> None:
    cfg, params = model(kind)
    x = torch.randn(2, 24, cfg.dim, generator=torch.Generator().manual_seed(3))
    position = document_position(windows(2, 2, 24, document=9))
    is_mla = layer in cfg.mla_layers
    run: Any = partial(mla if is_mla else gdn, params.blocks[layer].mixer, cfg=cfg)
    on = {"dtype": torch.float32, "device": torch.device("cpu")}
    state: Any = mla_state(cfg, 2, 24, **on) if is_mla else gdn_state(cfg, 2, **on)
    outputs = []
    for t in range(24):
        y, state = run(x[:, t : t + 1], position=position[:, t : t + 1], state=state)
        outputs.append(y)
    torch.testing.assert_close(torch.cat(outputs, dim=1), run(x, position=position)[0], atol=1e-5, rtol=1e-4)


@kinds
@few
@given(cuts=st.lists(st.integers(0, 33), max_size=4), seed=seeds)
def test_a_prompt_split_anywhere_gives_the_same_state(kind: str, cuts: list[int], seed: int) -> None:
    tokens = windows(seed, 2, 33, document=10)
    torch.testing.assert_close(continued(kind, tokens, cuts), continued(kind, tokens, []), atol=1e-5, rtol=1e-4)


@kinds
@few
@given(length=st.integers(1, 30), seed=seeds)
def test_a_packed_document_equals_itself_alone(kind: str, length: int, seed: int) -> None:
    cfg, params = model(kind)
    first, second = windows(seed, 1, 30), windows(seed + 1, 1, length, document=10**9)
    second = torch.cat([torch.full((1, 1), DELIMITER), second], dim=1)
    packed, _ = forward(params, torch.cat([first, second], dim=1), cfg=cfg)
    alone, _ = forward(params, second, cfg=cfg)
    torch.testing.assert_close(packed[:, 30:], alone, atol=1e-5, rtol=1e-4)


def prompt(seed: int, length: int) -> list[int]:
    tokens: list[int] = windows(seed, length, document=8).tolist()
    return tokens


@pytest.mark.parametrize(
    ("kind", "temperature"),
    [("gated_delta", 0.0), ("gated_delta", 1.0), ("delta", 1.0), ("gated_linear", 1.0), ("skip_and_feed_forward", 1.0)],
)
def test_rows_of_a_ragged_batch_equal_their_single_runs(kind: str, temperature: float) -> None:
    cfg, params = model(kind)
    prompts = [prompt(1, 3), [], prompt(2, 30), [DELIMITER, 7, 7]]
    make = partial(generate, params, cfg=cfg, max_new_tokens=8, temperature=temperature, top_p=0.95)
    together = make(prompts, seeds=[5, 6, 7, 8])
    alone = [make([each], seeds=[seed])[0] for each, seed in zip(prompts, [5, 6, 7, 8], strict=True)]
    assert [each.ids for each in together] == [each.ids for each in alone]
    assert [each.finish_reason for each in together] == [each.finish_reason for each in alone]
    for one, other in zip(together, alone, strict=True):
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-4)


@settings(max_examples=3, deadline=None)
@given(seed=seeds, order=st.permutations([0, 1, 2]))
def test_a_text_follows_its_seed_wherever_it_stands_in_the_batch(seed: int, order: list[int]) -> None:
    cfg, params = model()
    prompts, own = [prompt(seed, 2), prompt(seed + 1, 9), prompt(seed + 2, 5)], [seed, 3, seed]
    make = partial(generate, params, cfg=cfg, max_new_tokens=5)
    expected = make(prompts, seeds=own)
    moved = make([prompts[i] for i in order], seeds=[own[i] for i in order])
    assert [each.ids for each in moved] == [expected[i].ids for i in order]


def test_equal_prompts_differ_by_their_seeds() -> None:
    cfg, params = model()
    first, second, again = generate(params, [[5, 6]] * 3, cfg=cfg, max_new_tokens=6, seeds=[0, 1, 0])
    assert first.ids == again.ids
    assert first.ids != second.ids


def test_a_generation_goes_on_where_it_was_cut() -> None:
    cfg, params = model()
    make = partial(generate, params, cfg=cfg, seeds=[4], suppressed=[DELIMITER])
    (whole,) = make([[9, 8]], max_new_tokens=16)
    (start,) = make([[9, 8]], max_new_tokens=6)
    (rest,) = make([[9, 8, *start.ids]], max_new_tokens=10)
    assert start.ids + rest.ids == whole.ids


def test_a_prompt_is_opened_by_one_delimiter() -> None:
    cfg, params = model()
    bare, opened = (generate(params, [p], cfg=cfg, max_new_tokens=8) for p in ([3, 4], [DELIMITER, 3, 4]))
    assert bare == opened
    (nothing,), (only,) = (generate(params, [p], cfg=cfg, max_new_tokens=8) for p in ([], [DELIMITER]))
    assert nothing == only


def test_greedy_decoding_is_the_argmax_of_the_forward_pass_and_logprobs_are_its() -> None:
    cfg, params = model()
    (made,) = generate(params, [[3, 4, 5]], cfg=cfg, max_new_tokens=12, temperature=0.0, stop_ids=[])
    tokens = torch.tensor([[DELIMITER, 3, 4, 5, *made.ids]])
    log_p = forward(params, tokens, cfg=cfg)[0].log_softmax(-1)[0, 3:-1]
    assert log_p.argmax(-1).tolist() == made.ids
    assert log_p.gather(-1, torch.tensor(made.ids)[:, None])[:, 0].tolist() == pytest.approx(made.logprobs, abs=1e-4)


def test_a_stream_brings_each_unfinished_row_one_token_a_step() -> None:
    cfg, params = model()
    options: dict[str, Any] = {"cfg": cfg, "max_new_tokens": 6, "seeds": [1, 2]}
    made = generate(params, [[3], [4, 5]], **options)
    steps = list(stream(params, [[3], [4, 5]], **options))
    for row, each in enumerate(made):
        assert [new.id for step in steps for new in step if new.row == row] == each.ids
        assert [new.finish_reason for step in steps for new in step if new.row == row] == [None] * 5 + ["length"]


def test_a_stop_id_ends_its_row_alone_and_is_not_part_of_the_text() -> None:
    cfg, params = model()
    free = generate(params, [[3], [4, 5]], cfg=cfg, max_new_tokens=10, seeds=[1, 2])
    stop = free[0].ids[4]
    assert stop not in free[0].ids[:4] + free[1].ids
    stopped, other = generate(params, [[3], [4, 5]], cfg=cfg, max_new_tokens=10, seeds=[1, 2], stop_ids=[stop])
    assert stopped == Generation(free[0].ids[:4], free[0].logprobs[:4], "stop")
    assert other.ids == free[1].ids
    assert other.finish_reason == "length"


def test_the_delimiter_stops_by_default() -> None:
    cfg, params = model()
    suppressed = range(1, cfg.vocab_size)
    assert generate(params, [[3]], cfg=cfg, max_new_tokens=10, suppressed=suppressed) == [Generation([], [], "stop")]


@settings(max_examples=3, deadline=None)
@given(seed=seeds, temperature=st.sampled_from([0.0, 1.0, 100.0]))
def test_suppressed_ids_are_never_drawn(seed: int, temperature: float) -> None:
    cfg, params = model()
    allowed = torch.randperm(cfg.vocab_size, generator=torch.Generator().manual_seed(seed))[:3].tolist()
    suppressed = [i for i in range(cfg.vocab_size) if i not in allowed]
    made = generate(
        params,
        [[3], [4]],
        cfg=cfg,
        max_new_tokens=4,
        temperature=temperature,
        stop_ids=[],
        suppressed=suppressed,
        seeds=[seed, seed + 1],
    )
    assert {i for each in made for i in each.ids} <= set(allowed)


def test_the_last_position_of_the_context_can_be_used() -> None:
    cfg, params = model()
    (made,) = generate(params, [prompt(0, cfg.max_seq_len - 3)], cfg=cfg, max_new_tokens=2, stop_ids=[])
    assert len(made.ids) == 2


def test_a_compiled_decoding_step_makes_the_same_text() -> None:
    cfg = smallest_config().model
    params = initialize(model_spec(cfg), 0)
    make = partial(generate, params, [[3, 4], [5]], cfg=cfg, max_new_tokens=6)
    assert [each.ids for each in make(compile="aot_eager")] == [each.ids for each in make()]


def test_a_narrow_compute_dtype_changes_logprobs_by_its_rounding_only() -> None:
    cfg, params = model()
    half = with_compute_dtype(EAGER, torch.bfloat16)
    tokens = torch.tensor([[DELIMITER, 3, 4, 5]])
    (made,) = generate(params, [[3, 4, 5]], cfg=cfg, backend=half, max_new_tokens=1, stop_ids=[])
    exact = forward(params, tokens, cfg=cfg)[0][0, -1].log_softmax(-1)
    assert made.logprobs == pytest.approx([exact[made.ids[0]].item()], abs=0.05)


@kinds
@pytest.mark.parametrize("computed", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
def test_a_state_of_any_dtype_continues_and_keeps_its_dtype(
    kind: str, computed: torch.dtype, stored: torch.dtype
) -> None:
    cfg, params = model(kind)
    tokens = windows(3, 2, 9)
    state, logits = init_state(cfg, 2, 9, dtype=stored), []
    before = [leaf.dtype for leaf in tree.leaves(state)]
    for piece in tokens.split([4, 1, 4], dim=1):
        made, after = forward(params, piece, cfg=cfg, backend=with_compute_dtype(EAGER, computed), state=state)
        assert after is not None
        state = after
        logits.append(made)
        assert [leaf.dtype for leaf in tree.leaves(state)] == before
    exact = forward(params, tokens, cfg=cfg)[0]
    # A rounding may choose another expert.
    assert (torch.cat(logits, dim=1) - exact).norm() < 0.2 * exact.norm()


def test_prompts_are_lists_or_tensors_of_ids() -> None:
    cfg, params = model()
    lists = generate(params, [[3, 4], [5, 6]], cfg=cfg, max_new_tokens=3)
    for prompts in (torch.tensor([[3, 4], [5, 6]]), [torch.tensor([3, 4]), (5, 6)], iter([[3, 4], [5, 6]])):
        assert generate(params, prompts, cfg=cfg, max_new_tokens=3) == lists


def test_no_prompts_make_no_text() -> None:
    cfg, params = model()
    assert generate(params, [], cfg=cfg, max_new_tokens=3) == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": -0.1}, r"temperature: expected 0 .* or more, got -0.1"),
        ({"temperature": math.nan}, r"temperature: .* got nan"),
        ({"top_k": 0}, r"top_k: expected at least 1, .* got 0"),
        ({"top_p": 0.0}, r"top_p: expected a probability in \(0, 1\], .* got 0.0"),
        ({"top_p": 1.5}, r"top_p: .* got 1.5"),
        ({"min_p": -0.5}, r"min_p: expected a fraction in \[0, 1\], .* got -0.5"),
        ({"max_new_tokens": 0}, r"max_new_tokens: expected at least 1, got 0"),
        ({"max_new_tokens": 62}, r"prompt 0: 3 tokens .* and 62 new ones exceed max_seq_len 64; 61 new ones would fit"),
        ({"prompts": [[1], [2, 512]]}, r"prompt 1: id 512 at 1 is not in 0 to 511"),
        ({"prompts": "ab"}, r"prompt 0: expected a list or a 1-D tensor of ids, .* got str 'a'"),
        ({"prompts": [b"ab"]}, r"prompt 0: expected a list or a 1-D tensor of ids, .* got bytes b'ab'"),
        ({"prompts": [1, 2]}, r"prompt 0: expected a list or a 1-D tensor of ids, .* got int 1"),
        ({"prompts": [[1], ["a"]]}, r"prompt 1: expected a list or a 1-D tensor of ids, .* got list \['a'\]"),
        (
            {"prompts": [torch.zeros(2)]},
            r"prompt 0: expected a list or a 1-D tensor of ids, .* got Tensor \[0.0, 0.0\]",
        ),
        ({"prompts": torch.zeros(1, 2, 3).long()}, r"prompt 0: expected a list or a 1-D tensor of ids, .* got Tensor"),
        ({"prompts": [[-1]]}, r"prompt 0: id -1 at 0 is not in 0 to 511"),
        ({"seeds": [1, 2]}, r"seeds: expected one for each of 1 prompts, got 2"),
        ({"stop_ids": [512]}, r"stop_ids: id 512 at 0 is not in 0 to 511"),
        ({"suppressed": [-1]}, r"suppressed: id -1 at 0 is not in 0 to 511"),
        ({"suppressed": range(512)}, r"suppressed: all 512 ids are; leave at least one"),
    ],
)
def test_what_is_asked_wrongly_is_said_before_the_first_step(options: dict[str, Any], message: str) -> None:
    cfg, params = model()
    given_options = {"prompts": [[3, 4]], "max_new_tokens": 2} | options
    with pytest.raises(ValueError, match=message):
        stream(params, given_options.pop("prompts"), cfg=cfg, **given_options)


def test_advance_gives_the_logits_after_the_last_token() -> None:
    cfg, params = model()
    tokens = windows(0, 2, 9)
    _, logits = advance(init_state(cfg, 2, 9), params, tokens, cfg=cfg)
    torch.testing.assert_close(logits, forward(params, tokens, cfg=cfg)[0][:, -1], atol=1e-5, rtol=1e-5)


def kept_by_definition(logits: Tensor, temperature: float, top_k: int | None, top_p: float, min_p: float) -> set[int]:
    """Which ids may be drawn from one row of logits, filter after filter, in Python."""
    p = [math.exp((x - logits.max().item()) / temperature) for x in logits.tolist()]
    order = sorted(range(len(p)), key=lambda i: (-logits[i].item(), i))
    order = order[:top_k]
    total = sum(p[i] for i in order)
    kept, mass = [], 0.0
    for i in order:
        if mass / total >= top_p:
            break
        kept.append(i)
        mass += p[i]
    return {i for n, i in enumerate(kept) if n == 0 or (p[i] > 0 and p[i] >= min_p * p[order[0]])}


@settings(max_examples=150, deadline=None)
@given(
    vocab=st.integers(1, 40),
    spread=st.sampled_from([0.0, 0.1, 2.0, 30.0]),
    temperature=st.sampled_from([1e-6, 0.3, 1.0, 7.0]),
    top_k=st.none() | st.integers(1, 50),
    top_p=st.sampled_from([1e-9, 0.1, 0.5, 0.9, 0.999, 1.0]),
    min_p=st.sampled_from([0.0, 0.01, 0.3, 1.0]),
    seed=seeds,
)
def test_filters_keep_what_their_definition_keeps(
    vocab: int, spread: float, temperature: float, top_k: int | None, top_p: float, min_p: float, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = spread * torch.randn(vocab, generator=generator, dtype=torch.float64)
    kept = kept_by_definition(logits, temperature, top_k, top_p, min_p)
    # Noise that favours one id above all others draws it exactly if it was kept.
    noise = 1e9 * torch.eye(vocab, dtype=torch.float64)
    options: dict[str, Any] = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
    drawn = sample(logits.expand(vocab, -1), noise, **options)
    assert {i for i in range(vocab) if drawn[i] == i} == kept


@given(seed=seeds, top_k=st.integers(16, 10**6))
@few
def test_filters_that_keep_all_change_nothing(seed: int, top_k: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits, noise = torch.randn(2, 5, 16, generator=generator)
    noise = noise.double()
    assert torch.equal(sample(logits, noise, top_k=top_k, top_p=1.0, min_p=0.0), (logits.double() + noise).argmax(-1))


@given(seed=seeds)
@few
def test_temperature_zero_takes_the_largest_logit(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits, noise = torch.randn(2, 5, 16, generator=generator)
    assert torch.equal(sample(logits, noise.double() * 100, temperature=0.0), logits.argmax(-1))


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [0.4, 0.3, 0.2, 0.1]),
        ({"temperature": 0.5}, [16 / 30, 9 / 30, 4 / 30, 1 / 30]),
        ({"top_k": 2}, [4 / 7, 3 / 7, 0, 0]),
        ({"top_p": 0.75}, [4 / 9, 3 / 9, 2 / 9, 0]),
        ({"min_p": 0.6}, [4 / 7, 3 / 7, 0, 0]),
        ({"temperature": 2.0, "top_k": 3, "top_p": 0.5}, [2 / (2 + 3**0.5), 3**0.5 / (2 + 3**0.5), 0, 0]),
    ],
)
def test_tokens_are_drawn_as_often_as_their_probability_says(options: dict[str, Any], expected: list[float]) -> None:
    draws = 4000
    logits = torch.tensor([0.4, 0.3, 0.2, 0.1]).log().expand(draws, -1)
    noise = torch.stack([gumbel(seed, 7, 4) for seed in range(draws)])
    counts = torch.bincount(sample(logits, noise, **options), minlength=4)
    chi_square = 0.0
    for count, p in zip(counts.tolist(), expected, strict=True):
        if p == 0:
            assert count == 0
        else:
            chi_square += (count - draws * p) ** 2 / (draws * p)
    # The 99.9 % point of chi-square with 3 degrees of freedom.
    assert chi_square < 16.3


def test_noise_is_standard_gumbel_and_differs_by_seed_and_position() -> None:
    noise = gumbel(0, 0, 20_000)
    assert noise.mean().item() == pytest.approx(0.5772, abs=0.03)
    assert noise.std().item() == pytest.approx(math.pi / 6**0.5, abs=0.03)
    assert torch.equal(noise, gumbel(0, 0, 20_000))
    for other in (gumbel(0, 1, 20_000), gumbel(1, 0, 20_000)):
        assert abs(torch.corrcoef(torch.stack([noise, other]))[0, 1].item()) < 0.03

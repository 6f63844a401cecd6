"""Text from a model: one forward pass over the prompts, then one token of every sequence at a time.

What a sequence becomes depends on its prompt, its seed and the options, never on the sequences beside it: shorter
prompts are filled up on the left with delimiters, each a document of its own that nothing behind it can see, and the
randomness of a token is a hash of the sequence's seed and the token's position.
"""

import functools
import hashlib
import reprlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple, ParamSpec

import torch
from jaxtyping import Float, Int
from torch import Tensor

from hymo.backend import EAGER, Backend, keep
from hymo.config import DELIMITER, ModelConfig
from hymo.graph import Compile
from hymo.jit import jit
from hymo.layers.embedding import unembed
from hymo.layers.norm import rms_norm
from hymo.model import ModelParams, ModelState, gather_ends, head_table, hidden_states, init_state, model_spec

P = ParamSpec("P")
FinishReason = Literal["stop", "length"]


class NewToken(NamedTuple):
    """One token that was just made.

    Args:
        row: number of its sequence.
        id: of the token; a stop id is not part of the text.
        logprob: its natural log-probability under the model itself, before temperature and filters.
        finish_reason: why it is its sequence's last, or None.
    """

    row: int
    id: int
    logprob: float
    finish_reason: FinishReason | None


class Generation(NamedTuple):
    """One finished sequence.

    Args:
        ids: the new tokens, without prompt and stop id.
        logprobs: of each, as in `NewToken`.
        finish_reason: `stop` for a stop id, `length` for `max_new_tokens`.
    """

    ids: list[int]
    logprobs: list[float]
    finish_reason: FinishReason


def sample(
    logits: Float[Tensor, "b u"],
    noise: Float[Tensor, "b u"],
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float = 1.0,
    min_p: float = 0.0,
) -> Int[Tensor, " b"]:
    """One token of each row: the largest of `logits / temperature + noise` among those that the filters keep.

    With Gumbel noise that is a draw from the softmax  (arXiv:1411.0030). A rounding error in the logits changes it only
    where the two largest sums all but tie, so a text hardly depends on how a matrix product is split; a draw by the
    cumulative distribution would change a thousand times as often.

    Args:
        logits: in nats; -inf is never drawn, and one of a row must be finite.
        noise: independent standard Gumbel variables.
        temperature: 0 takes the largest logit, whatever the noise.
        top_k: how many tokens stay; None, or as many as there are, keeps all.
        top_p: the fewest tokens whose probability reaches it stay, in (0, 1]; after temperature and top_k.
        min_p: tokens less probable than this times the most probable one go, in [0, 1].
    """
    if temperature == 0:
        return logits.argmax(-1)
    ranked, token = logits.double().sort(dim=-1, descending=True, stable=True)
    # The largest is 0 before the division, so that a tiny temperature cannot overflow.
    ranked = (ranked - ranked[:, :1]) / temperature
    rank = torch.arange(ranked.shape[-1], device=ranked.device)
    if top_k is not None:
        ranked = ranked.masked_fill(rank >= top_k, -torch.inf)
    p = torch.softmax(ranked, dim=-1)
    goes = p < min_p * p[:, :1]
    if top_p < 1:
        goes = goes | (p.cumsum(-1) - p >= top_p)
    # Rounding may not take the most probable token too.
    ranked = ranked.masked_fill(goes & (rank > 0), -torch.inf)
    place = (ranked + noise.gather(-1, token)).argmax(-1, keepdim=True)
    return token.gather(-1, place)[:, 0]


def gumbel(seed: int, position: int, size: int) -> Float[Tensor, " {size}"]:
    """The noise that decides the token at `position` of the sequence with `seed`; from the CPU, for any device."""
    digest = hashlib.blake2b(f"{seed}/{position}".encode(), digest_size=8).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
    # Doubles: in single precision a large value would be rounded away, and 0 is drawn once in 2**24.
    return -torch.log(-torch.log(torch.rand(size, generator=generator, dtype=torch.float64)))


def advance(
    state: ModelState, params: ModelParams, tokens: Int[Tensor, "b t"], *, cfg: ModelConfig, backend: Backend = EAGER
) -> tuple[ModelState, Float[Tensor, "b {cfg.vocab_size}"]]:
    """The state after `tokens` and the logits of the token after them: prefill, and with t = 1 a decoding step."""
    hidden, after = hidden_states(params, tokens, cfg=cfg, backend=backend, state=state)
    assert after is not None
    ends = gather_ends(params, cfg=cfg, backend=backend)
    last = rms_norm(hidden[:, -1], ends.norm, eps=cfg.norm_eps)
    return after, unembed(last, head_table(ends), cap=cfg.logit_softcap)


def stream(
    params: ModelParams,
    prompts: Iterable[Any],
    *,
    cfg: ModelConfig,
    backend: Backend = EAGER,
    max_new_tokens: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float = 1.0,
    min_p: float = 0.0,
    stop_ids: Sequence[int] = (DELIMITER,),
    suppressed: Sequence[int] = (),
    seeds: Sequence[int] | None = None,
    compile: Compile = "none",
) -> Iterator[tuple[NewToken, ...]]:
    """The new token of every unfinished sequence, step by step, until all are finished.

    Args:
        prompts: ids of each sequence, a list or a 1-D tensor; a delimiter is put before those that do not begin with
            one.
        max_new_tokens: of each sequence, a stop id included.
        temperature, top_k, top_p, min_p: as in `sample`.
        stop_ids: ids that end a sequence.
        suppressed: ids that are never drawn (`ExtendedTokenizer.suppressed_ids`).
        seeds: one for each sequence; row i has seed i by default. A generation continued with the same seed, its text
            appended to its prompt, goes on as it would have.
        compile: of the decoding step, as in `hymo.jit.jit`.

    Raises:
        ValueError: for a wrong option, a prompt that is no list of ids, an id that is not in the vocabulary, or a
            prompt that leaves no room for `max_new_tokens` in `cfg.max_seq_len`. Raised at the call, before the first
            step.
    """
    asked = [_ids(prompt, row) for row, prompt in enumerate(prompts)]
    seeds = range(len(asked)) if seeds is None else seeds
    _check_options(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    for row, prompt in enumerate(asked):
        _check_ids(f"prompt {row}", prompt, cfg=cfg)
    _check_ids("stop_ids", stop_ids, cfg=cfg)
    _check_ids("suppressed", suppressed, cfg=cfg)
    if len(set(suppressed)) == cfg.vocab_size:
        raise ValueError(f"suppressed: all {cfg.vocab_size} ids are; leave at least one to draw")
    if len(seeds) != len(asked):
        raise ValueError(f"seeds: expected one for each of {len(asked)} prompts, got {len(seeds)}")
    opened = [prompt if prompt[:1] == [DELIMITER] else [DELIMITER, *prompt] for prompt in asked]
    _check_lengths(opened, max_new_tokens=max_new_tokens, cfg=cfg)
    choose = partial(sample, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    decode = _compiled_decode(cfg, backend._replace(gather=keep), compile)

    def steps() -> Iterator[tuple[NewToken, ...]]:
        # Weights are brought to where and what layers want them once, not at every token.
        weights = backend.gather(params, model_spec(cfg))
        device, longest = weights.table.device, max(map(len, opened))
        never = torch.tensor(tuple(suppressed), dtype=torch.int64, device=device)
        tokens = torch.tensor([[DELIMITER] * (longest - len(prompt)) + prompt for prompt in opened], device=device)
        state = init_state(cfg, len(opened), longest + max_new_tokens, dtype=weights.table.dtype, device=device)
        with torch.no_grad():
            state, logits = advance(state, weights, tokens, cfg=cfg, backend=backend._replace(gather=keep))

        running = set(range(len(opened)))
        for step in range(max_new_tokens):
            places = [(seed, len(prompt) + step) for seed, prompt in zip(seeds, opened, strict=True)]
            noise = torch.stack([gumbel(*place, cfg.vocab_size) for place in places]).to(device)
            drawn = choose(logits.index_fill(-1, never, -torch.inf), noise)
            logprob = torch.log_softmax(logits, dim=-1).gather(-1, drawn[:, None])[:, 0]
            length: FinishReason | None = "length" if step + 1 == max_new_tokens else None
            news = tuple(
                NewToken(row, i, value, "stop" if i in stop_ids else length)
                for row, (i, value) in enumerate(zip(drawn.tolist(), logprob.tolist(), strict=True))
                if row in running
            )
            running -= {new.row for new in news if new.finish_reason}
            yield news
            if not running:
                return
            state, logits = decode(state, weights, drawn[:, None])

    return steps() if opened else iter(())


def _collected(stream: Callable[P, Iterator[tuple[NewToken, ...]]]) -> Callable[P, list[Generation]]:
    @functools.wraps(stream)
    def generate(*arguments: P.args, **options: P.kwargs) -> list[Generation]:
        made: dict[int, list[NewToken]] = defaultdict(list)
        for step in stream(*arguments, **options):
            for new in step:
                made[new.row].append(new)
        return [_finished(made[row]) for row in sorted(made)]

    generate.__name__ = generate.__qualname__ = "generate"
    generate.__doc__ = "A continuation of every prompt: what `stream` yields, collected; arguments and errors are its."
    return generate


generate = _collected(stream)


def _finished(tokens: list[NewToken]) -> Generation:
    reason = tokens[-1].finish_reason
    assert reason is not None
    text = tokens[:-1] if reason == "stop" else tokens
    return Generation([new.id for new in text], [new.logprob for new in text], reason)


@functools.lru_cache(maxsize=4)
def _compiled_decode(cfg: ModelConfig, backend: Backend, compile: Compile) -> Callable[..., tuple[ModelState, Tensor]]:
    """One compiled step for all generations; the state's storage is reused, a finished row's tokens lead nowhere."""
    decode = jit(partial(advance, cfg=cfg, backend=backend), compile=compile, donate=True)
    return decode


def _check_options(*, temperature: float, top_k: int | None, top_p: float, min_p: float) -> None:
    if not 0 <= temperature < float("inf"):
        raise ValueError(f"temperature: expected 0 (the most probable token) or more, got {temperature}")
    if top_k is not None and top_k < 1:
        raise ValueError(f"top_k: expected at least 1, or None for all tokens, got {top_k}")
    if not 0 < top_p <= 1:
        raise ValueError(f"top_p: expected a probability in (0, 1], 1 for all tokens, got {top_p}")
    if not 0 <= min_p <= 1:
        raise ValueError(f"min_p: expected a fraction in [0, 1], 0 for all tokens, got {min_p}")


def _ids(prompt: Any, row: int) -> list[int]:
    ids = prompt.tolist() if isinstance(prompt, Tensor) else prompt
    if not isinstance(ids, Sequence) or isinstance(ids, str | bytes) or not all(type(i) is int for i in ids):
        raise ValueError(
            f"prompt {row}: expected a list or a 1-D tensor of ids, such as tokenizer.encode(text);"
            f" got {type(prompt).__name__} {reprlib.repr(ids)}"
        )
    return list(ids)


def _check_ids(name: str, ids: Sequence[int], *, cfg: ModelConfig) -> None:
    for place, i in enumerate(ids):
        if not 0 <= i < cfg.vocab_size:
            raise ValueError(f"{name}: id {i} at {place} is not in 0 to {cfg.vocab_size - 1}")


def _check_lengths(prompts: Sequence[Sequence[int]], *, max_new_tokens: int, cfg: ModelConfig) -> None:
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens: expected at least 1, got {max_new_tokens}")
    for row, prompt in enumerate(prompts):
        if len(prompt) + max_new_tokens > cfg.max_seq_len:
            raise ValueError(
                f"prompt {row}: {len(prompt)} tokens (the delimiter that opens it included) and {max_new_tokens} new "
                f"ones exceed max_seq_len {cfg.max_seq_len}; {max(0, cfg.max_seq_len - len(prompt))} new ones would fit"
            )

"""`HyMo`: a model in one value, new or from a run, for those who like `model(tokens)`. It owns no mathematics."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from hymo.backend import EAGER, Backend, choose_backend, inline
from hymo.checkpoint import find_latest, load_params, read_meta
from hymo.config import HyMoConfig, ModelConfig
from hymo.config_yaml import load_config
from hymo.data import ExtendedTokenizer
from hymo.layers.embedding import softcap, unembed
from hymo.layers.norm import rms_norm
from hymo.model import ModelParams, forward, gather_ends, head_table, hidden_states, init_state, model_spec
from hymo.params import ROLES, count, initialize
from hymo.run_folder import CHECKPOINTS, CONFIG, TOKENIZER


@dataclass(frozen=True, eq=False)
class HyMo:
    """A configuration, parameters and a backend together.

    Args:
        config: the network's.
        params: its parameters; `dataclasses.replace(model, params=...)` is the model with others.
        backend: what computes it.
    """

    config: ModelConfig
    params: ModelParams
    backend: Backend = EAGER

    def __call__(self, tokens: Int[Tensor, "b t"]) -> Float[Tensor, "b t {self.config.vocab_size}"]:
        """Softcapped logits of the token after each, in nats (`hymo.model.forward`).

        Raises:
            ValueError: if an id is not in the vocabulary; inside a transformation or a compiled graph none can be read.
        """
        self._check(tokens)
        return forward(self.params, tokens, cfg=self.config, backend=self.backend)[0]

    def forward_with_hidden(
        self, tokens: Int[Tensor, "b t"], start_pos: int = 0
    ) -> tuple[Float[Tensor, "b t {self.config.vocab_size}"], Float[Tensor, "b t {self.config.dim}"]]:
        """Softcapped logits, and the hidden states that final norm, head and MTP heads read.

        Args:
            start_pos: position of each row's first token in its document, unless that is a delimiter. Nothing before it
                is seen, and rotary angles are relative, so that it changes no more than roundings.

        Raises:
            ValueError: if `start_pos` is negative, or for an id as in a call.
        """
        self._check(tokens)
        if start_pos < 0:
            raise ValueError(f"forward_with_hidden: expected a start_pos of 0 or more, got {start_pos}")
        state = None
        if start_pos:
            empty = init_state(self.config, *tokens.shape, dtype=self.params.table.dtype, device=tokens.device)
            state = empty._replace(position=empty.position + start_pos)
        hidden, _ = hidden_states(self.params, tokens, cfg=self.config, backend=self.backend, state=state)
        ends = gather_ends(self.params, cfg=self.config, backend=self.backend)
        normed = rms_norm(hidden, ends.norm, eps=self.config.norm_eps)
        return unembed(normed, head_table(ends), cap=self.config.logit_softcap), hidden

    def _check(self, tokens: Int[Tensor, "b t"]) -> None:
        if torch.compiler.is_compiling() or torch._C._functorch.is_functorch_wrapped_tensor(tokens):
            return
        outside = tokens[(tokens < 0) | (tokens >= self.config.vocab_size)]
        if outside.numel():
            raise ValueError(f"tokens: id {outside[0].item()} is not in 0 to {self.config.vocab_size - 1}")

    def softcap(self, logits: Float[Tensor, "*b u"]) -> Float[Tensor, "*b u"]:
        """`logit_softcap * tanh(logits / logit_softcap)`."""
        return softcap(logits, self.config.logit_softcap)

    def num_parameters(self, only_trainable: bool = False) -> int:
        """How many numbers the model has, a tied table counted once; buffers (router balance) are not trained."""
        spec = model_spec(self.config)
        return count(spec) if only_trainable else count(spec, *ROLES)


def build_hymo(config: HyMoConfig, *, seed: int | None = None, device: torch.device | str = "cpu") -> HyMo:
    """A new model, computed as `training.backend` and `training.precision` say.

    Args:
        seed: of the initial weights; `training.seed` by default.

    Raises:
        ValueError: if the backend is not available on the device.
    """
    backend = _backend(config, device)
    seed = config.training.seed if seed is None else seed
    params = initialize(model_spec(config.model), seed, device=device)
    return HyMo(config.model, params, backend)


class Run(NamedTuple):
    """What a run's folder holds: the model at its newest checkpoint, and what goes with it."""

    model: HyMo
    config: HyMoConfig
    tokenizer: ExtendedTokenizer
    step: int


def open_run(folder: str | Path, overrides: Iterable[str] = (), *, device: torch.device | str = "cpu") -> Run:
    """The newest complete checkpoint of a run.

    Args:
        overrides: `section.key=value`, on top of the run's config.yaml.

    Raises:
        ValueError: if the folder is no run, has no complete checkpoint, or its parts do not fit together.
    """
    root = Path(folder)
    if not (root / CONFIG).is_file():
        what = f"holds no {CONFIG}" if root.is_dir() else "is no folder"
        raise ValueError(f"run {root}: {what}; give the folder that recipes/pretrain.py printed, such as runs/tiny-1")
    config, tokenizer = load_config(root / CONFIG, overrides), ExtendedTokenizer.load(root / TOKENIZER)
    if tokenizer.vocab_size != config.model.vocab_size:
        raise ValueError(
            f"run {root}: {TOKENIZER} has {tokenizer.vocab_size} ids, model.vocab_size is {config.model.vocab_size}"
        )
    checkpoint = find_latest(root / CHECKPOINTS)
    if checkpoint is None:
        raise ValueError(f"run {root}: no complete checkpoint yet; training.save_interval says when there is one")
    params = load_params(checkpoint, model_spec(config.model), device=device)
    model = HyMo(config.model, params, _backend(config, device))
    return Run(model, config, tokenizer, read_meta(checkpoint).step)


def _backend(config: HyMoConfig, device: torch.device | str) -> Backend:
    """That of training, without a compilation for every length of text that is asked about."""
    return choose_backend(config.training, device)._replace(region=inline)

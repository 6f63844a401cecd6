"""Small models that have every kind of layer, and the data and states that tests run them on."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hymo.backend import EAGER, Backend
from hymo.batch import Batch, make_batch
from hymo.config import DELIMITER, HyMoConfig, derive_config
from hymo.jit import jit
from hymo.model import ModelParams, model_spec
from hymo.optim import GradientTransform, build_optimizer
from hymo.params import initialize
from hymo.step import Metrics, TrainState, init_train_state, train_step

MODEL = {
    "vocab_size": 512,
    "max_seq_len": 64,
    "n_layers": 4,
    "dim": 32,
    "n_heads": 4,
    "n_kv_groups": 2,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "gdn_n_heads": 4,
    "gdn_n_key_heads": 2,
    "gdn_key_dim": 16,
    "gdn_value_dim": 8,
    "n_routed_experts": 4,
    "moe_inter_dim": 32,
    "mtp_inter_dim": 32,
}
TRAINING = {"max_seq_len": 64, "micro_batch_size": 2, "gradient_accumulation_steps": 2, "precision": "float32"}


def tiny_config(**changes: Any) -> HyMoConfig:
    """MLA with experts, then three GDN layers, and two MTP heads, 32 wide; `changes` as in `derive_config`."""
    config = derive_config(
        HyMoConfig(), model=MODEL, training=TRAINING, scheduler={"total_steps": 100}, data={"val_tokens": 4096}
    )
    return derive_config(config, **changes)


def smallest_config(**changes: Any) -> HyMoConfig:
    """One layer of each kind and one MTP head: what a whole step compiles fastest with."""
    model = {"n_layers": 2, "mla_every": 2, "mtp_depth": 1, "mtp_loss_weights": [0.3], "max_seq_len": 32}
    return derive_config(tiny_config(model=model, training={"max_seq_len": 32}), **changes)


def windows(seed: int, *shape: int, vocab: int = 512, document: int = 20) -> Tensor:
    """Uniform tokens; one in `document` is a delimiter."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(1, vocab, shape, generator=generator)
    return tokens.masked_fill(torch.rand(shape, generator=generator) < 1 / document, DELIMITER)


def micro_batches(cfg: HyMoConfig, seed: int) -> Batch:
    """The batch of one step: (micro-batches, rows, tokens)."""
    shape = cfg.training.gradient_accumulation_steps, cfg.training.micro_batch_size, cfg.training.max_seq_len + 1
    return make_batch(windows(seed, *shape, vocab=cfg.model.vocab_size))


class Setup(NamedTuple):
    """What a step is made of."""

    cfg: HyMoConfig
    spec: ModelParams
    optimizer: GradientTransform

    def state(self, seed: int = 0, *, backend: Backend = EAGER) -> TrainState:
        """The state before the first step."""
        params = initialize(self.spec, seed)
        return init_train_state(params, spec=self.spec, optimizer=self.optimizer, backend=backend)

    def pure(self, backend: Backend = EAGER) -> Callable[[TrainState, Batch], tuple[TrainState, Metrics]]:
        """The step as a pure function of state and batch."""
        return partial(train_step, cfg=self.cfg, spec=self.spec, optimizer=self.optimizer, backend=backend)

    def step(self, compile: Any = "none", *, donate: bool = False, backend: Backend = EAGER) -> Callable[..., Any]:
        """The step as `jit` makes it."""
        return jit(self.pure(backend), compile=compile, donate=donate)


def setup(cfg: HyMoConfig) -> Setup:
    """Specs and optimiser of a configuration."""
    spec = model_spec(cfg.model)
    return Setup(cfg, spec, build_optimizer(cfg.optimizer, cfg.scheduler, spec))

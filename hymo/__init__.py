"""hymo: pre-training of hybrid linear-attention language models, in pure functions on torch.func."""

from hymo import data, layers, optim, tree
from hymo.backend import EAGER, Backend, with_compute_dtype
from hymo.batch import Batch, make_batch
from hymo.checkpoint import load_checkpoint, load_params, save_checkpoint
from hymo.config import (
    DataConfig,
    HyMoConfig,
    ModelConfig,
    OptimizerConfig,
    RunConfig,
    SchedulerConfig,
    SourceConfig,
    TrainingConfig,
    derive_config,
)
from hymo.config_yaml import load_config, load_config_from_dict, to_yaml
from hymo.evaluate import Evaluation, compute_validation_loss, get_val_batch
from hymo.export import export_model, open_export
from hymo.generate import generate, stream
from hymo.handle import HyMo, build_hymo, open_run
from hymo.jit import jit
from hymo.loss import loss, token_nats
from hymo.model import ModelParams, ModelState, forward, init_state, model_spec
from hymo.optim import build_optimizer
from hymo.params import initialize
from hymo.step import Metrics, TrainState, gradients, init_train_state, train_step
from hymo.trainer import Trainer

__all__ = [
    "EAGER",
    "Backend",
    "Batch",
    "DataConfig",
    "Evaluation",
    "HyMo",
    "HyMoConfig",
    "Metrics",
    "ModelConfig",
    "ModelParams",
    "ModelState",
    "OptimizerConfig",
    "RunConfig",
    "SchedulerConfig",
    "SourceConfig",
    "TrainState",
    "Trainer",
    "TrainingConfig",
    "build_hymo",
    "build_optimizer",
    "compute_validation_loss",
    "data",
    "derive_config",
    "export_model",
    "forward",
    "generate",
    "get_val_batch",
    "gradients",
    "init_state",
    "init_train_state",
    "initialize",
    "jit",
    "layers",
    "load_checkpoint",
    "load_config",
    "load_config_from_dict",
    "load_params",
    "loss",
    "make_batch",
    "model_spec",
    "open_export",
    "open_run",
    "optim",
    "save_checkpoint",
    "stream",
    "to_yaml",
    "token_nats",
    "train_step",
    "tree",
    "with_compute_dtype",
]

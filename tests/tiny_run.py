"""A text, its shards and a configuration small enough to train in a second."""

import random
from pathlib import Path
from typing import Any

from configs import smallest_config

from hymo.config import HyMoConfig
from hymo.data import prepare_corpus
from hymo.run_data import RunData, open_run_data
from hymo.trainer import Trainer

WORDS = (
    "the",
    "a",
    "model",
    "state",
    "token",
    "learns",
    "reads",
    "writes",
    "and",
    "of",
    "in",
    "every",
    "memory",
    "head",
)


def text(seed: int, words: int = 300) -> str:
    """Words without a meaning, the same for a seed."""
    return " ".join(random.Random(seed).choices(WORDS, k=words)) + ".\n"


def prepare(folder: Path, *, vocab_size: int = 256) -> Path:
    """A prepared folder of two sources with `vocab_size` + 256 ids."""
    sources = {"prose": [text(i) for i in range(12)], "code": [text(i) for i in range(100, 112)]}
    return prepare_corpus(folder, sources, vocab_size=vocab_size, val_bytes=2000).directory


def run_config(prepared: Path, **changes: Any) -> HyMoConfig:
    """Six steps on a prepared folder; `changes` are keys by section."""
    sources = [{"name": "prose", "weight": 0.5}, {"name": "code", "weight": 0.5}]
    common = {
        "training": {"compile": "none", "log_interval": 1, "save_interval": 2, "eval_interval": 3, "sharding": "none"},
        "optimizer": {"adamw_lr": 3e-3},
        "scheduler": {"total_steps": 6},
        "data": {"folder": str(prepared), "sources": sources, "val_tokens": 128},
        "run": {"name": "trial"},
    }
    both = {name: {**common.get(name, {}), **changes.get(name, {})} for name in {*common, *changes}}
    return smallest_config(**both)


def open_trainer(config: HyMoConfig, folder: Path, data: RunData | None = None) -> Trainer:
    """A trainer in `folder`, on the CPU."""
    folder.mkdir(exist_ok=True)
    return Trainer(config, data=data or open_run_data(config, folder), folder=folder)

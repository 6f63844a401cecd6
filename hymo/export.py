"""A model outside its run: safetensors, config.json and the tokenizer, in one folder that others can read.

    model.safetensors       every parameter and buffer under its dotted name; a tied table is there once
    config.json             the network's configuration, and what the folder is
    tokenizer.json          opens in transformers' AutoTokenizer, with
    tokenizer_config.json
    README.md               what it is, for people

Weights are stored (in, out): a layer is `x @ w`.
"""

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from hymo import tree
from hymo.backend import EAGER, Backend
from hymo.config import ModelConfig
from hymo.data import ExtendedTokenizer
from hymo.data.record import expect_format, expect_keys, read_json
from hymo.data.tokenizer import SPECIALS
from hymo.handle import HyMo
from hymo.model import model_spec
from hymo.params import COMPUTE_ROLES, is_spec
from hymo.run_folder import TOKENIZER
from hymo.section import build

WEIGHTS, DESCRIPTION, TOKENIZER_SETTINGS, CARD = (
    "model.safetensors",
    "config.json",
    "tokenizer_config.json",
    "README.md",
)
_FORMAT = 1


class Exported(NamedTuple):
    """What an exported folder holds."""

    model: HyMo
    tokenizer: ExtendedTokenizer
    step: int


def export_model(
    folder: str | Path,
    model: HyMo,
    *,
    tokenizer: ExtendedTokenizer,
    step: int,
    dtype: torch.dtype = torch.float32,
    notes: str = "",
) -> Path:
    """Writes a model as a new folder, whole or not at all.

    Args:
        step: of training, recorded.
        dtype: of matrices, experts and embeddings; gates, vectors and buffers stay fp32. Only fp32 gives the same
            logits to the bit.
        notes: Markdown for the card.

    Raises:
        ValueError: if the folder is there already, or tokenizer and model do not fit.
        OSError: if it cannot be written.
    """
    target = Path(folder)
    if target.exists():
        raise ValueError(f"export {target}: it is there already; give a new folder")
    if tokenizer.vocab_size != model.config.vocab_size:
        raise ValueError(
            f"export {target}: the tokenizer has {tokenizer.vocab_size} ids, the model {model.config.vocab_size}"
        )
    partial = target.with_name(f"{target.name}.{os.getpid()}.partial")
    partial.mkdir(parents=True)
    try:
        leaves = tree.paths(tree.map(lambda leaf, kind: leaf.to(kind), model.params, _dtypes(model.config, dtype)))
        try:
            save_file({name: leaf.detach().cpu().contiguous() for name, leaf in leaves.items()}, partial / WEIGHTS)
        except SafetensorError as error:
            raise OSError(f"export {target}: {WEIGHTS} cannot be written ({error})") from None
        (partial / DESCRIPTION).write_text(json.dumps(_description(model.config, step, dtype), indent=1) + "\n")
        tokenizer.save(partial / TOKENIZER)
        settings = _tokenizer_settings(model.config)
        (partial / TOKENIZER_SETTINGS).write_text(json.dumps(settings, indent=1) + "\n")
        (partial / CARD).write_text(_card(model, step, notes), encoding="utf-8")
        partial.rename(target)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return target


def open_export(folder: str | Path, *, backend: Backend = EAGER, device: torch.device | str = "cpu") -> Exported:
    """The model of an exported folder, with fp32 parameters.

    Raises:
        ValueError: if it is no such folder, or naming the first parameter that is missing, unknown or of another shape.
    """
    root = Path(folder)
    description = _read_description(root)
    try:
        config = build(ModelConfig, description["model"])
    except ValueError as error:
        raise ValueError(f"export {root}: {DESCRIPTION} does not fit: {'; '.join(str(error).splitlines())}") from None
    spec = model_spec(config)
    wanted = tree.paths(spec, is_leaf=is_spec)
    try:
        with safe_open(root / WEIGHTS, framework="pt", device=str(device)) as file:
            _check_names(root, set(file.keys()), wanted)
            leaves = {name: file.get_tensor(name) for name in wanted}
    except (OSError, SafetensorError) as error:
        raise ValueError(f"export {root}: {WEIGHTS} cannot be read ({error})") from None
    for name, leaf in leaves.items():
        if tuple(leaf.shape) != wanted[name].shape:
            raise ValueError(
                f"export {root}: {name} has shape {list(leaf.shape)}, the configuration asks for"
                f" {list(wanted[name].shape)}"
            )
    _, structure = tree.flatten(tree.map(lambda leaf: 0, spec, is_leaf=is_spec))
    params = tree.unflatten([leaf.float() for leaf in leaves.values()], structure)
    tokenizer = ExtendedTokenizer.load(root / TOKENIZER)
    if tokenizer.vocab_size != config.vocab_size:
        raise ValueError(f"export {root}: {TOKENIZER} has {tokenizer.vocab_size} ids, the model {config.vocab_size}")
    return Exported(HyMo(config, params, backend), tokenizer, description["step"])


def _dtypes(config: ModelConfig, dtype: torch.dtype) -> Any:
    """The stored type of each parameter."""
    return tree.map(
        lambda each: dtype if each.role in COMPUTE_ROLES else torch.float32, model_spec(config), is_leaf=is_spec
    )


def _description(config: ModelConfig, step: int, dtype: torch.dtype) -> dict[str, Any]:
    return {
        "model_type": "hymo",
        "architectures": ["HyMo"],
        "format": _FORMAT,
        "step": step,
        "torch_dtype": str(dtype).removeprefix("torch."),
        "vocab_size": config.vocab_size,
        "bos_token_id": 0,
        "eos_token_id": 0,
        "pad_token_id": SPECIALS.index("<|pad|>"),
        "model": asdict(config),
    }


def _tokenizer_settings(config: ModelConfig) -> dict[str, Any]:
    end, begin, pad, unknown, mask = SPECIALS
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": config.max_seq_len,
        # Spaces before punctuation are text.
        "clean_up_tokenization_spaces": False,
        # A special's name in a text is text too.
        "split_special_tokens": True,
        "eos_token": end,
        "bos_token": begin,
        "pad_token": pad,
        "unk_token": unknown,
        "mask_token": mask,
    }


def _card(model: HyMo, step: int, notes: str) -> str:
    return f"""\
# A hymo model

{model.num_parameters(only_trainable=True):,} trained parameters, {model.config.n_layers} layers, vocabulary \
{model.config.vocab_size:,}, context {model.config.max_seq_len:,}; step {step}.

```python
from hymo.export import open_export

model, tokenizer, step = open_export(".")
```

A text begins with `<|endoftext|>` (id 0) and ends with it. The tokenizer also opens with transformers' `AutoTokenizer`.
{notes}"""


def _read_description(root: Path) -> dict[str, Any]:
    try:
        content = read_json(root / DESCRIPTION)
        expect_format(_FORMAT, content, DESCRIPTION)
        return expect_keys({"step": int, "model": dict}, content, DESCRIPTION)
    except FileNotFoundError:
        raise ValueError(f"export {root}: no {DESCRIPTION} there; recipes/export.py writes one") from None
    except OSError as error:
        raise ValueError(f"export {root}: {DESCRIPTION} cannot be read ({error.strerror})") from None
    except ValueError as error:
        raise ValueError(f"export {root}: {DESCRIPTION} is none of hymo's ({error})") from None


def _check_names(root: Path, found: set[str], wanted: Mapping[str, Any]) -> None:
    for name in wanted:
        if name not in found:
            raise ValueError(f"export {root}: {name} is missing; the configuration asks for it")
    for name in sorted(found - set(wanted)):
        raise ValueError(f"export {root}: {name} is unknown to the configuration")

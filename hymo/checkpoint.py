"""Checkpoints: a whole training state by dotted path, published whole or not at all.

    checkpoints/step_00000050/   meta.json and what torch.distributed.checkpoint writes
    checkpoints/latest           the name of the newest

A checkpoint is written beside its place, made durable, and renamed; `latest` moves then, and older ones go last. So a
folder called `step_...` is complete, and one that was cut short afterwards is told by the sizes in its meta.json.
"""

import json
import os
import re
import shutil
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from hymo import tree
from hymo.config import HyMoConfig
from hymo.params import is_spec
from hymo.section import build
from hymo.step import TrainState

T = TypeVar("T")

FORMAT = 1
META = "meta.json"
LATEST = "latest"
_NAME = re.compile(r"step_(\d{8,})")

# What a continued run may not change: all else is read from the state or only decides how fast it goes.
_FIXED = ("model", "optimizer", "training.seed", "training.max_seq_len")


class Provenance(NamedTuple):
    """What a state was made with: a run that continues it must be the same in these.

    Args:
        config: of the run, resolved.
        tokenizer: fingerprint of the tokenizer.
        data: fingerprint of the loader: which tokens sample n is, for every n.
    """

    config: HyMoConfig
    tokenizer: str
    data: str


class CheckpointMeta(NamedTuple):
    """What meta.json says: where training stood, and what it was made with."""

    step: int
    samples: int
    provenance: Provenance
    versions: Mapping[str, str]


def save_checkpoint(folder: str | Path, state: TrainState, *, meta: Provenance, keep_last: int = 2) -> Path:
    """Publishes `state` in `folder` and returns its place; older checkpoints but for `keep_last - 1` are removed.

    Raises:
        ValueError: if a parameter or a moment is not finite, named; nothing is written then.
    """
    leaves, step = tree.paths(state), int(state.step)
    for name, leaf in leaves.items():
        if leaf.is_floating_point() and not bool(leaf.isfinite().all()):
            raise ValueError(f"checkpoint of step {step}: {name} is not finite; the last good checkpoint is kept")
    root = Path(folder)
    root.mkdir(parents=True, exist_ok=True)
    target = root / f"step_{step:08d}"
    partial = _aside(target)
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    with _single_process():
        save(leaves, storage_writer=FileSystemWriter(partial, sync_files=True), no_dist=True)
    record = {
        "format": FORMAT,
        "step": step,
        "samples": int(state.samples),
        "tokenizer": meta.tokenizer,
        "data": meta.data,
        "config": asdict(meta.config),
        "versions": versions(),
        "files": {path.name: path.stat().st_size for path in sorted(partial.iterdir())},
    }
    _write_durably(partial / META, json.dumps(record, indent=1) + "\n")
    _sync_folder(partial)
    # A run that was set back comes by the same step again.
    _remove(target)
    partial.rename(target)
    _sync_folder(root)
    pointer = _aside(root / LATEST)
    _write_durably(pointer, target.name + "\n")
    os.replace(pointer, root / LATEST)
    _sync_folder(root)
    others = [path for path in _published(root) if path != target]
    for path in others[keep_last - 1 :]:
        _remove(path)
    for path in root.glob(".*.partial"):
        shutil.rmtree(path, ignore_errors=True)
    return target


def find_latest(folder: str | Path) -> Path | None:
    """The complete checkpoint that `latest` names, else the newest complete one, else None."""
    root = Path(folder)
    pointer = root / LATEST
    named = [root / pointer.read_text(encoding="utf-8").strip()] if pointer.is_file() else []
    candidates = [path for path in (*named, *_published(root)) if _NAME.fullmatch(path.name)]
    return next((path for path in candidates if _is_complete(path)), None)


def read_meta(path: str | Path) -> CheckpointMeta:
    """What the checkpoint at `path` says of itself.

    Raises:
        ValueError: if it is missing, cut short, or of another format.
    """
    record = _read_record(Path(path))
    provenance = Provenance(build(HyMoConfig, record["config"]), record["tokenizer"], record["data"])
    return CheckpointMeta(record["step"], record["samples"], provenance, record["versions"])


def load_checkpoint(path: str | Path, state: T) -> T:
    """The state stored at `path`, in new tensors with the structure, dtypes and devices of `state`.

    Raises:
        ValueError: if the checkpoint is not complete, or naming the first leaf that is missing, unknown, or of another
            shape or dtype than in `state`.
    """
    return _load(Path(path), tree.map(torch.empty_like, state), prefix="")


def load_params(path: str | Path, spec: T, *, device: torch.device | str = "cpu") -> T:
    """The parameters and buffers stored at `path`, without moments and counters, as `spec` declares them.

    Raises:
        ValueError: like `load_checkpoint`.
    """
    empty: T = tree.map(lambda leaf: torch.empty(leaf.shape, device=device), spec, is_leaf=is_spec)
    return _load(Path(path), empty, prefix="params.")


def check_continues(path: str | Path, run: Provenance) -> CheckpointMeta:
    """The meta of the checkpoint that `run` is to go on from.

    Raises:
        ValueError: if it was made with another model, optimiser, seed, row length, tokenizer or data; both are named.
    """
    meta = read_meta(path)
    stored, asked = _fixed_keys(meta.provenance.config), _fixed_keys(run.config)
    stored |= {"tokenizer": meta.provenance.tokenizer, "data": meta.provenance.data}
    asked |= {"tokenizer": run.tokenizer, "data": run.data}
    for name, value in stored.items():
        if asked[name] != value:
            raise ValueError(
                f"checkpoint {Path(path)}: made with {name} {value}, this run has {asked[name]};"
                " continue with the same, or begin a new run"
            )
    return meta


def versions() -> dict[str, str]:
    """Versions of what decides numbers: hymo and torch."""
    try:
        hymo = metadata.version("hymo")
    except metadata.PackageNotFoundError:
        hymo = "source"
    return {"hymo": hymo, "torch": torch.__version__}


def _load(path: Path, target: T, *, prefix: str) -> T:
    _read_record(path)
    leaves: dict[str, Tensor] = {prefix + name: leaf for name, leaf in tree.paths(target).items()}
    reader = FileSystemReader(path)
    stored = {
        name: entry for name, entry in reader.read_metadata().state_dict_metadata.items() if name.startswith(prefix)
    }
    for name, leaf in leaves.items():
        if name not in stored:
            raise ValueError(f"checkpoint {path}: {name} is missing; the configuration asks for {list(leaf.shape)}")
    for name, entry in stored.items():
        if name not in leaves:
            raise ValueError(f"checkpoint {path}: {name} is unknown to the configuration")
        _check_leaf(path, name, entry, leaves[name])
    with _single_process():
        load(leaves, storage_reader=reader, no_dist=True)
    return target


def _check_leaf(path: Path, name: str, entry: Any, leaf: Tensor) -> None:
    if not isinstance(entry, TensorStorageMetadata):
        raise ValueError(f"checkpoint {path}: {name} is no tensor")
    found, asked = list(entry.size), list(leaf.shape)
    if found != asked:
        raise ValueError(f"checkpoint {path}: {name} has shape {found}, the configuration asks for {asked}")
    if entry.properties.dtype != leaf.dtype:
        raise ValueError(f"checkpoint {path}: {name} is {entry.properties.dtype}, expected {leaf.dtype}")


def _fixed_keys(config: HyMoConfig) -> dict[str, Any]:
    """The keys that a continued run keeps, by dotted name."""
    keys = {f"{section}.{key}": value for section, each in asdict(config).items() for key, value in each.items()}
    return {name: value for name, value in keys.items() if name in _FIXED or name.split(".")[0] in _FIXED}


def _read_record(path: Path) -> dict[str, Any]:
    try:
        record: dict[str, Any] = json.loads((path / META).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"checkpoint {path}: no {META} there; a complete checkpoint has one") from None
    except (OSError, ValueError) as error:
        raise ValueError(f"checkpoint {path}: its {META} cannot be read ({error})") from None
    if record.get("format") != FORMAT:
        raise ValueError(f"checkpoint {path}: format {record.get('format')!r}, this version reads {FORMAT}")
    for name, size in record["files"].items():
        found = (path / name).stat().st_size if (path / name).is_file() else None
        if found != size:
            raise ValueError(f"checkpoint {path}: {name} has {found} bytes, {size} expected; it is not complete")
    return record


def _is_complete(path: Path) -> bool:
    try:
        _read_record(path)
    except ValueError:
        return False
    return True


def _published(root: Path) -> list[Path]:
    """Checkpoint folders, the newest first."""
    found = [path for path in root.glob("step_*") if _NAME.fullmatch(path.name)]
    return sorted(found, key=lambda path: -int(path.name.removeprefix("step_")))


def _aside(path: Path) -> Path:
    """Where `path` is made or taken apart: a name that never counts."""
    return path.with_name(f".{path.name}.partial")


def _remove(path: Path) -> None:
    """Takes a checkpoint away; at no moment is a part of it under its name."""
    aside = _aside(path).with_suffix(".removed.partial")
    if path.exists():
        shutil.rmtree(aside, ignore_errors=True)
        path.rename(aside)
        shutil.rmtree(aside, ignore_errors=True)


def _write_durably(path: Path, text: str) -> None:
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def _single_process() -> Iterator[None]:
    # torch.distributed.checkpoint warns that it assumes a single process even when it is told so.
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield

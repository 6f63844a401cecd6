"""Checkpoints: a whole training state by dotted path, published whole or not at all.

    checkpoints/step_00000050/   meta.json and what torch.distributed.checkpoint writes
    checkpoints/latest           the name of the newest

A checkpoint is written beside its place, made durable, and renamed; `latest` moves then, and older ones go last. So a
folder called `step_...` is complete. One that was cut short afterwards is told by the sizes in its meta.json and never
counts; one whose bytes were changed is told by their sha256 there, when it is loaded.

Of several ranks each writes its part, into one folder that all must see. Leaves are stored whole under their paths, so
any number of ranks, and one process without any, load what any other number has saved.
"""

import hashlib
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
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.tensor import DTensor

from hymo import tree
from hymo.config import HyMoConfig
from hymo.data.record import expect, expect_format, expect_keys, read_json
from hymo.distributed import ALONE, Ranks
from hymo.params import is_spec
from hymo.section import build
from hymo.step import TrainState

T = TypeVar("T")

FORMAT = 1
META = "meta.json"
METADATA = ".metadata"
LATEST = "latest"
_NAME = re.compile(r"step_(\d{8,})")
_META_KEYS = {
    "step": int,
    "samples": int,
    "rows": int,
    "run": str,
    "tokenizer": str,
    "data": str,
    "config": dict,
    "versions": dict,
    "files": dict,
    "sha256": dict,
}
_REMEDY = "move that folder away to use the checkpoint before it"

# What a continued run may not change: all else is read from the state or only decides how fast it goes.
_FIXED = ("model", "optimizer", "training.seed", "training.max_seq_len")


class Provenance(NamedTuple):
    """What a state was made with: a run that continues it must be the same in these.

    Args:
        config: of the run, resolved.
        tokenizer: fingerprint of the tokenizer.
        data: fingerprint of the loader: which tokens sample n is, for every n.
        run: name of the run that no other has; not compared.
    """

    config: HyMoConfig
    tokenizer: str
    data: str
    run: str = ""


class Damaged(ValueError):
    """A checkpoint is not what was written: the one before it may be."""


class CheckpointMeta(NamedTuple):
    """What meta.json says: where training stood, how many rows its steps had, and what it was made with."""

    step: int
    samples: int
    rows: int
    provenance: Provenance
    versions: Mapping[str, str]


def save_checkpoint(
    folder: str | Path,
    state: TrainState,
    *,
    meta: Provenance,
    keep_last: int = 2,
    keep_every: int | None = None,
    ranks: Ranks = ALONE,
) -> Path:
    """Publishes `state` in `folder` and returns its place; of complete ones `keep_last` are kept, this one included.

    Args:
        state: of several ranks, with what they share as DTensors (`hymo.sharding.whole_views`).
        keep_every: those at multiples of so many steps are kept as well.
        ranks: which all call this; what fails on one of them fails on all.

    Raises:
        ValueError: if a parameter or a moment is not finite, named; nothing is written then.
        OSError: if it cannot be written; what there was stays, and no half of the new one.
    """
    leaves, step = tree.paths(state), int(state.step)
    ranks.together(lambda: _require_finite(leaves, step), group=ranks.saving)
    root = Path(folder)
    target = root / folder_name(step)
    partial = _aside(target)

    def begin() -> None:
        root.mkdir(parents=True, exist_ok=True)
        _delete(partial)
        partial.mkdir()

    def write() -> dict[str, tuple[int, str]]:
        with _plain_errors(partial):
            writer = FileSystemWriter(partial, sync_files=True)
            save(leaves, storage_writer=writer, process_group=ranks.saving, no_dist=ranks.world == 1)
        own = [path for path in partial.iterdir() if _writer_of(path) == ranks.rank]
        return {path.name: (path.stat().st_size, _sha256(path)) for path in own}

    def publish(written: Mapping[str, tuple[int, str]]) -> None:
        record = {
            "format": FORMAT,
            "step": step,
            "samples": int(state.samples),
            "rows": meta.config.training.rows_per_step(ranks.world),
            "run": meta.run,
            "tokenizer": meta.tokenizer,
            "data": meta.data,
            "config": asdict(meta.config),
            "versions": versions(),
            "files": {name: size for name, (size, _) in sorted(written.items())},
            "sha256": {name: digest for name, (_, digest) in sorted(written.items())},
        }
        _write_durably(partial / META, json.dumps(record, indent=1) + "\n")
        _sync_folder(partial)
        _move(partial, target)
        with _published_whole(root / LATEST) as pointer:
            _write_durably(pointer, target.name + "\n")
        _remove_older(root, target, keep_last=keep_last, keep_every=keep_every)

    try:
        ranks.led(begin, group=ranks.saving)
        parts = ranks.everywhere(ranks.together(write, group=ranks.saving), group=ranks.saving)
        ranks.led(lambda: publish({name: each for part in parts for name, each in part.items()}), group=ranks.saving)
    except Exception:
        if ranks.is_lead:
            _delete(partial)
        raise
    return target


def folder_name(step: int) -> str:
    """What the checkpoint after a step is called."""
    return f"step_{step:08d}"


def candidates(folder: str | Path) -> list[Path]:
    """The checkpoints to go on from, complete or not, the best first: what `latest` names, then the newest."""
    root = Path(folder)
    named = _named_latest(root)
    return named + [path for path in _newest_first(root) if path not in named]


def find_latest(folder: str | Path) -> Path | None:
    """The first of the candidates that is complete, or None."""
    return next((path for path in candidates(folder) if _is_complete(path)), None)


def read_meta(path: str | Path) -> CheckpointMeta:
    """What the checkpoint at `path` says of itself.

    Raises:
        ValueError: if it is missing, cut short, or of another format.
    """
    record = _read_record(Path(path))
    try:
        config = build(HyMoConfig, record["config"])
    except ValueError as error:
        problems = "; ".join(str(error).splitlines())
        raise ValueError(f"checkpoint {path}: its {META} has a config that does not fit: {problems}") from None
    provenance = Provenance(config, record["tokenizer"], record["data"], record["run"])
    return CheckpointMeta(record["step"], record["samples"], record["rows"], provenance, record["versions"])


def load_checkpoint(path: str | Path, state: T, *, ranks: Ranks = ALONE) -> T:
    """The state stored at `path`, in new tensors with the structure, dtypes and devices of `state`.

    Args:
        ranks: which all call this, with `state` as in `save_checkpoint`; how many had saved it does not matter.

    Raises:
        ValueError: if the checkpoint is not complete or was changed, or naming the first leaf that is missing, unknown,
            or of another shape or dtype than in `state`.
    """
    return _load(Path(path), tree.map(torch.zeros_like, state), prefix="", ranks=ranks)


def load_params(path: str | Path, spec: T, *, device: torch.device | str = "cpu") -> T:
    """The parameters and buffers stored at `path`, without moments and counters, as `spec` declares them.

    Raises:
        ValueError: like `load_checkpoint`.
    """
    empty: T = tree.map(lambda leaf: torch.empty(leaf.shape, device=device), spec, is_leaf=is_spec)
    return _load(Path(path), empty, prefix="params.", ranks=ALONE)


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


def _load(path: Path, target: T, *, prefix: str, ranks: Ranks) -> T:
    leaves: dict[str, Tensor] = {prefix + name: leaf for name, leaf in tree.paths(target).items()}

    def check() -> FileSystemReader:
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
        return reader

    # First, by all: what was changed cannot be read, and each rank has looked at its share of the files only.
    ranks.together(lambda: _check_content(path, ranks))
    reader = ranks.together(check)
    with _plain_errors(path):
        load(leaves, storage_reader=reader, process_group=ranks.saving, no_dist=ranks.world == 1)
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
        content = read_json(path / META)
        expect_format(FORMAT, content, META)
        record = expect_keys(_META_KEYS, content, META)
        expect(int, record["files"].get(METADATA), f"{META}.files.{METADATA}")
    except FileNotFoundError:
        raise Damaged(f"checkpoint {path}: no {META} there; a complete checkpoint has one") from None
    except OSError as error:
        raise Damaged(f"checkpoint {path}: its {META} cannot be read ({error.strerror})") from None
    except ValueError as error:
        raise Damaged(f"checkpoint {path}: its {META} cannot be read ({error}); {_REMEDY}") from None
    for name, size in record["files"].items():
        found = (path / name).stat().st_size if (path / name).is_file() else None
        if found != size:
            raise Damaged(f"checkpoint {path}: {name} has {found} bytes, {size} expected; {_REMEDY}")
    return record


def _check_content(path: Path, ranks: Ranks) -> None:
    """Raises Damaged at the first of this rank's share of files whose bytes are not those that were written."""
    record = _read_record(path)
    for name in sorted(record["files"])[ranks.rank :: ranks.world]:
        found, written = _sha256(path / name), str(record["sha256"].get(name))
        if found != written:
            raise Damaged(
                f"checkpoint {path}: {name} is damaged, its sha256 is {found[:12]}, {written[:12]} expected; {_REMEDY}"
            )


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _is_complete(path: Path) -> bool:
    try:
        _read_record(path)
    except ValueError:
        return False
    return True


def _named_latest(root: Path) -> list[Path]:
    """What `latest` names; nothing if it cannot be read or is not there, for then the folders decide."""
    try:
        name = (root / LATEST).read_text(encoding="utf-8").strip()
    except (OSError, ValueError):
        return []
    return [root / name] if _NAME.fullmatch(name) and (root / name).is_dir() else []


def _newest_first(root: Path) -> list[Path]:
    """All checkpoint folders."""
    found = [path for path in root.glob("step_*") if _NAME.fullmatch(path.name)]
    return sorted(found, key=_step_of, reverse=True)


def _step_of(path: Path) -> int:
    return int(path.name.removeprefix("step_"))


def _aside(path: Path) -> Path:
    """Where `path` is made or taken apart: a name that never counts."""
    return path.with_name(f".{path.name}.partial")


@contextmanager
def _published_whole(target: Path) -> Iterator[Path]:
    """A place to make `target` in: moved there when the block ends, removed when it fails."""
    partial = _aside(target)
    _delete(partial)
    try:
        yield partial
        _move(partial, target)
    except Exception:
        _delete(partial)
        raise


def _move(partial: Path, target: Path) -> None:
    """Gives what is whole its name."""
    # A run that was set back comes by the same step again: what was there goes last.
    replaced = _taken_aside(target) if target.is_dir() else None
    partial.rename(target)
    _sync_folder(target.parent)
    if replaced:
        _delete(replaced)


def _remove_older(root: Path, newest: Path, *, keep_last: int, keep_every: int | None) -> None:
    """Only complete ones count, and only they and what was never finished go.

    Later ones than the newest are of before the run was set back, perhaps because they are damaged: they count last.
    """
    others = [path for path in _newest_first(root) if path != newest and _is_complete(path)]
    others.sort(key=lambda path: _step_of(path) > _step_of(newest))
    for path in others[keep_last - 1 :]:
        if keep_every is None or _step_of(path) % keep_every:
            _remove(path)
    for path in root.glob(".*.partial"):
        _delete(path)


def _require_finite(leaves: Mapping[str, Tensor], step: int) -> None:
    for name, leaf in leaves.items():
        own = leaf.to_local() if isinstance(leaf, DTensor) else leaf
        if own.is_floating_point() and not bool(own.isfinite().all()):
            raise ValueError(f"checkpoint of step {step}: {name} is not finite; the last good checkpoint is kept")


def _writer_of(path: Path) -> int:
    """The rank that wrote a file: __RANK_NUMBER.distcp, and what is of the whole by the lead."""
    found = re.match(r"__(\d+)_", path.name)
    return int(found[1]) if found else 0


def _remove(path: Path) -> None:
    """Takes a checkpoint away; at no moment is a part of it under its name."""
    _delete(_taken_aside(path))


def _taken_aside(path: Path) -> Path:
    aside = _aside(path).with_suffix(".removed.partial")
    _delete(aside)
    path.rename(aside)
    return aside


def _delete(path: Path) -> None:
    """Removes what may be there under a name that never counts."""
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


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
def _plain_errors(path: Path) -> Iterator[None]:
    """For torch.distributed.checkpoint at `path`: what goes wrong comes out as itself, the disk's part as OSError."""
    # It warns that it assumes a single process even when it is told so.
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        try:
            yield
        except CheckpointException as error:
            # No `except Exception` would catch this one, and it hides even a KeyboardInterrupt.
            first = next(cause for cause, _ in error.failures.values())
            disk = next((cause for cause in _causes(first) if isinstance(cause, OSError)), None)
            raise (OSError(disk.errno, disk.strerror, str(path)) if disk else first) from None


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """An exception, and those that it was raised from."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__

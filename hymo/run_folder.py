"""The folder of a run: where it is, what is in it, whose it is, and that a run which could not begin leaves none."""

import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import TextIO

from hymo.config import HyMoConfig, RunConfig, derive_config

if sys.platform != "win32":
    import fcntl

CONFIG = "config.yaml"
RUN = "run.json"
TOKENIZER = "tokenizer.json"
METRICS = "metrics.jsonl"
SAMPLE = "sample.txt"
REPORT = "report.html"
CHECKPOINTS = "checkpoints"
DATA = "data"
TRACKERS = "trackers"
PROFILE = "profile"
LOCK = ".lock"
REPLACED = ".replaced"
"""Where `fresh` keeps the run that is being replaced."""

_FOLDERS = {CHECKPOINTS, DATA, TRACKERS, PROFILE}
_FILES = {CONFIG, RUN, TOKENIZER, METRICS, SAMPLE, REPORT, LOCK}


def holds_run(folder: Path) -> bool:
    """Whether a run began there."""
    return (folder / CONFIG).exists() or (folder / CHECKPOINTS).exists()


def choose_folder(run: RunConfig, *, resume: bool = False, overwrite: bool = False) -> Path:
    """The folder of a run, absolute: `output_dir`, or a new one, runs/NAME-NUMBER, under the current folder.

    Raises:
        ValueError: if it cannot be used as asked; the message says what to ask for.
    """
    if run.output_dir is None:
        if resume or overwrite:
            flag = "--resume" if resume else "--overwrite"
            raise ValueError(f"{flag}: expected run.output_dir=FOLDER, the run it is meant for, got null")
        runs = Path("runs").absolute()
        return next(path for n in range(1, 10**9) if not os.path.lexists(path := runs / f"{run.name}-{n}"))
    folder = Path(os.path.realpath(run.output_dir))
    if os.path.lexists(folder) and not folder.is_dir():
        raise ValueError(f"run.output_dir: expected a folder, got {run.output_dir}, which is a file")
    if (folder / REPLACED).exists():
        raise ValueError(
            f"run.output_dir: {folder / REPLACED} holds the run that an --overwrite was to replace when it was killed;"
            f" delete it, or move what is in it back to {run.output_dir}"
        )
    if resume and not holds_run(folder):
        raise ValueError(f"--resume: {run.output_dir} holds no run; leave the flag out to begin one there")
    if holds_run(folder) and not (resume or overwrite):
        raise ValueError(
            f"run.output_dir: {run.output_dir} already holds a run; --resume goes on with it, --overwrite replaces it"
        )
    names = {path.name for path in folder.iterdir()} if folder.exists() else set()
    # What was being written when a run was killed is called NAME.partial.
    foreign = sorted(name for name in names if name.removesuffix(".partial") not in _FILES | _FOLDERS)
    if overwrite and foreign:
        raise ValueError(f"--overwrite: {run.output_dir} holds {foreign[0]}, which is not of a run; move it away first")
    for name in sorted(names & (_FILES | _FOLDERS)) if not overwrite else ():
        if (folder / name).is_dir() != (name in _FOLDERS):
            expected, found = ("folder", "file") if name in _FOLDERS else ("file", "folder")
            raise ValueError(
                f"run.output_dir: expected {folder / name} to be a {expected}, it is a {found}; move it away"
            )
    return folder


@contextmanager
def held(folder: Path, *, key: str = "run.output_dir") -> Iterator[Path]:
    """`folder`, made if it is missing, and this process's alone; if nothing was put there it is as before at the end.

    Args:
        key: of the configuration that names it.

    Raises:
        ValueError: if another process holds it.
    """
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    with ExitStack() as undo:
        for path in reversed(missing):
            path.mkdir(exist_ok=True)
            undo.callback(_remove_if_empty, path)
        lock = undo.enter_context((folder / LOCK).open("a"))
        _acquire(lock, folder, key)
        undo.callback(_remove_if_alone, folder / LOCK)
        yield folder


@contextmanager
def fresh(folder: Path) -> Iterator[None]:
    """`folder`, which is held, without the run that it may hold; if the block fails everything in it is as before."""
    aside = folder / REPLACED
    before = {*folder.iterdir(), folder / LOCK, aside}
    try:
        if holds_run(folder):
            aside.mkdir()
            for path in before - {folder / LOCK, aside}:
                path.rename(aside / path.name)
        yield
    except BaseException:
        for path in list(folder.iterdir()):
            if path not in before or os.path.lexists(aside / path.name):
                _remove(path)
        if aside.exists():
            for path in list(aside.iterdir()):
                path.rename(folder / path.name)
            aside.rmdir()
        raise
    if aside.exists():
        shutil.rmtree(aside)


def resolve(config: HyMoConfig, folder: Path) -> HyMoConfig:
    """The configuration with its paths absolute, so that what reads it later need not know where it was given."""

    def absolute(path: str | None) -> str | None:
        return path and str(Path(path).absolute())

    data = config.data
    paths = {name: absolute(getattr(data, name)) for name in ("folder", "tokenizer", "validation")}
    sources = [replace(each, shards=absolute(each.shards)) for each in data.sources]
    return derive_config(config, data={**paths, "sources": sources}, run={"output_dir": str(folder)})


def write_whole(path: Path, text: str) -> None:
    """Writes `text` at `path`, whole or not at all."""
    partial = path.with_name(f"{path.name}.partial")
    partial.write_text(text, encoding="utf-8")
    os.replace(partial, path)


def _acquire(lock: TextIO, folder: Path, key: str) -> None:
    """Locks an open file until it is closed, where the system and the file system can."""
    if sys.platform == "win32":
        return
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise ValueError(f"{key}: {folder} is in use by another process") from error
    except OSError:
        return


def _remove_if_alone(path: Path) -> None:
    with suppress(OSError):
        if list(path.parent.iterdir()) == [path]:
            path.unlink()


def _remove_if_empty(folder: Path) -> None:
    with suppress(OSError):
        folder.rmdir()


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()

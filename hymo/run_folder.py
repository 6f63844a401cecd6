"""The folder of a run: where it is, what is in it, and that a run which could not begin leaves none behind."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

from hymo.config import HyMoConfig, RunConfig, derive_config

CONFIG = "config.yaml"
RUN = "run.json"
TOKENIZER = "tokenizer.json"
METRICS = "metrics.jsonl"
SAMPLE = "sample.txt"
REPORT = "report.html"
CHECKPOINTS = "checkpoints"
DATA = "data"

_CONTENT = {CONFIG, RUN, TOKENIZER, METRICS, SAMPLE, REPORT, CHECKPOINTS, DATA}


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
    folder = Path(run.output_dir).absolute()
    if os.path.lexists(folder) and not folder.is_dir():
        raise ValueError(f"run.output_dir: expected a folder, got {run.output_dir}, which is a file")
    if resume and not holds_run(folder):
        raise ValueError(f"--resume: {run.output_dir} holds no run; leave the flag out to begin one there")
    if holds_run(folder) and not (resume or overwrite):
        raise ValueError(
            f"run.output_dir: {run.output_dir} already holds a run; --resume goes on with it, --overwrite replaces it"
        )
    if overwrite and folder.exists() and (foreign := sorted({path.name for path in folder.iterdir()} - _CONTENT)):
        raise ValueError(f"--overwrite: {run.output_dir} holds {foreign[0]}, which is not of a run; move it away first")
    return folder


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """`folder`, made, in place of a run that is there; if the block fails everything is as before."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    replaced = folder.with_name(f".{folder.name}.replaced") if holds_run(folder) else None
    if replaced:
        folder.rename(replaced)
    # A folder that appears in between belongs to another run.
    folder.mkdir(parents=True, exist_ok=folder not in missing and not replaced)
    try:
        yield folder
    except BaseException:
        if replaced or missing:
            shutil.rmtree(folder)
        if replaced:
            replaced.rename(folder)
        with suppress(OSError):
            for parent in missing[1:]:
                parent.rmdir()
        raise
    if replaced:
        shutil.rmtree(replaced)


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

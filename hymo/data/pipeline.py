"""Real corpora into a prepared folder: read and filter, leave out copies, hold out, train a tokenizer, encode.

    FOLDER/.preparing/     what is made on the way: parts by source, fates; removed at the end
    FOLDER/tokenizer.json
    FOLDER/SOURCE_train_00000.bin ...
    FOLDER/manifest.json   written last

Each stage leaves whole files behind and begins where there are none, so a preparation that was killed goes on, and what
it makes is a function of the texts and the settings: the same bytes, however often it was killed, on any number of
processes.
"""

import json
import shutil
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack
from dataclasses import asdict
from glob import glob
from multiprocessing import get_context, parent_process
from os import _exit
from pathlib import Path
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Int, UInt8
from torch import Tensor

from hymo.data.corpus import TOKENIZER, Floor, PreparedCorpus, open_prepared, order0_entropy, xz_bits_per_byte
from hymo.data.encoding import encode_documents
from hymo.data.fates import Fate, decide, source_ranges
from hymo.data.hub import count_files, read_hub, resolve_revision
from hymo.data.parts import PASSED, Part, append_numbers, map_numbers, open_part, write_part
from hymo.data.preparation import PrepareConfig, TextConfig
from hymo.data.readers import format_of, read_file
from hymo.data.record import read_json
from hymo.data.shards import MANIFEST, Manifest, Shard, find_shard, read_manifest, write_manifest, write_shard
from hymo.data.tokenizer import ExtendedTokenizer, train_bpe_tokenizer
from hymo.run_folder import held, write_whole

WORK = ".preparing"
SPLITS = {"train": Fate.TRAIN, "val": Fate.VAL}
_MADE_FROM = "made_from.json"
# Part of the identity of a prepared folder; raise it when the same texts would be prepared differently.
_RECIPE = 1


class Job(NamedTuple):
    """One part to be read: a file, or a file of a data set of the Hub."""

    source: int
    path: Path
    text: TextConfig
    file: Path | None
    revision: str
    number: int
    config: PrepareConfig


def prepare(config: PrepareConfig, *, workers: int = 1, tell: Callable[[str], None] = print) -> PreparedCorpus:
    """The prepared folder of `config`: gone on with, or reused when it is finished.

    Args:
        workers: processes that read.
        tell: takes a line for each thing that is done.

    Raises:
        ValueError: if what is asked cannot be had, the folder holds other data, or a source has too little text.
    """
    folder = Path(config.corpus.folder)
    if (folder / MANIFEST).exists():
        _check_same(folder, _identity(config, _noted(folder)), read_manifest(folder).notes.get("made_from"))
        shutil.rmtree(folder / WORK, ignore_errors=True)
        return open_prepared(folder, reused=True)
    if folder.exists() and not (folder / WORK).exists() and any(path.name != ".lock" for path in folder.iterdir()):
        raise ValueError(
            f"corpus.folder: expected a new folder, or one of this preparation, got {folder}, which is not"
        )
    with held(folder, key="corpus.folder"):
        work = folder / WORK
        made_from = _begin(config, folder)
        parts = _read(config, work, made_from, workers=workers, tell=tell)
        fates = _decide(config, parts, work)
        counts = _counts(config, parts, fates)
        for name, each in counts.items():
            tell(f"{name}: " + ", ".join(f"{reason} {count:,}" for reason, count in each.items()))
        try:
            _check_texts(config, parts, counts)
        except ValueError:
            # What was asked leads nowhere; the next try will ask something else.
            shutil.rmtree(work)
            raise
        tokenizer = _tokenizer(config, folder, parts, fates, tell)
        shards = _write(config, folder, parts, fates, tokenizer, tell)
        tell("baselines of the validation text: order-0 entropy, xz")
        notes = {
            "made_from": made_from,
            "documents": counts,
            "first": _first_places(config, parts),
            "sources": {each.name: _described(each) for each in config.corpus.sources},
            "validation": _floors(config, parts, fates),
        }
        write_manifest(folder, Manifest(tokenizer.fingerprint, tokenizer.vocab_size, shards, notes))
        shutil.rmtree(work)
    return open_prepared(folder, reused=False)


def read_job(job: Job) -> None:
    """Makes one part; in a process of its own where there are several."""
    limit = job.config.filters.max_document_bytes
    if job.file is None:
        reads = read_hub(job.text, job.revision, part=job.number, limit=limit)
    else:
        reads = read_file(job.file, job.text, limit=limit)
    write_part(job.path, reads, filters=job.config.filters, near=job.config.copies.near)


def _begin(config: PrepareConfig, folder: Path) -> dict[str, Any]:
    """What the folder is made from; begins the preparation, or checks that it is the one begun there."""
    path = folder / WORK / _MADE_FROM
    begun = read_json(path) if path.exists() else None
    made_from = _identity(config, begun or {})
    if begun is None:
        path.parent.mkdir(exist_ok=True)
        write_whole(path, json.dumps(made_from))
    else:
        _check_same(folder, made_from, begun)
    for left in folder.glob("*.tmp"):
        left.unlink()
    return made_from


def _identity(config: PrepareConfig, known: Mapping[str, Any]) -> dict[str, Any]:
    """What decides the shards: the settings, and size and time of each file or the commit of each data set."""
    settings = asdict(config)
    del settings["corpus"]
    if config.tokenizer.file:
        settings["tokenizer"]["file"] = ExtendedTokenizer.load(config.tokenizer.file).fingerprint
    settings["sources"] = {
        each.name: {key: value for key, value in asdict(each).items() if key not in ("weight", "licence", "files")}
        for each in config.corpus.sources
    }
    revisions = known.get("inputs", {})
    inputs: dict[str, Any] = {}
    for each in config.corpus.sources:
        if each.hub is not None:
            inputs[each.name] = revisions.get(each.name) or resolve_revision(each.hub)
        else:
            stats = [(path.name, path.stat()) for path in _files(each)]
            inputs[each.name] = [[name, stat.st_size, stat.st_mtime_ns] for name, stat in stats]
    # As JSON has it, so that it compares with what was read.
    made: dict[str, Any] = json.loads(json.dumps({"recipe": _RECIPE, "settings": settings, "inputs": inputs}))
    return made


def _noted(folder: Path) -> dict[str, Any]:
    made_from = read_manifest(folder).notes.get("made_from")
    return made_from if isinstance(made_from, dict) else {}


def _check_same(folder: Path, wanted: Any, found: Any) -> None:
    if wanted != found:
        where = _difference(wanted, found) or "another recipe"
        # A run that was trained on it may still need it.
        raise ValueError(
            f"corpus.folder: {folder} holds what was prepared from other texts or settings ({where} differs);"
            " give a new folder, or remove it"
        )


def _difference(one: Any, other: Any) -> str:
    """The dotted name of the first key in which two records differ."""
    if not isinstance(one, dict) or not isinstance(other, dict):
        return ""
    key = next((key for key in [*one, *other] if one.get(key) != other.get(key)), "")
    inner = _difference(one.get(key), other.get(key))
    return f"{key}.{inner}" if inner else key


def _files(source: TextConfig) -> list[Path]:
    found = sorted({path for pattern in source.files for path in glob(pattern, recursive=True)})
    files = [Path(path) for path in found if Path(path).is_file()]
    if not files:
        raise ValueError(f"corpus.sources: {source.name} has no files; {' '.join(source.files)} finds none")
    for path in files:
        format_of(path)
    return files


def _read(
    config: PrepareConfig, work: Path, made_from: Mapping[str, Any], *, workers: int, tell: Callable[[str], None]
) -> list[list[Part]]:
    """The parts of each source, as many as its `max_bytes` needs."""
    jobs: list[list[Job]] = []
    for number, source in enumerate(config.corpus.sources):
        revision = made_from["inputs"][source.name] if source.hub else ""
        files: Sequence[Path | None] = [None] * count_files(source.hub, revision) if source.hub else _files(source)
        place = work / "parts" / source.name
        jobs.append(
            [Job(number, place / f"{k:05d}", source, file, revision, k, config) for k, file in enumerate(files)]
        )
    finished = {job.path: open_part(job.path) for each in jobs for job in each if job.path.exists()}

    def needed(source: int) -> list[Part] | None:
        """The finished parts that the source needs, None if there must be more."""
        taken, size, most = [], 0, config.corpus.sources[source].max_bytes
        for job in jobs[source]:
            if most is not None and size >= most:
                break
            if job.path not in finished:
                return None
            taken.append(finished[job.path])
            size += int(taken[-1].sizes.sum())
        return taken

    def done(job: Job) -> None:
        finished[job.path] = part = open_part(job.path)
        name = f"file {job.number}" if job.file is None else job.file.name
        tell(f"read {job.text.name}: {name}, {part.counts[PASSED]:,} documents, {int(part.sizes.sum()):,} bytes")

    waiting = deque(job for each in jobs for job in each if job.path not in finished)
    _run(waiting, wanted=lambda job: needed(job.source) is None, workers=workers, done=done)
    return [needed(source) or [] for source in range(len(jobs))]


def _run(waiting: "deque[Job]", *, wanted: Callable[[Job], bool], workers: int, done: Callable[[Job], None]) -> None:
    """Does the jobs that are still wanted when their turn comes."""
    if workers == 1:
        for job in waiting:
            if wanted(job):
                read_job(job)
                done(job)
        return
    with ExitStack() as stack:
        # Forked threads of the tokenizer or of torch could hang.
        pool = ProcessPoolExecutor(workers, mp_context=get_context("spawn"), initializer=_begin_worker)
        stack.callback(pool.shutdown, cancel_futures=True)
        running: dict[Future[None], Job] = {}
        while waiting or running:
            while waiting and len(running) < workers:
                job = waiting.popleft()
                if wanted(job):
                    running[pool.submit(read_job, job)] = job
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                try:
                    future.result()
                except BrokenProcessPool:
                    raise ValueError(
                        "--workers: a process that read was killed; with fewer of them the same command goes on, if it"
                        " was for want of memory"
                    ) from None
                done(running.pop(future))


def _begin_worker() -> None:
    """One thread a process, and an end when the parent is killed: it would wait for jobs for ever."""
    torch.set_num_threads(1)
    parent = parent_process()
    assert parent is not None

    def follow() -> None:
        parent.join()
        _exit(1)

    threading.Thread(target=follow, daemon=True).start()


def _decide(config: PrepareConfig, parts: Sequence[Sequence[Part]], work: Path) -> UInt8[Tensor, " n"]:
    """The fates, kept when they were decided before."""
    path = work / "fates.u8"
    if not path.exists():
        fates = decide(
            parts,
            max_bytes=[each.max_bytes for each in config.corpus.sources],
            copies=config.copies,
            held_out=config.validation,
            work=work,
        )
        partial = path.with_suffix(".partial")
        with partial.open("wb") as file:
            append_numbers(file, fates)
        partial.rename(path)
    return map_numbers(path, torch.uint8, path.stat().st_size)


def _counts(
    config: PrepareConfig, parts: Sequence[Sequence[Part]], fates: UInt8[Tensor, " n"]
) -> dict[str, dict[str, int]]:
    """Documents by what became of them, for each source: they were read, refused by reason, and each has a fate."""
    counts: dict[str, dict[str, int]] = {}
    for source, of_source, (start, end) in zip(config.corpus.sources, parts, source_ranges(parts), strict=True):
        reasons = sorted({reason for part in of_source for reason in part.counts})
        read = {reason: sum(part.counts.get(reason, 0) for part in of_source) for reason in ("read", *reasons)}
        decided = {fate.name.lower(): int((fates[start:end] == fate).sum()) for fate in Fate}
        counts[source.name] = {**read, **decided}
    return counts


def _first_places(config: PrepareConfig, parts: Sequence[Sequence[Part]]) -> dict[str, dict[str, str]]:
    """Where each reason was met first."""
    return {
        source.name: {reason: place for part in reversed(of_source) for reason, place in part.places.items()}
        for source, of_source in zip(config.corpus.sources, parts, strict=True)
    }


def _check_texts(config: PrepareConfig, parts: Sequence[Sequence[Part]], counts: Mapping[str, Any]) -> None:
    for source, places in _first_places(config, parts).items():
        found = counts[source]
        splits = ["train", *(["val"] if config.validation.bytes else [])]
        missing = [split for split in splits if not found[split]]
        if missing:
            met = "; ".join(f"{reason} first at {place}" for reason, place in places.items())
            raise ValueError(
                f"corpus.sources: of the {found['read']} records of {source} none is left for {missing[0]}"
                f" ({', '.join(f'{reason} {count}' for reason, count in found.items() if count)}){met and '; ' + met}"
            )


def _tokenizer(
    config: PrepareConfig,
    folder: Path,
    parts: Sequence[Sequence[Part]],
    fates: UInt8[Tensor, " n"],
    tell: Callable[[str], None],
) -> ExtendedTokenizer:
    path, asked = folder / TOKENIZER, config.tokenizer
    if path.exists():
        return ExtendedTokenizer.load(path)
    if asked.file:
        tokenizer = ExtendedTokenizer.load(asked.file)
        tokenizer.save(path)
        return tokenizer
    flat = [part for source in parts for part in source]
    chosen = fates == Fate.TRAIN
    sizes, numbers = (torch.cat([getattr(part, name) for part in flat]) for name in ("sizes", "numbers"))
    total = int(sizes[chosen].sum())
    if total > asked.train_bytes:
        # The highest split numbers: an even part of each source.
        order = numbers[chosen].argsort(descending=True, stable=True)
        within = sizes[chosen][order].cumsum(0) <= asked.train_bytes
        chosen[chosen.nonzero()[:, 0][order[~within]]] = False
    tell(f"tokenizer: training {asked.vocab_size:,} + 256 ids on {int(sizes[chosen].sum()):,} bytes of {total:,}")
    return train_bpe_tokenizer(_texts(flat, chosen), vocab_size=asked.vocab_size, output_path=path)


def _texts(parts: Sequence[Part], chosen: Bool[Tensor, " n"]) -> Iterator[str]:
    """The documents of all parts that are chosen."""
    start = 0
    for part in parts:
        end = start + len(part.sizes)
        if bool(chosen[start:end].any()):
            yield from part.texts(chosen[start:end])
        start = end


def _write(
    config: PrepareConfig,
    folder: Path,
    parts: Sequence[Sequence[Part]],
    fates: UInt8[Tensor, " n"],
    tokenizer: ExtendedTokenizer,
    tell: Callable[[str], None],
) -> dict[str, dict[str, tuple[Shard, ...]]]:
    """The shards of each split of each source; those that are there are kept."""
    written: dict[str, dict[str, tuple[Shard, ...]]] = {}
    vocab_size, made_with = tokenizer.vocab_size, tokenizer.fingerprint
    for source, of_source, (start, end) in zip(config.corpus.sources, parts, source_ranges(parts), strict=True):
        written[source.name] = {}
        for split, fate in SPLITS.items():
            shards: list[Shard] = []
            sizes = torch.cat([part.sizes for part in of_source])
            unit = _units(sizes, fates[start:end] == fate, config.shards.text_bytes)
            last = int(unit.max())
            for number in range(last + 1):
                chosen = unit == number
                path = folder / f"{source.name}_{split}_{number:05d}.bin"
                size = int(sizes[chosen].sum())
                shard = find_shard(path, text_bytes=size, vocab_size=vocab_size, tokenizer=made_with)
                if shard is None:
                    shard = write_shard(
                        path,
                        encode_documents(tokenizer, _texts(of_source, chosen)),
                        vocab_size=vocab_size,
                        tokenizer=made_with,
                        first_document=sum(each.documents for each in shards),
                        ends_stream=number == last,
                    )
                    tell(f"wrote {path.name}: {shard.documents:,} documents, {shard.tokens:,} tokens, {size:,} bytes")
                shards.append(shard)
            if shards:
                written[source.name][split] = tuple(shards)
    return written


def _units(sizes: Int[Tensor, " n"], chosen: Bool[Tensor, " n"], text_bytes: int) -> Int[Tensor, " n"]:
    """The number of the shard of each chosen document, shards of about as many bytes of text; -1 for the others."""
    before = torch.where(chosen, sizes, 0).cumsum(0) - sizes
    # A document longer than a shard leaves numbers out.
    _, unit = torch.unique_consecutive(before[chosen] // text_bytes, return_inverse=True)
    units = torch.full_like(sizes, -1)
    units[chosen] = unit
    return units


def _floors(
    config: PrepareConfig, parts: Sequence[Sequence[Part]], fates: UInt8[Tensor, " n"]
) -> dict[str, dict[str, Any]]:
    """What a model has to beat on the validation text of each source, and on all of it."""
    texts = {
        source.name: "".join(_texts(of_source, fates[start:end] == Fate.VAL)).encode()
        for source, of_source, (start, end) in zip(config.corpus.sources, parts, source_ranges(parts), strict=True)
    }
    texts["all"] = b"".join(texts.values())
    return {
        name: Floor(len(text), order0_entropy(text), xz_bits_per_byte(text))._asdict()
        for name, text in texts.items()
        if text
    }


def _described(source: TextConfig) -> dict[str, Any]:
    return {"weight": source.weight, "licence": source.licence, "hub": asdict(source.hub) if source.hub else None}

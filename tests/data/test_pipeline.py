"""Texts become a prepared folder: every document once, on one side, the same bytes whatever happened on the way."""

import gzip
import json
import lzma
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from conftest import make_documents

from hymo.data import ExtendedTokenizer, PreparedCorpus, build_val_set, open_source, prepare, verify_shards
from hymo.data.pipeline import WORK
from hymo.data.preparation import PrepareConfig
from hymo.section import build

ROOT = Path(__file__).parents[2]
HOSTILE = [
    "a\0b",
    "one\r\ntwo\r",
    "x\u2028y\x85z",
    "<|endoftext|> </s> <0x41>",
    " " * 1_000_000,
    "m" * 1_000_000,
    "\ufeffa",
]
OPEN = {"max_digit_ratio": 1.0, "max_punct_ratio": 1.0, "max_whitespace_ratio": 1.0, "min_unique_chars_ratio": 0.0}


def near_copy(text: str) -> str:
    words = text.split(" ")
    return " ".join([*words[: len(words) // 2], "changed", *words[len(words) // 2 + 1 :]])


@pytest.fixture(scope="module")
def texts() -> dict[str, list[str]]:
    """Two sources; the second has five exact and five near copies from the first."""
    web = make_documents(90, seed=11, words=120)
    long = [text for text in web if len(text.split()) > 60]
    return {"web": web, "code": [*make_documents(70, seed=12), *web[:5], *map(near_copy, long[5:10])]}


@pytest.fixture(scope="module")
def inputs(texts: dict[str, list[str]], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("inputs")
    lines = {name: [json.dumps({"text": text}).encode() + b"\n" for text in each] for name, each in texts.items()}
    (folder / "web_0.jsonl.xz").write_bytes(lzma.compress(b"".join(lines["web"][:60])))
    (folder / "web_1.jsonl.gz").write_bytes(gzip.compress(b"".join(lines["web"][60:])))
    wrong = b'{"text": ""}\n{"text": "\\ud800"}\n{"text": "\xff"}\n{"body": "x"}\nnothing\n'
    (folder / "code.jsonl").write_bytes(b"".join(lines["code"]) + wrong)
    return folder


def config(inputs: Path, folder: Path, **changes: Any) -> PrepareConfig:
    sources = [
        {"name": "web", "files": [str(inputs / "web*")], "weight": 0.7, "licence": "CC0"},
        {"name": "code", "files": [str(inputs / "code*")], "weight": 0.3},
    ]
    raw: dict[str, Any] = {
        "corpus": {"folder": str(folder), "sources": sources},
        "tokenizer": {"vocab_size": 120},
        "validation": {"bytes": 600, "fraction": 0.2},
        "shards": {"text_bytes": 9_000},
        "copies": {"threshold": 0.7},
    }
    return build(PrepareConfig, {**raw, **{name: {**raw.get(name, {}), **each} for name, each in changes.items()}})


def quiet(line: str) -> None:
    """Tells nobody."""


def texts_of(prepared: PreparedCorpus, name: str, split: str) -> list[str]:
    with open_source(prepared.directory, source=name, split=split, tokenizer=prepared.tokenizer.fingerprint) as source:
        return [prepared.tokenizer.decode(source.read(*span).tolist()) for span in source.documents()]


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


@pytest.fixture(scope="module")
def prepared(inputs: Path, tmp_path_factory: pytest.TempPathFactory) -> PreparedCorpus:
    return prepare(config(inputs, tmp_path_factory.mktemp("out") / "data"), tell=quiet)


def test_every_document_is_there_once_and_on_one_side(prepared: PreparedCorpus, texts: dict[str, list[str]]) -> None:
    train, val = ({name: texts_of(prepared, name, split) for name in texts} for split in ("train", "val"))
    assert sorted(train["web"] + val["web"]) == sorted(texts["web"])
    # Copies are left to the first source.
    assert sorted(train["code"] + val["code"]) == sorted(texts["code"][:70])
    everything = [text for split in (train, val) for each in split.values() for text in each]
    assert len(set(everything)) == len(everything)
    for name in texts:
        assert sum(len(text.encode()) for text in val[name]) >= 600
    verify_shards(prepared.directory)


def test_documents_are_counted_by_what_became_of_them(prepared: PreparedCorpus, inputs: Path) -> None:
    notes = prepared.manifest.notes
    counts = notes["documents"]["code"]
    assert (counts["read"], counts["passed"], counts["exact_copy"], counts["near_copy"]) == (85, 80, 5, 5)
    assert counts["train"] + counts["val"] == 70
    for reason in ("empty", "lone_surrogate", "invalid_utf8", "no_text", "invalid_json"):
        assert counts[reason] == 1
    assert notes["first"]["code"]["empty"] == f"{inputs / 'code.jsonl'}:81"
    assert notes["sources"]["web"] == {"weight": 0.7, "licence": "CC0", "hub": None}
    assert prepared.validation.keys() == {"web", "code", "all"}


def test_delimiters_end_as_many_documents_as_there_are(prepared: PreparedCorpus) -> None:
    for name, splits in prepared.manifest.sources.items():
        for split, shards in splits.items():
            fingerprint = prepared.tokenizer.fingerprint
            with open_source(prepared.directory, source=name, split=split, tokenizer=fingerprint) as source:
                tokens = source.read(0, source.num_tokens)
            # The first one opens the stream.
            assert int((tokens[1:] == 0).sum()) == sum(shard.documents for shard in shards)
            assert tokens[0] == tokens[-1] == 0
    assert len(prepared.manifest.sources["web"]["train"]) > 2


def test_preparing_again_does_nothing(prepared: PreparedCorpus, inputs: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in prepared.directory.iterdir()}
    again = prepare(config(inputs, prepared.directory), tell=pytest.fail)
    assert again.reused
    assert again.manifest == prepared.manifest
    assert before == {path: path.stat().st_mtime_ns for path in prepared.directory.iterdir()}


class Killed(BaseException):
    """What no handler catches."""


def test_killed_anywhere_it_goes_on_to_the_same_bytes(prepared: PreparedCorpus, inputs: Path, tmp_path: Path) -> None:
    told: list[str] = []
    for stop in range(100):
        lines = iter(range(stop + 1))

        def tell(line: str, lines: Iterator[int] = lines) -> None:
            told.append(line)
            if next(lines, None) is None:
                raise Killed

        folder = tmp_path / "data"
        shutil.rmtree(folder, ignore_errors=True)
        try:
            prepare(config(inputs, folder), tell=tell)
        except Killed:
            # What was half written when the power went, too.
            (folder / "web_train_00000.bin.1.tmp").write_bytes(b"half")
            prepare(config(inputs, folder), tell=quiet)
        else:
            break
        assert files(folder) == files(prepared.directory), told[-1]
        assert not (folder / WORK).exists()
    assert stop > 12
    assert any("wrote code_train_00001" in line for line in told)


def test_a_shard_that_is_there_is_not_written_again(
    prepared: PreparedCorpus, inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "data"

    def stop(line: str) -> None:
        if "wrote code_train_00001" in line:
            raise Killed

    with pytest.raises(Killed):
        prepare(config(inputs, folder), tell=stop)
    with monkeypatch.context() as patch:
        for name in ("read_job", "decide", "train_bpe_tokenizer"):
            patch.setattr(f"hymo.data.pipeline.{name}", lambda *args, **options: pytest.fail("done twice"))
        lines: list[str] = []
        prepare(config(inputs, folder), tell=lines.append)
    assert next(line.split(":")[0] for line in lines if "wrote" in line) == "wrote code_val_00000.bin"
    assert files(folder) == files(prepared.directory)


def test_other_texts_or_settings_are_refused_by_name(prepared: PreparedCorpus, inputs: Path, tmp_path: Path) -> None:
    other = config(inputs, prepared.directory, filters={"max_digit_ratio": 0.4})
    with pytest.raises(ValueError, match=r"other texts or settings \(settings.filters.max_digit_ratio differs\)"):
        prepare(other, tell=quiet)
    changed = tmp_path / "inputs"
    shutil.copytree(inputs, changed)
    (changed / "code.jsonl").write_bytes(b'{"text": "new"}\n' + (inputs / "code.jsonl").read_bytes())
    with pytest.raises(ValueError, match=r"inputs.code differs|settings.sources"):
        prepare(config(changed, prepared.directory), tell=quiet)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("mine")
    with pytest.raises(ValueError, match=r"corpus.folder: expected a new folder, or one of this preparation"):
        prepare(config(inputs, tmp_path / "mine"), tell=quiet)
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["thesis.tex"]


def test_a_source_of_which_nothing_is_left_is_told_and_leaves_nothing(inputs: Path, tmp_path: Path) -> None:
    (tmp_path / "bad.jsonl").write_bytes(b'{"body": 1}\nnothing\n')
    wrong = config(inputs, tmp_path / "data", corpus={"sources": [{"name": "bad", "files": [str(tmp_path / "bad*")]}]})
    with pytest.raises(ValueError, match=r"of the 2 records of bad none is left for train .*no_text first at .*:1"):
        prepare(wrong, tell=quiet)
    assert not (tmp_path / "data").exists()
    missing = config(inputs, tmp_path / "data", corpus={"sources": [{"name": "bad", "files": ["/nowhere/*.txt"]}]})
    with pytest.raises(ValueError, match=r"bad has no files; /nowhere/\*.txt finds none"):
        prepare(missing, tell=quiet)
    assert not (tmp_path / "data").exists()
    (tmp_path / "notes.md").write_text("x")
    source = {"name": "bad", "files": [f"{inputs}/web*", str(tmp_path / "notes.md")]}
    with pytest.raises(ValueError, match=r"notes.md: expected .txt, .jsonl, .parquet, the first two also .gz"):
        prepare(config(inputs, tmp_path / "data", corpus={"sources": [source]}), tell=quiet)
    assert not (tmp_path / "data").exists()


def test_hostile_documents_are_kept_to_the_byte(inputs: Path, tmp_path: Path) -> None:
    for number, text in enumerate(HOSTILE):
        (tmp_path / f"{number}.txt").write_bytes(text.encode())
    (tmp_path / "bom.txt").write_bytes(b"\xef\xbb\xbfwith a mark")
    source = {"name": "hostile", "files": [str(tmp_path / "*.txt")]}
    made = prepare(
        config(inputs, tmp_path / "data", corpus={"sources": [source]}, filters=OPEN, validation={"bytes": 0}),
        tell=quiet,
    )
    assert list(made.manifest.sources["hostile"]) == ["train"]
    # The sixth begins with what is a mark and not text.
    expected = sorted([*HOSTILE[:-1], "a", "with a mark"])
    assert sorted(texts_of(made, "hostile", "train")) == expected
    assert made.manifest.notes["documents"]["hostile"]["byte_order_mark"] == 2


def test_a_cap_takes_the_first_documents_and_leaves_later_files_unread(
    texts: dict[str, list[str]], inputs: Path, tmp_path: Path
) -> None:
    source = {"name": "web", "files": [str(inputs / "web*")], "max_bytes": 5000}
    lines: list[str] = []
    made = prepare(config(inputs, tmp_path / "data", corpus={"sources": [source]}), tell=lines.append)
    kept = texts_of(made, "web", "train") + texts_of(made, "web", "val")
    assert sorted(kept) == sorted(texts["web"][: len(kept)])
    assert 4000 < sum(len(text.encode()) for text in kept) <= 5000
    assert [line for line in lines if "web_1" in line] == []


def test_a_given_tokenizer_is_used(prepared: PreparedCorpus, inputs: Path, tmp_path: Path) -> None:
    path = prepared.directory / "tokenizer.json"
    made = prepare(config(inputs, tmp_path / "data", tokenizer={"file": str(path)}), tell=quiet)
    assert made.manifest.identity == prepared.manifest.identity
    assert made.tokenizer.fingerprint == ExtendedTokenizer.load(path).fingerprint


def test_a_tokenizer_is_trained_on_as_much_as_it_may_and_on_no_validation_text(
    prepared: PreparedCorpus, inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []

    def train(texts: Sequence[str], **options: Any) -> ExtendedTokenizer:
        seen.extend(texts)
        prepared.tokenizer.save(options["output_path"])
        return prepared.tokenizer

    monkeypatch.setattr("hymo.data.pipeline.train_bpe_tokenizer", train)
    made = prepare(config(inputs, tmp_path / "data", tokenizer={"train_bytes": 8000}), tell=quiet)
    assert 6000 < sum(len(text.encode()) for text in seen) <= 8000
    assert set(seen) <= {text for name in ("web", "code") for text in texts_of(made, name, "train")}


def test_one_validation_stream_is_proven_to_be_held_out(prepared: PreparedCorpus, tmp_path: Path) -> None:
    shard = build_val_set(prepared.directory, output_path=tmp_path / "val.bin", target_tokens=10**6)
    both = [text for name in ("web", "code") for text in texts_of(prepared, name, "val")]
    assert shard.documents == len(both)
    assert shard.bytes == sum(len(text.encode()) for text in both)
    small = build_val_set(prepared.directory, output_path=tmp_path / "small.bin", target_tokens=400)
    assert small.tokens <= 400
    assert 2 <= small.documents < shard.documents
    with pytest.raises(ValueError, match="no held-out document has 4 tokens or less"):
        build_val_set(prepared.directory, output_path=tmp_path / "none.bin", target_tokens=4)
    leaking = tmp_path / "leaking"
    shutil.copytree(prepared.directory, leaking)
    manifest = json.loads((leaking / "manifest.json").read_text())
    manifest["sources"]["code"]["train"] = manifest["sources"]["web"]["val"]
    (leaking / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(ValueError, match="document 0 of code stands in training and in validation"):
        build_val_set(leaking, output_path=tmp_path / "leak.bin")
    assert not (tmp_path / "leak.bin").exists()


def command(folder: Path, inputs: Path, *more: str) -> list[str]:
    sources = f"[{{name: web, files: ['{inputs}/web*']}}, {{name: code, files: ['{inputs}/code*']}}]"
    keys = [f"corpus.folder={folder}", f"corpus.sources={sources}", "tokenizer.vocab_size=120", "validation.bytes=600"]
    keys += ["validation.fraction=0.2", "shards.text_bytes=9e3", "copies.threshold=0.7"]
    return [sys.executable, str(ROOT / "recipes" / "prepare_data.py"), *keys, *more]


def kill_oneself(job: Any) -> None:
    """In place of `read_job`, in a process of its own."""
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.heavy
def test_a_reader_that_is_killed_is_one_line(inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("hymo.data.pipeline.read_job", kill_oneself)
        with pytest.raises(ValueError, match=r"^--workers: a process that read was killed"):
            prepare(config(inputs, tmp_path / "data"), workers=2, tell=quiet)
    assert prepare(config(inputs, tmp_path / "data"), workers=2, tell=quiet).manifest.notes["documents"]


@pytest.mark.heavy
def test_sigkill_at_random_moments_changes_no_byte(prepared: PreparedCorpus, inputs: Path, tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}", "OMP_NUM_THREADS": "1"}
    draw = random.Random(0)
    for attempt in range(6):
        folder = tmp_path / str(attempt)
        for _ in range(4):
            process = subprocess.Popen(
                command(folder, inputs, "--workers", "2"), env=environment, stdout=subprocess.DEVNULL
            )
            time.sleep(draw.uniform(3, 9))
            process.send_signal(signal.SIGKILL)
            process.wait()
        done = subprocess.run(
            command(folder, inputs, "--workers", "2"), env=environment, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        found, expected = files(folder), files(prepared.directory)
        assert {name for name in found if name != ".lock"} == {name for name in expected if name != ".lock"}
        for name in expected:
            assert name == "manifest.json" or found[name] == expected[name], name

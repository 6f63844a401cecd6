"""The recipes that make data: what they print, and what they say when they are asked wrongly."""

import json
import shlex
from importlib import util
from pathlib import Path
from typing import Any

import pytest
import yaml
from tiny_run import run_config, text

from hymo.config import derive_config
from hymo.config_yaml import load_config
from hymo.data import ExtendedTokenizer
from hymo.run_data import open_run_data

ROOT = Path(__file__).parents[1]
OPEN = "filters.min_unique_chars_ratio=0"


def recipe(name: str) -> Any:
    spec = util.spec_from_file_location(name, ROOT / "recipes" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    folder = tmp_path / "texts"
    folder.mkdir()
    for source, first in (("a", 0), ("b", 100)):
        lines = [json.dumps({"text": text(first + i), "body": text(i)}) + "\n" for i in range(30)]
        (folder / f"{source}.jsonl").write_text("".join(lines))
    return folder


def test_what_was_prepared_is_trained_on_with_the_keys_that_are_printed(
    texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sources = f"[{{name: a, files: ['{texts}/a*']}}, {{name: b, files: ['{texts}/b*']}}]"
    asked = [f"corpus.folder={tmp_path / 'out'}", f"corpus.sources={sources}", "tokenizer.vocab_size=256", OPEN]
    main = recipe("prepare_data").main
    assert main([*asked, "--workers", "1"]) == 0
    first = capsys.readouterr().out
    assert "a: read 30, " in first
    assert "finished in " in first
    assert main([*asked, "--workers", "1"]) == 0
    again = capsys.readouterr().out
    assert again.startswith("finished before\n")
    assert again.splitlines()[1:] == first.splitlines()[-len(again.splitlines()) + 1 :]
    (line,) = [line for line in again.splitlines() if line.startswith("train on it:")]
    keys = dict(word.split("=", 1) for word in shlex.split(line) if "=" in word)
    assert keys["model.vocab_size"] == "512"
    assert keys["data.folder"] == str(tmp_path / "out")
    config = derive_config(run_config(tmp_path / "out"), data={"sources": yaml.safe_load(keys["data.sources"])})
    with_data = open_run_data(config, tmp_path / "run")
    assert [source.name for source in with_data.train] == ["a", "b"]
    assert set(with_data.baselines) == {"order0_bits_per_byte", "xz_bits_per_byte"}
    with_data.close()


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ([], "prepare_data: corpus: missing; it has no default"),
        (["--workers", "0"], "prepare_data: --workers: expected at least 1, got 0"),
        (["nowhere.yaml"], "prepare_data: nowhere.yaml: no such file"),
        (["corpus.sources=[{name: a, files: ['/nowhere/*.txt']}]"], "a has no files; /nowhere/*.txt finds none"),
        (["corpus.sources=[{name: a, fils: [x]}]"], "corpus.sources[0].fils: unknown key (did you mean 'files'?)"),
    ],
)
def test_what_is_asked_wrongly_is_one_line(
    arguments: list[str],
    line: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert recipe("prepare_data").main(arguments) == 2
    error = capsys.readouterr().err
    assert line in error
    assert len(error.splitlines()) == 1
    assert not list(tmp_path.iterdir())


def test_a_tokenizer_is_trained_on_files(texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main = recipe("train_tokenizer").main
    common = [f"{texts}/*.jsonl", "--vocab-size", "300"]
    for name in ("one", "two"):
        assert main([str(tmp_path / name), *common]) == 0
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()
    tokenizer = ExtendedTokenizer.load(tmp_path / "one")
    assert tokenizer.vocab_size == 556
    assert tokenizer.decode(tokenizer.encode(text(5))) == text(5)
    out = capsys.readouterr().out
    assert "556 ids, trained on " in out
    assert "a.jsonl: " in out
    assert main([str(tmp_path / "three"), *common, "--max-bytes", "4000", "--column", "body"]) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "trained on" in line]
    assert "of 2 documents" in line
    assert main([str(tmp_path / "four"), "/nowhere/*.txt"]) == 2
    assert "files: /nowhere/*.txt finds none" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("output", "more", "line"),
    [
        ("texts/a.jsonl", [], "output: expected a new file, got texts/a.jsonl, which is there already"),
        ("new", ["--max-bytes", "0"], "--max-bytes: expected at least 1, got 0"),
        ("new", ["--max-bytes", "9"], "files: none of texts/b.jsonl begins with a document that"),
        ("texts/a.jsonl/new", [], "texts/a.jsonl"),
    ],
)
def test_a_tokenizer_that_cannot_be_is_one_line_and_costs_no_file(
    output: str,
    more: list[str],
    line: str,
    texts: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    before = {path: path.read_bytes() for path in texts.iterdir()}
    assert recipe("train_tokenizer").main([output, "texts/b.jsonl", "--vocab-size", "300", *more]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"train_tokenizer: {line}")
    assert len(error.splitlines()) == 1
    assert {path: path.read_bytes() for path in texts.iterdir()} == before
    assert [path.name for path in tmp_path.iterdir()] == ["texts"]


@pytest.mark.parametrize("name", ["null", "a, b: c", "1"])
def test_any_name_and_size_of_a_source_can_be_trained_on(
    name: str, texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (texts / "tiny.txt").write_text("tiny")
    (texts / "large.txt").write_text(text(1, words=200_000))
    sources = [{"name": name, "files": [f"{texts}/tiny.txt"]}, {"name": "b", "files": [f"{texts}/large.txt"]}]
    asked = {"corpus.folder": tmp_path / "out", "corpus.sources": json.dumps(sources), "tokenizer.vocab_size": 300}
    keys = [OPEN, "validation.bytes=0", *(f"{key}={value}" for key, value in asked.items())]
    assert recipe("prepare_data").main([*keys, "--workers", "1"]) == 0
    line = capsys.readouterr().out.splitlines()[-1]
    (given,) = [word for word in shlex.split(line) if word.startswith("data.sources=")]
    config = load_config(ROOT / "recipes" / "configs" / "tiny.yaml", ["data.corpus=null", given])
    assert [each.name for each in config.data.sources] == [name, "b"]
    assert config.data.sources[0].weight == 1e-4

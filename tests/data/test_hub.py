"""Data sets of the Hub, a file at a time; the Hub itself is played."""

import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hymo.data import open_source, prepare
from hymo.data.hub import read_hub, resolve_revision
from hymo.data.preparation import HubConfig, PrepareConfig, TextConfig
from hymo.section import build

FILES = [[f"words of file {k} and record {i} that nothing else has, " * 4 for i in range(20)] for k in range(3)]


class Stream:
    """As `datasets` streams one."""

    def __init__(self, files: list[list[str]], *, broken: bool = False) -> None:
        self.files, self.broken = files, broken
        self.num_shards = len(files)

    def shard(self, *, num_shards: int, index: int) -> "Stream":
        assert num_shards == self.num_shards
        return Stream([self.files[index]], broken=self.broken and index == 1)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for text in self.files[0]:
            yield {"content": text, "lang": "en"}
        if self.broken:
            raise OSError(104, "Connection reset by peer")


class Hub:
    """What is asked of the two packages."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.error: Exception | None = None
        self.sha, self.broken = "c0ffee", False
        self.loaded: list[Any] = []
        errors: Any = importlib.import_module("huggingface_hub.errors")
        library = SimpleNamespace(auth_check=self.auth_check, HfApi=lambda: self)
        monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=self.load))
        monkeypatch.setitem(sys.modules, "huggingface_hub", library)
        monkeypatch.setitem(sys.modules, "huggingface_hub.errors", errors)

    def auth_check(self, repo: str, *, repo_type: str) -> None:
        assert repo_type == "dataset"
        if self.error:
            raise self.error

    def dataset_info(self, repo: str, *, revision: str | None) -> Any:
        return SimpleNamespace(sha=revision or self.sha)

    def load(self, *names: Any, **options: Any) -> Stream:
        self.loaded.append((names, options))
        return Stream(FILES, broken=self.broken)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Hub:
    return Hub(monkeypatch)


def config(folder: Path, **source: Any) -> PrepareConfig:
    asked = {"name": "web", "hub": {"repo": "owner/name", "config": "small"}, "column": "content", **source}
    return build(
        PrepareConfig,
        {
            "corpus": {"folder": str(folder), "sources": [asked]},
            "tokenizer": {"vocab_size": 100},
            "copies": {"near": False},
            "validation": {"bytes": 300},
        },
    )


def test_a_data_set_is_prepared_at_the_commit_that_is_recorded(hub: Hub, tmp_path: Path) -> None:
    made = prepare(config(tmp_path / "data"), tell=lambda line: None)
    for names, options in hub.loaded:
        assert names == ("owner/name", "small")
        assert options == {"split": "train", "data_dir": None, "revision": "c0ffee", "streaming": True}
    found = []
    for split in ("train", "val"):
        with open_source(made.directory, source="web", split=split, tokenizer=made.tokenizer.fingerprint) as source:
            found += [made.tokenizer.decode(source.read(*span).tolist()) for span in source.documents()]
    assert sorted(found) == sorted(text for file in FILES for text in file)
    assert made.manifest.notes["made_from"]["inputs"] == {"web": "c0ffee"}
    # Nobody asks the Hub again, which has a newer one by now.
    hub.error, hub.sha = RuntimeError("no network"), "decaf"
    assert prepare(config(tmp_path / "data"), tell=pytest.fail).reused


def test_a_broken_connection_costs_one_file(hub: Hub, tmp_path: Path) -> None:
    hub.broken = True
    with pytest.raises(OSError, match="Connection reset"):
        prepare(config(tmp_path / "data"), tell=lambda line: None)
    hub.broken, hub.sha = False, "decaf"
    lines: list[str] = []
    made = prepare(config(tmp_path / "data"), tell=lines.append)
    assert [line.split(",")[0] for line in lines if line.startswith("read")] == ["read web: file 1", "read web: file 2"]
    assert made.manifest.notes["made_from"]["inputs"] == {"web": "c0ffee"}


def test_files_beyond_the_cap_are_not_asked_for(hub: Hub, tmp_path: Path) -> None:
    lines: list[str] = []
    prepare(config(tmp_path / "data", max_bytes=4000), tell=lines.append)
    assert [line.split(",")[0] for line in lines if line.startswith("read")] == ["read web: file 0"]


def test_records_are_judged_like_those_of_files(hub: Hub) -> None:
    source = TextConfig("web", hub=HubConfig("owner/name"), column="text")
    reads = list(read_hub(source, "c0ffee", part=2, limit=99))
    assert {read.reason for read in reads} == {"no_text"}
    assert reads[4].place == "owner/name file 2 record 5"


def test_a_hub_that_says_no_is_one_line(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    errors = sys.modules["huggingface_hub.errors"]
    for kind, line in [
        ("GatedRepoError", r"owner/name: accept its terms at https://huggingface.co/datasets/owner/name and log in"),
        ("RepositoryNotFoundError", r"owner/name: the Hub has no such data set"),
    ]:
        hub.error = getattr(errors, kind).__new__(getattr(errors, kind))
        with pytest.raises(ValueError, match=line):
            resolve_revision(HubConfig("owner/name"))
    hub.error = ConnectionError("no route\nto host")
    with pytest.raises(ValueError, match=r"^owner/name: the Hub could not be asked \(no route\)$"):
        resolve_revision(HubConfig("owner/name"))
    hub.error = None
    assert resolve_revision(HubConfig("owner/name", revision="abc")) == "abc"
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ValueError, match=r'datasets is not installed; `pip install "hymo\[hub\]"` would work'):
        resolve_revision(HubConfig("owner/name"))


def test_the_real_package_streams_its_files_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets: Any = pytest.importorskip("datasets")
    for k, texts in enumerate(FILES):
        lines = "".join(json.dumps({"content": text}) + "\n" for text in texts)
        (tmp_path / f"{k}.jsonl").write_text(lines)
    stream = datasets.load_dataset(
        "json", data_files=[str(tmp_path / f"{k}.jsonl") for k in range(3)], split="train", streaming=True
    )
    monkeypatch.setattr("hymo.data.hub._stream", lambda hub, revision: stream)
    source = TextConfig("web", hub=HubConfig("owner/name"), column="content")
    for part in range(3):
        assert [read.text for read in read_hub(source, "", part=part, limit=10**6)] == FILES[part]

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tiny_run import prepare, run_config

from hymo import run_data
from hymo.run_data import open_run_data


@pytest.fixture
def prepared(tmp_path: Path) -> Path:
    return prepare(tmp_path / "data")


def swap_tokens(path: Path) -> None:
    """Two neighbours that differ change places: every id stays in range."""
    data = bytearray(path.read_bytes())
    at = next(i for i in range(1024 + 2, len(data), 2) if data[i : i + 2] != data[i + 2 : i + 4])
    data[at : at + 4] = data[at + 2 : at + 4] + data[at : at + 2]
    path.write_bytes(data)


@pytest.mark.parametrize("split", ["train", "val"])
def test_a_changed_token_is_refused_before_the_run(
    split: str, prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_run_data(run_config(prepared), tmp_path).close()
    swap_tokens(prepared / f"code_{split}_00000.bin")
    with pytest.raises(ValueError, match=rf"code_{split}_00000.bin: its tokens have sha256 \w+, \w+ expected") as error:
        open_run_data(run_config(prepared), tmp_path)
    assert "\n" not in str(error.value)
    # A source that is too large to be read twice is left to verify_shards.
    monkeypatch.setattr(run_data, "_VERIFIED_TOKENS", 10)
    open_run_data(run_config(prepared), tmp_path).close()


def test_a_folder_that_is_a_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("")
    with pytest.raises(ValueError, match=r"^data.folder: expected a folder, got .*mine.py, which is a file$"):
        open_run_data(run_config(tmp_path / "mine.py"), tmp_path)


def set_floor(notes: dict[str, Any]) -> None:
    notes["validation"]["all"]["order0_bits_per_byte"] = "abc"


@pytest.mark.parametrize("spoil", [set_floor, lambda notes: notes.update(validation=[])])
def test_baselines_that_are_no_numbers_are_refused_before_the_run(
    spoil: Callable[[dict[str, Any]], None], prepared: Path, tmp_path: Path
) -> None:
    manifest = json.loads((prepared / "manifest.json").read_text())
    spoil(manifest["notes"])
    (prepared / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(ValueError, match=r"manifest.json: notes.validation"):
        open_run_data(run_config(prepared), tmp_path)

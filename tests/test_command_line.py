"""What the recipes share: which of several ranks tells what went wrong."""

import pytest
from command_line import Refusal, execute


@pytest.mark.parametrize(
    ("rank", "local", "refused", "lost"),
    [
        ("0", "0", "job: no\n", "job: memory is not enough: 9 GB\n"),
        ("3", "3", "", "job: rank 3: memory is not enough: 9 GB\n"),
        ("8", "0", "job: rank 8: no\n", "job: rank 8: memory is not enough: 9 GB\n"),
    ],
)
def test_what_all_find_each_machine_tells_once_and_what_one_finds_it_tells(
    rank: str,
    local: str,
    refused: str,
    lost: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setenv("LOCAL_RANK", local)

    def fails(error: Exception) -> object:
        raise error

    assert execute("job", lambda: fails(Refusal("no"))) == 2
    assert capsys.readouterr().err == refused
    assert execute("job", lambda: fails(MemoryError("9 GB"))) == 1
    assert capsys.readouterr().err == lost

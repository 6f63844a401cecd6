"""What a preparation can be asked for, and the mixture of hymo v1.0."""

import math
from pathlib import Path
from typing import Any

import pytest

from hymo.config import V1_SOURCES
from hymo.config_yaml import load_sections
from hymo.data.preparation import FilterConfig, PrepareConfig
from hymo.section import build

MIXTURE = Path(__file__).parents[2] / "recipes" / "configs" / "mixture.yaml"
ONE = {"corpus": {"sources": [{"name": "own", "files": ["*.txt"]}]}}


def test_the_shipped_mixture_is_that_of_the_model() -> None:
    config = load_sections(PrepareConfig, MIXTURE)
    asked = {each.name: each.weight for each in config.corpus.sources}
    assert asked == {each.name: each.weight for each in V1_SOURCES}
    assert math.isclose(sum(each.weight or 0 for each in config.corpus.sources), 1)
    assert all(each.hub and each.licence for each in config.corpus.sources)
    for each in config.corpus.sources:
        # 30 B tokens of 4.5 bytes and some copies.
        assert each.max_bytes == pytest.approx(30e9 * (each.weight or 0) * 4.9, rel=0.03)
    assert config.filters == FilterConfig()
    assert config.tokenizer.vocab_size == 64_000


def test_the_command_line_is_enough(tmp_path: Path) -> None:
    config = load_sections(
        PrepareConfig, None, ["corpus.sources=[{name: own, files: ['texts/*.txt']}]", f"corpus.folder={tmp_path}/a b"]
    )
    assert config.corpus.folder == f"{tmp_path}/a b"
    assert config.corpus.sources[0].files == ("texts/*.txt",)


@pytest.mark.parametrize(
    ("corpus", "line"),
    [
        ({"sources": []}, "corpus.sources: expected at least one source, got none"),
        ({"sources": [{"name": "a/b", "files": ["x"]}]}, "expected a name that can be a file's, got 'a/b'"),
        ({"sources": [{"name": "a"}]}, "corpus.sources[0].files: expected either files or hub, got neither"),
        (
            {"sources": [{"name": "a", "files": ["x"], "hub": {"repo": "o/n"}}]},
            "corpus.sources[0].files: expected either files or hub, got both",
        ),
        ({"sources": [{"name": "a", "files": ["x"]}] * 2}, "expected a name of its own, got 'a' again"),
        (
            {"sources": [{"name": "a", "files": ["x"], "weight": 0.5}, {"name": "b", "files": ["x"]}]},
            "corpus.sources: expected weights that sum to 1, or none, got 1 of 0.5",
        ),
        (
            {"sources": [{"name": "a", "files": ["x"], "where": [{"field": "score"}]}]},
            "corpus.sources[0].where[0].field: expected one of at_least, equals, differs, got none",
        ),
        ({"sources": [{"name": "a", "files": ["x"], "separator": ""}]}, "separator: expected text, or null, got ''"),
        ({"sources": [{"name": "a", "file": ["x"]}]}, "unknown key (did you mean 'files'?)"),
    ],
)
def test_what_cannot_be_is_one_line_that_names_it(corpus: dict[str, Any], line: str) -> None:
    with pytest.raises(ValueError) as error:  # noqa: PT011 - the message is compared
        build(PrepareConfig, {"corpus": corpus})
    assert line in str(error.value)
    assert len(str(error.value).splitlines()) == 1


def test_the_corpus_must_be_given() -> None:
    with pytest.raises(ValueError, match="corpus: missing; it has no default"):
        load_sections(PrepareConfig, None)
    assert build(PrepareConfig, ONE).validation.bytes == 2_000_000

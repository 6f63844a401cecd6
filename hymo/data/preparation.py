"""What `prepare_data` is asked to do: sources, filters, copies, tokenizer, held-out text, shards; strict, as a run's.

Every key has a meaning, a default and a range. None of it decides how fast it goes.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

from hymo.config import SPECIAL_TOKENS, is_file_name
from hymo.section import REQUIRED, Problem, Section, key


@dataclass(frozen=True)
class HubConfig(Section):
    """A data set of the Hugging Face Hub; needs `pip install "hymo[hub]"`."""

    repo: str = key(REQUIRED, "Data set, `OWNER/NAME`.")
    config: str | None = key(None, "Its configuration; null for the default one.")
    split: str = key("train", "Its split.")
    data_dir: str | None = key(None, "Folder in it; null for all.")
    revision: str | None = key(None, "Commit; null for the newest one, which is recorded and kept.")


@dataclass(frozen=True)
class ConditionConfig(Section):
    """What a field of a record must be; a record that lacks the field does not fulfil it."""

    field: str = key(REQUIRED, "Name; dots lead into nested fields, `meta.set`.")
    at_least: float | None = key(None, "Smallest number.")
    equals: str | None = key(None, "The one text.")
    differs: str | None = key(None, "Any text but this.")

    def rules(self) -> Iterator[Problem]:
        given = [name for name in ("at_least", "equals", "differs") if getattr(self, name) is not None]
        if len(given) != 1:
            yield Problem(("field",), f"expected one of at_least, equals, differs, got {' and '.join(given) or 'none'}")


@dataclass(frozen=True)
class TextConfig(Section):
    """One source of documents: local files or a data set of the Hub."""

    name: str = key(REQUIRED, "Name in the prepared folder.")
    files: tuple[str, ...] = key(
        (), "Globs: .txt, .jsonl, each plain, .gz, .xz, .bz2 or .zst, and .parquet; read in order of their paths."
    )
    hub: HubConfig | None = key(None, "A data set of the Hub, in place of files.")  # noqa: RUF009
    column: str = key("text", "Field of a record that holds the document.")
    separator: str | None = key(None, "Text between the documents of a .txt file; null if a file is a document.")
    where: tuple[ConditionConfig, ...] = key((), "Conditions that a record must fulfil.")
    max_bytes: int | None = key(
        None, "Text to take, in bytes: the first documents that pass the filters; null for all.", within="[1, 1e18]"
    )
    weight: float | None = key(
        None, "Share of the training windows, for the training command; null for its share of tokens.", within="(0, 1]"
    )
    licence: str | None = key(None, "Licence, as its authors name it; recorded.")

    def rules(self) -> Iterator[Problem]:
        if not is_file_name(self.name):
            yield Problem(("name",), f"expected a name that can be a file's, got {self.name!r}")
        if bool(self.files) == (self.hub is not None):
            yield Problem(("files",), f"expected either files or hub, got {'both' if self.files else 'neither'}")
        if self.separator == "":
            yield Problem(("separator",), "expected text, or null, got ''")


@dataclass(frozen=True)
class CorpusConfig(Section):
    """The folder to make, and what goes into it."""

    sources: tuple[TextConfig, ...] = key(REQUIRED, "The sources; of copies, the one in the first source is kept.")
    folder: str = key("prepared", "Folder that will hold tokenizer, shards and manifest.")

    def rules(self) -> Iterator[Problem]:
        names = [each.name for each in self.sources]
        if not names:
            yield Problem(("sources",), "expected at least one source, got none")
        for index, name in enumerate(names):
            if name in names[:index]:
                yield Problem(("sources", index, "name"), f"expected a name of its own, got {name!r} again")
        given = [each.weight for each in self.sources if each.weight is not None]
        if given and (len(given) < len(names) or abs(sum(given) - 1) > 1e-6):
            yield Problem(("sources",), f"expected weights that sum to 1, or none, got {len(given)} of {sum(given):g}")


@dataclass(frozen=True)
class FilterConfig(Section):
    """Which documents are taken. What is not is counted by reason; nothing is changed.

    Ratios are fractions of a document's characters. `min_unique_chars_ratio` is a mean over windows of 256 characters:
    over a whole document it would fall with its length and drop nearly all prose.
    """

    max_digit_ratio: float = key(0.5, "Most digits.", within="[0, 1]")
    max_punct_ratio: float = key(0.5, "Most punctuation and symbols.", within="[0, 1]")
    max_whitespace_ratio: float = key(0.5, "Most whitespace.", within="[0, 1]")
    min_unique_chars_ratio: float = key(
        0.05, "Fewest different characters among 256 in a row, mean over the document.", within="[0, 1]"
    )
    max_document_bytes: int = key(16_000_000, "Longest document, in bytes as stored.", within="[1, 1e9]")


@dataclass(frozen=True)
class CopiesConfig(Section):
    """Which copies are left out, over all sources. Exact ones always are; the earliest document is kept."""

    near: bool = key(True, "Whether near copies are left out too: found by MinHash over runs of five words.")
    threshold: float = key(
        0.8, "Runs of five words in common, over those in either: from here on a near copy.", within="[0.5, 1]"
    )


@dataclass(frozen=True)
class TokenizerConfig(Section):
    """The tokenizer: trained on the training text, or a file."""

    file: str | None = key(None, "Tokenizer to use; null to train one.")
    vocab_size: int = key(
        64_000, "Special and merged tokens; the 256 bytes come on top.", within=f"[{SPECIAL_TOKENS + 1}, 16776960]"
    )
    train_bytes: int = key(
        500_000_000, "Text to train on, at most: a part of each source chosen by hash.", within="[1, 1e12]"
    )


@dataclass(frozen=True)
class HeldOutConfig(Section):
    """Validation text of each source: the documents with the lowest hashes, which no other split has."""

    bytes: int = key(2_000_000, "Text, in bytes, at least; 0 for no validation.", within="[0, 1e12]")
    fraction: float = key(0.05, "But no more than this part of the source.", within="(0, 0.5]")


@dataclass(frozen=True)
class ShardConfig(Section):
    """How token files are cut."""

    text_bytes: int = key(250_000_000, "Text that a shard stands for, about, in bytes.", within="[1, 1e10]")


@dataclass(frozen=True)
class PrepareConfig(Section):
    """A whole preparation."""

    corpus: CorpusConfig = key(REQUIRED, "Folder and sources.")  # noqa: RUF009
    filters: FilterConfig = field(default_factory=FilterConfig)
    copies: CopiesConfig = field(default_factory=CopiesConfig)
    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)
    validation: HeldOutConfig = field(default_factory=HeldOutConfig)
    shards: ShardConfig = field(default_factory=ShardConfig)

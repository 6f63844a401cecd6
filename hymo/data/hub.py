"""Documents of the Hugging Face Hub, a file of a data set at a time. Only a preparation reads there, never a run."""

import importlib
from collections.abc import Iterator
from typing import Any

from hymo.data.preparation import HubConfig, TextConfig
from hymo.data.readers import Read, package, read_record


def resolve_revision(hub: HubConfig) -> str:
    """The commit to read: the one that is asked for, or the newest.

    Raises:
        ValueError: if the data set is not there, its terms were not accepted, or the Hub cannot be asked.
    """
    package("datasets", "hub")
    library = importlib.import_module("huggingface_hub")
    errors = importlib.import_module("huggingface_hub.errors")
    page = f"https://huggingface.co/datasets/{hub.repo}"
    try:
        library.auth_check(hub.repo, repo_type="dataset")
        return str(library.HfApi().dataset_info(hub.repo, revision=hub.revision).sha)
    except errors.GatedRepoError:
        raise ValueError(f"{hub.repo}: accept its terms at {page} and log in with `hf auth login`") from None
    except errors.RepositoryNotFoundError:
        raise ValueError(f"{hub.repo}: the Hub has no such data set, or not for you; see {page}") from None
    # The libraries below raise whatever their network stack does.
    except Exception as error:
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise ValueError(f"{hub.repo}: the Hub could not be asked ({reason})") from error


def count_files(hub: HubConfig, revision: str) -> int:
    """Files of the data set: how many parts it has."""
    return int(_stream(hub, revision).num_shards)


def read_hub(source: TextConfig, revision: str, *, part: int, limit: int) -> Iterator[Read]:
    """What stands in one file of the data set of a source, in its order; `limit` as in `read_file`."""
    assert source.hub is not None
    stream = _stream(source.hub, revision)
    for number, record in enumerate(stream.shard(num_shards=stream.num_shards, index=part), 1):
        yield read_record(record, source, limit=limit, place=f"{source.hub.repo} file {part} record {number}")


def _stream(hub: HubConfig, revision: str) -> Any:
    return package("datasets", "hub").load_dataset(
        hub.repo, hub.config, split=hub.split, data_dir=hub.data_dir, revision=revision, streaming=True
    )

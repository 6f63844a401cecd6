"""JSON files that this package wrote, read as if anyone could have written them."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")

_NAMES: dict[type, str] = {dict: "a mapping", list: "a list", str: "a string", int: "an integer", float: "a float"}


def read_json(path: str | Path) -> Any:
    """What the JSON file at `path` holds.

    Raises:
        OSError: if it cannot be read.
        ValueError: if it is no JSON; one line that says why, without the path.
    """
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except RecursionError:
        raise ValueError("no JSON that can be read: it is nested too deeply") from None
    except ValueError as error:
        raise ValueError(f"no JSON: {error}") from None


def expect(kind: type[T], value: Any, where: str) -> T:
    """`value`, if it is of just this type (a bool is no integer); else ValueError with `where` it stands."""
    # Narrows for mypy what the exact type already says.
    if type(value) is not kind or not isinstance(value, kind):
        received = _NAMES[type(value)] if isinstance(value, dict | list) else json.dumps(value)[:40]
        raise ValueError(f"{where}: expected {_NAMES[kind]}, got {received}")
    return value


def expect_keys(kinds: Mapping[str, Any], value: Any, where: str) -> dict[str, Any]:
    """`value`, if it is a mapping that has these keys with values of these types; else ValueError like `expect`."""
    record = expect(dict, value, where)
    for key, kind in kinds.items():
        if key not in record:
            raise ValueError(f"{where}: {key} is missing")
        expect(kind, record[key], f"{where}.{key}")
    return record


def expect_format(known: int, value: Any, where: str) -> None:
    """Raises ValueError unless `value` is a mapping with the `format` that this version reads."""
    found = expect_keys({"format": int}, value, where)["format"]
    if found != known:
        raise ValueError(f"format {found}, this version reads {known}")

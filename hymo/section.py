"""A section of a configuration: a frozen dataclass whose keys are documented, checked and described in one place.

A key is one line, `dim: int = key(896, "Width of the residual stream.", within="[1, inf)")`: type, default, meaning and
range. The checks, the YAML loader and the configuration reference are derived from it.
Every problem is a path and a message, so that whoever knows the file can say where; all problems are raised at once.
"""

import difflib
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import MISSING, dataclass, field, fields
from types import NoneType, UnionType
from typing import Any, Literal, NamedTuple, TypeAlias, TypeVar, Union, get_args, get_origin

REQUIRED: Any = MISSING
# Integers from here on have no float.
FLOAT_END = 2**1023

KeyPath: TypeAlias = tuple[str | int, ...]


class Problem(NamedTuple):
    """One thing wrong with one key: `path` leads to the key, `message` says what was asked, received and would work."""

    path: KeyPath
    message: str


class ConfigError(ValueError):
    """Everything that is wrong with a configuration, one line a problem."""

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(f"{dotted(path)}: {message}" for path, message in self.problems))

    def under(self, *prefix: str | int) -> list[Problem]:
        """The problems as seen from the section that holds this one at `prefix`."""
        return [Problem(prefix + path, message) for path, message in self.problems]


@dataclass(frozen=True)
class Section:
    """Base of all sections: values are brought to their declared types and checked when the section is made.

    Raises:
        ConfigError: with all wrong keys; if every key is fine by itself, with all broken `rules`.
    """

    def __post_init__(self) -> None:
        given = {each.name: getattr(self, each.name) for each in fields(self)}
        for name, value in conform_keys(type(self), given).items():
            object.__setattr__(self, name, value)
        if problems := list(self.rules()):
            raise ConfigError(problems)

    def rules(self) -> Iterator[Problem]:
        """Problems that need more than one key to see; it may rely on each key being right by itself."""
        return iter(())


S = TypeVar("S", bound=Section)


def key(default: Any, doc: str, *, within: str = "") -> Any:
    """A key of a section, for the right-hand side of a dataclass field.

    Args:
        default: the value when the key is not given; REQUIRED if there is none.
        doc: meaning and unit.
        within: the allowed numbers in interval notation, `[0, 1)`; for a list, of each element. null is always outside.
    """
    return field(default=default, metadata={"doc": doc, "within": within})


def dotted(path: KeyPath) -> str:
    """`("data", "sources", 2, "weight")` as `data.sources[2].weight`."""
    return "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in path).removeprefix(".")


def build(section: type[S], raw: Mapping[str, Any]) -> S:
    """The section with the keys of `raw`; what is absent keeps its default, what is unknown is an error.

    Raises:
        ConfigError: with all unknown, missing and wrong keys at once, those of nested sections included.
    """
    known = [each.name for each in fields(section)]
    problems = [unknown_key(name, known) for name in raw if name not in known]
    problems += [
        Problem((each.name,), "missing; it has no default")
        for each in fields(section)
        if each.default is each.default_factory is MISSING and each.name not in raw
    ]
    values: dict[str, Any] = {}
    try:
        values = conform_keys(section, {name: value for name, value in raw.items() if name in known})
    except ConfigError as error:
        problems += error.problems
    # A rule judged with a default in place of a misspelt key would only mislead.
    if problems:
        raise ConfigError(problems)
    return section(**values)


def unknown_key(name: object, known: Iterable[str]) -> Problem:
    """The problem of a key that does not exist, with the nearest one that does."""
    near = difflib.get_close_matches(str(name), list(known), n=1)
    hint = f"did you mean '{near[0]}'?" if near else f"known: {', '.join(known)}"
    return Problem((str(name),), f"unknown key ({hint})")


def conform_keys(section: type[Section], values: Mapping[str, Any]) -> dict[str, Any]:
    """Each value in the type that its key declares. Raises ConfigError with all that cannot be."""
    keys = [each for each in fields(section) if each.name in values]
    return _conform_each((each.name, each.type, values[each.name], each.metadata.get("within", "")) for each in keys)


def conform(kind: Any, value: Any, *, within: str = "") -> Any:
    """`value` as a `kind`: bool, int, float, str, Literal, `X | None`, tuple or Section.

    An integer passes for a float and an integral float (3e8) for an integer; a bool passes for neither. Lists become
    tuples, mappings sections, paths strings. Raises ConfigError if it does not fit.
    """
    choices, optional = _without_none(kind)
    match value:
        case None if optional:
            return None
        case Mapping() if isinstance(choices, type) and issubclass(choices, Section):
            return build(choices, value)
        case list() | tuple() if (kinds := _element_kinds(choices, len(value))) is not None:
            elements = zip(range(len(value)), kinds, value, [within] * len(value), strict=True)
            return tuple(_conform_each(elements).values())
        case _ if get_origin(choices) is Literal and value in get_args(choices):
            return value
        case int() if choices is float and not isinstance(value, bool) and abs(value) < FLOAT_END:
            value = float(value)
        case float() if choices is int and value.is_integer():
            value = int(value)
        case os.PathLike() if choices is str:
            value = os.fspath(value)
    is_misfit = not isinstance(choices, type) or not isinstance(value, choices)
    if is_misfit or (isinstance(value, bool) and choices is not bool):
        raise ConfigError([Problem((), f"expected {describe(kind)}, got {received(value)}")])
    if within and not _is_within(value, within):
        raise ConfigError([Problem((), f"expected {describe(kind)} in {within}, got {_shown(value)}")])
    return value


def describe(kind: Any) -> str:
    """A type in the words of a YAML file: `int or null`, `list of float`, `one of linear, cosine`."""
    choices, optional = _without_none(kind)
    if get_origin(choices) is Literal:
        options = [str(each) for each in get_args(choices)]
        text = "one of " * (len(options) > 1) + ", ".join(options)
    elif get_origin(choices) is tuple:
        first, *rest = get_args(choices)
        count = "" if Ellipsis in rest else f"{1 + len(rest)} "
        text = f"list of {count}{describe(first).removeprefix('one of ')}"
    elif choices is bool:
        text = "true or false"
    else:
        text = "mapping" if issubclass(choices, Section) else choices.__name__
    return f"{text} or null" if optional else text


def _conform_each(items: Iterable[tuple[Any, Any, Any, str]]) -> dict[Any, Any]:
    """`conform` over (step, kind, value, within), by step, with the problems of all items raised together."""
    values: dict[Any, Any] = {}
    problems: list[Problem] = []
    for step, kind, value, within in items:
        try:
            values[step] = conform(kind, value, within=within)
        except ConfigError as error:
            problems += error.under(step)
    if problems:
        raise ConfigError(problems)
    return values


def _without_none(kind: Any) -> tuple[Any, bool]:
    """`X | None` as (X, True), any other type as itself and False."""
    if get_origin(kind) not in (Union, UnionType):
        return kind, False
    (choices,) = [each for each in get_args(kind) if each is not NoneType]
    return choices, True


def _element_kinds(kind: Any, length: int) -> tuple[Any, ...] | None:
    """The types of the elements of a tuple type with this many; None if `kind` is no such type."""
    if get_origin(kind) is not tuple:
        return None
    first, *rest = get_args(kind)
    kinds = (first,) * length if Ellipsis in rest else (first, *rest)
    return kinds if len(kinds) == length else None


def received(value: object) -> str:
    """A value in the words of a message, with its type: `int 7`, `a list of 3`."""
    match value:
        case None:
            return "null"
        case list() | tuple():
            return f"a list of {len(value)}"
        case Mapping():
            return "a mapping"
        case _:
            return f"{type(value).__name__} {_shown(value)}"


def _shown(value: object) -> str:
    # Python itself refuses to print integers of thousands of digits.
    return "a number of over 300 digits" if isinstance(value, int) and abs(value) >= FLOAT_END else repr(value)


def _is_within(value: int | float, within: str) -> bool:
    left, low, high, right = re.fullmatch(r"([\[(])(.+), (.+)([\])])", within).groups()  # type: ignore[union-attr]
    above = float(low) <= value if left == "[" else float(low) < value
    return above and (value <= float(high) if right == "]" else value < float(high))

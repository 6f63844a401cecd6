"""YAML files to configurations and back. Strict: what is unknown, doubled or of a wrong type is an error with its line.

Scalars follow YAML 1.2, not PyYAML: `1e-4` and `3e8` are numbers, `no`, `1:30`, `2024-01-01` text. No aliases or tags.
"""

import difflib
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import yaml

from hymo.config import HyMoConfig, SourceConfig
from hymo.section import FLOAT_END, ConfigError, KeyPath, Problem, Section, build, describe, received

# Where each key stands, for messages: `tiny.yaml:14` or `argument 'training.seed=7'`.
Places: TypeAlias = dict[KeyPath, str]

S = TypeVar("S", bound=Section)

_SCALARS: dict[str, tuple[str, Callable[[str], Any]]] = {
    "tag:yaml.org,2002:null": (r"(~|null|Null|NULL|)\Z", lambda text: None),
    "tag:yaml.org,2002:bool": (r"(true|True|TRUE|false|False|FALSE)\Z", lambda text: text.lower() == "true"),
    "tag:yaml.org,2002:int": (
        r"[-+]?[0-9]+(_[0-9]+)*\Z",
        # Python reads no integer of more than 4,300 digits; no key takes one of a tenth of that.
        lambda text: int(text) if len(text) < 4300 else FLOAT_END,
    ),
    "tag:yaml.org,2002:float": (
        r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?\Z|[-+]?\.(inf|Inf|INF)\Z|\.(nan|NaN|NAN)\Z",
        lambda text: float(re.sub(r"\.([a-zA-Z])", r"\1", text)),
    ),
    "tag:yaml.org,2002:str": (r"(?!)", str),
}
_RESOLVERS: dict[Any, list[tuple[str, re.Pattern[str]]]] = {
    None: [(tag, re.compile(pattern)) for tag, (pattern, _) in _SCALARS.items()]
}
# A list of sections in a section is four deep.
_DEEPEST = 20


def load_config(path: str | Path, overrides: Iterable[str] = ()) -> HyMoConfig:
    """The configuration of a YAML file, with `section.key=value` arguments on top; keys not given keep v1.0's value.

    Raises:
        ConfigError: with everything that is wrong, one line each, that names the file's line or the argument at fault:
            `optimizer.muon_lr: expected float, got str 'abc' (tiny.yaml:14)`.
    """
    return load_sections(HyMoConfig, path, overrides)


def load_sections(kind: type[S], path: str | Path | None, overrides: Iterable[str] = ()) -> S:
    """`load_config` for any configuration whose keys are sections; without a file all comes from `overrides`.

    Raises:
        ConfigError: like `load_config`.
    """
    raw, places, problems = ({}, {}, []) if path is None else _parse(_read(Path(path)), lambda line: f"{path}:{line}")
    if not isinstance(raw, dict):
        raise _no_sections(str(path), "an empty file" if raw is None else received(raw))
    arguments: Places = {}
    for argument in overrides:
        problems += _override(kind, raw, places, arguments, argument=argument)
    try:
        config = build(kind, raw)
    except ConfigError as error:
        problems += [_placed(problem, places) for problem in error.problems]
    if problems:
        raise ConfigError(problems)
    return config


def load_config_from_dict(raw: object) -> HyMoConfig:
    """The configuration of a dictionary of sections; keys not given keep v1.0's value.

    Raises:
        ConfigError: with everything that is wrong, one line each.
    """
    if not isinstance(raw, Mapping):
        raise _no_sections("configuration", received(raw))
    return build(HyMoConfig, raw)


def to_yaml(config: HyMoConfig) -> str:
    """Every key of a configuration as YAML; loading it gives the same configuration."""
    return yaml.dump(config, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers = _RESOLVERS
    depth = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        event = self.peek_event()  # type: ignore[no-untyped-call]
        # An alias could make a list its own element, a tag anything of anything; no configuration needs either.
        is_alias, is_tagged = isinstance(event, yaml.AliasEvent), getattr(event, "tag", None) is not None
        if is_alias or is_tagged or self.depth == _DEEPEST:
            problem = "aliases are not used here" if is_alias else "tags are not used here" if is_tagged else "too deep"
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=event.start_mark)
        self.depth += 1
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node


class _Dumper(yaml.SafeDumper):
    # The same rules, so that text is quoted exactly where the loader would take it for something else.
    yaml_implicit_resolvers = _RESOLVERS

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _represent_section(dumper: yaml.SafeDumper, section: Section) -> yaml.Node:
    keys = {each.name: getattr(section, each.name) for each in fields(section)}
    return dumper.represent_mapping("tag:yaml.org,2002:map", keys, flow_style=isinstance(section, SourceConfig))


def _represent_tuple(dumper: yaml.SafeDumper, elements: tuple[Any, ...]) -> yaml.Node:
    is_flat = not any(isinstance(each, Section) for each in elements)
    return dumper.represent_sequence("tag:yaml.org,2002:seq", elements, flow_style=is_flat)


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.Node:
    # Only this style escapes line ends and their kin, which the others fold into spaces.
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=None if text.isprintable() else '"')


_Dumper.add_multi_representer(Section, _represent_section)
_Dumper.add_representer(tuple, _represent_tuple)
_Dumper.add_representer(str, _represent_text)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        line, byte = 1 + error.object.count(b"\n", 0, error.start), error.object[error.start]
        raise ConfigError([Problem((f"{path}:{line}",), f"expected UTF-8 text, got byte {byte:#x}")]) from None
    except FileNotFoundError:
        names = [each.name for each in path.parent.glob("*.yaml")]
        near = difflib.get_close_matches(path.name, names, n=1)
        hint = f" (did you mean '{path.parent / near[0]}'?)" if near else ""
        raise ConfigError([Problem((str(path),), f"no such file{hint}")]) from None
    except OSError as error:
        raise ConfigError([Problem((str(path),), f"expected a YAML file: {error.strerror}")]) from None


def _parse(text: str, place: Callable[[int], str]) -> tuple[Any, Places, list[Problem]]:
    """Plain data, where each key stands (`place` of its line), and what is wrong with it as YAML."""
    places: Places = {}
    problems: list[Problem] = []

    def plain(node: yaml.Node, path: KeyPath) -> Any:
        match node:
            case yaml.MappingNode():
                mapping: dict[str, Any] = {}
                for key_node, value_node in node.value:
                    name = key_node.value if isinstance(key_node, yaml.ScalarNode) else "?"
                    inner, line = (*path, name), key_node.start_mark.line + 1
                    if inner in places:
                        problems.append(Problem(inner, f"given twice ({places[inner]}, {place(line)})"))
                    places[inner] = place(line)
                    mapping[name] = plain(value_node, inner)
                return mapping
            case yaml.SequenceNode():
                for index, element in enumerate(node.value):
                    places[(*path, index)] = place(element.start_mark.line + 1)
                return [plain(element, (*path, index)) for index, element in enumerate(node.value)]
        return _SCALARS[node.tag][1](node.value)

    try:
        root = yaml.compose(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise ConfigError([Problem((place(line),), f"expected YAML: {error.problem}")]) from None
    except yaml.YAMLError as error:
        raise ConfigError([Problem((place(1),), f"expected YAML: {' '.join(str(error).split())}")]) from None
    return (None if root is None else plain(root, ())), places, problems


def _override(
    kind: type[Section], raw: dict[str, Any], places: Places, arguments: Places, *, argument: str
) -> list[Problem]:
    """Puts the value of `section.key=value` into `raw` and its place into `places` and `arguments`.

    The value is YAML, but where text is expected what is neither quoted nor null is the text itself. Returns what is
    wrong with it.
    """
    here = f"argument {argument!r}"
    name, _, text = argument.partition("=")
    section, _, key = name.strip().partition(".")
    if "=" not in argument or not section or not key:
        return [Problem((argument,), "expected section.key=value, such as training.seed=7")]
    if (section, key) in arguments:
        return [Problem((section, key), f"given twice ({arguments[section, key]}, {here})")]
    arguments[section, key] = here
    try:
        is_verbatim = _is_text(kind, section, key) and not re.match(r"\s*(['\"]|(~|null|)\s*\Z)", text)
        value, inner, problems = (text.strip(), {}, []) if is_verbatim else _parse(text, lambda line: here)
    except ConfigError as error:
        return list(error.problems)
    keys = raw.setdefault(section, {})
    # A section that is no mapping in the file is reported as such.
    if isinstance(keys, dict):
        keys[key] = value
        places.setdefault((section,), here)
        for stale in [path for path in places if path[:2] == (section, key)]:
            del places[stale]
        places[section, key] = here
        places.update({(section, key, *path): place for path, place in inner.items()})
    return ConfigError(problems).under(section, key)


def _is_text(kind: type[Section], section: str, key: str) -> bool:
    """Whether the key is one of text."""
    sections: dict[str, Any] = {each.name: each.type for each in fields(kind)}
    kinds = {each.name: describe(each.type) for each in fields(sections[section])} if section in sections else {}
    return kinds.get(key) in ("str", "str or null")


def _no_sections(place: str, found: str) -> ConfigError:
    return ConfigError([Problem((place,), f"expected sections such as `model:`, got {found}")])


def _placed(problem: Problem, places: Places) -> Problem:
    """The problem with the place of its key or of the nearest section around it that was given."""
    for length in range(len(problem.path), 0, -1):
        if place := places.get(problem.path[:length]):
            return Problem(problem.path, f"{problem.message} ({place})")
    return problem

"""The configuration reference, docs/configuration.md, from the sections: `python -m hymo.config_reference`."""

import inspect
from dataclasses import MISSING, Field, fields
from pathlib import Path
from typing import Any

from hymo.config import HyMoConfig, SourceConfig
from hymo.section import Section, describe

REFERENCE = Path(__file__).parents[1] / "docs" / "configuration.md"

_INTRODUCTION = """\
# Configuration

<!-- Written by `python -m hymo.config_reference` from hymo/config.py; edit it there. -->

A configuration is a YAML file of six sections. A key that is not given keeps the default below, hymo v1.0's. A key
that does not exist, a key given twice and a value of a wrong type are errors that name the line. An integer passes for
a float, `3e8` for an integer. Aliases, tags and paths that begin with `~` are errors too. On the command line,
`section.key=value` comes on top of the file, each key once; where text is expected it needs no quotes:

```
python recipes/pretrain.py recipes/configs/tiny.yaml scheduler.total_steps=50 'optimizer.adamw_betas=[0.9, 0.99]'
```

In Python, `derive_config(config, **{"optimizer.muon_lr": 0.01})` does the same. Ranges are intervals: `[0, 1)` holds 0
but not 1.
"""


def reference() -> str:
    """Markdown with every key of every section: type, default, range and meaning."""
    sections = [(each.name, each.default_factory) for each in fields(HyMoConfig)]
    parts = [_INTRODUCTION]
    for name, section in [*sections, ("data.sources", SourceConfig)]:
        parts.append(f"## `{name}`\n\n{inspect.getdoc(section)}\n\n{_table(section)}\n")
    return "\n".join(parts)


def _table(section: Any) -> str:
    rows = ["| key | type | default | range | meaning |", "|---|---|---|---|---|"]
    for each in fields(section):
        cells = [f"`{each.name}`", describe(each.type), _default(each), each.metadata["within"], each.metadata["doc"]]
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


def _default(field: Field[Any]) -> str:
    match field.default:
        case value if value is MISSING:
            return "required"
        case [Section(), *_] as sources:
            return ", ".join(f"{each.name} {each.weight:g}" for each in sources)
        case value:
            return f"`{_yaml(value)}`"


def _yaml(value: object) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return str(value).lower()
        case tuple():
            return f"[{', '.join(map(_yaml, value))}]"
        case _:
            return str(value)


if __name__ == "__main__":
    REFERENCE.write_text(reference(), encoding="utf-8")
    print(f"wrote {REFERENCE}")

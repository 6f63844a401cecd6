"""The report of a run: one HTML file with all its curves, that needs nothing beside it."""

import json
import math
import os
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from html import escape
from pathlib import Path
from typing import Any

from hymo.chart import LEVELS, Level, Line, heat_map, line_chart, short
from hymo.config_yaml import load_config
from hymo.run_folder import CONFIG, METRICS, REPORT, RUN, SAMPLE

MOST_COLUMNS = 160
"""Columns of a heat map; of more steps, averages."""
VISIBLE = {code: 0x2400 + code for code in range(32) if chr(code) not in "\n\t"} | dict.fromkeys(
    (0x7F, 0xFFFE, 0xFFFF, *range(0xD800, 0xE000)), 0xFFFD
)
"""Control characters as their pictures, and other characters that no page may hold as the replacement character."""
BASELINES = {"order0_bits_per_byte": "order-0 entropy", "xz_bits_per_byte": "xz -9e"}

Record = dict[str, Any]
Read = Callable[[Record], Any]


def write_report(run_folder: str | Path) -> Path:
    """Makes report.html out of what a run left in its folder, whatever of it there is, and returns its path."""
    folder = Path(run_folder)
    records = list(_records(folder / METRICS))
    train = [record for record in records if record.get("kind") == "train"]
    evaluations = [record for record in records if record.get("kind") == "eval"]
    run = _json(_text(folder / RUN))
    config, sample = _text(folder / CONFIG), _text(folder / SAMPLE)
    name = str(run.get("name") or folder.name)
    baselines = {key: value for key, value in (run.get("baselines") or {}).items() if _number(value) == _number(value)}

    body = [
        _header(name, run, train, evaluations, baselines),
        f"<main>{''.join(_charts(train, evaluations, baselines))}</main>",
        _loads(train, _layers(config, folder / CONFIG)),
        _sample(sample),
        _details(run, config),
    ]
    page = (
        "<!DOCTYPE html>\n<html lang='en'><head><meta charset='utf-8'/>"
        "<meta name='viewport' content='width=device-width, initial-scale=1'/>"
        f"<title>{_escaped(name)}</title><style>{STYLE}</style></head><body>{''.join(body)}</body></html>\n"
    )
    path, partial = folder / REPORT, folder / f"{REPORT}.partial"
    partial.write_text(page, encoding="utf-8", errors="replace")
    os.replace(partial, path)
    return path


def _header(name: str, run: Record, train: list[Record], evaluations: list[Record], baselines: dict[str, float]) -> str:
    last, scored = train[-1] if train else {}, evaluations[-1] if evaluations else {}
    parameters = run.get("parameters") or {}
    floors = ", ".join(f"{BASELINES.get(key, key)} {short(value)}" for key, value in baselines.items())
    seconds = max((_number(record.get("seconds")) for record in (last, scored)), default=math.nan)
    speeds = sorted(v for v in (_number(record.get("tokens_per_second")) for record in train) if math.isfinite(v))
    nats = _shown(scored.get("loss"), "{:.3f}")
    tiles = [
        ("bits per byte", _shown(scored.get("bits_per_byte"), "{:.3f}"), floors),
        ("perplexity", _shown(scored.get("perplexity"), "{:.4g}"), f"{nats} nats per token"),
        ("training loss", _shown(last.get("loss"), "{:.3f}"), "nats per token"),
        ("parameters", _shown(parameters.get("stored")), f"{_shown(parameters.get('active'))} active"),
        ("tokens", _shown(last.get("tokens")), f"in {_shown(last.get('step'), '{:,.0f}')} steps"),
        ("time", _clock(seconds), f"{_shown(speeds[len(speeds) // 2]) if speeds else '–'} tokens/s"),
    ]
    cells = "".join(
        f"<div><dt>{_escaped(label)}</dt><dd>{_escaped(value)}</dd><small>{_escaped(more)}</small></div>"
        for label, value, more in tiles
    )
    command = f"<code>{_escaped(str(run['command']))}</code>" if run.get("command") else ""
    return f"<header><h1>{_escaped(name)}</h1>{command}<dl>{cells}</dl></header>"


def _charts(train: list[Record], evaluations: list[Record], baselines: dict[str, float]) -> Iterator[str]:
    chart = partial(line_chart, until=max(x for x, _ in [*_points([*train, *evaluations], lambda r: 0), (0.0, 0.0)]))

    def trained(name: str, read: Read, *, is_smoothed: bool = True) -> Line:
        return Line(name, _points(train, read), is_smoothed=is_smoothed)

    def scored(name: str, read: Read) -> Line:
        return Line(name, _points(evaluations, read))

    def over_layers(read: Callable[[Record], list[float]]) -> list[Line]:
        worst = trained("fullest layer", lambda r: max(read(r), default=None))
        mean = trained("mean of layers", lambda r: _mean(read(r)))
        return [worst, mean] if any(len(read(record)) > 1 for record in train) else [worst._replace(name="the layer")]

    depth = max((len(record.get("mtp") or ()) for record in train), default=0)
    ahead = [trained(f"{k + 2} ahead", partial(_ahead, k=k)) for k in range(depth)]
    loss = [trained("next token", lambda r: r.get("loss")), *ahead, scored("validation", lambda r: r.get("loss"))]
    yield chart("Loss", loss, unit="nats per token")

    names = list(dict.fromkeys(name for record in evaluations for name in record.get("sources") or {}))
    bits = [
        scored("all", lambda r: r.get("bits_per_byte")),
        *(scored(name, partial(_source_bits, name=name)) for name in names),
    ]
    levels = [Level(BASELINES.get(key, key), float(value)) for key, value in baselines.items()]
    yield chart("Bits per byte", bits, unit="validation", levels=levels)

    rates = [
        trained("NorMuon", lambda r: r.get("muon_lr"), is_smoothed=False),
        trained("AdamW", lambda r: r.get("adamw_lr"), is_smoothed=False),
    ]
    yield chart("Learning rate", rates, is_log=True)

    skipped = sum(record.get("finite") is False for record in train)
    note = f"loss or gradient was not finite in {skipped} of the recorded steps: skipped" if skipped else ""
    norm = [trained("before clipping", lambda r: r.get("grad_norm"))]
    yield chart("Gradient norm", norm, is_log=True, note=note)

    speed = [trained("tokens per second", lambda r: r.get("tokens_per_second"))]
    yield chart("Speed", speed, from_zero=True, note=_mfu(train))

    balance = over_layers(lambda r: [_imbalance(row) for row in r.get("load") or []])
    yield chart("Fullest expert over mean", balance, unit="1 is even", levels=[Level("even", 1.0)])

    low = trained("lowest", lambda r: _item(r.get("bias_range"), 0), is_smoothed=False)
    high = trained("highest", lambda r: _item(r.get("bias_range"), 1), is_smoothed=False)
    yield chart("Router bias", [low, high], unit="router score", band=(low, high))

    dropped = over_layers(lambda r: [100 * _number(fraction) for fraction in r.get("dropped") or []])
    yield chart("Dropped assignments", dropped, unit="%, for want of capacity", from_zero=True)


def _loads(train: list[Record], layers: Sequence[int]) -> str:
    """A heat map for each layer with experts: who was chosen how often, over the steps."""
    loads = [record["load"] for record in train if record.get("load")]
    if not loads:
        return ""
    strips = []
    for index in range(max(map(len, loads))):
        history = [load[index] for load in loads if index < len(load)]
        dead = sum(value == 0 for value in history[-1])
        name = f"layer {layers[index]}" if index < len(layers) else f"mixture {index + 1}"
        note = f"at the end: max/mean {short(_imbalance(history[-1]))}, {dead or 'none'} dead"
        strips.append(heat_map(name, _averaged(history), note=note))
    first, final = (_shown(record.get("step"), "{:,.0f}") for record in (train[0], train[-1]))
    shades = "".join(f"<i style='background:var(--h{shade})'></i>" for shade in range(LEVELS))
    return (
        "<section><h2>Expert load</h2>"
        f"<p class='note key'><span>A row is an expert; steps {first} to {final} from left to right.</span>"
        f"<span class='scale'>idle {shades} twice its share</span></p>"
        f"<div class='strips'>{''.join(strips)}</div></section>"
    )


def _layers(config: str, path: Path) -> Sequence[int]:
    """The layers with experts, if the run's configuration can be read."""
    try:
        return load_config(path).model.mla_layers if config else ()
    except ValueError:
        return ()


def _ahead(record: Record, *, k: int) -> Any:
    return _item(record.get("mtp"), k)


def _source_bits(record: Record, *, name: str) -> Any:
    return ((record.get("sources") or {}).get(name) or {}).get("bits_per_byte")


def _sample(text: str) -> str:
    if not text.strip():
        return ""
    return f"<section><h2>What it writes</h2><blockquote>{_escaped(text.strip())}</blockquote></section>"


def _details(run: Record, config: str) -> str:
    versions = run.get("versions") or {}
    cells = ((_escaped(str(name)), _escaped(str(version))) for name, version in versions.items())
    rows = "".join(f"<tr><th>{name}</th><td>{version}</td></tr>" for name, version in cells)
    parts = [
        f"<details><summary>Configuration</summary><pre>{_escaped(config)}</pre></details>" if config else "",
        f"<details><summary>Versions</summary><table>{rows}</table></details>" if rows else "",
    ]
    return f"<section>{''.join(parts)}</section>" if any(parts) else ""


def _records(path: Path) -> Iterator[Record]:
    """The lines of a metrics file that are whole; a run that was killed leaves half a line."""
    for line in _text(path).splitlines():
        if record := _json(line):
            yield record


def _json(text: str) -> Record:
    try:
        value = json.loads(text)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""


def _points(records: Sequence[Record], read: Read) -> list[tuple[float, float]]:
    """(step, value) of every record; a value that is missing or no number is NaN."""
    points = [(_number(record.get("step")), _number(read(record))) for record in records]
    return [point for point in points if math.isfinite(point[0])]


def _number(value: Any) -> float:
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else math.nan


def _item(values: Sequence[Any] | None, index: int) -> Any:
    return values[index] if values and index < len(values) else None


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else math.nan


def _imbalance(row: Sequence[Any]) -> float:
    """The load of the fullest expert over the mean."""
    loads = [value for value in row if value is not None]
    total = sum(loads)
    return max(loads) * len(row) / total if total > 0 else math.nan


def _averaged(history: list[list[Any]]) -> list[list[float]]:
    """At most `MOST_COLUMNS` columns: means over stretches of steps."""
    stretch = math.ceil(len(history) / MOST_COLUMNS)
    parts = [history[start : start + stretch] for start in range(0, len(history), stretch)]
    return [[_mean([v for v in values if v is not None]) for values in zip(*part, strict=False)] for part in parts]


def _mfu(train: list[Record]) -> str:
    known = sorted(value for value in (_number(record.get("mfu")) for record in train) if math.isfinite(value))
    return f"{known[len(known) // 2]:.1%} of the device's peak in the median step" if known else ""


def _shown(value: Any, form: str = "") -> str:
    number = _number(value)
    if not math.isfinite(number):
        return "–"
    return form.format(number) if form else short(number)


def _clock(seconds: float) -> str:
    if not math.isfinite(seconds):
        return "–"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h {minutes:02d}m" if hours else f"{minutes}m {rest:02d}s" if minutes else f"{seconds:.1f}s"


def _escaped(text: str) -> str:
    """Text that is safe inside an element or attribute; control characters, which no page may hold, become visible."""
    return escape(text.replace("\r\n", "\n").translate(VISIBLE))


STYLE = """
:root{color-scheme:light dark;--page:#f7f6f3;--card:#fff;--ink:#1d1c1a;--soft:#77736b;--rule:#e7e4dd;
--c0:#2563c9;--c1:#d9730d;--c2:#0f8f6b;--c3:#9b4fc4;--c4:#c93a5b;--c5:#0e8aa8;--c6:#8a7a15;--c7:#6b6fd1;--c8:#b0582c;--c9:#5c7f33;
--h0:#2a5fb0;--h1:#5d8acb;--h2:#97b4de;--h3:#cbd8ea;--h4:#eeece7;--h5:#f6d9ba;--h6:#f0b478;--h7:#e58a3a;--h8:#cc5f0c}
@media (prefers-color-scheme:dark){:root{--page:#151618;--card:#1d1f22;--ink:#e9e7e2;--soft:#98958e;--rule:#303338;
--c0:#6ea3f5;--c1:#f0a04b;--c2:#4cc79d;--c3:#c68ae6;--c4:#f0768f;--c5:#54c2dc;--c6:#cdbb4a;--c7:#a0a4f5;--c8:#dd8f63;--c9:#9cc46d;
--h0:#5b93ea;--h1:#4675bd;--h2:#37588c;--h3:#2f4160;--h4:#2a2c30;--h5:#513b27;--h6:#855526;--h7:#bb7227;--h8:#f0952f}}
*{box-sizing:border-box;margin:0}
body{background:var(--page);color:var(--ink);font:15px/1.5 system-ui,-apple-system,'Segoe UI',Roboto,sans-serif;
max-width:1240px;margin:auto;padding:clamp(20px,4vw,48px) clamp(14px,3vw,40px) 64px;font-variant-numeric:tabular-nums}
h1{font-size:clamp(26px,4vw,38px);line-height:1.15;letter-spacing:-.02em;overflow-wrap:anywhere}
h2{font-size:18px;margin-bottom:6px}
header code{display:block;color:var(--soft);font-size:13px;margin-top:6px;overflow-wrap:anywhere}
code,pre{font-family:ui-monospace,'SF Mono',Menlo,Consolas,monospace}
small,.note,.none{color:var(--soft);font-size:12.5px}
dl{display:grid;grid-template-columns:repeat(auto-fit,minmax(150px,1fr));gap:1px;margin:24px 0 20px;
background:var(--rule);border:1px solid var(--rule);border-radius:12px;overflow:hidden}
dl div{background:var(--card);padding:14px 16px}
dt{color:var(--soft);font-size:12.5px}
dd{font-size:26px;font-weight:650;letter-spacing:-.01em;line-height:1.25}
dl div:first-child dd{color:var(--c0)}
main{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,440px),1fr));gap:16px}
figure,section{background:var(--card);border:1px solid var(--rule);border-radius:12px;padding:16px 18px}
section{margin-top:16px}
figure{min-width:0;display:flex;flex-direction:column}
figcaption{font-weight:650}
figcaption small{font-weight:400;margin-left:8px}
.legend{list-style:none;padding:0;display:flex;flex-wrap:wrap;gap:2px 14px;min-height:20px;
font-size:12.5px;color:var(--soft)}
.legend b{color:var(--ink);font-weight:600}
.legend i{display:inline-block;width:12px;height:3px;border-radius:2px;margin-right:6px;vertical-align:middle}
.plot{position:relative;height:220px;margin:10px 6px 22px 44px}
.plot svg{position:absolute;inset:0;width:100%;height:100%;overflow:hidden}
.plot path{fill:none;stroke-width:1.8;vector-effect:non-scaling-stroke;stroke-linejoin:round;stroke-linecap:round}
.plot .grid{stroke:var(--rule);stroke-width:1}
.plot .level{stroke:var(--soft);stroke-width:1.2;stroke-dasharray:5 5}
.plot .faint{opacity:.25;stroke-width:1}
.plot .band{fill:var(--c0);opacity:.12;stroke:none}
.plot span{position:absolute;font-size:11.5px;line-height:1;color:var(--soft);white-space:nowrap}
.plot .y{right:100%;margin-right:8px;transform:translateY(50%)}
.plot .x{top:100%;margin-top:8px;transform:translateX(-50%)}
.plot .named{margin-bottom:4px;text-shadow:0 0 3px var(--card),0 0 3px var(--card),0 0 3px var(--card)}
.plot i{position:absolute;width:6px;height:6px;border-radius:50%;transform:translate(-50%,50%)}
.none{margin:auto;padding:60px 0}
.strips{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,440px),1fr));gap:14px 24px;margin-top:12px}
.strip{display:grid;grid-template-columns:1fr auto;gap:2px 10px;font-size:12.5px}
.strip b{font-weight:600}
.strip small{grid-row:1;grid-column:2}
.strip svg{grid-column:1/-1;width:100%;border-radius:4px;shape-rendering:crispEdges;background:var(--page)}
.key{display:flex;flex-wrap:wrap;justify-content:space-between;gap:2px 16px}
.scale i{display:inline-block;width:14px;height:10px}
blockquote{white-space:pre-wrap;overflow-wrap:anywhere;font:13.5px/1.6 ui-monospace,'SF Mono',Menlo,Consolas,monospace;
margin-top:8px;max-width:100ch}
summary{cursor:pointer;font-weight:600;padding:4px 0}
details pre{font-size:12.5px;line-height:1.5;overflow-x:auto;padding:10px 0}
table{border-collapse:collapse;font-size:13.5px}
th{text-align:left;font-weight:400;color:var(--soft);padding:2px 24px 2px 0}
@media print{body{max-width:none}figure,section{break-inside:avoid}}
"""

"""The report of a run: whatever a run left behind, one page that shows all of it and needs nothing else."""

import json
import math
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from hymo.chart import MOST_POINTS, Level, Line, heat_map, line_chart, running_median, short, thinned
from hymo.report import write_report

CHARTS = (
    *("Loss", "Bits per byte", "Learning rate", "Gradient norm", "Speed"),
    *("Fullest expert over mean", "Router bias", "Dropped assignments"),
)
CONFIG = Path(__file__).parent.parent / "recipes" / "configs" / "tiny.yaml"


def train(step: int, **changed: Any) -> dict[str, Any]:
    record = {
        **{"kind": "train", "step": step, "loss": 7 / step, "total": 9 / step, "mtp": [8 / step, 9 / step]},
        **{"grad_norm": 1.5, "muon_lr": 0.02, "adamw_lr": 3e-4, "tokens": 2048 * step, "samples": 8 * step},
        **{"skipped": 0, "finite": True, "load": [[0.5, 0.25, 0.25, 0.0]], "dropped": [0.01], "mfu": None},
        **{"bias_range": [-0.1, 0.2], "tokens_per_second": 2000.0, "seconds": 1.0 * step, "eta_seconds": 0.0},
    }
    return record | changed


def evaluation(step: int, bits: float = 2.5) -> dict[str, Any]:
    sources = {name: {"loss": 3.0, "bits_per_byte": bits, "tokens": 10, "bytes": 30} for name in ("prose", "code")}
    return {
        **{"kind": "eval", "step": step, "loss": 3.0, "perplexity": math.exp(3), "bits_per_byte": bits},
        **{"byte_perplexity": 2**bits, "tokens": 20, "bytes": 60, "sources": sources, "seconds": 1.0 * step},
    }


def folder_with(path: Path, records: list[dict[str, Any]], *, sample: str = "", **run: Any) -> Path:
    (path / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    (path / "run.json").write_text(json.dumps({"name": "trial", "command": "pretrain.py x=1", **run}), encoding="utf-8")
    (path / "sample.txt").write_text(sample, encoding="utf-8")
    (path / "config.yaml").write_text(CONFIG.read_text(encoding="utf-8"), encoding="utf-8")
    return path


def page_of(folder: Path) -> tuple[str, ElementTree.Element]:
    """The page as text and as a tree, which it only has if it is well formed."""
    path = write_report(folder)
    assert path == folder / "report.html"
    text = path.read_text(encoding="utf-8")
    return text, ElementTree.fromstring(text)


def curves(page: ElementTree.Element, title: str) -> list[str]:
    """The shapes of a chart's lines: all paths that are no grid and no level."""
    (figure,) = [f for f in page.iter("figure") if (f.findtext("figcaption") or "").startswith(title)]
    return [p.get("d", "") for p in figure.iter("path") if p.get("class") not in ("grid", "level", "band")]


def test_page_has_every_curve_and_every_number(tmp_path: Path) -> None:
    records = [train(1), train(2), evaluation(2), train(3), train(4), evaluation(4, 2.25)]
    baselines = {"order0_bits_per_byte": 4.62, "xz_bits_per_byte": 1.61}
    run = {
        "baselines": baselines,
        "parameters": {"stored": 1_346_264, "active": 1_149_656},
        "versions": {"torch": "2.13"},
    }
    text, page = page_of(folder_with(tmp_path, records, sample="Once upon", **run))

    for title, lines in zip(CHARTS, (4, 3, 2, 1, 1, 1, 2, 1), strict=True):
        assert len(curves(page, title)) == lines, title
        assert all(d.count("L") >= 1 for d in curves(page, title)), title
    for words in (
        "next token",
        "2 ahead",
        "3 ahead",
        "validation",
        "prose",
        "code",
        "order-0 entropy 4.62",
        "xz -9e 1.61",
    ):
        assert words in text
    for words in ("2.250", "1.35M", "1.15M active", "8.19k", "Once upon", "pretrain.py x=1", "gdn_key_dim: 32", "2.13"):
        assert words in text
    assert "layer 0" in text
    assert "at the end: max/mean 2, 1 dead" in text


def test_page_needs_nothing_beside_it(tmp_path: Path) -> None:
    text, _ = page_of(folder_with(tmp_path, [train(1), evaluation(1)], sample="x"))

    assert not re.search(r"https?://|<script|<link|<img|@import|url\(|src=", text)
    assert "prefers-color-scheme:dark" in text
    assert "width=device-width" in text


def test_text_of_the_model_is_shown_and_never_obeyed(tmp_path: Path) -> None:
    sample = "<script>alert('1')</script> & </blockquote> \x1b[0m \x00 ]]> \ufffe"
    text, page = page_of(folder_with(tmp_path, [train(1)], sample=sample, name="<b>", command="a && b"))

    assert "<script" not in text
    assert page.findtext("body/header/h1") == "<b>"
    assert page.findtext("body/header/code") == "a && b"
    (shown,) = page.iter("blockquote")
    assert shown.text == "<script>alert('1')</script> & </blockquote> \u241b[0m \u2400 ]]> \ufffd"


def test_gaps_stay_gaps(tmp_path: Path) -> None:
    holes = [train(step, loss=value) for step, value in enumerate([3.0, 2.0, None, math.nan, math.inf, 1.0, 1.5], 1)]
    holes[2] |= {"finite": False, "grad_norm": None, "load": [[None, None, None, None]], "mtp": [None, None]}
    text, page = page_of(folder_with(tmp_path, holes))

    assert curves(page, "Loss")[0].count("M") == 2
    assert curves(page, "Gradient norm")[0].count("M") == 2
    assert "not finite in 1 of the recorded steps" in text
    drawn = text.split("<body>")[1].split("<details>")[0]
    assert not re.search(r"\b(nan|inf)\b", drawn)


@pytest.mark.parametrize(
    "records",
    [
        [],
        [train(1)],
        [evaluation(1)],
        [train(1), train(2)],
        [train(1, main=None, mtp=[None, None], grad_norm=None, load=[], dropped=[], bias_range=None)],
        [train(1, main=2.0, mtp=[], load=[[0.0, 0.0]], muon_lr=0.0, adamw_lr=0.0), train(2, muon_lr=0.0)],
        [{"kind": "train"}, {"step": 3}, {"kind": "eval", "step": 1, "sources": None}],
    ],
)
def test_any_run_has_a_page(tmp_path: Path, records: list[dict[str, Any]]) -> None:
    _, page = page_of(folder_with(tmp_path, records))

    assert len(list(page.iter("figure"))) == len(CHARTS)


def test_an_empty_folder_and_a_broken_one_have_a_page(tmp_path: Path) -> None:
    assert "nothing recorded" in page_of(tmp_path)[0]
    (tmp_path / "metrics.jsonl").write_text(json.dumps(train(5)) + '\n\n7\n{"kind": "tra', encoding="utf-8")
    (tmp_path / "run.json").write_text("{", encoding="utf-8")
    (tmp_path / "config.yaml").write_text("model: {dim: -1}\n", encoding="utf-8")
    (tmp_path / "sample.txt").write_bytes(b"caf\xe9 \xff")

    text, page = page_of(tmp_path)

    assert page.findtext("body/header/h1") == tmp_path.name
    assert "mixture 1" in text
    assert "dim: -1" in text


def test_long_runs_are_thinned_but_keep_their_extremes(tmp_path: Path) -> None:
    points = [(float(i), math.sin(i / 900)) for i in range(20_000)]
    points[12_345] = (12_345.0, 9.0)
    points[7] = (7.0, -9.0)

    few = thinned(points)

    assert len(few) <= MOST_POINTS + 2
    assert {points[0], points[-1], points[12_345], points[7]} <= set(few)
    assert few == sorted(few)
    _, page = page_of(folder_with(tmp_path, [train(step) for step in range(1, 2_001)]))
    assert max(len(d) for d in curves(page, "Loss")) < 20_000


def test_a_long_gap_survives_thinning() -> None:
    points = [(float(i), math.nan if 5_000 <= i < 8_000 else 1.0) for i in range(12_000)]

    steps = [x for x, y in thinned(points) if math.isnan(y)]

    assert min(steps) < 5_100
    assert max(steps) > 7_900


def test_median_ignores_a_spike_and_follows_a_slope() -> None:
    points = [(float(i), 2.0 * i) for i in range(500)]
    spiked = [*points[:250], (250.0, 1e9), *points[251:]]

    smooth = dict(running_median(spiked))

    assert [smooth[x] for x in (0.0, 100.0, 499.0)] == [0.0, 200.0, 998.0]
    assert smooth[250.0] == pytest.approx(500.0, abs=4)


def test_a_spike_leaves_the_chart_instead_of_flattening_it() -> None:
    usual = [(float(i), 3.0 - i / 100) for i in range(100)]

    chart = line_chart("Loss", [Line("main", [*usual, (100.0, 1e6)])], until=100.0)

    heights = [float(h) for h in re.findall(r"[ML][\d.]+ (-?[\d.e+]+)", chart.split("stroke:var(--c0)")[1])]
    assert max(heights[:-1]) - min(heights[:-1]) > 100
    assert heights[-1] < -1000


def test_levels_are_named_and_inside_the_chart() -> None:
    page = ElementTree.fromstring(
        line_chart("x", [Line("a", [(1.0, 2.0)])], until=1.0, levels=[Level("xz < all", 8.0)])
    )

    (named,) = [span for span in page.iter("span") if span.get("class") == "named"]
    assert named.text == "xz < all 8"
    assert 0 <= float(re.findall(r"bottom:([\d.]+)%", named.get("style", ""))[0]) <= 100


def test_heat_is_load_over_even_share() -> None:
    page = ElementTree.fromstring(heat_map("layer 0", [[0.5, 0.25, 0.25, 0.0], [math.nan] * 4]))

    shades = {p.get("style"): p.get("d") for p in page.iter("path")}
    assert shades == {
        "fill:var(--h8)": "M0 0h1v1h-1z",
        "fill:var(--h4)": "M0 1h1v1h-1zM0 2h1v1h-1z",
        "fill:var(--h0)": "M0 3h1v1h-1z",
    }


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (0.0, "0"),
        (1.934, "1.93"),
        (57_220.0, "57.2k"),
        (3e-4, "0.0003"),
        (1.5e-5, "1.5e-5"),
        (1.13e9, "1.13B"),
        (0.02, "0.02"),
        (-0.0162, "-0.0162"),
    ],
)
def test_numbers_are_short(number: float, text: str) -> None:
    assert short(number) == text

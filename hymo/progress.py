"""What a run says while it trains: lines of metrics.jsonl, and the same as lines for people."""

import json
import math
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hymo.evaluate import Evaluation
from hymo.run_folder import write_whole
from hymo.step import Metrics
from hymo.tracker import Tracker


class MetricsLog:
    """metrics.jsonl: one object a line, on disk before the next one is made."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def append(self, record: Mapping[str, Any]) -> None:
        """Adds a line. JSON has no NaN: what is not finite becomes null."""
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(plain(record), allow_nan=False) + "\n")

    def rewind(self, step: int) -> float:
        """Drops what was recorded after `step` or is no record; returns the run's seconds up to there."""
        text = self.path.read_text(encoding="utf-8", errors="replace") if self.path.exists() else ""
        records = [record for line in text.splitlines() if (record := _parsed(line)) and record["step"] <= step]
        write_whole(self.path, "".join(json.dumps(record) + "\n" for record in records))
        return max((record["seconds"] for record in records), default=0.0)


class Progress:
    """Tells of a run: each step that is due and each evaluation becomes a line on stdout and a line of the log.

    Args:
        log: of the run.
        total_steps: of the whole run.
        row_tokens: labels of a row.
        rows: of one step.
        flops: of one step, forward and backward.
        peak: of the device, FLOP/s; None if it is not known.
    """

    def __init__(
        self, log: MetricsLog, total_steps: int, *, rows: int, row_tokens: int, flops: float, peak: float | None
    ) -> None:
        self.log, self.total_steps, self.rows, self.row_tokens = log, total_steps, rows, row_tokens
        self.flops, self.peak = flops, peak
        self._begun = time.perf_counter()
        self._is_warm = False
        self._timed: list[float] = []
        self._tracker: Tracker | None = None

    def go_on(self, step: int, *, tracker: Tracker | None = None) -> None:
        """Takes the log up after `step`: what it says of later steps is not true any more.

        Args:
            tracker: hears of every record after it is in the log.
        """
        self._tracker = tracker
        self._begun = time.perf_counter() - self.log.rewind(step)

    @contextmanager
    def timed_step(self) -> Iterator[None]:
        """Around all that one step takes, so that evaluations and checkpoints do not count as slow steps."""
        begun = time.perf_counter()
        yield
        seconds = time.perf_counter() - begun
        # The first one compiles: it would spoil the average.
        if self._is_warm:
            self._timed.append(seconds)
        self._is_warm = True

    def tell_step(self, step: int, samples: int, *, metrics: Metrics) -> None:
        """Waits for the step, prints and records it; speeds are those since the step told before, null for the first.

        Args:
            samples: rows seen up to and with it.
        """
        pace = sum(self._timed) / len(self._timed) if self._timed else None
        self._timed = []
        values = {name: value.tolist() for name, value in metrics._asdict().items()}
        bias = [value for row in values.pop("bias") for value in row]
        losses = {"loss": values.pop("main"), "total": values.pop("loss")}
        record = {
            "kind": "train",
            "step": step,
            **losses,
            **values,
            "tokens": samples * self.row_tokens,
            "samples": samples,
            "bias_range": [min(bias), max(bias)] if bias else None,
            "tokens_per_second": pace and self.rows * self.row_tokens / pace,
            "mfu": pace and self.peak and self.flops / pace / self.peak,
            "seconds": time.perf_counter() - self._begun,
            "eta_seconds": pace and (self.total_steps - step) * pace,
        }
        self._record(record)
        print(train_line(record, self.total_steps), flush=True)

    def tell_evaluation(self, step: int, evaluation: Evaluation) -> None:
        """Prints and records an evaluation."""
        seconds = time.perf_counter() - self._begun
        record = {"kind": "eval", "step": step, **evaluation.record(), "seconds": seconds}
        self._record(record)
        print(eval_line(record), flush=True)

    def _record(self, record: Mapping[str, Any]) -> None:
        self.log.append(record)
        if self._tracker is not None:
            self._tracker.log(record)


def train_line(record: Mapping[str, Any], total_steps: int) -> str:
    """A train record for people: loss in nats per token, expert load as that of the fullest expert over the mean."""
    loads = [max(row) * len(row) for row in record["load"]]
    parts = [
        f"step {record['step']:>{len(str(total_steps))}}/{total_steps}",
        f"loss {record['loss']:.4f}",
        f"lr {record['muon_lr']:.2e} {record['adamw_lr']:.2e}",
        f"grad {record['grad_norm']:.3f}",
    ]
    if loads:
        parts.append(f"experts max/mean {max(loads):.2f}")
    if record["tokens_per_second"]:
        parts.append(f"{record['tokens_per_second']:,.0f} tok/s")
    if record["mfu"]:
        parts.append(f"mfu {record['mfu']:.1%}")
    parts.append(f"{clock(record['eta_seconds'])} left" if record["eta_seconds"] is not None else "compiled and begun")
    return "  ".join(parts) + ("" if record["finite"] else "  NOT FINITE, skipped")


def eval_line(record: Mapping[str, Any]) -> str:
    """An eval record for people."""
    sources = "  ".join(f"{name} {each['bits_per_byte']:.3f}" for name, each in record["sources"].items())
    return (
        f"eval at step {record['step']}: {record['bits_per_byte']:.4f} bits/byte ({sources}), "
        f"loss {record['loss']:.4f}, perplexity {record['perplexity']:.2f}, {record['tokens']:,} tokens"
    )


def plain(value: Any) -> Any:
    """`value` as JSON can say it: a number that is not finite becomes None."""
    match value:
        case Mapping():
            return {name: plain(each) for name, each in value.items()}
        case list() | tuple():
            return [plain(each) for each in value]
        case float() if not math.isfinite(value):
            return None
    return value


def clock(seconds: float) -> str:
    """Seconds as minutes:seconds, or hours:minutes:seconds from an hour on."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}:{rest:02d}" if minutes < 60 else f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}"


def _parsed(line: str) -> dict[str, Any] | None:
    """The record in a line, None if there is none."""
    try:
        record = json.loads(line)
    except ValueError:
        return None
    is_record = isinstance(record, dict) and all(
        isinstance(record.get(name), int | float) for name in ("step", "seconds")
    )
    return record if is_record else None

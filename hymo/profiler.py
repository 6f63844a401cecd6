"""A trace of a few steps: what ran when, on the host and on the device."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from hymo.run_folder import PROFILE


class Profiler:
    """Traces the steps that it is asked for, and costs nothing in the others.

    Args:
        steps: first and last, counted from 1; None for none.
        folder: of the run; there come profile/steps_A_B.json, for chrome://tracing or Perfetto, and a table, .txt.
        rank: appended to their names unless it is 0.
    """

    def __init__(self, steps: tuple[int, int] | None, folder: Path, *, rank: int = 0) -> None:
        self._steps, self._folder = steps, folder / PROFILE
        self._name = f"steps_{steps[0]}_{steps[1]}" + (f"_rank_{rank}" if rank else "") if steps else ""
        self._trace: profile | None = None

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Around step `number`, all that it takes."""
        if self._steps and number == self._steps[0]:
            gpu = [ProfilerActivity.CUDA] if torch.cuda.is_available() else []
            self._trace = profile(activities=[ProfilerActivity.CPU, *gpu])
            self._trace.start()
        try:
            yield
        finally:
            if self._trace is not None and self._steps and number >= self._steps[1]:
                self.close()

    def close(self) -> None:
        """Writes a trace that has begun."""
        if self._trace is None:
            return
        trace, self._trace = self._trace, None
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        trace.stop()
        self._folder.mkdir(exist_ok=True)
        trace.export_chrome_trace(str(self._folder / f"{self._name}.json"))
        key = "self_device_time_total" if torch.cuda.is_available() else "self_cpu_time_total"
        table = trace.key_averages().table(sort_by=key, row_limit=20)
        (self._folder / f"{self._name}.txt").write_text(table, encoding="utf-8")

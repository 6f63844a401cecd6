"""Times a training step, and the scan inside it: `benchmarks/step.py [CONFIG] [section.key=value ...]`.

Two tables, each of one run with its contestants interleaved, so that a busy machine slows all of them alike: the step
compiled and not, and the gated delta rule chunked and token by token at T = 512. Read the ratios.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import torch
from scan import environment, inputs, program

from hymo import (
    TrainState,
    build_hymo,
    build_optimizer,
    init_train_state,
    jit,
    load_config,
    make_batch,
    model_spec,
    train_step,
    tree,
)
from hymo.backend import choose_backend
from hymo_kernels import chunk_gated_delta_rule, fused_recurrent_gated_delta_rule

TINY = Path(__file__).parents[1] / "recipes" / "configs" / "tiny.yaml"


def interleaved(runs: Mapping[str, Callable[[], object]], times: int) -> dict[str, list[float]]:
    """Milliseconds of every run of every contestant."""
    spent: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(times):
        for name, run in runs.items():
            start = time.perf_counter()
            run()
            spent[name].append(1e3 * (time.perf_counter() - start))
    return spent


def table(title: str, spent: Mapping[str, list[float]], tokens: int) -> None:
    """Medians, spreads, and the ratio to the slowest."""
    print(f"\n{title}\n{'':>12} {'ms':>9} {'min..max':>19} {'tokens/s':>10} {'speedup':>8}")
    slowest = max(statistics.median(each) for each in spent.values())
    for name, each in spent.items():
        median, spread = statistics.median(each), f"{min(each):.1f}..{max(each):.1f}"
        print(f"{name:>12} {median:9.1f} {spread:>19} {1e3 * tokens / median:10,.0f} {slowest / median:7.2f}x")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("values", nargs="*", metavar="[CONFIG] section.key=value")
    parser.add_argument(
        "--compile", nargs="+", default=["none", "aot_eager"], choices=["none", "aot_eager", "inductor"]
    )
    parser.add_argument("--runs", type=int, default=9)
    asked = parser.parse_intermixed_args()
    named = bool(asked.values) and "=" not in asked.values[0]
    config = load_config(asked.values[0] if named else TINY, asked.values[named:])
    print("command: benchmarks/step.py", *sys.argv[1:])
    print(f"{environment()}; medians of {asked.runs} interleaved runs")

    training, spec = config.training, model_spec(config.model)
    optimizer = build_optimizer(config.optimizer, config.scheduler, spec)
    params = build_hymo(config).params
    pure = partial(
        train_step, cfg=config, spec=spec, optimizer=optimizer, backend=choose_backend(config.training, "cpu")
    )
    shape = training.gradient_accumulation_steps, training.micro_batch_size, training.max_seq_len + 1
    batch = make_batch(torch.randint(config.model.vocab_size, shape, generator=torch.Generator().manual_seed(0)))

    def ready(compile: str) -> Callable[[], object]:
        state: TrainState = init_train_state(tree.map(torch.clone, params), spec=spec, optimizer=optimizer)
        step = jit(pure, compile=compile, donate=True)
        start = time.perf_counter()
        step(state, batch)
        print(f"first step, {compile}: {time.perf_counter() - start:.1f} s")
        return lambda: step(state, batch)

    steps = interleaved({compile: ready(compile) for compile in asked.compile}, asked.runs)
    table(f"one step of {config.run.name}, {batch.tokens.numel():,} tokens", steps, batch.tokens.numel())

    forms = {"recurrent": fused_recurrent_gated_delta_rule, "chunk": chunk_gated_delta_rule}
    x = inputs(8, 512, 2, 32, 32)
    runs = {name: partial(program(form, "fwdbwd"), *x) for name, form in forms.items()}
    for run in runs.values():
        run()
    table("the scan, forward and backward, 8 x 512 tokens, 2 heads of 32 x 32", interleaved(runs, asked.runs), 8 * 512)


if __name__ == "__main__":
    main()

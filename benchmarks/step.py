"""Times a training step: `benchmarks/step.py [CONFIG] [section.key=value ...] [--compile ...] [--backend ...]`.

    benchmarks/step.py --compile none aot_eager inductor
    benchmarks/step.py recipes/configs/hymo_750m.yaml training.gradient_accumulation_steps=1 --compile inductor

A table of one run with its contestants interleaved, so that a busy machine slows all of them alike: every way of
compiling with every backend, over packed documents. On a CPU read the ratios, and those of a second table: the gated
delta rule chunked and token by token at T = 512. On a GPU there are tokens per second, FLOP/s by the convention of
`--dry-run` against the card's peak, the most memory held, and where the time of the last contestant goes.
"""

import argparse
import re
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from scan import Shape, environment, inputs, program

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
from hymo.accounting import flops_per_token, peak_flops
from hymo.backend import choose_backend
from hymo.batch import Batch
from hymo.config import DELIMITER, HyMoConfig, derive_config
from hymo_kernels import chunk_gated_delta_rule, fused_recurrent_gated_delta_rule

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
DOCUMENT = 600
"""Tokens of a document, on average."""

KINDS = {
    "scan": r"fused_(prepare|forward|backward)_kernel|^(prepare|forward|chain)_kernel|chunk_kernel|carry_kernel|pairs",
    "convolution": r"conv",
    "attention": r"sdpa|fmha|flash|attention|attn",
    "matrix products": r"gemm|cutlass|nvjet|xmma|cublas",
    "communication": r"nccl",
    "made by inductor": r"^triton_",
    "copies": r"memcpy|memset",
}
"""What a kernel's name tells about it; the first that fits counts."""

TINY = Path(__file__).parents[1] / "recipes" / "configs" / "tiny.yaml"


def interleaved(runs: Mapping[str, Callable[[], object]], times: int) -> dict[str, list[float]]:
    """Milliseconds of every run of every contestant."""
    spent: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(times):
        for name, run in runs.items():
            spent[name].append(1e3 * seconds(run))
    return spent


def seconds(run: Callable[[], object]) -> float:
    """How long a run takes, to the end of what it starts on a GPU."""
    if ON_GPU:
        torch.cuda.synchronize()
    start = time.perf_counter()
    run()
    if ON_GPU:
        torch.cuda.synchronize()
    return time.perf_counter() - start


def table(title: str, spent: Mapping[str, list[float]], tokens: int) -> None:
    """Medians, spreads, and the ratio to the slowest."""
    print(f"\n{title}\n{'':>20} {'ms':>9} {'min..max':>19} {'tokens/s':>10} {'speedup':>8}")
    slowest = max(statistics.median(each) for each in spent.values())
    for name, each in spent.items():
        median, spread = statistics.median(each), f"{min(each):.1f}..{max(each):.1f}"
        print(f"{name:>20} {median:9.1f} {spread:>19} {1e3 * tokens / median:10,.0f} {slowest / median:7.2f}x")


def documents(config: HyMoConfig) -> Batch:
    """The batch of one step: uniform tokens in packed documents."""
    training = config.training
    shape = training.gradient_accumulation_steps, training.micro_batch_size, training.max_seq_len + 1
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(1, config.model.vocab_size, shape, generator=generator)
    batch = make_batch(tokens.masked_fill(torch.rand(shape, generator=generator) < 1 / DOCUMENT, DELIMITER))
    return tree.map(lambda leaf: leaf.to(DEVICE), batch)


def ready(config: HyMoConfig, batch: Batch, compile: Any, backend: str) -> Callable[[], object]:
    """A step that has run once, with what that took told."""
    config = derive_config(config, training={"compile": compile, "backend": backend})
    spec = model_spec(config.model)
    optimizer = build_optimizer(config.optimizer, config.scheduler, spec)
    chosen = choose_backend(config.training, DEVICE)
    pure = partial(train_step, cfg=config, spec=spec, optimizer=optimizer, backend=chosen)
    params = tree.map(lambda leaf: leaf.to(DEVICE), build_hymo(config).params)
    state: TrainState = init_train_state(params, spec=spec, optimizer=optimizer)
    step = jit(pure, compile=compile, donate=True)
    print(f"first step, {compile} {backend}: {seconds(lambda: step(state, batch)):.1f} s", flush=True)
    return lambda: step(state, batch)


def tell_speed(config: HyMoConfig, run: Callable[[], object], milliseconds: float, tokens: int) -> None:
    """FLOP/s and memory of a step on a GPU, and where its time goes."""
    done = flops_per_token(config.model, config.training.max_seq_len) * tokens / milliseconds * 1e3
    peak = peak_flops(torch.cuda.get_device_name())
    share = f", {100 * done / peak:.1f} % of the card's peak" if peak else ""
    torch.cuda.reset_peak_memory_stats()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        seconds(run)
    print(f"\n{done / 1e12:.1f} TFLOP/s{share}; at most {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB held")
    spent: Counter[str] = Counter()
    for kernel in profile.key_averages():
        fits = (kind for kind, pattern in KINDS.items() if re.search(pattern, kernel.key, re.IGNORECASE))
        spent[next(fits, "other")] += kernel.self_device_time_total / 1e3
    total = sum(spent.values())
    for kind, each in spent.most_common():
        print(f"{kind:>20} {each:9.2f} ms {100 * each / total:5.1f} %")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("values", nargs="*", metavar="[CONFIG] section.key=value")
    parser.add_argument(
        "--compile", nargs="+", default=["none", "aot_eager"], choices=["none", "aot_eager", "inductor"]
    )
    parser.add_argument("--backend", nargs="+", default=["auto"], choices=["auto", "eager", "triton"])
    parser.add_argument("--runs", type=int, default=9)
    asked = parser.parse_intermixed_args()
    named = bool(asked.values) and "=" not in asked.values[0]
    config = load_config(asked.values[0] if named else TINY, asked.values[named:])
    print("command: benchmarks/step.py", *sys.argv[1:])
    print(f"{environment()}; medians of {asked.runs} interleaved runs")

    batch = documents(config)
    tokens = batch.tokens.numel()
    ways = list(product(asked.compile, asked.backend))
    steps = {f"{compile} {backend}": ready(config, batch, compile, backend) for compile, backend in ways}
    spent = interleaved(steps, asked.runs)
    table(f"one step of {config.run.name}, {tokens:,} tokens", spent, tokens)
    if ON_GPU:
        last = list(steps)[-1]
        tell_speed(config, steps[last], statistics.median(spent[last]), tokens)
        return

    forms = {"recurrent": fused_recurrent_gated_delta_rule, "chunk": chunk_gated_delta_rule}
    x = inputs(Shape(8, 512, 2, 32, 32))
    runs = {name: partial(program(form, "fwdbwd"), *x) for name, form in forms.items()}
    for run in runs.values():
        run()
    table("the scan, forward and backward, 8 x 512 tokens, 2 heads of 32 x 32", interleaved(runs, asked.runs), 8 * 512)


if __name__ == "__main__":
    main()

"""Times a training step: `benchmarks/step.py [CONFIG] [section.key=value ...] [--compile ...] [--backend ...]`.

    benchmarks/step.py --compile none aot_eager inductor
    benchmarks/step.py recipes/configs/hymo_750m.yaml training.gradient_accumulation_steps=1 --compile inductor --twin

A table of one run with its contestants interleaved, so that a busy machine slows all of them alike: every way of
compiling with every backend, over packed documents; with `--twin` the same step in plain PyTorch too (`twin.py`). On a
CPU read the ratios, and those of a second table: the gated delta rule chunked and token by token at T = 512. On a GPU
there are tokens per second, FLOP/s by the convention of `--dry-run` against the card's peak and against what a large
product reaches in the same run, the most memory that a contestant holds, and where its time goes; what inductor
compiles is timed as a CUDA graph, hymo's step and the twin's alike.
"""

import argparse
import gc
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch
from scan import NOTES, Shape, available, environment, inputs, program
from torch import Tensor
from twin import Rule, TwinStep, build_twin, choose_convolution, passes
from where import breakdown

from hymo import (
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
from hymo.model import ModelParams
from hymo.replay import replayed
from hymo_kernels import chunk_gated_delta_rule, fused_recurrent_gated_delta_rule

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
QUEUED = 4 if ON_GPU else 1
"""Steps that are timed as one: a training loop does not wait for a step before it launches the next."""

DOCUMENT = 600
"""Tokens of a document, on average."""

TINY = Path(__file__).parents[1] / "recipes" / "configs" / "tiny.yaml"


def interleaved(runs: Mapping[str, Callable[[], object]], times: int, *, queued: int = 1) -> dict[str, list[float]]:
    """Milliseconds a run of every contestant, so many times.

    Args:
        queued: runs in a row whose end alone is waited for, as a training loop queues its steps.
    """
    spent: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(times):
        for name, run in runs.items():
            spent[name].append(1e3 * seconds(partial(_repeat, run, queued)) / queued)
    return spent


def _repeat(run: Callable[[], object], times: int) -> None:
    for _ in range(times):
        run()


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


class Contestant(NamedTuple):
    """A step that has run.

    Args:
        run: the step, as it is timed; its loss.
        first: seconds of the first one, with what it compiled.
        memory: GiB that it would hold alone, at the worst moment of a step.
        parts: milliseconds of GPU time by kind.
    """

    run: Callable[[], Tensor]
    first: float
    memory: float
    parts: Mapping[str, float]


def ready(name: str, build: Callable[[], Callable[[], Tensor]], config: HyMoConfig) -> Contestant:
    """A contestant, with what its first step took, and found, told."""
    before, losses = allocated(), []
    run = build()
    first = seconds(lambda: losses.append(run()))
    print(f"first step, {name}: {first:.1f} s, loss {float(losses[0]):.5f}", flush=True)
    if not ON_GPU:
        return Contestant(run, first, 0.0, {})
    resident = allocated() - before
    memory, parts = held(run, resident), breakdown(run, config.model)
    run = recorded(name, run) if "inductor" in name else run
    # Said at once: whoever waits for the others may not get to the table.
    alone = statistics.median(interleaved({name: run}, 3, queued=QUEUED)[name])
    print(f"a step, {name}, alone: {alone:.1f} ms, {memory:.1f} GiB", flush=True)
    return Contestant(run, first, memory, parts)


def recorded(name: str, run: Callable[[], Tensor]) -> Callable[[], Tensor]:
    """A step as a CUDA graph, so that nobody loses to the host's launches; as it is, if it cannot be recorded."""
    replay = replayed(lambda leaves: [run()], 0)
    try:
        for _ in range(2):
            replay([])
    except RuntimeError as error:
        print(f"{name} cannot be recorded and is timed as launched: {str(error).splitlines()[0]}", flush=True)
        return run
    return lambda: replay([])[0]


def ready_ones(builds: Mapping[str, Callable[[], Callable[[], Tensor]]], config: HyMoConfig) -> dict[str, Contestant]:
    """The contestants that run; of the others the error is shown."""
    steps: dict[str, Contestant] = {}
    for name, build in builds.items():
        try:
            steps[name] = ready(name, build, config)
        except Exception:
            traceback.print_exc()
            print(f"{name}: does not run", flush=True)
    return steps


def on_device(params: ModelParams) -> ModelParams:
    """Copies, for a step that writes into them."""
    return tree.map(lambda leaf: leaf.to(DEVICE, copy=True), params)


def hymo_step(
    config: HyMoConfig, initial: ModelParams, batch: Batch, compile: Any, backend: str
) -> Callable[[], Tensor]:
    """hymo's own step."""
    config = derive_config(config, training={"compile": compile, "backend": backend})
    spec = model_spec(config.model)
    optimizer = build_optimizer(config.optimizer, config.scheduler, spec)
    chosen = choose_backend(config.training, DEVICE)
    pure = partial(train_step, cfg=config, spec=spec, optimizer=optimizer, backend=chosen)
    state = init_train_state(on_device(initial), spec=spec, optimizer=optimizer, backend=chosen)
    step = jit(pure, compile=compile, donate=True)
    return lambda: step(state, batch)[1].loss


def twin_step(config: HyMoConfig, initial: ModelParams, batch: Batch, compile: Any, rule: Rule) -> Callable[[], object]:
    """The step of the twin."""
    twin = build_twin(on_device(initial), config, rule, choose_convolution(DEVICE)[0], compile)
    step = TwinStep(twin, config, model_spec(config.model), compile)
    return partial(step, passes(batch, config.model))


def choose_scan(asked: str, config: HyMoConfig) -> tuple[str, Rule]:
    """The twin's scan: the one asked for, or the fastest there is."""
    names = [asked]
    if asked == "auto":
        wide = (config.model.gdn_key_dim, config.model.gdn_value_dim) == (128, 128)
        names = [*(["flashqla"] if wide else []), "fla", "hymo"] if ON_GPU else ["eager"]
    for name in names:
        for rule in available([name], print).values():
            return name, rule
    raise SystemExit("error: no scan for the twin")


def allocated() -> int:
    """Bytes held on the GPU."""
    gc.collect()
    return torch.cuda.memory_allocated() if ON_GPU else 0


def held(run: Callable[[], object], resident: int) -> float:
    """GiB that a step would hold alone, at its worst moment; between steps it holds so many bytes."""
    before = allocated()
    torch.cuda.reset_peak_memory_stats()
    seconds(run)
    return (torch.cuda.max_memory_allocated() - before + resident) / 2**30


def product_flops() -> float:
    """FLOP/s of a bf16 product large enough to fill the GPU."""
    x, y = (torch.randn(8192, 8192, device=DEVICE, dtype=torch.bfloat16) for _ in range(2))
    spent = interleaved({"product": lambda: [x @ y for _ in range(10)]}, 7)["product"]
    return 10 * 2 * 8192**3 / statistics.median(spent) * 1e3


def tell_speed(
    config: HyMoConfig, steps: Mapping[str, Contestant], spent: Mapping[str, list[float]], tokens: int
) -> None:
    """FLOP/s and memory of every contestant on a GPU, and where its time goes."""
    per_step = flops_per_token(config.model, config.training.max_seq_len) * tokens
    reached, peak = product_flops(), peak_flops(torch.cuda.get_device_name())
    print(f"\n{per_step / 1e12:.2f} TFLOP a step; a product of 8192 x 8192 reaches {reached / 1e12:.0f} TFLOP/s")
    print(f"{'':>20} {'TFLOP/s':>9} {'of peak':>8} {'of product':>10} {'GiB held':>9} {'first step':>11}")
    for name, step in steps.items():
        done = per_step / statistics.median(spent[name]) * 1e3
        share = f"{done / peak:.1%}" if peak else "-"
        row = f"{name:>20} {done / 1e12:9.1f} {share:>8} {done / reached:10.1%} {step.memory:9.1f}"
        print(f"{row} {step.first:9.1f} s", flush=True)

    parts = {name: step.parts for name, step in steps.items()}
    kinds = {kind: None for each in parts.values() for kind in sorted(each, key=lambda kind: -each[kind])}
    print(f"\n{'ms of GPU time':>20} " + " ".join(f"{name:>18}" for name in parts))
    for kind in kinds:
        print(f"{kind:>20} " + " ".join(f"{each.get(kind, 0.0):18.2f}" for each in parts.values()))
    print(f"{'together':>20} " + " ".join(f"{sum(each.values()):18.2f}" for each in parts.values()))


def main() -> bool:
    """Prints the tables; returns whether all contestants are in them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("values", nargs="*", metavar="[CONFIG] section.key=value")
    parser.add_argument(
        "--compile", nargs="+", default=["none", "aot_eager"], choices=["none", "aot_eager", "inductor"]
    )
    parser.add_argument("--backend", nargs="+", default=["auto"], choices=["auto", "eager", "triton"])
    parser.add_argument("--runs", type=int, default=9)
    parser.add_argument(
        "--twin",
        nargs="?",
        const="auto",
        choices=["auto", "flashqla", "fla", "hymo", "eager"],
        help="also the step in plain PyTorch, compiled in the last way, with this scan",
    )
    asked = parser.parse_intermixed_args()
    named = bool(asked.values) and "=" not in asked.values[0]
    config = load_config(asked.values[0] if named else TINY, asked.values[named:])
    print("command: benchmarks/step.py", *sys.argv[1:])
    print(f"{environment()}; medians of {asked.runs} interleaved runs of {QUEUED} steps each")

    batch = documents(config)
    tokens = batch.tokens.numel()
    ways = list(product(asked.compile, asked.backend))
    start = config, build_hymo(config).params, batch
    builds = {f"{compile} {backend}": partial(hymo_step, *start, compile, backend) for compile, backend in ways}
    if asked.twin:
        name, rule = choose_scan(asked.twin, config)
        print(f"twin: the scan of {name}, the convolution of {choose_convolution(DEVICE)[1]}; it drops no tokens")
        if name in NOTES:
            print(NOTES[name])
        builds[f"{asked.compile[-1]} twin, {name}"] = partial(twin_step, *start, asked.compile[-1], rule)
    steps = ready_ones(builds, config)
    if not steps:
        return False
    spent = interleaved({name: step.run for name, step in steps.items()}, asked.runs, queued=QUEUED)
    table(f"one step of {config.run.name}, {tokens:,} tokens", spent, tokens)
    print("loss of one step more: " + ", ".join(f"{name} {float(s.run()):.5f}" for name, s in steps.items()))
    if ON_GPU:
        tell_speed(config, steps, spent, tokens)
        return len(steps) == len(builds)

    forms = {"recurrent": fused_recurrent_gated_delta_rule, "chunk": chunk_gated_delta_rule}
    x = inputs(Shape(8, 512, 2, 32, 32))
    runs = {name: partial(program(form, "fwdbwd"), *x) for name, form in forms.items()}
    for run in runs.values():
        run()
    table("the scan, forward and backward, 8 x 512 tokens, 2 heads of 32 x 32", interleaved(runs, asked.runs), 8 * 512)
    return len(steps) == len(builds)


if __name__ == "__main__":
    sys.exit(not main())

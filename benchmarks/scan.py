"""Times the gated delta rule against the definition's error and against other packages, each run beside the others.

On a GPU: `benchmarks/scan.py --impl hymo eager fla flashqla --shape 1x32768x32x128x128`, bf16, gradients of q, k, v, g
and beta. All implementations take turns, with the L2 cache overwritten before each run; a time is the median of CUDA
events, with the GPU kept busy while the host launches (`--host` waits for launches, as `triton.testing.do_bench` does).
What peers compile at their first call is compiled by many processes before (`peers.py`) and is no part of any time.
"hymo-states" leaves the backward the states of the forward, as the model's layers do, where "hymo" makes them again.
On a CPU: `benchmarks/scan.py --impl chunk recurrent --shape 8x512x2x32x32`; read the ratios, not the milliseconds.

The bound of "% bound" is what no program can go below: inputs and outputs moved once at 4.3 TB/s, or the products of
the fused algorithm in chunks of 64 (32 for small heads) at 790 TFLOP/s, whichever takes longer; both were measured on
an H200. GB/s and TFLOP/s count those bytes and products.
"""

import argparse
import importlib
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from peers import LARGE, compile_beforehand
from torch import Tensor

from hymo_kernels import chunk_gated_delta_rule, fused_recurrent_gated_delta_rule, naive_gated_delta_rule

ON_GPU = torch.cuda.is_available()
SHAPES = (
    ["1x32768x32x128x128", "4x8192x16x128x128", "4x4096x14x128x128", "4x4096x40x32x32"] if ON_GPU else ["8x512x2x32x32"]
)
NAMES = ("o", "dq", "dk", "dv", "dg", "dbeta")
BYTES_PER_SECOND, FLOPS = 4.3e12, 790e12
CHECKED = 2  # heads of the first batch row that are compared with fp64

Rule = Callable[..., tuple[Tensor, Tensor | None]]


# Implementations


def fla() -> Rule:
    # Its Triton path, also where it could hand over to another package.
    os.environ["FLA_DISABLE_BACKEND_DISPATCH"] = "1"
    # It refuses its gated backward on Hopper with Triton 3.4 to 3.7.0, which compiles it wrongly; for its time only.
    importlib.import_module("fla.ops.common.chunk_o").TRITON_ABOVE_3_7_1 = True
    # It tries all its tilings, each for 25 ms instead of 125: there are hundreds.
    testing = importlib.import_module("triton.testing")
    testing.do_bench = partial(testing.do_bench, warmup=5, rep=20)  # type: ignore[attr-defined]
    rule: Rule = importlib.import_module("fla.ops.gated_delta_rule").chunk_gated_delta_rule
    return rule


def flashqla() -> Rule:
    rule: Rule = importlib.import_module("flash_qla").chunk_gated_delta_rule
    return rule


IMPLEMENTATIONS: dict[str, Callable[[], Rule]] = {
    "hymo": lambda: partial(chunk_gated_delta_rule, backend="triton"),
    "hymo-states": lambda: partial(chunk_gated_delta_rule, backend="triton", keep_states=True),
    "eager": lambda: partial(chunk_gated_delta_rule, backend="eager"),
    "fla": fla,
    "flashqla": flashqla,
    "chunk": lambda: partial(chunk_gated_delta_rule, backend="eager"),
    "recurrent": lambda: partial(fused_recurrent_gated_delta_rule, backend="eager"),
}
NOTES = {"fla": "fla: its dk is wrong on Hopper with this Triton (its own guard is lifted), its time is right"}


def available(names: list[str], say: Callable[[str], None]) -> dict[str, Rule]:
    """The implementations that can be imported; the others are said in a line each."""
    found = {}
    for name in names:
        try:
            found[name] = IMPLEMENTATIONS[name]()
        except Exception as error:
            say(f"{name}: not available, {type(error).__name__}: {first_line(error)}")
    return found


def first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), "")


# One problem


class Shape(NamedTuple):
    """Sizes of a problem; as many key heads as value heads."""

    batch: int
    time: int
    heads: int
    key: int
    value: int

    @classmethod
    def of(cls, text: str) -> "Shape":
        """From what the command line says, "4x4096x14x128x128"."""
        return cls(*(int(size) for size in text.split("x")))


class Cost(NamedTuple):
    """The least bytes and the products of a pass."""

    bytes: float
    flops: float

    def seconds(self) -> float:
        return max(self.bytes / BYTES_PER_SECOND, self.flops / FLOPS)


def costs(shape: Shape) -> tuple[Cost, Cost]:
    """Of the forward and of the backward, bf16 with fp32 gates."""
    k, v, chunk = shape.key, shape.value, 64 if max(shape.key, shape.value) > 32 else 32
    tokens = shape.batch * shape.time * shape.heads
    forward = Cost(tokens * (4 * (k + v) + 8), tokens * (6 * k * v + 4 * chunk * (k + v)))
    backward = Cost(tokens * (4 * (k + v) + 2 * (2 * k + v) + 16), tokens * (14 * k * v + 10 * chunk * (k + v)))
    return forward, backward


def inputs(shape: Shape, device: str = "cpu", dtype: torch.dtype = torch.float32) -> tuple[Tensor, ...]:
    """q, k, v, g and beta as a layer makes them: unit keys, gates near -0.05, beta around one half."""
    generator = torch.Generator(device).manual_seed(0)

    def normal(*sizes: int) -> Tensor:
        return torch.randn(*sizes, generator=generator, device=device)

    rows = shape[:3]
    q, k = (torch.nn.functional.normalize(normal(*rows, shape.key), dim=-1).to(dtype) for _ in range(2))
    gate = torch.nn.functional.logsigmoid(normal(*rows) + 3)
    return q, k, normal(*rows, shape.value).to(dtype), gate, normal(*rows).sigmoid()


def environment() -> str:
    if ON_GPU:
        import triton

        return f"{torch.cuda.get_device_name()}, torch {torch.__version__}, Triton {triton.__version__}"
    info = Path("/proc/cpuinfo")
    models = [line.split(":")[1].strip() for line in info.read_text().splitlines() if line.startswith("model name")]
    model = models[0] if models else platform.processor()
    return f"{model}, {torch.get_num_threads()} threads, torch {torch.__version__}"


# GPU


def forward(rule: Rule, x: tuple[Tensor, ...], options: dict[str, Any]) -> Tensor:
    with torch.no_grad():
        return rule(*x, **options)[0]


def both(rule: Rule, x: tuple[Tensor, ...], d_o: Tensor, options: dict[str, Any]) -> tuple[Tensor, ...]:
    """Read-outs and all gradients."""
    leaves = [y.detach().requires_grad_() for y in x]
    o = rule(*leaves, **options)[0]
    return (o.detach(), *torch.autograd.grad(o, leaves, d_o))


def errors(found: tuple[Tensor, ...], want: tuple[Tensor, ...]) -> dict[str, float]:
    """Relative error of every quantity, in the worse of the checked heads."""
    worst = {}
    for name, got, right in zip(NAMES, found, want, strict=True):
        difference, size = ((y.movedim(2, 0).flatten(1).norm(dim=1)) for y in (checked(got) - right, right))
        worst[name] = float((difference / size).max())
    return worst


def checked(x: Tensor) -> Tensor:
    return x[:1, :, :CHECKED].double()


def interleaved(programs: dict[str, Callable[[], Any]], rounds: int, *, host: bool) -> dict[str, float]:
    """Median milliseconds of each program, all of them run in every round."""
    cache = torch.empty(256 * 2**20, dtype=torch.int8, device="cuda")
    spans: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {name: [] for name in programs}
    for turn in range(rounds + 3):
        for name, program in programs.items():
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            cache.zero_()
            if not host:
                torch.cuda._sleep(9_000_000)  # about 5 ms, in which the host gets ahead
            start.record()
            program()
            end.record()
            if turn >= 3:
                spans[name].append((start, end))
        torch.cuda.synchronize()
    return {name: statistics.median(a.elapsed_time(b) for a, b in pairs) for name, pairs in spans.items()}


def peak_memory(program: Callable[[], Any]) -> float:
    """MiB allocated at the worst moment of a program, beyond what was there before."""
    program()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    program()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def first_calls(name: str, shape: Shape, options: dict[str, Any]) -> None:
    """Prints seconds and compiled kernels of this process's first forward and backward, then with other T and B."""
    rule = IMPLEMENTATIONS[name]()
    others = (
        shape._replace(time=shape.time // 2),
        shape._replace(time=shape.time - 37),
        shape._replace(batch=shape.batch + 1),
    )
    spent = []
    for other in (shape, *others):
        x = inputs(other, "cuda", torch.bfloat16)
        torch.cuda.synchronize()
        before, start = kernels_compiled(), time.perf_counter()
        both(rule, x, x[2], options)
        torch.cuda.synchronize()
        spent.append((time.perf_counter() - start, kernels_compiled() - before))
    print(json.dumps(spent))


def kernels_compiled() -> int:
    """By Triton and TileLang, into the caches of this process."""
    folders = [os.environ[name] for name in ("TRITON_CACHE_DIR", "TILELANG_CACHE_DIR")]
    return sum(1 for folder in folders for pattern in ("*.cubin", "*.so") for _ in Path(folder).rglob(pattern))


def in_a_fresh_process(name: str, shape: str, norm: str) -> str:
    """`first_calls` with nothing compiled before, as "seconds (kernels)" of the call, of T / 2, T - 37 and B + 1."""
    with tempfile.TemporaryDirectory() as folder:
        caches = {"TRITON_CACHE_DIR": f"{folder}/triton", "TILELANG_CACHE_DIR": f"{folder}/tilelang"}
        command = [sys.executable, "-W", "ignore", __file__, "--first", name, "--shape", shape, "--norm", norm]
        try:
            done = subprocess.run(
                command, env=os.environ | caches, capture_output=True, text=True, check=True, timeout=200
            )
            spent = json.loads(done.stdout.splitlines()[-1])
            return "  ".join(f"{seconds:7.2f} ({kernels})" for seconds, kernels in spent)
        except subprocess.TimeoutExpired:
            return "more than 200"
        except subprocess.CalledProcessError as error:
            return f"failed: {error.stderr.splitlines()[-1:]}"


def on_gpu(options: argparse.Namespace, say: Callable[[str], None]) -> None:
    """Errors, then times, of every shape."""
    rules = available(options.impl, say)
    how = "q and k of unit length before the call" if options.norm == "before" else "q and k normalised inside the call"
    launches = "with launches" if options.host else "launches hidden"
    say(f"{environment()}; bf16, {how}; median of {options.runs} interleaved runs, {launches}, L2 flushed")
    for note in (NOTES[name] for name in rules if name in NOTES):
        say(note)
    large = [name for name in rules if name in LARGE]
    if large and options.jobs:
        say(compile_beforehand(large, options.shape, options.norm, options.jobs))
    inside = {"use_qk_l2norm_in_kernel": True} if options.norm == "inside" else {}
    for text in options.shape:
        shape = Shape.of(text)
        x = inputs(shape, "cuda", torch.bfloat16)
        d_o = torch.randn_like(x[2])
        exact = tuple(checked(y) for y in x)
        want = both(IMPLEMENTATIONS["eager"](), exact, checked(d_o), {**inside, "scale": shape.key**-0.5})
        say(f"\n{text}: relative error against fp64 in the worse of {CHECKED} heads, forward and gradients")
        works: dict[str, Rule] = {}
        for name, rule in rules.items():
            try:
                found = errors(both(rule, x, d_o, inside), want)
                works[name] = rule
                say(f"  {name:>11}  " + "  ".join(f"{quantity} {error:.1e}" for quantity, error in found.items()))
            except Exception as error:
                torch.cuda.empty_cache()
                say(f"  {name:>11}  does not run: {type(error).__name__}: {first_line(error)}")
        del want, exact
        timed = partial(interleaved, rounds=options.runs, host=options.host)
        once = timed({name: partial(forward, rule, x, inside) for name, rule in works.items()})
        twice = timed({name: partial(both, rule, x, d_o, inside) for name, rule in works.items()})
        peaks = {name: peak_memory(partial(both, rule, x, d_o, inside)) for name, rule in works.items()}
        rows(text, shape, once, twice, peaks, say)
        del x, d_o
        torch.cuda.empty_cache()
    for text in options.first_calls:
        say(f"\n{text}: seconds (kernels compiled) of the first forward + backward, then with T / 2, T - 37, B + 1")
        for name in rules:
            say(f"  {name:>11}  {in_a_fresh_process(name, text, options.norm)}")


def rows(
    text: str,
    shape: Shape,
    once: dict[str, float],
    twice: dict[str, float],
    peaks: dict[str, float],
    say: Callable[[str], None],
) -> None:
    """One line an implementation and pass, against the first one."""
    ahead, back = costs(shape)
    whole = Cost(ahead.bytes + back.bytes, ahead.flops + back.flops)
    titles = ("ms", "ratio", "GB/s", "TFLOP/s", "% bound", "peak MiB")
    say(f"  {'pass':>9} {'impl':>11} " + " ".join(f"{title:>9}" for title in titles))
    for label, times, cost, bound in (
        ("fwd", once, ahead, ahead.seconds()),
        ("fwd+bwd", twice, whole, ahead.seconds() + back.seconds()),
    ):
        for name, ms in times.items():
            speed = f"{cost.bytes / ms / 1e6:9.0f} {cost.flops / ms / 1e9:9.1f} {1e5 * bound / ms:9.1f}"
            peak = f"{peaks[name]:9.0f}" if label == "fwd+bwd" else ""
            say(f"  {label:>9} {name:>11} {ms:9.3f} {ms / next(iter(times.values())):9.2f} {speed} {peak}".rstrip())


# CPU


def program(rule: Rule, which: str) -> Callable[..., tuple[Tensor, ...]]:
    """(q, k, v, g, beta) -> (o,), or the gradients of sum(o * sin(v)), which has no favourite direction."""
    if which == "fwd":
        return lambda *x: rule(*x)[:1]
    return torch.func.grad(lambda *x: (rule(*x)[0] * x[2].detach().sin()).sum(), argnums=(0, 1, 2, 3, 4))


def compiled(f: Callable[..., tuple[Tensor, ...]], how: str) -> Callable[..., tuple[Tensor, ...]]:
    if how == "none":
        return f
    traced = torch._dynamo.nonstrict_trace(f)
    return torch.compile(lambda *x: traced(*x), fullgraph=True, backend=how)


def worst_error(got: tuple[Tensor, ...], want: tuple[Tensor, ...]) -> float:
    return max(float((g.double() - w).norm() / w.norm()) for g, w in zip(got, want, strict=True))


def on_cpu(options: argparse.Namespace, say: Callable[[str], None]) -> None:
    """Errors and times of every shape and pass."""
    torch.set_num_threads(options.threads)
    say(f"{environment()}; compile={options.compile}, median of {options.runs} interleaved runs")
    say(f"{'shape':>18} {'pass':>7} {'impl':>10} {'ms':>9} {'min..max':>17} {'Mtoken/s':>9} {'error':>8} {'ratio':>6}")
    rules = available(options.impl, say)
    for text in options.shape:
        shape = Shape.of(text)
        x = inputs(shape)
        for which in options.passes:
            want = program(naive_gated_delta_rule, which)(*(t.double() for t in x))
            runs = {n: compiled(program(rule, which), options.compile) for n, rule in rules.items()}
            errors = {name: worst_error(run(*x), want) for name, run in runs.items()}
            times: dict[str, list[float]] = {name: [] for name in runs}
            for _ in range(options.runs):
                for name, run in runs.items():
                    start = time.perf_counter()
                    run(*x)
                    times[name].append(1e3 * (time.perf_counter() - start))
            first = statistics.median(next(iter(times.values())))
            for name, spent in times.items():
                median, spread = statistics.median(spent), f"{min(spent):.2f}..{max(spent):.2f}"
                speed = shape.batch * shape.time / median / 1e3
                row = f"{text:>18} {which:>7} {name:>10} {median:9.2f} {spread:>17} {speed:9.3f} {errors[name]:8.1e}"
                say(f"{row} {median / first:6.2f}")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    kinds = ["hymo", "hymo-states", "eager", "fla", "flashqla"] if ON_GPU else ["chunk", "recurrent"]
    parser.add_argument("--impl", nargs="+", choices=IMPLEMENTATIONS, default=kinds, help="ratios are to the first")
    parser.add_argument("--shape", nargs="+", default=SHAPES, help="batch x time x heads x key x value")
    parser.add_argument("--runs", type=int, default=20 if ON_GPU else 7)
    parser.add_argument("--output", type=Path, help="a file that gets what is printed")
    gpu = parser.add_argument_group("on a GPU")
    gpu.add_argument("--norm", choices=["before", "inside"], default="before", help="where q and k get unit length")
    gpu.add_argument("--host", action="store_true", help="count the time that the host takes to launch")
    gpu.add_argument("--first-calls", nargs="*", default=[], metavar="SHAPE", help="slow: a process each")
    gpu.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes that compile for the peers; 0: none")
    gpu.add_argument("--first", choices=IMPLEMENTATIONS, help=argparse.SUPPRESS)
    cpu = parser.add_argument_group("on a CPU")
    cpu.add_argument("--pass", nargs="+", choices=["fwd", "fwdbwd"], default=["fwd", "fwdbwd"], dest="passes")
    cpu.add_argument("--compile", choices=["none", "aot_eager", "inductor"], default="none")
    cpu.add_argument("--threads", type=int, default=torch.get_num_threads())
    return parser.parse_args()


def main() -> None:
    options = arguments()
    if options.first:
        shape = Shape.of(options.shape[0])
        first_calls(options.first, shape, {"use_qk_l2norm_in_kernel": True} if options.norm == "inside" else {})
        return
    lines: list[str] = []

    def say(line: str) -> None:
        print(line, flush=True)
        lines.append(line + "\n")
        if options.output:
            options.output.write_text("".join(lines))

    (on_gpu if ON_GPU else on_cpu)(options, say)


if __name__ == "__main__":
    main()

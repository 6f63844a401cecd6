"""Times the gated delta rule: `benchmarks/scan.py --impl chunk recurrent --shape 8x512x2x32x32 --pass fwd fwdbwd`.

Each implementation's error against the definition in fp64 comes before its time. Runs are interleaved, so that a busy
machine slows all of them alike; read the ratios.
"""

import argparse
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from hymo_kernels import chunk_gated_delta_rule, fused_recurrent_gated_delta_rule, naive_gated_delta_rule

IMPLEMENTATIONS = {"chunk": chunk_gated_delta_rule, "recurrent": fused_recurrent_gated_delta_rule}
COMPILE = ("none", "aot_eager", "inductor")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--impl", nargs="+", choices=IMPLEMENTATIONS, default=list(IMPLEMENTATIONS))
    parser.add_argument("--shape", nargs="+", default=["8x512x2x32x32"], help="batch x time x heads x key x value")
    parser.add_argument("--pass", nargs="+", choices=["fwd", "fwdbwd"], default=["fwd", "fwdbwd"], dest="passes")
    parser.add_argument("--compile", choices=COMPILE, default="none")
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    return parser.parse_args()


def environment() -> str:
    info = Path("/proc/cpuinfo")
    models = [line.split(":")[1].strip() for line in info.read_text().splitlines() if line.startswith("model name")]
    model = models[0] if models else platform.processor()
    return f"{model}, {torch.get_num_threads()} threads, torch {torch.__version__}"


def inputs(batch: int, length: int, heads: int, key: int, value: int) -> tuple[Tensor, ...]:
    """q, k, v, g and beta as a layer makes them: unit keys, gates near -0.05, beta around one half."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    q, k = (torch.nn.functional.normalize(normal(batch, length, heads, key), dim=-1) for _ in range(2))
    gate = torch.nn.functional.logsigmoid(normal(batch, length, heads) + 3)
    return q, k, normal(batch, length, heads, value), gate, normal(batch, length, heads).sigmoid()


def program(rule: Callable[..., tuple[Tensor, Tensor | None]], which: str) -> Callable[..., tuple[Tensor, ...]]:
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


def main() -> None:
    options = arguments()
    torch.set_num_threads(options.threads)
    print(environment(), f"compile={options.compile}, median of {options.runs} interleaved runs", sep="; ")
    print(
        f"{'shape':>18} {'pass':>7} {'impl':>10} {'ms':>9} {'min..max':>17} {'Mtoken/s':>9} {'error':>8} {'ratio':>6}"
    )
    for shape in options.shape:
        sizes = [int(size) for size in shape.split("x")]
        x = inputs(*sizes)
        for which in options.passes:
            want = program(naive_gated_delta_rule, which)(*(t.double() for t in x))
            runs = {name: compiled(program(IMPLEMENTATIONS[name], which), options.compile) for name in options.impl}
            errors = {name: worst_error(run(*x), want) for name, run in runs.items()}
            times: dict[str, list[float]] = {name: [] for name in runs}
            for _ in range(options.runs):
                for name, run in runs.items():
                    start = time.perf_counter()
                    run(*x)
                    times[name].append(1e3 * (time.perf_counter() - start))
            first = statistics.median(times[options.impl[0]])
            for name, spent in times.items():
                median, spread = statistics.median(spent), f"{min(spent):.2f}..{max(spent):.2f}"
                speed = sizes[0] * sizes[1] / median / 1e3
                row = f"{shape:>18} {which:>7} {name:>10} {median:9.2f} {spread:>17} {speed:9.3f} {errors[name]:8.1e}"
                print(f"{row} {median / first:6.2f}")


if __name__ == "__main__":
    main()

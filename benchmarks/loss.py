"""Times a vocabulary head: softcapped cross-entropy with the gradients of hidden states and table.

    benchmarks/loss.py --shape 16384x896x64256 --bytes 28 29 30 31

On a GPU in bf16: the three matrix products alone, which no program can go below; plain PyTorch, compiled; and the
kernel, with 2^n bytes of logits at once. Contestants take turns, with the L2 cache overwritten before each run. Errors
are those of loss, d_hidden and d_table against fp64, with weights on the first tokens only. On a CPU plain PyTorch runs
in fp32; read the ratios, not the milliseconds.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from scan import ON_GPU, environment, interleaved, peak_memory
from torch import Tensor

from hymo_kernels import linear_cross_entropy

CAP = 15.0
CHECKED = 256  # tokens whose loss is compared with fp64
SHAPE, BYTES = ("16384x896x64256", [28, 29, 30, 31]) if ON_GPU else ("256x32x2000", [18, 30])
DTYPE = torch.bfloat16 if ON_GPU else torch.float32


class Problem(NamedTuple):
    """A head's inputs."""

    hidden: Tensor
    table: Tensor
    labels: Tensor
    weight: Tensor


def problem(tokens: int, width: int, vocabulary: int) -> Problem:
    """Hidden states as a norm leaves them, a table as a model begins with, one label in eight ignored."""
    device = "cuda" if ON_GPU else "cpu"
    draw = torch.Generator(device).manual_seed(0)
    hidden = torch.randn(tokens, width, generator=draw, device=device).to(DTYPE)
    table = (3 * width**-0.5 * torch.randn(vocabulary, width, generator=draw, device=device)).to(DTYPE)
    labels = torch.randint(0, vocabulary, (tokens,), generator=draw, device=device)
    weight = (torch.rand(tokens, generator=draw, device=device) < 7 / 8).float() / tokens
    return Problem(hidden, table, labels, weight)


def gradients(x: Problem, **how: Any) -> tuple[Tensor, ...]:
    """d_hidden, d_table and the loss."""

    def loss(hidden: Tensor, table: Tensor) -> Tensor:
        return linear_cross_entropy(hidden, table, x.labels, x.weight, cap=CAP, **how)

    grads, value = torch.func.grad_and_value(loss, argnums=(0, 1))(x.hidden, x.table)
    return *grads, value


def compiled(**how: Any) -> Callable[[Problem], tuple[Tensor, ...]]:
    traced = torch._dynamo.nonstrict_trace(lambda *x: gradients(Problem(*x), **how))
    program = torch.compile(lambda *x: traced(*x), fullgraph=True)
    return lambda x: program(*x)


def products(x: Problem) -> tuple[Tensor, ...]:
    """The matrix products alone, with all logits at once."""
    logits = x.hidden @ x.table.mT
    return logits @ x.table, logits.mT @ x.hidden


def contestants(exponents: list[int]) -> dict[str, Callable[[Problem], tuple[Tensor, ...]]]:
    eager = {"plain": partial(gradients, backend="eager", logit_bytes=2 ** exponents[-1])}
    if not ON_GPU:
        return eager | {f"2^{n}": partial(gradients, backend="eager", logit_bytes=2**n) for n in exponents}
    # Inside a compiled step the kernel is the same call: nothing around it is worth fusing.
    kernel = {f"kernel 2^{n}": partial(gradients, backend="triton", logit_bytes=2**n) for n in exponents}
    return {"products": products, "compiled": compiled(backend="eager"), **kernel}


def errors(found: tuple[Tensor, ...], want: tuple[Tensor, ...]) -> list[float]:
    """Relative, of the loss, d_hidden and d_table."""
    pairs = list(zip(found, want, strict=True))
    return [float((a.double() - b).norm() / b.norm()) for a, b in (pairs[-1], *pairs[:-1])]


def on_cpu(programs: dict[str, Callable[[], Any]], runs: int) -> dict[str, float]:
    """Median milliseconds, all programs in every round."""
    spent: dict[str, list[float]] = {name: [] for name in programs}
    for _ in range(runs):
        for name, program in programs.items():
            start = time.perf_counter()
            program()
            spent[name].append(1e3 * (time.perf_counter() - start))
    return {name: statistics.median(times) for name, times in spent.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default=SHAPE, help="tokens x width x vocabulary")
    parser.add_argument("--bytes", nargs="+", type=int, default=BYTES, metavar="N", help="2^N bytes of logits at once")
    parser.add_argument("--runs", type=int, default=10)
    options = parser.parse_args()
    x = problem(*(int(size) for size in options.shape.split("x")))
    first = x._replace(weight=torch.where(torch.arange(len(x.labels), device=x.weight.device) < CHECKED, x.weight, 0))
    head = Problem(x.hidden[:CHECKED].double(), x.table.double(), x.labels[:CHECKED], x.weight[:CHECKED].double())
    d_hidden, d_table, value = gradients(head, backend="eager")
    print(f"{environment()}; {options.shape}, {DTYPE}, cap {CAP}; median of {options.runs} interleaved runs")
    programs = contestants(options.bytes)
    wrong: dict[str, list[float]] = {}
    for name, run in programs.items():
        if name == "products":
            continue
        found = run(first)
        wrong[name] = errors((found[0][:CHECKED], *found[1:]), (d_hidden, d_table, value))
        assert not found[0][CHECKED:].any(), f"{name}: a token without weight has a gradient"
        assert all(each.isfinite().all() for each in run(x)), name
    del d_hidden, d_table
    calls = {name: partial(run, x) for name, run in programs.items()}
    times = interleaved(calls, options.runs, host=False) if ON_GPU else on_cpu(calls, options.runs)
    print(f"{'':>12} {'ms':>9} {'ratio':>6} {'peak MiB':>9}  {'loss':>8} {'d_hidden':>8} {'d_table':>8}")
    for name, ms in times.items():
        peak = f"{peak_memory(calls[name]):9.0f}" if ON_GPU else f"{'':9}"
        found = " ".join(f"{error:8.1e}" for error in wrong.get(name, []))
        print(f"{name:>12} {ms:9.3f} {ms / next(iter(times.values())):6.2f} {peak}  {found}".rstrip())


if __name__ == "__main__":
    main()

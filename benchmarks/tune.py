"""Measures the table of tiles of the gated delta rule's general kernels anew, on an NVIDIA GPU.

`benchmarks/tune.py --entry bfloat16x256 float32x64` tries, for every kernel of those entries, the tiles next to the
present ones: half and twice as many value features, key features and warps, another pipeline stage more or less. Of
each it prints milliseconds of the pass that the kernel belongs to, and the worst relative error of a head against fp64,
over read-outs and gradients; a candidate whose error is off is not a candidate. Every process of candidates may end
in an illegal access, which ends it for good: the next one goes on behind the candidate that did it.

The last line of an entry is what the table should say. The kernels for Hopper are put aside.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from scan import Shape, both, checked, environment, errors, forward, inputs, interleaved
from torch import Tensor

from hymo_kernels import chunk_gated_delta_rule
from hymo_kernels.host import triton_gated_delta_rule as kernels
from hymo_kernels.host.triton_gated_delta_rule import Plan, Tiles

TABLES = {torch.bfloat16: kernels.PLANS, torch.float16: kernels.PLANS, torch.float32: kernels.FP32_PLANS}
ENTRIES = [
    f"{dtype}x{width}"
    for dtype, table in (("bfloat16", kernels.PLANS), ("float32", kernels.FP32_PLANS))
    for width in table
]
LIMITS = {torch.bfloat16: 1.5e-2, torch.float16: 5e-3, torch.float32: 1e-5}
"""Largest errors: some three times those of correct kernels on these inputs."""

PATIENCE = 60
"""Seconds that a candidate may take, compilation included."""


def neighbours(role: str, tiles: Tiles, width: int) -> Iterator[Tiles]:
    """The present tiles and those that differ from them in one step of one number."""
    yield tiles
    for name, values in (
        ("block_v", () if role == "prepare" else (tiles.block_v // 2, tiles.block_v * 2)),
        ("warps", (tiles.warps // 2, tiles.warps * 2)),
        ("stages", (tiles.stages - 1, tiles.stages + 1)),
        ("block_k", (tiles.block_k // 2, tiles.block_k * 2) if tiles.block_k else (width // 2,)),
    ):
        low, high = {"block_v": (16, 128), "warps": (2, 16), "stages": (1, 3), "block_k": (32, width)}[name]
        yield from (tiles._replace(**{name: value}) for value in values if low <= value <= high)


def surrounded(x: Tensor) -> Tensor:
    """A view with the values of x, NaN before and after them in time: whoever reads beyond x shows it."""
    room = x.new_full([x.shape[0], x.shape[1] + 128, *x.shape[2:]], torch.nan)
    return room[:, 64:-64].copy_(x)


def measure(entry: str, role: str, candidates: list[Tiles], options: argparse.Namespace) -> None:
    """Prints a line of JSON for each candidate: milliseconds, or what is wrong with it."""
    dtype, width = parse(entry)
    kernels.hopper._is_hopper = lambda device: False  # type: ignore[assignment]
    shape = Shape(*(int(size) for size in options.shape.split("x")), width, width)
    plain = inputs(shape, "cuda", dtype)
    x, d_o = tuple(surrounded(y) for y in plain), torch.randn_like(plain[2])
    norm = {"use_qk_l2norm_in_kernel": True}
    exact = partial(chunk_gated_delta_rule, backend="eager")
    want = both(exact, tuple(checked(y) for y in plain), checked(d_o), {**norm, "scale": width**-0.5})
    rule = partial(chunk_gated_delta_rule, backend="triton", precision=options.precision)
    present = TABLES[dtype][width]
    run = forward if role in ("prepare", "forward") else partial(both, d_o=d_o)
    for tiles in candidates:
        TABLES[dtype][width] = present._replace(**{role: tiles})
        found: dict[str, Any] = {}
        try:
            worst = errors(both(rule, x, d_o, norm), want)
            found["error"] = max(error if error == error else float("inf") for error in worst.values())
            found["ms"] = interleaved({"": partial(run, rule, x, options=norm)}, options.runs, host=False)[""]
        except Exception as error:
            # A kernel that does not fit is an exception; what the GPU refuses ends the process.
            found["failed"] = f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"
            torch.cuda.synchronize()
        print(json.dumps(found), flush=True)


def measured(entry: str, role: str, candidates: list[Tiles], options: argparse.Namespace) -> list[dict[str, Any]]:
    """What `measure` finds, in as many processes as it takes."""
    found: list[dict[str, Any]] = []
    while len(found) < len(candidates):
        left = candidates[len(found) :]
        command = [sys.executable, "-W", "ignore", __file__, "--entry", entry, "--role", role, "--shape", options.shape]
        command += ["--runs", str(options.runs), "--precision", options.precision, "--candidates", json.dumps(left)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
            try:
                output, complaint = process.communicate(timeout=PATIENCE * len(left))
            except subprocess.TimeoutExpired:
                process.kill()
                output, complaint = process.communicate()
        found += [json.loads(line) for line in output.splitlines() if line.startswith("{")]
        if len(found) < len(candidates):
            found.append({"failed": next(reversed(complaint.splitlines()), "it took too long")})
    return found


def parse(entry: str) -> tuple[torch.dtype, int]:
    name, width = entry.split("x")
    return getattr(torch, name), int(width)


def tune(entry: str, options: argparse.Namespace) -> None:
    """Prints every candidate of an entry, and the entry with the best ones."""
    dtype, width = parse(entry)
    best: Plan = TABLES[dtype][width]
    for role in options.role:
        present: Tiles = getattr(best, role)
        candidates = list(neighbours(role, present, width))
        found = measured(entry, role, candidates, options)
        right = {i: each["ms"] for i, each in enumerate(found) if each.get("error", torch.inf) < LIMITS[dtype]}
        chosen = min(right, key=right.__getitem__, default=None)
        for i, (tiles, each) in enumerate(zip(candidates, found, strict=True)):
            mark = " best" * (i == chosen) + " present" * (i == 0)
            verdict = each.get("failed") or f"{each['ms']:8.3f} ms  error {each['error']:.1e}" + " WRONG" * (
                i not in right
            )
            print(f"{entry:>12} {role:>8} {tiles!s:60} {verdict}{mark}", flush=True)
        if chosen is not None:
            best = best._replace(**{role: candidates[chosen]})
    print(f"    {width}: Plan({', '.join(f'Tiles{tuple(tiles)}' for tiles in best)}),  # {entry}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--entry", nargs="+", choices=ENTRIES, default=ENTRIES, help="dtype x key width")
    parser.add_argument("--role", nargs="+", choices=Plan._fields, default=list(Plan._fields), help="kernels")
    parser.add_argument("--shape", default="4x4090x8", help="batch x time x heads")
    parser.add_argument("--precision", choices=["tf32x3", "ieee"], default="tf32x3", help="of fp32 entries")
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--candidates", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("it needs an NVIDIA GPU")
    if options.candidates:
        measure(options.entry[0], options.role[0], [Tiles(*each) for each in json.loads(options.candidates)], options)
        return
    print(f"{environment()}; {options.shape} heads, value width = key width, median of {options.runs} runs", flush=True)
    for entry in options.entry:
        tune(entry, options)


if __name__ == "__main__":
    main()

"""Times document-isolated attention against its definition in fp64 and against PyTorch's own, in turns on one GPU.

`benchmarks/attention.py --shape 4x4096x16x4x128x128 --documents 800 0`: rows in which a document starts at a token with
probability 1/800, and rows of one document. `flash` is PyTorch's FlashAttention over packed documents; `cudnn` and
`causal` (FlashAttention) attend to whole rows, so beside shorter documents they do more work and have no error.

TFLOP/s count the products that the definition needs: two forward and five backward of each visible pair of tokens.
"""

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from scan import environment, first_line, interleaved
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from hymo_kernels import document_attention, naive_document_attention

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]
NAMES = ("o", "dq", "dk", "dv")
CHECKED = 2  # heads of the first row, of one group, that are compared with fp64


class Shape(NamedTuple):
    """Sizes of a problem."""

    batch: int
    time: int
    heads: int
    groups: int
    key: int
    value: int

    @property
    def scale(self) -> float:
        return float(self.key**-0.5)


def positions(shape: Shape, mean: int) -> Tensor:
    """Documents of a mean length; 0 is one a row."""
    token = torch.arange(shape.time).expand(shape.batch, -1)
    starts = torch.rand(shape.batch, shape.time, generator=torch.Generator().manual_seed(0)) * max(mean, 1) < (mean > 0)
    return (token - torch.where(starts, token, 0).cummax(1).values).cuda()


def flash(position: Tensor, shape: Shape) -> Attention:
    """FlashAttention over the documents of all rows, packed."""
    bounds = torch.cat([(position.flatten() == 0).nonzero().flatten(), position.new_tensor([position.numel()])])
    longest = int(bounds.diff().max())

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        packed = (x.flatten(0, 1) for x in (q, k, v))
        cu_seqlens = bounds.int()
        o = torch.ops.aten._flash_attention_forward(
            *packed, cu_seqlens, cu_seqlens, longest, longest, 0.0, True, False, scale=shape.scale
        )[0]
        return o.unflatten(0, q.shape[:2])

    return attend


def whole_rows(position: Tensor, shape: Shape, kernel: SDPBackend) -> Attention:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        with sdpa_kernel(kernel):
            o = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=shape.scale, enable_gqa=True)
        return o.transpose(1, 2)

    return attend


def ours(position: Tensor, shape: Shape, backend: str) -> Attention:
    return partial(document_attention, position=position, scale=shape.scale, backend=backend)  # type: ignore[arg-type]


IMPLEMENTATIONS: dict[str, Callable[[Tensor, Shape], Attention]] = {
    "hymo": partial(ours, backend="triton"),
    "flash": flash,
    "cudnn": partial(whole_rows, kernel=SDPBackend.CUDNN_ATTENTION),
    "causal": partial(whole_rows, kernel=SDPBackend.FLASH_ATTENTION),
    "eager": partial(ours, backend="eager"),
}
WHOLE_ROWS = ("cudnn", "causal")


def forward(attend: Attention, x: tuple[Tensor, ...]) -> Tensor:
    with torch.no_grad():
        return attend(*x)


def both(attend: Attention, x: tuple[Tensor, ...], do: Tensor) -> tuple[Tensor, ...]:
    leaves = [y.detach().requires_grad_() for y in x]
    o = attend(*leaves)
    return (o.detach(), *torch.autograd.grad(o, leaves, do))


def exact(x: tuple[Tensor, ...], do: Tensor, position: Tensor, shape: Shape) -> tuple[Tensor, ...]:
    """The definition in fp64 of the first row's first group; the query gradients of its first heads."""
    of_group = shape.heads // shape.groups
    q, k, v, do = (y[:1, :, :n].double() for y, n in zip((*x, do), (of_group, 1, 1, of_group), strict=True))
    return both(partial(naive_document_attention, position=position[:1], scale=shape.scale), (q, k, v), do)


def errors(found: tuple[Tensor, ...], want: tuple[Tensor, ...]) -> str:
    """Relative error of every quantity, in the worse of the checked heads."""
    worst = []
    for name, got, right in zip(NAMES, found, want, strict=True):
        right = right[:, :, :CHECKED]
        difference = got[:1, :, : right.shape[2]].double() - right
        apart, size = (x.movedim(2, 0).flatten(1).norm(dim=1) for x in (difference, right))
        worst.append(f"{name} {float((apart / size).max()):.1e}")
    return "  ".join(worst)


def on_shape(text: str, mean: int, names: list[str], runs: int, say: Callable[[str], None]) -> None:
    """Errors, then times, of one shape and length of documents."""
    shape = Shape(*(int(size) for size in text.split("x")))
    draw = torch.Generator("cuda").manual_seed(0)
    sizes = [(shape.heads, shape.key), (shape.groups, shape.key), (shape.groups, shape.value)]
    q, k, v, do = (
        torch.randn(*shape[:2], *size, generator=draw, device="cuda").bfloat16()
        for size in (*sizes, (shape.heads, shape.value))
    )
    position = positions(shape, mean)
    documents = int((position == 0).sum())
    say(f"\n{text}, {documents} documents: relative error against fp64 in the worse of {CHECKED} heads")
    want = exact((q, k, v), do, position, shape)
    works: dict[str, Attention] = {}
    for name in names:
        attend = IMPLEMENTATIONS[name](position, shape)
        try:
            found = both(attend, (q, k, v), do)
            works[name] = attend
            comparable = name not in WHOLE_ROWS or documents == shape.batch
            say(f"  {name:>9}  " + (errors(found, want) if comparable else "not isolated"))
        except Exception as error:
            say(f"  {name:>9}  does not run: {type(error).__name__}: {first_line(error)}")
    del want
    torch.cuda.empty_cache()
    once = interleaved({name: partial(forward, attend, (q, k, v)) for name, attend in works.items()}, runs, host=False)
    twice = interleaved(
        {name: partial(both, attend, (q, k, v), do) for name, attend in works.items()}, runs, host=False
    )
    pairs = float((position + 1).sum()) * shape.heads
    say("  " + " ".join(f"{title:>9}" for title in ("pass", "impl", "ms", "ratio", "TFLOP/s")))
    for label, times, flops in (
        ("fwd", once, 2 * pairs * (shape.key + shape.value)),
        ("fwd+bwd", twice, 2 * pairs * (4 * shape.key + 3 * shape.value)),
    ):
        for name, ms in times.items():
            say(f"  {label:>9} {name:>9} {ms:9.3f} {ms / next(iter(times.values())):9.2f} {flops / ms / 1e9:9.1f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--impl", nargs="+", choices=IMPLEMENTATIONS, default=list(IMPLEMENTATIONS))
    shape = "batch x time x heads x groups x key x value"
    parser.add_argument("--shape", nargs="+", default=["4x4096x16x4x128x128"], help=shape)
    parser.add_argument("--documents", nargs="+", type=int, default=[800, 0], help="mean length; 0: one a row")
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--output", type=Path, help="a file that gets what is printed")
    options = parser.parse_args()
    lines: list[str] = []

    def say(line: str) -> None:
        print(line, flush=True)
        lines.append(line + "\n")
        if options.output:
            options.output.write_text("".join(lines))

    say(f"{environment()}; bf16; median of {options.runs} interleaved runs, launches hidden, L2 flushed")
    for text in options.shape:
        for mean in options.documents:
            on_shape(text, mean, options.impl, options.runs, say)


if __name__ == "__main__":
    main()

"""Cases of the kernel's cross-entropy against its definition in fp64, for the interpreter and for a GPU.

The interpreter's are run by `interpreter.py`.
"""

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from hymo_kernels import linear_cross_entropy
from hymo_kernels.host import triton_cross_entropy as kernels
from hymo_kernels.primitive import LIBRARY

NAMES = ("nats", "d_hidden", "d_table")
Inputs = tuple[Tensor, Tensor, Tensor, Tensor]


@dataclass(frozen=True)
class Case:
    """One call: sizes, cap, how large the logits are, tokens of a chunk, the dtype of labels, views of rows, and
    whether all logits are far below 0."""

    n: int
    d: int
    u: int
    cap: float = 15.0
    scale: float = 1.0
    chunk: int = 2**30
    indices: torch.dtype = torch.int64
    strided: bool = False
    low: bool = False


def inputs(case: Case, device: str, dtype: torch.dtype) -> Inputs:
    """Hidden states, table, labels and weights, drawn on the CPU; a label in four is negative, a weight in three 0."""
    draw = torch.Generator().manual_seed(case.n * 131 + case.u)
    hidden = case.scale * torch.randn(case.n, case.d + 8 * case.strided, generator=draw)
    table = torch.randn(case.u, case.d, generator=draw)
    labels = torch.randint(0, case.u, (case.n,), generator=draw).to(case.indices)
    weight = torch.rand(case.n, generator=draw)
    labels[3::4], weight[2::3] = -100, 0
    if case.low:
        hidden, table = -hidden.abs(), table.abs()
    return hidden.to(device, dtype)[:, -case.d :], table.to(device, dtype), labels.to(device), weight.to(device)


def by_kernel(case: Case, x: Inputs) -> tuple[Tensor, Tensor, Tensor]:
    """Nats and gradients, straight from the launcher."""
    return kernels.forward(*x, case.cap, min(case.chunk, case.n), True)


def by_definition(case: Case, x: Inputs) -> tuple[Tensor, Tensor, Tensor]:
    """The same in fp64, of logits that are rounded to the dtype of the inputs as those of a matrix product are."""
    hidden, table = (y.double().requires_grad_() for y in x[:2])
    exact = hidden @ table.mT
    rounded = (x[0] @ x[1].mT).double()
    capped = case.cap * torch.tanh((exact + (rounded - exact).detach()) / case.cap)
    counts = (x[2] >= 0) & (x[3] != 0)
    picked = capped.gather(1, x[2].long().clamp(min=0)[:, None])[:, 0]
    nats = torch.where(counts, x[3].double() * (capped.logsumexp(1) - picked), 0)
    return nats.detach(), *torch.autograd.grad(nats.sum(), (hidden, table))


def errors(case: Case, device: str, dtype: torch.dtype) -> dict[str, float]:
    """Relative error of every quantity; NaN counts as infinite, and so does a gradient of what is ignored."""
    x = inputs(case, device, dtype)
    found = {}
    results = by_kernel(case, x)
    for name, got, want in zip(NAMES, results, by_definition(case, x), strict=True):
        assert got.shape == want.shape, (name, got.shape, want.shape)
        error = (got.double() - want).norm() / want.norm().clamp(min=1e-30)
        found[name] = float(error.nan_to_num(float("inf")))
    ignored = (x[2] < 0) | (x[3] == 0)
    assert not results[0][ignored].any()
    assert not results[1][ignored].any()
    alone = kernels.forward(*x, case.cap, min(case.chunk, case.n), False)
    if is_kept(case, dtype):
        # Of the other form.
        torch.testing.assert_close(alone[0], results[0], rtol=1e-5, atol=1e-5)
    else:
        assert torch.equal(alone[0], results[0])
    assert alone[1].numel() == alone[2].numel() == 0
    return found


def is_kept(case: Case, dtype: torch.dtype) -> bool:
    """Whether gradients are of the form that reads a row once."""
    return kernels._is_kept(torch.empty(0, case.u, dtype=dtype), case.cap)


@contextmanager
def _form(*, kept: bool) -> Iterator[None]:
    """One of both forms, whatever the cap."""
    before = kernels.KEPT_CAP
    kernels.KEPT_CAP = before if kept else -1.0
    try:
        yield
    finally:
        kernels.KEPT_CAP = before


def check_forms_agree(u: int, device: str) -> None:
    """Both forms on the same rows: NaN, infinite and saturated logits, what is ignored, and labels of no column."""
    rows, cap = 21, 15.0
    draw = torch.Generator().manual_seed(u)
    # What lies between rows is read by neither, nor written.
    given = torch.full((rows, kernels._stride(u)), torch.nan, dtype=torch.bfloat16)
    given[:, :u] = 8 * torch.randn(rows, u, generator=draw)
    labels, weight = torch.randint(0, u, (rows,), generator=draw), torch.rand(rows, generator=draw) + 0.1
    given[0, u // 2] = given[1, u - 1] = given[2, 0] = torch.nan
    given[3, 0], given[3, u - 1], given[4, :u:3] = torch.inf, -torch.inf, -torch.inf
    given[5, :u], given[6, :u], given[7, :u], given[8, :u] = 200, -200, torch.inf, -torch.inf
    given[9, :u] = given[10, :u] = torch.nan
    labels[2], labels[3], labels[9], weight[10] = 0, 0, -100, 0
    labels[11], labels[12], labels[13], labels[14], weight[15] = -1, 0, u - 1, u, torch.nan
    labels, weight = labels.to(device), weight.to(device)
    found = []
    for kept in (True, False, True):
        room, nats = given.to(device, copy=True), torch.full((rows,), 7.0, device=device)
        with _form(kept=kept):
            assert kernels._is_kept(room[:, :u], cap) is kept
            kernels._replace(room[:, :u], room.shape[1], labels, weight, nats, cap, 0, True)
        assert room[:, u:].isnan().all()
        found.append((nats.cpu(), room[:, :u].float().cpu()))
    (nats, entries), (want_nats, want), again = found
    torch.testing.assert_close(again, found[0], rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(nats, want_nats, rtol=1e-5, atol=1e-5, equal_nan=True)
    # Neighbours in bf16.
    torch.testing.assert_close(entries, want, rtol=2**-7, atol=1e-4 / u, equal_nan=True)
    assert nats.isnan().nonzero()[:, 0].tolist() == [0, 1, 2, 14, 15]
    assert torch.equal(entries.isnan().all(1), entries.isnan().any(1))
    assert entries.isnan().any(1).nonzero()[:, 0].tolist() == [0, 1, 2, 15]
    assert not torch.cat([nats[9:12], entries[9:12].flatten()]).any()


INTERPRETED = (
    Case(5, 8, 200, chunk=2),
    Case(7, 8, 128, scale=30.0),
    Case(4, 16, 37, cap=1.0, chunk=3, indices=torch.int32, strided=True),
    Case(6, 8, 64, cap=64.0, scale=10.0),
    Case(3, 4, 2, scale=1e-3, chunk=1),
    Case(4, 32, 192, cap=32.0, scale=10.0, low=True),
)


KEPT = (
    Case(7, 8, 250),
    Case(5, 8, 256, chunk=2, scale=10.0, indices=torch.int32),
    Case(5, 16, 130, cap=1.0),
    Case(4, 8, 192, cap=32.0, scale=20.0),
    Case(4, 8, 192, cap=32.0, scale=20.0, low=True),
)
"""In bf16, whose rows are read once where four steps of four words are what a row takes at most."""


def _accumulate(total: Tensor, a: Tensor, b: Tensor, *, begin: bool) -> None:
    """The launcher's: the CPU has no product of 16-bit matrices with an fp32 result."""
    product = a.to(total.dtype) @ b.to(total.dtype)
    total.copy_(product if begin else total + product)


def check_rows_that_are_read_once() -> None:
    """By two programs, against the definition and against the form that reads rows twice."""
    kernels.KEPT_BLOCK, kernels.COMPILED = 16, False
    kernels.multiprocessors = lambda device: 2  # type: ignore[assignment]
    kernels._accumulate = _accumulate
    for case in KEPT:
        assert is_kept(case, torch.bfloat16)
        found = errors(case, "cpu", torch.bfloat16)
        print(case, {name: f"{error:.1e}" for name, error in found.items()})
        assert found.pop("nats") < 2e-5, (case, found)
        assert all(error < 6e-3 for error in found.values()), (case, found)
    for case in (Case(1, 8, 128), Case(1, 8, 251), Case(1, 8, 258), Case(1, 8, 250, cap=32.1)):
        assert not is_kept(case, torch.bfloat16)
    assert not is_kept(KEPT[0], torch.float32)
    for u in (250, 256):
        check_forms_agree(u, "cpu")


def check_public_path() -> None:
    """Gradients through the public name, alone, mapped and compiled, and the op's declared outputs."""
    LIBRARY.impl("linear_cross_entropy", kernels.forward, "CPU")  # type: ignore[no-untyped-call]
    module = importlib.import_module("hymo_kernels.host.cross_entropy")
    module.unavailable = lambda *arguments: None  # type: ignore[attr-defined]
    hidden, table, labels, weight = inputs(Case(7, 8, 70), "cpu", torch.float32)

    def gradients(backend: str, hidden: Tensor, table: Tensor) -> tuple[tuple[Tensor, ...], Tensor]:
        def loss(hidden: Tensor, table: Tensor) -> Tensor:
            return -2.5 * linear_cross_entropy(hidden, table, labels, weight, cap=15.0, backend=backend)  # type: ignore[arg-type]

        found: tuple[tuple[Tensor, ...], Tensor] = torch.func.grad_and_value(loss, (0, 1))(hidden, table)
        return found

    stacked = torch.stack([hidden, -hidden]), torch.stack([table, 2 * table])
    for in_dims in ((None, 0, None), (None, None, 0), (None, 0, 0)):
        x = [one if dim is None else two for dim, one, two in zip(in_dims[1:], (hidden, table), stacked, strict=True)]
        got, want = (torch.func.vmap(gradients, in_dims=in_dims)(backend, *x) for backend in ("triton", "eager"))
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)
    outside = torch.func.grad(
        lambda h: torch.func.vmap(lambda h: linear_cross_entropy(h, table, labels, weight, cap=15.0, backend="triton"))(
            h
        ).sum()
    )(stacked[0])
    want = torch.func.vmap(gradients, in_dims=(None, 0, None))("eager", stacked[0], table)[0][0] / -2.5
    torch.testing.assert_close(outside, want, rtol=1e-5, atol=1e-6)

    traced = torch._dynamo.nonstrict_trace(gradients)
    compiled = torch.compile(lambda *x: traced("triton", *x), fullgraph=True, backend="aot_eager")(hidden, table)
    torch.testing.assert_close(compiled, gradients("eager", hidden, table), rtol=1e-5, atol=1e-6)

    nats = linear_cross_entropy(hidden, table, labels, weight, cap=15.0, reduction="none", backend="triton")
    torch.testing.assert_close(nats.sum() * -2.5, gradients("eager", hidden, table)[1])
    beyond = linear_cross_entropy(
        hidden, table, torch.full_like(labels, 70), weight, cap=15.0, reduction="none", backend="triton"
    )
    assert torch.equal(beyond.isnan(), weight != 0)
    for gradient in (True, False):
        arguments = (hidden, table, labels, weight, 15.0, 3, gradient)
        torch.library.opcheck(kernels.FORWARD, arguments, test_utils=("test_schema", "test_faketensor"))
    print("public path")


def main() -> None:
    kernels.BLOCK = 16
    for case in INTERPRETED:
        found = errors(case, "cpu", torch.float32)
        print(case, {name: f"{error:.1e}" for name, error in found.items()})
        assert all(error < 3e-6 for error in found.values()), (case, found)
    nan = inputs(Case(3, 8, 70), "cpu", torch.float32)
    nan[0][0] = torch.nan
    assert by_kernel(Case(3, 8, 70), nan)[0].isnan().tolist() == [True, False, False]
    check_rows_that_are_read_once()
    check_public_path()

"""The Triton delta rule where kernels break: far offsets, wide grids, NaN around inputs, graphs, recompilation."""

import importlib
import pkgutil
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from hymo_kernels import chunk_gated_delta_rule, naive_gated_delta_rule
from hymo_kernels.host import triton_gated_delta_rule as kernels
from tests.close import assert_heads_close, assert_same_bits

pytestmark = pytest.mark.gpu

NAMES = ("q", "k", "v", "g", "beta", "start")
ALL = tuple(range(6))


def draw(b: int, t: int, h: int, k: int, v: int, *, sequences: int | None = None, seed: int = 0) -> list[Tensor]:
    """q, k, v in bf16, then g, beta and a state per sequence in fp32."""
    generator = torch.Generator("cuda").manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device="cuda")

    low = [normal(b, t, h, width).bfloat16() for width in (k, k, v)]
    g, beta = -0.3 * normal(b, t, h).abs(), normal(b, t, h).sigmoid()
    return [*low, g, beta, normal(sequences or b, h, k, v)]


def scan(*x: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    """The kernels' read-outs and final state."""
    start = x[5] if len(x) > 5 else None
    found = chunk_gated_delta_rule(
        *x[:5],
        initial_state=start,
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
        backend="triton",
        **options,
    )
    assert found[1] is not None
    return found[0], found[1]


def loss(*x: Tensor, **options: Any) -> Tensor:
    """A scalar in which every read-out and every number of the final state has a slope of its own."""
    o, end = scan(*x, **options)
    return o.float().sin().sum() + end.sin().sum()


def gradient(*x: Tensor, only: tuple[int, ...] = ALL, **options: Any) -> tuple[Tensor, ...]:
    found: tuple[Tensor, ...] = torch.func.grad(lambda *x: loss(*x, **options), only)(*x)
    return found


def everything(*x: Tensor, **options: Any) -> tuple[Tensor, ...]:
    """Read-outs, final state and all gradients."""
    return (*scan(*x, **options), *gradient(*x, only=tuple(range(len(x))), **options))


def by_definition(*x: Tensor) -> tuple[Tensor, ...]:
    """The same in fp64."""
    wide = [t.double() for t in x]

    def loss(*x: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        found = naive_gated_delta_rule(
            *x[:5], initial_state=x[5], output_final_state=True, use_qk_l2norm_in_kernel=True
        )
        assert found[1] is not None
        return found[0].sin().sum() + found[1].sin().sum(), (found[0], found[1])

    grads, outputs = torch.func.grad(loss, ALL, has_aux=True)(*wide)
    return (*outputs, *grads)


def assert_equals_definition(x: list[Tensor], found: tuple[Tensor, ...]) -> None:
    """Per head, at three times the error of a correct bf16 kernel for random keys, mild gates and beta below 1."""
    heads = (2, 1, 2, 2, 2, 2, 2, 1)
    for name, head, got, want in zip(("o", "end", *NAMES), heads, found, by_definition(*x), strict=True):
        # dg and dbeta are sums of products that may cancel.
        floor = 0.1 if name in ("g", "beta") else 1e-3
        assert_heads_close(got, want, head=head, within=1e-2, floor=floor, name=name)


def assert_equals_another_program(name: str, got: Tensor, want: Tensor, *, within: float = 5e-3) -> None:
    """Equal but for rounding: loads of another width or other segments are another program."""
    assert_heads_close(got, want, head=1 if name in ("end", "start") else 2, within=within, floor=0.05, name=name)


@pytest.mark.parametrize("packed", [False, True], ids=["batch", "packed"])
@pytest.mark.parametrize("width", [32, 128])
def test_a_hundred_repetitions_give_the_same_bits(width: int, packed: bool) -> None:
    bounds = torch.tensor([0, 100, 100, 2111, 4090], device="cuda") if packed else None
    x = draw(1, 4096, 4, width, width, sequences=4 if packed else 1)
    first = everything(*x, cu_seqlens=bounds)
    for _ in range(99):
        for name, got, want in zip(("o", "end", *NAMES), everything(*x, cu_seqlens=bounds), first, strict=True):
            assert torch.equal(got, want), name


def in_nan(x: Tensor, *, before: int) -> Tensor:
    """A strided view with the values of x into a larger buffer of NaN, `before` elements into its rows."""
    room = x.new_full([x.shape[0] + 1, x.shape[1] + 130, x.shape[2] + 2, *(n + 24 for n in x.shape[3:])], torch.nan)
    view = room[1:, 65 : 65 + x.shape[1], 1:-1]
    view = view[..., before : before + x.shape[3]] if x.ndim == 4 else view
    return view.copy_(x)


@pytest.mark.parametrize("widths", [(16, 16), (48, 40), (64, 64), (128, 128), (96, 128), (192, 160)], ids=str)
@pytest.mark.parametrize("time", [1, 64, 130])
def test_what_surrounds_the_inputs_is_not_read(widths: tuple[int, int], time: int) -> None:
    clean = draw(2, time, 2, *widths)
    # 16 bytes, or an odd number of elements, which rules out wide loads.
    around = [in_nan(x, before=7 if time == 64 else 8) for x in clean[:5]]
    # A transposed state in NaN: no stride of it is that of a contiguous one.
    start = clean[5].new_full((2, 2, widths[1] + 3, widths[0] + 5), torch.nan)[..., 1:-2, 2:-3].mT.copy_(clean[5])
    for name, got, want in zip(("o", "end", *NAMES), everything(*around, start), everything(*clean), strict=True):
        assert got.isfinite().all(), name
        # dg is a sum that cancels. One program truncates the operands of a chunk's inverse, the other rounds them: in
        # fp64 otherwise, dg of one chunk is then up to 4.5e-3 apart in 60 draws.
        assert_equals_another_program(name, got, want, within=1e-2 if name == "g" else 3e-3)


@pytest.mark.parametrize("width", [32, 128])
def test_nan_past_the_last_sequence_is_not_read_and_gives_zeros(width: int) -> None:
    bounds = torch.tensor([0, 64, 64, 65, 190], device="cuda")
    clean = draw(1, 300, 2, width, width, sequences=4)
    dirty = [*(torch.cat([x[:, :190], torch.full_like(x[:, 190:], torch.nan)], 1) for x in clean[:5]), clean[5]]
    found = everything(*dirty, cu_seqlens=bounds)
    # The memory that freed tensors leave behind is not zero either.
    for name, got, want in zip(("o", "end", *NAMES), found, everything(*clean, cu_seqlens=bounds), strict=True):
        assert_same_bits(got, want, name)
        if name not in ("end", "start"):
            assert (got[:, 190:] == 0).all(), name


def test_offsets_beyond_two_billion_elements_of_a_contiguous_batch() -> None:
    """Every tensor of a head has more than 2^31 elements; the last sequences are those of a small batch."""
    b, t, h = 2**31 // (4096 * 2 * 128) + 3, 4096, 2
    last = draw(3, t, h, 128, 128)

    def repeated(x: Tensor) -> Tensor:
        whole = torch.empty(b, *x.shape[1:], dtype=x.dtype, device=x.device)
        whole[:-3] = x[:1]
        whole[-3:] = x
        return whole

    def run(*x: Tensor) -> tuple[Tensor, ...]:
        # v as the gradient of the read-outs: nothing of the size of the inputs is made besides.
        leaves = [y.requires_grad_() for y in x]
        o, end = scan(*leaves)
        return (o.detach(), end.detach(), *torch.autograd.grad(o, leaves, leaves[2].detach()))

    torch.cuda.empty_cache()
    x = [repeated(x) for x in last]
    assert x[0][:-3].numel() >= 2**31
    found = [(y[:2].clone(), y[-3:].clone()) for y in run(*x)]
    for name, (first, got), want in zip(("o", "end", *NAMES), found, run(*last), strict=True):
        # Another number of programs cuts the sequences into other segments: not the same bits.
        assert_equals_another_program(name, got, want)
        assert_same_bits(first[0], first[1], name)


@pytest.mark.parametrize("which", range(5), ids=NAMES[:5])
def test_offsets_beyond_two_billion_elements_of_a_view(which: int) -> None:
    """A step in time is so long that 50 of them pass 2^31 elements, inside the first chunk."""
    x = draw(1, 130, 1, 32, 32)
    stride = 2**31 // 50 + 16 - 2**31 // 50 % 16
    near = x[which]
    room = torch.empty(stride * 130, dtype=near.dtype, device="cuda")
    far = room.as_strided(near.shape, (room.numel(), stride, 32, 1)[: near.ndim]).copy_(near)
    found = everything(*x[:which], far, *x[which + 1 :])
    for name, got, want in zip(("o", "end", *NAMES), found, everything(*x), strict=True):
        assert_same_bits(got, want, name)
    assert_equals_definition(x, found)


@pytest.mark.parametrize("packed", [False, True], ids=["batch", "packed"])
def test_more_programs_than_a_grid_axis_holds(packed: bool) -> None:
    count, t, h = 40_000, 3, 2
    x = draw(1 if packed else count, t * count if packed else t, h, 16, 16, sequences=count)
    bounds = torch.arange(0, t * count + 1, t, device="cuda") if packed else None
    found = everything(*x, cu_seqlens=bounds)
    rows = [y[:, -2 * t :].unflatten(1, (2, t))[0] if packed else y[-2:] for y in x[:5]]
    last = [*rows, x[5][-2:]]
    sizes = [
        y[:, -2 * t :].unflatten(1, (2, t))[0] if packed and i not in (1, 7) else y[-2:] for i, y in enumerate(found)
    ]
    assert_equals_definition(last, tuple(sizes))


MODES: dict[str, Callable[..., Any]] = {
    "compiled gradient": lambda backend: torch.compile(gradient, fullgraph=True, dynamic=True, backend=backend),
    "traced gradient": lambda backend: _traced(backend),
    "compiled forward": lambda backend: _compiled_forward(backend),
}


def _traced(backend: Any) -> Callable[..., tuple[Tensor, ...]]:
    raised: list[Exception] = []

    def remembering(*x: Tensor) -> tuple[Tensor, ...]:
        try:
            return gradient(*x)
        except Exception as error:
            raised.append(error)
            raise

    inner = torch._dynamo.nonstrict_trace(remembering)
    compiled = torch.compile(lambda *x: inner(*x), fullgraph=True, dynamic=True, backend=backend)

    def run(*x: Tensor) -> tuple[Tensor, ...]:
        try:
            return compiled(*x)
        except Exception as error:
            # Dynamo reports every error of the traced function as an unsupported output type.
            raise (raised or [error])[-1] from None

    return run


def _compiled_forward(backend: Any) -> Callable[..., tuple[Tensor, ...]]:
    compiled = torch.compile(loss, fullgraph=True, dynamic=True, backend=backend)

    def run(*x: Tensor) -> tuple[Tensor, ...]:
        leaves = [y.detach().requires_grad_() for y in x]
        return torch.autograd.grad(compiled(*leaves), leaves)

    return run


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("mode", MODES)
def test_six_lengths_compile_at_most_twice(mode: str) -> None:
    from torch._dynamo.testing import CompileCounterWithBackend

    torch._dynamo.reset()
    counter = CompileCounterWithBackend("inductor")
    compiled = MODES[mode](counter)
    for time in (65, 128, 200, 333, 500, 640):
        x = draw(2, time, 2, 64, 64)
        for name, got, want in zip(NAMES, compiled(*x), gradient(*x), strict=True):
            # Only the sine and the sum around the scan are other kernels.
            assert_heads_close(got, want, head=1 if name == "start" else 2, within=5e-3, floor=0.05, name=name)
    assert counter.frame_count <= 2


@pytest.mark.parametrize("packed", [False, True], ids=["batch", "packed"])
def test_a_replayed_graph_gives_the_bits_of_eager(packed: bool) -> None:
    """A capture fails on any read of a GPU number on the host, so this shows that there is none."""
    bounds = torch.tensor([0, 64, 64, 700, 990], device="cuda") if packed else None
    x = draw(1, 1000, 2, 64, 64, sequences=4 if packed else 1)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        everything(*x, cu_seqlens=bounds)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = everything(*x, cu_seqlens=bounds)
    for seed in (1, 2):
        fresh = draw(1, 1000, 2, 64, 64, sequences=4 if packed else 1, seed=seed)
        for old, new in zip(x, fresh, strict=True):
            old.copy_(new)
        if bounds is not None:
            bounds.copy_(torch.tensor([0, 1, 300 * seed, 300 * seed, 900]))
        graph.replay()
        for name, got, want in zip(("o", "end", *NAMES), captured, everything(*fresh, cu_seqlens=bounds), strict=True):
            assert_same_bits(got, want, name)


def test_vmap_and_vmap_of_the_gradient_equal_a_loop() -> None:
    cases = [draw(2, 150, 2, 64, 32, seed=seed) for seed in range(3)]
    stacked = [torch.stack(x) for x in zip(*cases, strict=True)]
    for run in (scan, gradient):
        for i, mapped in enumerate(torch.func.vmap(run)(*stacked)):
            assert_same_bits(mapped, torch.stack([run(*x)[i] for x in cases]))
    # Some arguments shared by all samples.
    mapped = torch.func.vmap(gradient, in_dims=(0, None, 0, None, 0, None))(
        *(s if i in (0, 2, 4) else c for i, (s, c) in enumerate(zip(stacked, cases[0], strict=True)))
    )
    for j, case in enumerate(cases):
        mixed = [case[i] if i in (0, 2, 4) else cases[0][i] for i in ALL]
        for name, got, want in zip(NAMES, mapped, gradient(*mixed), strict=True):
            assert_same_bits(got[j], want, name)


@pytest.mark.parametrize("width", [32, 64])
@pytest.mark.parametrize("only", [(0,), (1,), (2,), (3,), (4,), (5,), (2, 5), (0, 1)], ids=str)
def test_the_gradients_asked_for_equal_those_among_all(only: tuple[int, ...], width: int) -> None:
    x = draw(1, 600, 2, width, width)
    every = gradient(*x)
    for i, got in zip(only, gradient(*x, only=only), strict=True):
        if only == (5,):
            # The state's gradient alone needs one kernel, the one that carries it.
            assert_heads_close(got, every[i], head=1, within=3e-3, floor=0.05)
            return
        assert_same_bits(got, every[i], NAMES[i])
    # And through autograd, where the others are no leaves at all.
    leaves = [y.clone().requires_grad_(i in only) for i, y in enumerate(x)]
    for i, got in zip(only, torch.autograd.grad(loss(*leaves), [leaves[i] for i in only]), strict=True):
        assert_same_bits(got, every[i], NAMES[i])


@pytest.mark.parametrize("width", [32, 64])
def test_raw_ops_are_what_their_schemas_say(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The calls that a gradient makes, with a gate in the kernel or without: no output is an input, fakes are right."""
    calls: list[tuple[Any, tuple[Any, ...]]] = []

    def recorded(op: Any) -> Callable[..., Any]:
        def run(*arguments: Any) -> Any:
            calls.append((op, arguments))
            return op(*arguments)

        return run

    is_narrow = width <= 32
    forward, backward, kept = kernels.OPS[is_narrow]
    monkeypatch.setitem(kernels.OPS, is_narrow, kernels.Ops(recorded(forward), recorded(backward), kept))
    x = draw(1, 150, 2, 32, width, sequences=2)
    bounds = torch.tensor([0, 70, 140], device="cuda")
    leaves = [y.requires_grad_() for y in (*x, torch.zeros(2, device="cuda"), torch.ones(2, device="cuda"))]
    torch.autograd.grad(loss(*leaves[:6], cu_seqlens=bounds), leaves[:6])
    torch.autograd.grad(
        loss(*leaves[:6], cu_seqlens=bounds, use_gate_in_kernel=True, A_log=leaves[6], dt_bias=leaves[7]), leaves
    )
    assert len(calls) == 4
    for op, arguments in calls:
        plain = tuple(y.detach() if isinstance(y, Tensor) else y for y in arguments)
        torch.library.opcheck(op, plain, test_utils=("test_schema", "test_faketensor"))


def test_parts_of_one_projection_are_read_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inputs and the gradient of the read-outs as strided views: no copy is made, the numbers are those of copies."""
    b, t, h, k, v = 2, 200, 3, 64, 32
    generator = torch.Generator("cuda").manual_seed(0)
    fused = torch.randn(b, t, 2 * h * k + h * v + 2 * h, generator=generator, device="cuda").bfloat16()
    q, key, value, gate, write = fused.split([h * k, h * k, h * v, h, h], dim=-1)
    views = [q.unflatten(-1, (h, k)), key.unflatten(-1, (h, k)), value.unflatten(-1, (h, v)), gate, write]
    d_o = torch.randn(b, h, t, v, generator=generator, device="cuda").bfloat16().movedim(1, 2)
    options = {
        "use_gate_in_kernel": True,
        "A_log": torch.zeros(h, device="cuda"),
        "dt_bias": torch.ones(h, device="cuda"),
        "use_beta_sigmoid_in_kernel": True,
    }

    def run(d_o: Tensor, *x: Tensor) -> tuple[Tensor, ...]:
        leaves = [y.detach().requires_grad_() for y in x]
        o, end = scan(*leaves, **options)
        return (o, end, *torch.autograd.grad(o, leaves, d_o))

    want = run(d_o.contiguous(), *(x.contiguous() for x in views))

    def copied(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        raise AssertionError(f"a copy of {list(x.shape)}, strides {x.stride()}")

    monkeypatch.setattr(torch.Tensor, "contiguous", copied)
    found = run(d_o, *views)
    monkeypatch.undo()
    for name, got, right in zip(("o", "end", *NAMES), found, want, strict=False):
        # Aligned rows may have a kernel of their own.
        assert_equals_another_program(name, got, right)


def test_mixed_dtypes_are_read_as_they_are_and_their_gradients_are_alike() -> None:
    """g fp32, beta bf16 and a bf16 state: what `autocast` and a layer hand over."""
    x = draw(2, 200, 2, 64, 64)
    x = [*x[:4], x[4].bfloat16(), x[5].bfloat16()]
    found = everything(*x)
    assert [y.dtype for y in found[2:]] == [y.dtype for y in x]
    assert found[1].dtype == torch.float32
    assert_equals_definition(x, found)


def compiled_kernels() -> dict[str, int]:
    """How many versions of each of the package's Triton kernels this process has compiled."""
    from triton.runtime.jit import JITFunction

    from hymo_kernels import device

    counts: dict[str, int] = {}
    for module in pkgutil.iter_modules(device.__path__):
        for name, kernel in vars(importlib.import_module(f"{device.__name__}.{module.name}")).items():
            if isinstance(kernel, JITFunction) and name.endswith("_kernel"):
                counts[f"{module.name}.{name}"] = sum(len(caches[0]) for caches in kernel.device_caches.values())
    return counts


@pytest.mark.parametrize("packed", [False, True], ids=["batch", "packed"])
@pytest.mark.parametrize("width", [32, 64])
def test_a_new_length_or_batch_compiles_nothing(width: int, packed: bool) -> None:
    def run(b: int, t: int) -> None:
        bounds = torch.tensor([0, *(t * (i + 1) for i in range(b))], device="cuda") if packed else None
        everything(*draw(1 if packed else b, t * b if packed else t, 2, width, width, sequences=b), cu_seqlens=bounds)

    run(2, 512)
    before = compiled_kernels()
    assert sum(before.values()) > 0
    for b, t in ((2, 500), (1, 500), (3, 777), (1, 1), (5, 64), (1, 4096), (16, 16), (7, 1000)):
        run(b, t)
        grown = {name: (before[name], n) for name, n in compiled_kernels().items() if n != before[name]}
        assert not grown, f"batch {b}, time {t}: {grown}"

"""Document-isolated attention: its definition, its kernels interpreted on the CPU, and run where there is a GPU."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from hymo_kernels import document_attention, naive_document_attention
from hymo_kernels.host import triton_attention as kernels
from tests.close import assert_same_bits
from tests.kernels.attention_cases import Case, check_declared_outputs, errors, inputs
from tests.kernels.interpreter import interpret

# Weights and their gradients are rounded before a product, results after it.
BUDGET = {torch.bfloat16: 8e-3, torch.float16: 1e-3}
dtypes = pytest.mark.parametrize("dtype", list(BUDGET), ids=str)
GPU_CASES = [
    Case(2, 16, 4, 128, 128, (1, 2, 300, 77, 640)),
    Case(1, 16, 4, 128, 128, (1025,), before=5),
    Case(1, 4, 4, 64, 64, (63, 64, 65, 1, 1, 190)),
    Case(2, 6, 2, 96, 128, (100, 29), before=3, strided=True),
    Case(1, 8, 1, 192, 128, (300, 1, 45)),
    Case(1, 4, 2, 256, 256, (170, 31)),
    Case(1, 32, 1, 48, 22, (150, 51)),
    Case(1, 5, 5, 7, 9, (10, 90)),
    Case(33, 4, 2, 32, 16, (1,)),
    Case(2, 4, 2, 16, 8, (30, 70)),
    Case(2, 4, 2, 64, 64, ()),
]


def documents(x: dict[str, Tensor]) -> tuple[Tensor, ...]:
    return x["q"], x["k"], x["v"]


def loss(*x: Tensor, position: Tensor, **options: Any) -> Tensor:
    return document_attention(*x, position=position, scale=0.1, **options).float().sin().sum()


def gradients(position: Tensor, *x: Tensor, **options: Any) -> tuple[Tensor, ...]:
    found: tuple[Tensor, ...] = torch.func.grad(partial(loss, position=position, **options), (0, 1, 2))(*x)
    return found


def test_the_definition_is_softmax_over_the_tokens_of_a_document() -> None:
    x = inputs(Case(2, 4, 2, 6, 3, (1, 5, 4), before=2), "cpu", torch.float64)
    found = naive_document_attention(*documents(x), position=x["position"], scale=0.4)
    for b in range(2):
        for t in range(10):
            start = max(t - int(x["position"][b, t]), 0)
            for h in range(4):
                weight = (0.4 * x["k"][b, start : t + 1, h // 2] @ x["q"][b, t, h]).softmax(0)
                torch.testing.assert_close(found[b, t, h], weight @ x["v"][b, start : t + 1, h // 2])


def test_interpreted_kernels_equal_the_definition() -> None:
    interpret("attention_cases")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"backend": "triton"},
            "backend='triton' is not available, it needs tensors on an NVIDIA GPU, these are on cpu",
        ),
        ({"scale": 0.0}, "scale must be > 0; got 0.0"),
        ({"q": torch.zeros(1, 4, 3, 8)}, r"h a multiple of g; got q \[1, 4, 3, 8\]"),
    ],
)
def test_a_call_that_makes_no_sense_is_one_line(changes: dict[str, Any], message: str) -> None:
    good = {"q": torch.zeros(1, 4, 4, 8), "k": torch.zeros(1, 4, 2, 8), "v": torch.zeros(1, 4, 2, 6), "scale": 1.0}
    call: dict[str, Any] = {**good, "position": torch.arange(4)[None], **changes}
    with pytest.raises(ValueError, match=message) as caught:
        document_attention(**call)
    assert "\n" not in str(caught.value)


@pytest.mark.gpu
@dtypes
@pytest.mark.parametrize("engine", [True, False], ids=["copied", "pointers"])
@pytest.mark.parametrize("case", GPU_CASES, ids=str)
def test_kernels_equal_the_definition(
    case: Case, engine: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the copy engine where the card has one, and without."""
    has_copy_engine = kernels._has_copy_engine
    monkeypatch.setattr(kernels, "_has_copy_engine", lambda device: engine and has_copy_engine(device))
    found = errors(case, "cuda", dtype)
    wrong = {name: error for name, error in found.items() if not error < BUDGET[dtype]}
    assert not wrong, found


@pytest.mark.gpu
def test_gpu_tensors_take_the_kernels_where_nothing_is_said() -> None:
    x = inputs(GPU_CASES[0], "cuda", torch.bfloat16)
    for got, want in zip(
        gradients(x["position"], *documents(x)),
        gradients(x["position"], *documents(x), backend="triton"),
        strict=True,
    ):
        assert_same_bits(got, want)


@pytest.mark.gpu
def test_kernels_are_bitwise_repeatable() -> None:
    x = inputs(GPU_CASES[0], "cuda", torch.bfloat16)
    first = gradients(x["position"], *documents(x))
    for _ in range(100):
        assert all(torch.equal(a, b) for a, b in zip(first, gradients(x["position"], *documents(x)), strict=True))


@pytest.mark.gpu
def test_no_bit_of_a_document_depends_on_another() -> None:
    case = Case(1, 8, 2, 64, 64, (100, 37, 300))
    x, other = inputs(case, "cuda", torch.bfloat16), inputs(Case(1, 8, 2, 64, 64, (437,)), "cuda", torch.bfloat16)
    middle = slice(100, 137)
    changed = {name: 50 * other[name].flip(1) for name in ("q", "k", "v")}
    for name in changed:
        changed[name][:, middle] = x[name][:, middle]

    def run(x: tuple[Tensor, ...]) -> list[Tensor]:
        o = document_attention(*x, position=position, scale=0.1)
        return [y[:, middle] for y in (o, *gradients(position, *x))]

    position = x["position"]
    for got, want in zip(run(documents(changed)), run(documents(x)), strict=True):
        assert_same_bits(got, want)


@pytest.mark.gpu
def test_vmap_and_compiled_gradients_equal_eager_ones() -> None:
    x = inputs(Case(3, 8, 2, 64, 32, (100, 200)), "cuda", torch.bfloat16)
    position, whole = x["position"], documents(x)
    each = [gradients(position[i : i + 1], *(y[i : i + 1] for y in whole)) for i in range(3)]
    mapped = torch.func.vmap(gradients)(position[:, None], *(y[:, None] for y in whole))
    for found, want in zip(mapped, zip(*each, strict=True), strict=True):
        assert_same_bits(found, torch.stack(want))
    traced = torch._dynamo.nonstrict_trace(gradients)
    compiled = torch.compile(lambda *y: traced(*y), fullgraph=True)(position, *whole)
    for found, want in zip(compiled, gradients(position, *whole), strict=True):
        torch.testing.assert_close(found, want, rtol=2e-2, atol=2e-3)


@pytest.mark.gpu
def test_offsets_beyond_two_billion_elements() -> None:
    """Queries in a view whose last rows start beyond 2^31 elements of its storage."""
    x = inputs(Case(1, 2, 1, 64, 64, (65,)), "cuda", torch.bfloat16)
    stride = 2**31 // 64 + 128
    room = torch.empty(stride * 65, dtype=torch.bfloat16, device="cuda")
    far = room.as_strided(x["q"].shape, (room.numel(), stride, 64, 1))
    far.copy_(x["q"])
    for got, want in zip(
        gradients(x["position"], far, x["k"], x["v"]), gradients(x["position"], *documents(x)), strict=True
    ):
        assert_same_bits(got, want)


@pytest.mark.gpu
def test_nothing_is_kept_for_the_backward_but_inputs_and_outputs() -> None:
    x = [y.requires_grad_() for y in documents(inputs(Case(2, 16, 4, 128, 128, (2048,)), "cuda", torch.bfloat16))]
    position = torch.arange(2048, device="cuda").expand(2, -1)
    before = torch.cuda.memory_allocated()
    o = document_attention(*x, position=position, scale=0.1)
    assert torch.cuda.memory_allocated() - before <= o.numel() * 2 + o[..., 0].numel() * 4 + 2**20


@pytest.mark.gpu
def test_new_lengths_and_batches_compile_nothing() -> None:
    from triton.runtime import driver

    from hymo_kernels.device import attention

    def compiled() -> int:
        device = driver.active.get_current_device()
        names = ("forward_kernel", "query_backward_kernel", "key_backward_kernel")
        return sum(len(getattr(attention, name).device_caches[device][0]) for name in names)

    def run(b: int, t: int) -> None:
        x = inputs(Case(b, 4, 2, 64, 64, (t,)), "cuda", torch.bfloat16)
        gradients(x["position"], *documents(x))

    run(2, 100)
    before = compiled()
    for b, t in ((2, 1), (1, 101), (3, 128), (5, 1000), (1, 16)):
        run(b, t)
    assert compiled() == before


@pytest.mark.gpu
def test_a_captured_graph_replays() -> None:
    x = inputs(Case(1, 8, 2, 64, 64, (100, 237)), "cuda", torch.bfloat16)
    run = partial(document_attention, *documents(x), position=x["position"], scale=0.1)
    want = run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o = run()
    o.zero_()
    graph.replay()
    assert_same_bits(o, want)


@pytest.mark.gpu
def test_declared_outputs_of_the_raw_ops_are_true() -> None:
    check_declared_outputs(inputs(Case(2, 8, 2, 64, 32, (20, 40)), "cuda", torch.bfloat16))

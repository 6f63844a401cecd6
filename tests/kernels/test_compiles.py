"""Every kernel and table entry compiles for Ampere and Hopper without a GPU, and fits their shared memory."""

import pytest
import torch
from torch import Tensor

from hymo_kernels.host import gated
from hymo_kernels.host import narrow_gated_delta_rule as narrow
from hymo_kernels.host import symmetric_product as symmetric
from hymo_kernels.host import triton_attention as attention
from hymo_kernels.host import triton_causal_conv1d as convolution
from hymo_kernels.host import triton_causal_conv1d_heads as convolution_heads
from hymo_kernels.host import triton_cross_entropy as cross_entropy
from hymo_kernels.host import triton_gated_delta_rule as scan
from hymo_kernels.host import triton_gated_linear_scan as linear
from hymo_kernels.host import triton_recurrent_delta_rule as recurrent
from hymo_kernels.host.gated_delta_call import Options, Precision
from tests.kernels.compiled import Launch, assert_compiles, compiled, form_of, launches_of

pytestmark = pytest.mark.heavy
cards = pytest.mark.parametrize("capability", [80, 90])


@pytest.fixture(autouse=True)
def _needs_triton() -> None:
    pytest.importorskip("triton", reason="Triton is an extra")


@pytest.mark.parametrize(
    ("dtype", "width", "precision", "capability"),
    [
        *((torch.bfloat16, width, "tf32x3", card) for width in scan.PLANS for card in (80, 86, 90)),
        *((torch.float32, width, "tf32x3", card) for width in scan.FP32_PLANS for card in (80, 86, 90)),
        *((torch.float32, width, "ieee", 90) for width in scan.FP32_PLANS),
    ],
    ids=str,
)
def test_every_entry_of_the_scan_compiles(
    dtype: torch.dtype, width: int, precision: Precision, capability: int
) -> None:
    q = torch.zeros(1, 4096, 2, width, dtype=dtype)
    g = torch.zeros(1, 4096, 2)
    static = Options(width**-0.5, True, False, False, 1.0, False, precision)

    def call() -> None:
        o, _, *made = scan.forward(q, q, q, g, g, None, None, None, None, *static)
        scan.backward(q, q, q, None, None, *made, o, None, False, *static)

    launches = launches_of(call, scan)
    chunk = "wide_chunk_kernel" if dtype == torch.float32 or width > 128 else "chunk_kernel"
    names = ["prepare_kernel", "forward_kernel", "forward_kernel", "chain_kernel", chunk]
    assert [launch.kernel.__name__ for launch in launches] == names
    assert_compiles(launches, capability)


@cards
@pytest.mark.parametrize(("key", "value", "packed"), [(32, 32, False), (16, 24, True)], ids=str)
def test_the_kernels_for_narrow_heads_compile(key: int, value: int, packed: bool, capability: int) -> None:
    q, v = torch.zeros(1, 4096, 2, key, dtype=torch.bfloat16), torch.zeros(1, 4096, 4, value, dtype=torch.bfloat16)
    g, state = torch.zeros(1, 4096, 4), torch.zeros(1, 4, key, value)
    start, bounds = (state, torch.zeros(2, dtype=torch.int32)) if packed else (None, None)
    static = Options(key**-0.5, not packed, False, False, 1.0, packed)

    def call() -> None:
        o, end, *made = narrow.forward(q, q, v, g, g, None, None, start, bounds, *static)
        narrow.backward(q, q, v, start, bounds, *made, o, end if packed else None, False, *static)
        narrow.backward(q, q, v, start, bounds, *made, o, end if packed else None, True, *static)

    launches = launches_of(call, narrow)
    both = ["prepare", "carry", "forward", "chain", "carry", "forward", "backward", "chain", "carry"]
    assert [launch.kernel.__name__ for launch in launches] == [f"narrow_{name}_kernel" for name in both]
    assert_compiles(launches, capability)


@cards
@pytest.mark.parametrize(("index", "width"), list(enumerate((16, 32, 64, 96, 128, 256))))
def test_every_tile_of_the_recurrent_scan_compiles(index: int, width: int, capability: int) -> None:
    """Wide and narrow tiles of every width; over the widths, each with every dtype, and what is optional or packed."""
    launches: list[Launch] = []
    for place, processors in enumerate((1, 20, 132)):
        dtype = (torch.bfloat16, torch.float16, torch.float32)[(index + place) % 3]
        packed = (index // 3 + place) % 2 == 1
        q, v = torch.zeros(2 - packed, 40, 2, width, dtype=dtype), torch.zeros(2 - packed, 40, 4, 192, dtype=dtype)
        g, state = torch.zeros(2 - packed, 40, 4), torch.zeros(2, 4, width, 192)
        bounds = torch.zeros(3, dtype=torch.int32) if packed else None
        weights: tuple[Tensor | None, ...] = (None, None) if packed else (g[0, 0], g[0, 0])
        static = Options(width**-0.5, not packed, not packed, not packed, 2.0, True)

        def call(q=q, v=v, g=g, state=state, bounds=bounds, weights=weights, static=static) -> None:  # type: ignore[no-untyped-def]
            sequence = (q, q, v, g, g, *weights)
            recurrent.forward(*sequence, None, bounds, *static)
            recurrent.update(*sequence, state, torch.zeros(2, dtype=torch.int64), bounds, *static)
            recurrent.backward(*sequence, state, bounds, v, state, *static)

        launches += launches_of(call, recurrent, multiprocessors=processors)
    assert {launch.arguments["BLOCK_V"] for launch in launches if "BLOCK_V" in launch.arguments} == {8, 16, 32}
    assert_compiles(launches, capability)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("length", [4096, 4000], ids=["full", "cut"])
@pytest.mark.parametrize("width", [64, 128])
def test_the_kernels_for_hopper_compile_and_spill_little(
    width: int, length: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scan.hopper, "_is_hopper", lambda device: True)
    q = torch.zeros(1, length, 2, width, dtype=dtype)
    g, state = torch.zeros(1, length, 2), torch.zeros(1, 2, width, width)
    static = (width**-0.5, True, False, False, 1.0, True)

    def call() -> None:
        o, end, *made = scan.forward(q, q, q, g, g, None, None, state, None, *static)
        scan.backward(q, q, q, state, None, *made, o, end, False, *static)

    launches = launches_of(call, scan.hopper)
    names = ["fused_prepare_kernel", "fused_forward_kernel", "fused_forward_kernel", "fused_backward_kernel"]
    assert [launch.kernel.__name__ for launch in launches] == names
    assert_compiles(launches, 90)


@pytest.mark.parametrize("gate", [True, False], ids=["gate", "plain"])
def test_five_programs_of_the_prepare_share_a_multiprocessor_of_hopper(
    gate: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their registers and shared memory fit, and little is spilled for that."""
    monkeypatch.setattr(scan.hopper, "_is_hopper", lambda device: True)
    q, g, A_log = torch.zeros(1, 4096, 2, 128, dtype=torch.bfloat16), torch.zeros(1, 4096, 2), torch.zeros(2)
    weights = (A_log, A_log) if gate else (None, None)
    static = (128**-0.5, True, gate, gate, 1.0, False)
    launch = launches_of(lambda: scan.forward(q, q, q, g, g, *weights, None, None, *static), scan.hopper)[0]
    assert launch.kernel.__name__ == "fused_prepare_kernel"
    made = compiled(launch.kernel, form_of(launch), 90)
    assert 5 * 32 * launch.arguments["num_warps"] * launch.arguments["maxnreg"] <= 65_536
    assert 5 * (made.metadata.shared + 1024) <= 233_472
    assert sum(made.asm["sass"].count(name) for name in ("LDL", "STL")) <= 64


@cards
@pytest.mark.parametrize(
    ("width", "dtype", "forms"),
    [
        (4, torch.bfloat16, ("documents", "packed", "rows")),
        (4, torch.float16, ("documents",)),
        (4, torch.float32, ("packed",)),
        (2, torch.bfloat16, ("documents",)),
        (8, torch.bfloat16, ("packed",)),
    ],
)
def test_every_form_of_the_convolution_compiles(
    width: int, dtype: torch.dtype, forms: tuple[str, ...], capability: int
) -> None:
    """The usual taps and dtype with and without what is optional, the others with it."""
    launches: list[Launch] = []
    for form in forms:
        documents, packed = form == "documents", form == "packed"
        x = torch.zeros(2 - packed, 100, 336, dtype=dtype)
        weight, bias = torch.zeros(336, width), torch.zeros(336)
        position = torch.zeros(2, 100, dtype=torch.int64) if documents else None
        bounds = torch.zeros(3, dtype=torch.int32) if packed else None
        state = torch.zeros(2, width - 1, 336, dtype=dtype)

        def call(x=x, weight=weight, bias=bias, position=position, bounds=bounds, state=state) -> None:  # type: ignore[no-untyped-def]
            if len(forms) > 1:
                convolution.forward(x, weight, position, None, None, bounds, True, False)
                convolution.backward(x, weight, position, None, None, bounds, x, None, False)
            convolution.forward(x, weight, position, bias, state, bounds, True, True)
            convolution.backward(x, weight, position, bias, state, bounds, x, state, True)

        launches += launches_of(call, convolution)
    assert_compiles(launches, capability)


@cards
@pytest.mark.parametrize(
    ("dtype", "keys", "half", "documents"),
    [
        (torch.bfloat16, (14, 128), 16, True),
        (torch.float16, (2, 16), 8, True),
        (torch.float32, (3, 20), 3, False),
        (torch.bfloat16, (4, 64), 0, False),
    ],
    ids=str,
)
def test_every_form_of_the_convolution_of_heads_compiles(
    dtype: torch.dtype, keys: tuple[int, int], half: int, documents: bool, capability: int
) -> None:
    heads, dim = keys
    x, weight = torch.zeros(2, 100, 3 * heads * dim, dtype=dtype), torch.zeros(3 * heads * dim, 4)
    position = torch.zeros(2, 100, dtype=torch.int64) if documents else None
    angle = torch.zeros(2, 100, 1, half)

    def call() -> None:
        q, k, v = convolution_heads.forward(x, weight, position, angle, angle, heads, dim, heads)
        convolution_heads.backward(x, weight, position, angle, angle, q, k, v)

    launches = launches_of(call, convolution)
    assert [launch.kernel.__name__ for launch in launches] == [
        "conv_heads_forward_kernel",
        "conv_heads_backward_kernel",
        "sum_taps_kernel",
    ]
    assert_compiles(launches, capability)


@cards
@pytest.mark.parametrize(
    ("dtype", "widths", "packed"),
    [*((dtype, (128, 128), False) for dtype in linear.PLANS), (torch.bfloat16, (24, 40), True)],
    ids=str,
)
def test_every_entry_of_the_linear_scan_compiles(
    dtype: torch.dtype, widths: tuple[int, int], packed: bool, capability: int
) -> None:
    b, v = (torch.zeros(1, 4096, 2, width, dtype=dtype) for width in widths)
    g, A_log, state = torch.zeros(1, 4096, 2), torch.zeros(2, widths[0]), torch.zeros(1, 2, *widths)
    start, bounds = (state, torch.zeros(2, dtype=torch.int32)) if packed else (None, None)

    def call() -> None:
        o, end, pairs = linear.forward(v, b, b, g, A_log, start, bounds, packed)
        linear.backward(v, b, b, g, A_log, start, bounds, pairs, o, end if packed else None, True, True)

    launches = launches_of(call)
    names = ["carry_kernel", "pairs_kernel", "read_kernel"]
    again = ["carry_kernel", "read_kernel", "carry_kernel", "pairs_backward_kernel"]
    assert [launch.kernel.__name__ for launch in launches] == names + again
    assert_compiles(launches, capability)


@cards
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("vocabulary", [64_256, 50_257])
def test_every_form_of_the_cross_entropy_compiles(
    vocabulary: int, dtype: torch.dtype, capability: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The CPU has no product of 16-bit matrices with an fp32 result.
    monkeypatch.setattr(cross_entropy, "_accumulate", lambda *operands, begin: None)
    hidden, table = torch.zeros(2, 8, dtype=dtype), torch.zeros(vocabulary, 8, dtype=dtype)
    labels, weight = torch.zeros(2, dtype=torch.int64), torch.ones(2)

    def call() -> None:
        for gradient in (True, False):
            cross_entropy.forward(hidden, table, labels, weight, 15.0, 2, gradient)

    launches = launches_of(call, cross_entropy)
    kept = vocabulary == 64_256 and dtype == torch.bfloat16
    names = ["kept_cross_entropy_kernel" if kept else "cross_entropy_kernel", "cross_entropy_kernel"]
    assert [launch.kernel.__name__ for launch in launches] == names
    assert_compiles(launches, capability, spills=False)


@cards
@pytest.mark.parametrize(
    ("widths", "heads", "dtype"),
    [
        ((64, 64), (4, 4), torch.float16),
        ((128, 128), (16, 4), torch.bfloat16),
        ((96, 128), (6, 2), torch.bfloat16),
        ((256, 256), (4, 2), torch.float16),
    ],
    ids=str,
)
def test_every_entry_of_attention_compiles(
    widths: tuple[int, int],
    heads: tuple[int, int],
    dtype: torch.dtype,
    capability: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(attention, "_has_copy_engine", lambda device: capability >= 90)
    q, k, v = (
        torch.zeros(2, 100, *size, dtype=dtype) for size in ((heads[0], widths[0]), *((heads[1], w) for w in widths))
    )
    position = torch.arange(100).expand(2, -1)

    def call() -> None:
        o, lse = attention.forward(q, k, v, position, 0.1)
        attention.backward(q, k, v, position, o, lse, o, 0.1)

    launches = launches_of(call)
    names = ["forward_kernel", "query_backward_kernel", "key_backward_kernel"]
    assert [launch.kernel.__name__ for launch in launches] == names
    assert_compiles(launches, capability)


@cards
@pytest.mark.parametrize(("dtype", "width"), [(torch.bfloat16, 2304), (torch.float32, 1000)], ids=str)
def test_every_form_of_the_gated_gradient_compiles(dtype: torch.dtype, width: int, capability: int) -> None:
    y, dh, ends = (torch.zeros(1, 100, size, dtype=dtype) for size in (2 * width, width, 16))
    launches = launches_of(lambda: gated.backward(y, dh, ends.int()))
    assert [launch.kernel.__name__ for launch in launches] == ["gated_backward_kernel"]
    assert_compiles(launches, capability)


def test_every_form_of_the_symmetric_product_compiles() -> None:
    if not symmetric._has_groups_of_warps():
        pytest.skip("Triton 3.6 or later is not installed")
    x, gram = (torch.zeros(3, 200, width, dtype=torch.bfloat16) for width in (136, 200))

    def call() -> None:
        symmetric.launch_product(x, False)
        symmetric.launch_product(x, True)
        symmetric.launch_polynomial(gram, 1.0, 2.0, 3.0, None)
        symmetric.launch_polynomial(gram, 1.0, 2.0, 3.0, torch.ones(3))

    launches = launches_of(call, symmetric)
    assert [launch.kernel.__name__ for launch in launches] == ["symmetric_product_kernel"] * 4
    assert_compiles(launches, 90)

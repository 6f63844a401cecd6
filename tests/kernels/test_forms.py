"""Another length or batch launches the kernels that are compiled already: nothing of either is compiled in."""

from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from hymo_kernels.host import narrow_gated_delta_rule as narrow
from hymo_kernels.host import triton_gated_delta_rule as scan
from tests.kernels.compiled import Form, Launch, form_of, launches_of


@pytest.fixture(autouse=True)
def _needs_triton() -> None:
    pytest.importorskip("triton", reason="Triton is an extra")


def forms(kernels: Any, batch: int, time: int, heads: int, width: int, dtype: torch.dtype) -> list[Form]:
    """Of what a first forward and backward compile, in an order that says nothing."""
    q = torch.zeros(batch, time, heads, width, dtype=dtype)
    g = torch.zeros(batch, time, heads)
    static = (width**-0.5, True, False, False, 1.0, False, "tf32x3")

    def call() -> None:
        o, _, *made = kernels.forward(q, q, q, g, g, None, None, None, None, *static)
        kernels.backward(q, q, q, None, None, *made, o, None, False, *static)

    beside: list[Launch] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scan.hopper, "_COMPILED", set())
        launches = launches_of(call, scan, scan.hopper, narrow, beside=beside)
    return sorted((form_of(launch) for launch in launches + beside), key=str)


@pytest.mark.parametrize("batch_and_time", [(1, 4096), (1, 512), (2, 1024), (5, 2112), (3, 1040), (1, 999)], ids=str)
@pytest.mark.parametrize(
    ("kernels", "width", "dtype", "on_hopper"),
    [
        (scan, 128, torch.bfloat16, True),
        (scan, 128, torch.bfloat16, False),
        (scan, 64, torch.float32, False),
        (narrow, 32, torch.bfloat16, True),
    ],
    ids=["hopper", "general", "fp32", "narrow"],
)
def test_another_length_or_batch_needs_no_other_kernels(
    kernels: Any,
    width: int,
    dtype: torch.dtype,
    on_hopper: bool,
    batch_and_time: tuple[int, int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(scan.hopper, "_is_hopper", lambda device: on_hopper)
    batch, time = batch_and_time
    for heads in (2, 14):
        sizes = heads, width, dtype
        assert forms(kernels, batch, time, *sizes) == forms(kernels, 4, 4096, *sizes)


@pytest.mark.parametrize("width", [16, 64])
def test_kernels_are_looked_up_where_widths_are_symbols(width: int) -> None:
    """A symbol's comparison is not the key that a plain bool is."""
    dims = [DimDynamic.DYNAMIC] * 4
    mode = FakeTensorMode(shape_env=ShapeEnv())
    q = mode.from_tensor(
        torch.empty(2, 65, 2, width, dtype=torch.bfloat16),
        symbolic_context=StatelessSymbolicContext(dynamic_sizes=dims),
    )
    assert isinstance(q.shape[-1], torch.SymInt)
    assert narrow.serves(q, q) is (width == 16)

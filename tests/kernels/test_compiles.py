"""Every kernel and table entry compiles for Hopper on a machine without a GPU, and fits its shared memory."""

from typing import Any

import pytest
import torch

from hymo_kernels.host import triton_gated_delta_rule as kernels

SHARED_MEMORY = 232_448  # bytes of one block on an H100 or H200
POINTERS = {torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32", torch.int8: "*i8"}


@pytest.mark.heavy
@pytest.mark.parametrize("width", list(kernels.PLANS))
def test_every_kernel_compiles_for_hopper(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    triton = pytest.importorskip("triton", reason="Triton is an extra")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.runtime.jit import JITFunction

    launches: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = []
    monkeypatch.setattr(
        JITFunction, "__getitem__", lambda kernel, grid: lambda *args, **kwargs: launches.append((kernel, args, kwargs))
    )
    monkeypatch.setattr(kernels, "multiprocessors", lambda device: 132)
    q = torch.zeros(1, 4096, 2, width, dtype=torch.bfloat16)
    g = torch.zeros(1, 4096, 2)
    static = (width**-0.5, True, False, False, 1.0, False)
    o, _, *made = kernels.forward(q, q, q, g, g, None, None, None, None, *static)
    kernels.backward(q, q, q, g, g, None, None, None, None, *made, o, None, False, *static)
    assert [kernel.__name__ for kernel, _, _ in launches] == [
        "prepare_kernel",
        "forward_kernel",
        "chain_kernel",
        "forward_kernel",
        "chunk_kernel",
    ]
    for kernel, args, kwargs in launches:
        values = dict(zip(kernel.arg_names, args, strict=False)) | kwargs
        signature: dict[str, str] = {}
        constants: dict[str, Any] = {}
        hints: dict[tuple[int, ...], Any] = {}
        for place, (name, param) in enumerate(zip(kernel.arg_names, kernel.params, strict=True)):
            value = values[name]
            if param.is_constexpr or (isinstance(value, int) and value == 1):
                signature[name], constants[name] = "constexpr", value
            elif isinstance(value, torch.Tensor):
                signature[name], hints[(place,)] = POINTERS[value.dtype], [["tt.divisibility", 16]]
            else:
                signature[name] = "fp32" if isinstance(value, float) else "i32"
                if isinstance(value, int) and value % 16 == 0:
                    hints[(place,)] = [["tt.divisibility", 16]]
        options = {name: kwargs[name] for name in ("num_warps", "num_stages")}
        source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=hints)
        compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
        assert compiled.metadata.shared <= SHARED_MEMORY, kernel.__name__
        assert compiled.asm["cubin"]

"""One small forward and backward of each family of kernels on a GPU, in a process of its own: for tools that watch one.

`python -m tests.kernels.families hopper`, from the repository with `.` and `kernels` on PYTHONPATH, prints the errors
against the definition; without a name, the names. Lengths are no multiple of a tile. To see whether a kernel reads or
writes what it must not, each tensor needs memory of its own:

    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck python -m tests.kernels.families hopper
"""

import sys
from collections.abc import Callable
from functools import partial
from unittest import mock

import torch

from hymo_kernels.host import triton_attention
from tests.kernels import (
    attention_cases,
    convolution_cases,
    convolution_heads_cases,
    cross_entropy_cases,
    decode_cases,
    linear_cases,
    symmetric_cases,
    triton_cases,
)


def delta_rule(k: int, v: int, dtype: torch.dtype = torch.bfloat16) -> dict[str, float]:
    return triton_cases.worst_heads(triton_cases.Case(1, 130, 1, 2, k, v, resets=(20,)), "cuda", dtype)


def attention(engine: bool) -> dict[str, float]:
    case = attention_cases.Case(1, 4, 2, 64, 64, (63, 1, 140))
    with mock.patch.object(triton_attention, "_has_copy_engine", return_value=engine):
        return attention_cases.errors(case, "cuda", torch.bfloat16)


FAMILIES: dict[str, Callable[[], dict[str, float]]] = {
    "narrow": partial(delta_rule, 32, 32),
    "hopper": partial(delta_rule, 128, 128),
    "general": partial(delta_rule, 64, 48),
    "wide": partial(delta_rule, 256, 192),
    "fp32": partial(delta_rule, 64, 64, torch.float32),
    "decode": lambda: decode_cases.errors(decode_cases.Case(2, 5, 2, 4, 64, 96), "cuda", torch.bfloat16),
    "convolution": lambda: convolution_cases.errors(
        convolution_cases.Case(2, 140, 336, 4, lengths=(1, 139)), "cuda", torch.bfloat16
    ),
    "convolution_heads": lambda: convolution_heads_cases.errors(
        convolution_heads_cases.Case(2, 140, (3, 48), (3, 56), 8, lengths=(1, 139)), "cuda", torch.bfloat16
    ),
    "linear": lambda: linear_cases.worst_heads(linear_cases.Case(1, 130, 2, 64, 40), "cuda", torch.bfloat16),
    "attention_copied": partial(attention, True),
    "attention_plain": partial(attention, False),
    "cross_entropy": lambda: cross_entropy_cases.errors(
        cross_entropy_cases.Case(129, 64, 1000), "cuda", torch.bfloat16
    ),
    "symmetric": lambda: symmetric_cases.errors(symmetric_cases.Case(3, 136, 200), "cuda"),
    "symmetric_transposed": lambda: symmetric_cases.errors(symmetric_cases.Case(3, 200, 136, True), "cuda"),
}


def main(names: list[str]) -> None:
    if not names:
        print(*FAMILIES)
    for name in names:
        if name not in FAMILIES:
            raise SystemExit(f"a family is one of {', '.join(FAMILIES)}; got {name!r}")
        print(name, *(f"{quantity} {error:.1e}" for quantity, error in FAMILIES[name]().items()), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])

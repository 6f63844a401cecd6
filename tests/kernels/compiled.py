"""Compiling what a call would launch, for GPUs that are not there."""

import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch

from tests.kernels.registers import kept_operands

# Bytes of one block: A100, consumer cards, H100 and H200.
SHARED_MEMORY = {80: 166_912, 86: 101_376, 90: 232_448}
INSTRUCTIONS = 8_000
"""Of PTX, at most: a kernel of so many compiles in some 10 seconds, on slow machines 30."""

LOCAL = re.compile(r"\b(?:LDL|STL)\b")
"""Machine code that reads or writes what registers have no room for."""

POINTERS = {
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float32: "*fp32",
    torch.int8: "*i8",
    torch.int32: "*i32",
    torch.int64: "*i64",
}


class Launch(NamedTuple):
    """A kernel with its arguments by name, warps and stages among them."""

    kernel: Any
    arguments: dict[str, Any]


def launches_of(
    call: Callable[[], object], *modules: Any, multiprocessors: int = 132, beside: list[Launch] | None = None
) -> list[Launch]:
    """What `call` would launch, given tensors of the CPU, on a card of so many multiprocessors.

    Args:
        modules: the host modules that ask for `multiprocessors`.
        beside: gets what it would compile without a launch.
    """
    from triton.runtime.jit import JITFunction

    launches: list[Launch] = []

    def recorded(kernel: Any, grid: tuple[int, ...]) -> Callable[..., None]:
        assert len(grid) == 1, f"{kernel.__name__}: other axes end at 65,535 programs"

        def launch(*args: Any, **kwargs: Any) -> None:
            launches.append(Launch(kernel, dict(zip(kernel.arg_names, args, strict=False)) | kwargs))

        return launch

    def only_compiled(kernel: Any, *args: Any, grid: tuple[int, ...], **kwargs: Any) -> None:
        if beside is not None:
            beside.append(Launch(kernel, dict(zip(kernel.arg_names, args, strict=False)) | kwargs))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(JITFunction, "__getitem__", recorded)
        patch.setattr(JITFunction, "warmup", only_compiled)
        for module in modules:
            patch.setattr(module, "multiprocessors", lambda device: multiprocessors)
        call()
    return launches


class Form(NamedTuple):
    """What decides whether two launches share one compiled kernel.

    Args:
        signature: the type of each argument.
        constants: the values that are compiled in.
        hints: the places of the arguments that are known to be multiples of 16.
        options: warps, stages and registers.
    """

    name: str
    signature: dict[str, str]
    constants: dict[str, Any]
    hints: dict[tuple[int, ...], Any]
    options: dict[str, int]


def form_of(launch: Launch) -> Form:
    """As Triton's launcher specialises a kernel, for tensors that begin where 16 bytes do."""
    kernel, arguments = launch
    options = {name: arguments[name] for name in ("num_warps", "num_stages", "maxnreg") if name in arguments}
    form = Form(kernel.__name__, {}, {}, {}, options)
    for place, name, kind, value in _specialized(kernel, arguments):
        form.signature[name] = kind
        if kind == "constexpr":
            form.constants[name] = value
        elif kind.startswith("tensordesc"):
            continue
        elif kind[0] == "*" or (kind[0] == "i" and value % 16 == 0 and not kernel.params[place].do_not_specialize):
            form.hints[(place,)] = [["tt.divisibility", 16]]
    return form


def compiled(kernel: Any, form: Form, capability: int) -> Any:
    """What Triton makes of a kernel in one form."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.experimental.gluon._runtime import GluonASTSource

    source_of = GluonASTSource if kernel.is_gluon() else ASTSource
    source = source_of(fn=kernel, signature=form.signature, constexprs=form.constants, attrs=form.hints)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=form.options)


def assert_compiles(launches: list[Launch], capability: int, *, spills: bool = True) -> None:
    """Each different kernel becomes machine code: soon, right, and within the card's shared memory.

    Args:
        spills: False if it must be within the registers, too.
    """
    seen = set()
    for launch in launches:
        kernel, form = launch.kernel, form_of(launch)
        if str(form) in seen:
            continue
        seen.add(str(form))
        made = compiled(kernel, form, capability)
        assert made.metadata.shared <= SHARED_MEMORY[capability], (kernel.__name__, made.metadata.shared)
        instructions = sum(line.rstrip().endswith(";") for line in made.asm["ptx"].splitlines())
        assert instructions <= INSTRUCTIONS, (kernel.__name__, form.options, instructions)
        assert not kept_operands(made.asm["ptx"]), (kernel.__name__, form.options)
        assert made.asm["cubin"]
        assert spills or not LOCAL.search(made.asm["sass"]), (kernel.__name__, form.options)


def _specialized(kernel: Any, arguments: dict[str, Any]) -> Iterator[tuple[int, str, str, Any]]:
    """Place, name, type and value of each argument, as a launch would specialise the kernel."""
    for place, (name, param) in enumerate(zip(kernel.arg_names, kernel.params, strict=True)):
        value = arguments[name]
        if param.is_constexpr or (isinstance(value, int) and value == 1 and not param.do_not_specialize):
            kind = "constexpr"
        elif isinstance(value, torch.Tensor):
            kind = POINTERS[value.dtype]
        elif hasattr(value, "block_shape"):
            # Gluon says how a tile lies in shared memory, Triton finds it out.
            layout = f",{value.layout!r}" if hasattr(value, "layout") else ""
            kind = f"tensordesc<{POINTERS[value.base.dtype][1:]}{list(value.block_shape)}{layout}>"
        elif isinstance(value, float):
            kind = "fp32"
        else:
            kind = "i32" if -(2**31) <= value < 2**31 else "i64"
        yield place, name, kind, value

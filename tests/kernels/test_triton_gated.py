"""The kernel's gradient of silu(gate) * up: interpreted on the CPU, and run where there is a GPU."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from hymo_kernels.host import gated
from tests.kernels.gated_cases import INTERPRETED, Case, by_fp64, error, inputs

ROOT = Path(__file__).parents[2]
GPU_CASES = [*INTERPRETED, Case(4096, 2304, (4001,)), Case(1000, 40, (999, 1000))]
# Half a unit in the last place, and what fp32 adds where a slope is near 0.
ROUNDING = {torch.bfloat16: 2**-8 + 2e-5, torch.float32: 2e-5}


def test_the_interpreted_kernel_equals_the_definition() -> None:
    pytest.importorskip("triton", reason="Triton is an extra")
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}"}
    program = [sys.executable, "-W", "ignore", str(ROOT / "tests" / "kernels" / "gated_cases.py")]
    done = subprocess.run(program, env=environment, capture_output=True, text=True, check=False, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("dtype", list(ROUNDING), ids=str)
def test_what_a_cpu_takes_equals_the_definition(dtype: torch.dtype) -> None:
    y, dh, ends = inputs(Case(16, 256, (16,)), "cpu", dtype)
    want = by_fp64(y, dh)
    off = (gated.BACKWARD(y, dh, ends).double() - want).abs() / want.abs().clamp(min=1e-2)
    assert off.max() <= ROUNDING[dtype]


def test_declared_outputs_of_the_raw_op_are_true() -> None:
    given = inputs(Case(5, 24, (3, 5)), "cpu", torch.bfloat16)
    torch.library.opcheck(gated.BACKWARD, given, test_utils=("test_schema", "test_faketensor"))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", list(ROUNDING), ids=str)
@pytest.mark.parametrize("case", GPU_CASES, ids=str)
def test_the_kernel_equals_the_definition(case: Case, dtype: torch.dtype) -> None:
    assert error(case, "cuda", dtype) <= ROUNDING[dtype]


@pytest.mark.gpu
def test_empty_rows_are_left_as_they_are() -> None:
    """Seen in memory that a result is given again."""
    y, dh, ends = inputs(Case(4096, 2304, (2001,)), "cuda", torch.bfloat16)
    before = torch.full_like(y, 7.0)
    place = before.data_ptr()
    del before
    dy = gated.backward(y, dh, ends)
    assert dy.data_ptr() == place
    assert (dy[:, 2001:] == 7.0).all()
    assert not (dy[:, :2001] == 7.0).all()


@pytest.mark.gpu
def test_offsets_beyond_two_billion_elements() -> None:
    """The last of 500,000 rows against the same row alone."""
    rows, width = 500_000, 2304
    y = torch.zeros(1, rows, 2 * width, dtype=torch.bfloat16, device="cuda")
    dh = torch.zeros(1, rows, width, dtype=torch.bfloat16, device="cuda")
    one = inputs(Case(1, width, (1,)), "cuda", torch.bfloat16)
    y[:, -1:], dh[:, -1:] = one[:2]
    dy = gated.backward(y, dh, torch.tensor([[rows]], dtype=torch.int32, device="cuda"))
    assert torch.equal(dy[:, -1:], gated.backward(*one))

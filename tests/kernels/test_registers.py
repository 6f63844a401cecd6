"""The search for what a loop's products keep in registers, on PTX written by hand."""

import pytest

from tests.kernels.registers import kept_operands

LOOP = """
    mov.b32 %r1, 0;
$L__BB0_1:
    {inside}
    wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {{%r8,%r9}}, {{%r1,%r2}}, %rd1, 0, 1, 1, 0;
    @%p1 bra $L__BB0_1;
    ret;
"""


@pytest.mark.parametrize(
    ("inside", "kept"),
    [
        ("add.s32 %r3, %r1, %r2;", ["%r1", "%r2"]),
        ("st.shared.b32 [%r1], %r2;", ["%r1", "%r2"]),
        ("cvt.rn.bf16x2.f32 %r1, %f1, %f2;", ["%r2"]),
        ("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%r1, %r2, %r3, %r4}, [%r5];", []),
        # On one way only: by the other, what was there before is read again.
        ("@%p2 bra $L__BB0_2;\n mov.b32 %r1, 1;\n$L__BB0_2:\n mov.b32 %r2, 1;", ["%r1"]),
    ],
)
def test_an_operand_is_kept_unless_the_round_writes_it(inside: str, kept: list[str]) -> None:
    assert kept_operands(LOOP.format(inside=inside)) == kept


def test_outside_of_loops_nothing_is_kept() -> None:
    assert kept_operands(LOOP.format(inside="").replace("@%p1 bra $L__BB0_1;", "")) == []

"""Cross-entropy of softcapped logits: a program turns one row of logits into its loss and, in place, its gradient.

With r = 1 / (1 + exp(2 x / cap)) of a logit x, the capped logit is cap tanh(x / cap) = cap (1 - 2 r) and its slope is
4 r (1 - r). Capped logits are bounded, so their exponentials need no running maximum. Exponentials and reciprocals come
from a unit with an eighth of the throughput of multiplications: four columns share one reciprocal.
"""

import triton
import triton.language as tl

LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)
LN2: tl.constexpr = tl.constexpr(0.6931471805599453)

# Exponents of two up to which tanh is told from 1 in fp32; four such factors are far from overflow.
SATURATED: tl.constexpr = tl.constexpr(30.0)


@triton.jit(do_not_specialize=["first"])
def cross_entropy_kernel(
    logits,  # [rows, STRIDE], replaced by their gradient
    labels,  # [N]; below 0: ignored
    weight,  # [N]
    nats,  # [N] fp32, weighted
    cap,
    first,  # token of row 0
    U: tl.constexpr,
    STRIDE: tl.constexpr,
    BLOCK: tl.constexpr,
    GRADIENT: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    logits += row * STRIDE
    label = tl.load(labels + first + row)
    factor = tl.load(weight + first + row).to(tl.float32)
    span: tl.constexpr = 4 * BLOCK
    whole: tl.constexpr = U // span
    if (label < 0) | (factor == 0):
        tl.store(nats + first + row, 0.0)
        if GRADIENT:
            columns = tl.arange(0, span)
            zeros = tl.zeros([span], logits.dtype.element_ty)
            for block in tl.range(0, whole):
                tl.store(logits + block * span + columns, zeros)
            if U % span != 0:
                tl.store(logits + whole * span + columns, zeros, mask=whole * span + columns < U)
    else:
        squeeze = 2 * LOG2E / cap
        height = cap * LOG2E
        inside = label < U
        target = 1.0 / _reach(tl.load(logits + label, mask=inside, other=0.0), squeeze)
        sums = tl.zeros([BLOCK], tl.float32)
        for block in tl.range(0, whole):
            sums += _sums(logits + block * span, squeeze, height, U, BLOCK, False)
        if U % span != 0:
            sums += _sums(logits + whole * span, squeeze, height, U - whole * span, BLOCK, True)
        total = tl.log2(tl.sum(sums, 0))
        exponent = height - 2 * height * target - total
        # A label beyond the vocabulary must not pass for a loss.
        tl.store(nats + first + row, tl.where(inside, -LN2 * factor * exponent, float("nan")))
        if GRADIENT:
            # Backwards, since what was read last is the likeliest to be in a cache.
            if U % span != 0:
                _replace(logits + whole * span, squeeze, height, total, factor, U - whole * span, BLOCK, True)
            for block in tl.range(0, whole):
                _replace(logits + (whole - 1 - block) * span, squeeze, height, total, factor, U, BLOCK, False)
            # The label's own entry was written by another thread.
            tl.debug_barrier()
            slope = 4 * factor * target * (1 - target)
            entry = (tl.exp2(exponent) - 1) * slope
            tl.store(logits + label, entry.to(logits.dtype.element_ty), mask=inside)


@triton.jit
def _reach(x, squeeze):
    """1 + exp(2 x / cap), bounded; NaN stays NaN."""
    exponent = tl.minimum(x.to(tl.float32) * squeeze, SATURATED, propagate_nan=tl.PropagateNan.ALL)
    return 1.0 + tl.exp2(exponent)


@triton.jit
def _reciprocals(logits, squeeze, LEFT: tl.constexpr, BLOCK: tl.constexpr, MASKED: tl.constexpr):
    """r of four runs of columns, by one division."""
    columns = tl.arange(0, BLOCK)
    if MASKED:
        a = tl.load(logits + columns, mask=columns < LEFT, other=0.0)
        b = tl.load(logits + BLOCK + columns, mask=BLOCK + columns < LEFT, other=0.0)
        c = tl.load(logits + 2 * BLOCK + columns, mask=2 * BLOCK + columns < LEFT, other=0.0)
        d = tl.load(logits + 3 * BLOCK + columns, mask=3 * BLOCK + columns < LEFT, other=0.0)
    else:
        a = tl.load(logits + columns)
        b = tl.load(logits + BLOCK + columns)
        c = tl.load(logits + 2 * BLOCK + columns)
        d = tl.load(logits + 3 * BLOCK + columns)
    a, b, c, d = _reach(a, squeeze), _reach(b, squeeze), _reach(c, squeeze), _reach(d, squeeze)
    ab, cd = a * b, c * d
    inverse = 1.0 / (ab * cd)
    of_ab, of_cd = inverse * cd, inverse * ab
    return b * of_ab, a * of_ab, d * of_cd, c * of_cd


@triton.jit
def _sums(logits, squeeze, height, LEFT: tl.constexpr, BLOCK: tl.constexpr, MASKED: tl.constexpr):
    """Sums of four exponentials each; LEFT columns count if MASKED."""
    a, b, c, d = _reciprocals(logits, squeeze, LEFT, BLOCK, MASKED)
    a, b = tl.exp2(height - 2 * height * a), tl.exp2(height - 2 * height * b)
    c, d = tl.exp2(height - 2 * height * c), tl.exp2(height - 2 * height * d)
    if MASKED:
        columns = tl.arange(0, BLOCK)
        a = tl.where(columns < LEFT, a, 0.0)
        b = tl.where(BLOCK + columns < LEFT, b, 0.0)
        c = tl.where(2 * BLOCK + columns < LEFT, c, 0.0)
        d = tl.where(3 * BLOCK + columns < LEFT, d, 0.0)
    return (a + b) + (c + d)


@triton.jit
def _replace(logits, squeeze, height, total, factor, LEFT: tl.constexpr, BLOCK: tl.constexpr, MASKED: tl.constexpr):
    """Logits become their gradient, as if none of them were the label's."""
    a, b, c, d = _reciprocals(logits, squeeze, LEFT, BLOCK, MASKED)
    _store(logits, a, height, total, factor, LEFT, BLOCK, MASKED)
    _store(logits + BLOCK, b, height, total, factor, LEFT - BLOCK, BLOCK, MASKED)
    _store(logits + 2 * BLOCK, c, height, total, factor, LEFT - 2 * BLOCK, BLOCK, MASKED)
    _store(logits + 3 * BLOCK, d, height, total, factor, LEFT - 3 * BLOCK, BLOCK, MASKED)


@triton.jit
def _store(logits, r, height, total, factor, LEFT: tl.constexpr, BLOCK: tl.constexpr, MASKED: tl.constexpr):
    columns = tl.arange(0, BLOCK)
    part = tl.exp2((height - total) - 2 * height * r) * r
    entry = ((part - part * r) * (4 * factor)).to(logits.dtype.element_ty)
    if MASKED:
        tl.store(logits + columns, entry, mask=columns < LEFT)
    else:
        tl.store(logits + columns, entry)

"""Cross-entropy of softcapped logits: a program turns one row of logits into its loss and, in place, its gradient.

With s = exp(2 x / cap) of a logit x and r = 1 / (1 + s), the capped logit is cap tanh(x / cap) = cap (1 - 2 r) and its
slope is 4 r (1 - r), or 4 s r^2 where r is so near 1 that fp32 would keep few digits of 1 - r. Capped logits are
bounded, so their exponentials need no running maximum. Exponentials and reciprocals come from a unit with an eighth of
the throughput of multiplications: four columns share one reciprocal.

There are two forms. One reads a row twice, and serves every call. The other reads it once: a row's gradient before it
is divided by the sum of exponentials, a number from 0 to 1, stays in registers in 16 bits, of which 7 are its exponent
and 9 its mantissa. What is read are then words of two bf16 logits, the first in the lower half.
"""

import triton
import triton.language as tl
from triton.language.extra import libdevice

LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)
LN2: tl.constexpr = tl.constexpr(0.6931471805599453)

# Exponents of two up to which tanh is told from 1 in fp32; four such factors are far from overflow.
SATURATED: tl.constexpr = tl.constexpr(30.0)

# The second number of a word.
UPPER: tl.constexpr = tl.constexpr(-65536)


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
        rise = _rise(tl.load(logits + label, mask=inside, other=0.0), squeeze)
        target = 1.0 / (1.0 + rise)
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
            slope = 4 * factor * target * (rise * target)
            entry = (tl.exp2(exponent) - 1) * slope
            tl.store(logits + label, entry.to(logits.dtype.element_ty), mask=inside)


@triton.jit
def _rise(x, squeeze):
    """s, bounded; NaN stays NaN."""
    return tl.exp2(tl.minimum(x.to(tl.float32) * squeeze, SATURATED, propagate_nan=tl.PropagateNan.ALL))


@triton.jit
def _loaded(logits, squeeze, LEFT: tl.constexpr, BLOCK: tl.constexpr, MASKED: tl.constexpr):
    """s of four runs of columns."""
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
    return _rise(a, squeeze), _rise(b, squeeze), _rise(c, squeeze), _rise(d, squeeze)


@triton.jit
def _divided(a, b, c, d, FAST: tl.constexpr):
    """1 / (1 + a) and those of b, c and d, by one division; FAST for a product up to 2^126."""
    a, b, c, d = 1.0 + a, 1.0 + b, 1.0 + c, 1.0 + d
    ab, cd = a * b, c * d
    inverse = libdevice.fast_dividef(1.0, ab * cd) if FAST else 1.0 / (ab * cd)
    of_ab, of_cd = inverse * cd, inverse * ab
    return b * of_ab, a * of_ab, d * of_cd, c * of_cd


@triton.jit
def _sums(logits, squeeze, height, LEFT: tl.constexpr, BLOCK: tl.constexpr, MASKED: tl.constexpr):
    """Sums of four exponentials each; LEFT columns count if MASKED."""
    a, b, c, d = _loaded(logits, squeeze, LEFT, BLOCK, MASKED)
    a, b, c, d = _divided(a, b, c, d, False)
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
    a, b, c, d = _loaded(logits, squeeze, LEFT, BLOCK, MASKED)
    of_a, of_b, of_c, of_d = _divided(a, b, c, d, False)
    _store(logits, a, of_a, height, total, factor, LEFT, BLOCK, MASKED)
    _store(logits + BLOCK, b, of_b, height, total, factor, LEFT - BLOCK, BLOCK, MASKED)
    _store(logits + 2 * BLOCK, c, of_c, height, total, factor, LEFT - 2 * BLOCK, BLOCK, MASKED)
    _store(logits + 3 * BLOCK, d, of_d, height, total, factor, LEFT - 3 * BLOCK, BLOCK, MASKED)


@triton.jit
def _store(logits, s, r, height, total, factor, LEFT: tl.constexpr, BLOCK: tl.constexpr, MASKED: tl.constexpr):
    columns = tl.arange(0, BLOCK)
    part = tl.exp2((height - total) - 2 * height * r) * r
    entry = (part * (s * r) * (4 * factor)).to(logits.dtype.element_ty)
    if MASKED:
        tl.store(logits + columns, entry, mask=columns < LEFT)
    else:
        tl.store(logits + columns, entry)


@triton.jit(do_not_specialize=["first", "rows"])
def kept_cross_entropy_kernel(
    words,  # [rows, STRIDE / 2] int32, replaced by their gradient
    labels,  # [N]; below 0: ignored
    weight,  # [N]
    nats,  # [N] fp32, weighted
    cap,  # so low that exp(-2 cap) 2^-24 is a normal fp32 number
    first,  # token of row 0
    rows,
    U: tl.constexpr,  # even
    STRIDE: tl.constexpr,
    BLOCK: tl.constexpr,  # words of one load
    STEPS: tl.constexpr,  # of two loads, which cover a row
    COMPILED: tl.constexpr,  # False in the interpreter, which has no assembly and no libdevice
):
    columns = tl.arange(0, 2 * BLOCK)
    squeeze = 2 * LOG2E / cap
    depth = -2 * cap * LOG2E
    for row in tl.range(tl.program_id(0), rows, tl.num_programs(0)):
        label = tl.load(labels + first + row)
        factor = tl.load(weight + first + row).to(tl.float32)
        line = words + tl.cast(row, tl.int64) * (STRIDE // 2)
        logits = line.to(tl.pointer_type(tl.bfloat16), bitcast=True)
        if (label < 0) | (factor == 0):
            tl.store(nats + first + row, 0.0)
            zeros = tl.zeros([2 * BLOCK], tl.bfloat16)
            for run in tl.static_range(0, 2 * STEPS):
                _store_run(logits, columns, zeros, run, U)
        else:
            inside = label < U
            rise = _rise(tl.load(logits + label, mask=inside, other=0.0), squeeze)
            target = 1.0 / (1.0 + rise)
            # All loads are under way before the first is used.
            kept = ()
            for run in tl.static_range(0, 2 * STEPS):
                kept = kept + (_load_run(line, run, U, BLOCK),)
            sums = tl.zeros([BLOCK], tl.float32)
            for step in tl.static_range(0, STEPS):
                x, y = kept[2 * step], kept[2 * step + 1]
                more, x, y = _keep(x, y, squeeze, depth, U - step * 4 * BLOCK, BLOCK, COMPILED)
                sums += more
                if COMPILED:
                    x, y = _opaque(x), _opaque(y)
                kept = kept[: 2 * step] + (x, y) + kept[2 * step + 2 :]
            sum = tl.sum(sums, 0)
            exponent = depth * target - tl.log2(sum)
            # A label beyond the vocabulary must not pass for a loss.
            tl.store(nats + first + row, tl.where(inside, -LN2 * factor * exponent, float("nan")))
            # NaN if any logit of the row is, which none of its kept numbers need tell.
            scale = 4 / sum * factor
            for run in tl.static_range(0, 2 * STEPS):
                a, b = _unpacked(kept[run])
                _store_run(logits, columns, tl.interleave(a * scale, b * scale).to(tl.bfloat16), run, U)
            # The label's own entry was written by another thread.
            tl.debug_barrier()
            slope = 4 * factor * target * (rise * target)
            entry = (tl.exp2(exponent) - 1) * slope
            tl.store(logits + label, entry.to(tl.bfloat16), mask=inside)


@triton.jit
def _load_run(line, run: tl.constexpr, U: tl.constexpr, BLOCK: tl.constexpr):
    """A run of a row's words; 0 beyond the vocabulary."""
    at = run * BLOCK + tl.arange(0, BLOCK)
    return tl.load(line + at) if (run + 1) * 2 * BLOCK <= U else tl.load(line + at, mask=2 * at < U, other=0)


@triton.jit
def _store_run(logits, columns, entries, run: tl.constexpr, U: tl.constexpr):
    """A run of a row's gradient, two entries a word."""
    at = run * columns.shape[0] + columns
    if (run + 1) * columns.shape[0] <= U:
        tl.store(logits + at, entries)
    else:
        tl.store(logits + at, entries, mask=at < U)


@triton.jit
def _keep(x, y, squeeze, depth, LEFT: tl.constexpr, BLOCK: tl.constexpr, COMPILED: tl.constexpr):
    """Sums of four exponentials each, of which LEFT columns count, and what is kept in place of two runs of words."""
    a, b = _rise(_number(x << 16), squeeze), _rise(_number(x & UPPER), squeeze)
    c, d = _rise(_number(y << 16), squeeze), _rise(_number(y & UPPER), squeeze)
    a, b, c, d = _divided(a, b, c, d, COMPILED)
    p, q, s, t = tl.exp2(depth * a), tl.exp2(depth * b), tl.exp2(depth * c), tl.exp2(depth * d)
    x = _packed(p * (a - a * a), q * (b - b * b))
    y = _packed(s * (c - c * c), t * (d - d * d))
    if LEFT < 4 * BLOCK:
        columns = 2 * tl.arange(0, BLOCK)
        p = tl.where(columns < LEFT, p, 0.0)
        q = tl.where(columns < LEFT, q, 0.0)
        s = tl.where(2 * BLOCK + columns < LEFT, s, 0.0)
        t = tl.where(2 * BLOCK + columns < LEFT, t, 0.0)
    return (p + q) + (s + t), x, y


@triton.jit
def _number(bits):
    """The fp32 number of these bits."""
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _packed(a, b):
    """Two numbers from 0 to 1 in a word, rounded to 10 significant bits: the two highest of their own bits are 0."""
    low, high = a.to(tl.int32, bitcast=True) * 4 + 0x8000, b.to(tl.int32, bitcast=True) * 4 + 0x8000
    return ((low >> 16) & 0xFFFF) | (high & UPPER)


@triton.jit
def _unpacked(word):
    """The two numbers of a word."""
    return _number((word << 14) & 0x3FFFC000), _number((word >> 2) & 0x3FFFC000)


@triton.jit
def _opaque(x):
    """x itself, of which LLVM does not see that it was packed: it would keep both numbers in a register each."""
    return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], tl.int32, False, 1)

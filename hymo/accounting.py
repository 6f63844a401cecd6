"""What a configuration costs, in numbers: parameters, arithmetic, memory and data. Nothing is allocated for them."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from hymo import tree
from hymo.config import HyMoConfig, ModelConfig
from hymo.layers.gdn import GdnParams
from hymo.layers.mla import MlaParams
from hymo.layers.moe import MoeParams
from hymo.memory import SCAN_CHUNK, Memory, step_memory, uses_kernels
from hymo.model import model_spec
from hymo.optim import GroupRow, group_table
from hymo.params import ParamSpec, count, is_spec

Row = tuple[str, ...]

BACKWARD = 2
"""The backward pass over the forward pass: each matrix product has two gradients, each a product of the same size."""
MANY_EPOCHS = 4
"""Repeating text more often than this is worth little: Muennighoff et al. 2023, arXiv:2305.16264."""

CONVENTION = (
    "FLOPs: 2 for each multiply-add of matrix products and convolutions, forward + 2 x backward; attention causal, T/2",
    f"keys a query; scan in chunks of {SCAN_CHUNK}; top-k experts, not their capacity; nothing for elementwise work.",
)

PEAK_FLOPS = {
    "B200": 2250e12,
    "GH200": 989.4e12,
    "H200 NVL": 835.5e12,
    "H200": 989.4e12,
    "H100 NVL": 835.5e12,
    "H100 PCIe": 756e12,
    "H100": 989.4e12,
    "A100": 312e12,
    "A40": 149.7e12,
    "A10G": 70e12,
    "A10": 125e12,
    "L40S": 362.05e12,
    "L4": 121e12,
    "RTX 4090": 165.2e12,
    "RTX 3090": 71e12,
    "MI300X": 1307.4e12,
}
"""Peak of dense bf16 products with fp32 sums, FLOP/s, from the makers' data sheets."""


class Part(NamedTuple):
    """One part of a model.

    Args:
        name: of the part, with how many there are.
        stored: parameters.
        active: parameters that a token is multiplied by.
        flops: per token, forward and backward.
    """

    name: str
    stored: int
    active: int
    flops: float


class SourceEpochs(NamedTuple):
    """How often a run sees a source of text."""

    name: str
    tokens: float
    epochs: float | None


class Accounting(NamedTuple):
    """The costs of a run.

    Args:
        parts: of the model; they add up to its totals.
        embedding: parameters of token tables.
        active_without_mtp: parameters that a token is multiplied by in evaluation.
        buffers: numbers that are stored with the model but not trained.
        groups: of the optimiser.
        memory: of one rank, in bytes.
        checkpoint: bytes of a checkpoint: parameters, buffers and moments.
    """

    parts: tuple[Part, ...]
    embedding: int
    active_without_mtp: int
    buffers: int
    groups: tuple[GroupRow, ...]
    memory: Memory
    checkpoint: int
    world_size: int
    rows_per_step: int
    tokens_per_step: int
    steps: int
    total_tokens: int
    sources: tuple[SourceEpochs, ...]

    @property
    def stored(self) -> int:
        """Parameters."""
        return sum(part.stored for part in self.parts)

    @property
    def active(self) -> int:
        """Parameters that a token is multiplied by in training."""
        return sum(part.active for part in self.parts)

    @property
    def flops(self) -> float:
        """FLOPs per token of training."""
        return sum(part.flops for part in self.parts)


def account(config: HyMoConfig, world_size: int = 1) -> Accounting:
    """All the numbers of a run on `world_size` ranks. Raises ConfigError if its rows per step do not fit."""
    spec, total = model_spec(config.model), config.total_tokens(world_size)
    parts = model_parts(config.model, config.training.max_seq_len)
    memory, counts = step_memory(config, world_size), parameter_counts(config.model)
    epochs = config.epochs(world_size)
    whole = memory if world_size == 1 else step_memory(config)
    return Accounting(
        parts=parts,
        embedding=counts["embedding"],
        active_without_mtp=counts["active_without_mtp"],
        buffers=count(spec, "buffer"),
        groups=tuple(group_table(spec, config.optimizer)),
        memory=memory,
        checkpoint=whole.masters + sum(whole.moments.values()),
        world_size=world_size,
        rows_per_step=config.training.rows_per_step(world_size),
        tokens_per_step=config.training.tokens_per_step(world_size),
        steps=config.scheduler.total_steps,
        total_tokens=total,
        sources=tuple(SourceEpochs(each.name, each.weight * total, epochs[each.name]) for each in config.data.sources),
    )


def parameter_counts(cfg: ModelConfig) -> dict[str, int]:
    """Parameters: stored, active in training, active without MTP, in token tables. What a run records of itself."""
    spec, parts = model_spec(cfg), model_parts(cfg, 1)
    active = sum(part.active for part in parts)
    return {
        "stored": count(spec),
        "active": active,
        "active_without_mtp": active - count(spec.mtp),
        "embedding": count(spec, "embed"),
    }


def flops_per_token(cfg: ModelConfig, tokens: int) -> float:
    """FLOPs that training costs per token in rows of `tokens`, by the convention of `CONVENTION`."""
    return sum(part.flops for part in model_parts(cfg, tokens))


def peak_flops(device_name: str) -> float | None:
    """The peak of a device as torch names it (`torch.cuda.get_device_name`), dense bf16, FLOP/s; None if not known."""
    words = f" {device_name.replace('-', ' ')} "
    return next((peak for name, peak in PEAK_FLOPS.items() if f" {name} " in words), None)


def model_parts(cfg: ModelConfig, tokens: int) -> tuple[Part, ...]:
    """The parts of a model, with the cost of a token in a row of `tokens`."""
    spec = model_spec(cfg)
    mixers: dict[type, list[Any]] = {GdnParams: [], MlaParams: []}
    experts: list[Any] = []
    feedforwards: list[Any] = []
    for block in spec.blocks:
        mixers[type(block.mixer)].append(block.mixer)
        (experts if isinstance(block.ffn, MoeParams) else feedforwards).append(block.ffn)
    gdn, mla = mixers[GdnParams], mixers[MlaParams]
    chosen = cfg.n_activated_experts / cfg.n_routed_experts
    norms = [spec.norm, *(norm for block in spec.blocks for norm in (block.mixer_norm, block.ffn_norm))]
    logits = 2.0 * (1 + BACKWARD) * cfg.vocab_size * cfg.dim

    def several(number: int, name: str) -> str:
        return f"{number} {name}{'s' * (number != 1)}"

    def rows() -> Iterator[Part]:
        yield _part("embedding", spec.table)
        if not cfg.tie_embeddings:
            yield _part("output head", spec.head)
        yield _part(several(len(gdn), "GDN mixer"), gdn)
        yield Part("  scan", 0, 0, len(gdn) * (1 + BACKWARD) * scan_flops(cfg))
        yield _part(several(len(gdn), "GDN feed-forward"), feedforwards)
        yield _part(several(len(mla), "MLA mixer"), mla)
        yield Part("  attention", 0, 0, len(mla) * (1 + BACKWARD) * attention_flops(cfg, tokens))
        yield _part(several(len(mla), "router"), [moe.router for moe in experts])
        routed, shared = several(cfg.n_routed_experts, "routed expert"), several(cfg.n_shared_experts, "shared expert")
        yield _part(f"{len(mla)} x {routed}", [moe.routed for moe in experts], share=chosen)
        yield _part(f"{len(mla)} x {shared}", [moe.shared for moe in experts])
        yield _part(several(cfg.mtp_depth, "MTP module"), spec.mtp)
        yield _part("norms", norms)
        yield Part("logits, next token", 0, 0, logits)
        yield Part(f"logits, {cfg.mtp_depth} MTP", 0, 0, cfg.mtp_depth * logits)

    return tuple(part for part in rows() if part.stored or part.flops)


def attention_flops(cfg: ModelConfig, tokens: int) -> float:
    """Scores and read-outs of one token in one layer, forward; a query sees half of the row."""
    return 2 * cfg.n_heads * (cfg.qk_head_dim + cfg.v_head_dim) * tokens / 2


def scan_flops(cfg: ModelConfig) -> float:
    """The chunked scan of one token in one layer, forward: matrix products of a fused kernel, halves not discounted.

    Per value head: state times key, query times state and the state's update (2 K V each; without erasing the first is
    missing), and products inside a chunk of C tokens: A R and P V' (2 C V each). Per key head K K^T and Q K^T (2 C K
    each). A rule without erasing has no K K^T and no A, and a decay for each channel, so its Q K^T is per value head.
    """
    key, value, heads = cfg.gdn_key_dim, cfg.gdn_value_dim, cfg.gdn_n_heads
    if cfg.gdn_rule == "gated_linear":
        return float(heads * (2 * 2 * key * value + 2 * SCAN_CHUNK * (key + value)))
    per_value_head = 3 * 2 * key * value + 2 * 2 * SCAN_CHUNK * value
    return float(heads * per_value_head + cfg.gdn_n_key_heads * 2 * 2 * SCAN_CHUNK * key)


def _part(name: str, specs: Any, *, share: float = 1.0) -> Part:
    """The parameters of `specs`, of which a token uses the fraction `share`, and the products with them."""
    leaves: list[ParamSpec] = [leaf for leaf in tree.leaves(specs, is_leaf=is_spec) if leaf.role != "buffer"]
    stored = sum(leaf.size for leaf in leaves)
    multiplied = sum(leaf.size for leaf in leaves if leaf.inputs and leaf.role != "embed")
    return Part(name, stored, round(stored * share), 2 * (1 + BACKWARD) * multiplied * share)


def describe(config: HyMoConfig, world_size: int = 1) -> str:
    """What a run costs, as tables for people. Raises ConfigError like `account`."""
    it, model, training = account(config, world_size), config.model, config.training
    layers = f"{len(model.gdn_layers)} GDN + {len(model.mla_layers)} MLA layers of {model.dim}"
    title = f"{config.run.name}: {layers}, {model.vocab_size:,} token ids, rows of {training.max_seq_len:,} tokens"
    return "\n\n".join(
        [
            title,
            _table(
                ("model", "stored", "active", "MFLOP/token", "share"),
                [
                    (part.name, _many(part.stored), _many(part.active), _mega(part.flops), _share(part.flops, it.flops))
                    for part in it.parts
                ],
                ("total", _many(it.stored), _many(it.active), _mega(it.flops), ""),
            ),
            _notes(it),
            _group_table(it),
            _memory_table(config, it),
            _run_table(config, it),
            _source_table(it),
        ]
    )


def _notes(it: Accounting) -> str:
    naive = 6 * it.active
    return "\n".join(
        [
            f"{it.stored:,} parameters stored, {it.active:,} active ({_many(it.active_without_mtp)} without MTP),",
            f"{it.embedding:,} of them token embeddings; {it.buffers:,} numbers that balance routers come on top.",
            *CONVENTION,
            f"6 x active parameters would be {_mega(naive)} MFLOP/token, {naive / it.flops:.2f} of it.",
        ]
    )


def _group_table(it: Accounting) -> str:
    moments = it.memory.moments
    rows = [
        (row.group, row.optimiser, str(row.tensors), _many(row.scalars), _bytes(moments[row.group]))
        for row in it.groups
    ]
    total = ("total", "", str(sum(row.tensors for row in it.groups)), _many(it.stored), _bytes(sum(moments.values())))
    return _table(("optimiser group", "optimiser", "tensors", "parameters", "moments"), rows, total)


def _memory_table(config: HyMoConfig, it: Accounting) -> str:
    memory, training = it.memory, config.training
    step = {"inductor": "fused", "aot_eager": "op by op", "none": "uncompiled"}[training.compile]
    rows = [
        ("master weights", _bytes(memory.masters), "fp32"),
        ("moments", _bytes(sum(memory.moments.values())), "fp32"),
        ("gradients", _bytes(memory.gradients), "those that exist at the peak"),
        ("weights in use", _bytes(memory.copies), training.precision if memory.copies else "the masters themselves"),
        (
            "activations",
            _bytes(memory.activations),
            f"{training.micro_batch_size} x {training.max_seq_len:,} tokens, {training.precision}, {step}"
            + (", with kernels" if uses_kernels(config) else ""),
        ),
        ("logits", _bytes(memory.logits), "one chunk"),
    ]
    ranks = "memory" if it.world_size == 1 else f"memory of each of {it.world_size} ranks"
    return _table((ranks, "bytes", ""), rows, ("peak", _bytes(memory.total), ""), left=(0, 2))


def _run_table(config: HyMoConfig, it: Accounting) -> str:
    training = config.training
    rows = " x ".join(str(n) for n in (training.micro_batch_size, training.gradient_accumulation_steps, it.world_size))
    return _table(
        ("run", "", ""),
        [
            ("tokens per step", f"{it.tokens_per_step:,}", f"{rows} rows of {training.max_seq_len:,}"),
            ("steps", f"{it.steps:,}", f"{config.scheduler.warmup_steps:,} up, {config.scheduler.decay_steps:,} down"),
            ("tokens", f"{it.total_tokens:,}", _many(it.total_tokens)),
            ("FLOPs", f"{it.flops * it.total_tokens:.3g}", f"{it.flops * it.tokens_per_step:.3g} per step"),
            ("checkpoint", _bytes(it.checkpoint), "parameters and moments, fp32"),
        ],
        left=(0, 2),
    )


def _source_table(it: Accounting) -> str:
    def epochs(each: SourceEpochs) -> str:
        return "unknown size" if each.epochs is None else f"{each.epochs:.3g}"

    rows = [(each.name, _share(each.tokens, it.total_tokens), _many(each.tokens), epochs(each)) for each in it.sources]
    often = [each.name for each in it.sources if each.epochs and each.epochs > MANY_EPOCHS]
    warning = f"\nwarning: more than {MANY_EPOCHS} epochs of {', '.join(often)}: repetition stops paying off"
    return _table(("source", "share", "tokens", "epochs"), rows) + (warning if often else "")


def _table(head: Row, rows: Sequence[Row], foot: Row | None = None, *, left: tuple[int, ...] = (0,)) -> str:
    """Columns as wide as needed, numbers to the right, a rule under the head and above the foot."""
    lines = [head, *rows, *([foot] if foot else [])]
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]

    def line(cells: Row) -> str:
        return "  ".join(
            cell.ljust(width) if column in left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(cells, widths, strict=True))
        ).rstrip()

    rule = "─" * max(len(line(each)) for each in lines)
    return "\n".join([line(head), rule, *map(line, rows), *([rule, line(foot)] if foot else [])])


def _many(number: int | float) -> str:
    """A count with four digits at most: 57.6 M."""
    for size, unit in ((1e12, " T"), (1e9, " B"), (1e6, " M"), (1e3, " k")):
        if number >= size:
            return f"{number / size:.3g}{unit}" if number < 100 * size else f"{number / size:.0f}{unit}"
    return f"{number:.0f}" if number else "-"


def _mega(flops: int | float) -> str:
    return f"{flops / 1e6:,.1f}" if flops >= 5e4 else f"{flops / 1e6:,.3f}" if flops else "-"


def _share(part: int | float, whole: int | float) -> str:
    return f"{part / whole:.1%}" if part else "-"


def _bytes(size: int | float) -> str:
    """In powers of 1,024."""
    for power, unit in ((30, "GiB"), (20, "MiB"), (10, "KiB")):
        if size >= 2**power:
            return f"{size / 2**power:.2f} {unit}"
    return f"{size:.0f} B" if size else "-"

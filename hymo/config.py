"""Every number of a run, in one frozen tree: model, optimizer, scheduler, training, data, run.

Ranges leave room for any machine there is; they end where a tensor's bytes would not fit 64 bits, or a number fp32.
The defaults are hymo v1.0. What follows from other numbers is a property or a method, so that nothing is typed twice.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from hymo.section import REQUIRED, ConfigError, Problem, Section, build, key

# The id of <|endoftext|>. As a label it ends a document; as an input it belongs to the document that it opens.
DELIMITER = 0
# A vocabulary is special tokens, merged tokens and, at its end, one token for each byte.
SPECIAL_TOKENS = 5
BYTE_TOKENS = 256
# The sources of the corpus that every Python installation carries.
EMBEDDED_SOURCES = ("prose", "code")
# Tokens of one forward pass: attention makes a score for each pair of them and head, which must fit 64 bits.
MICRO_BATCH_TOKENS = 2**24


def _problem(name: str, message: str) -> Problem:
    return Problem((name,), message)


def _indivisible(name: str, parts: int, whole_name: str, whole: int) -> Problem:
    works = ", ".join(str(n) for n in range(1, min(whole, 256) + 1) if whole % n == 0)
    return _problem(name, f"expected a divisor of {whole_name} ({whole}), got {parts}; {works} would work")


def _misplaced(section: Section, *names: str) -> Iterator[Problem]:
    """The keys that are to be paths and cannot be."""
    for name in names:
        path = getattr(section, name)
        if path is None:
            continue
        if not path.strip() or "\0" in path:
            yield _problem(name, f"expected a path, or null, got {path!r}")
        elif path.startswith("~"):
            yield _problem(name, f"expected a path without ~, which only shells know, got {path!r}; $HOME would work")


def is_file_name(name: str) -> bool:
    """Whether a file or folder can have this name."""
    return bool(name.strip(". ")) and not set(name) & set("/\\\0") and name.isprintable()


@dataclass(frozen=True)
class ModelConfig(Section):
    """The network. Layer i is an MLA layer with experts if i % mla_every == mla_offset, else a GDN layer.

    Heads must divide evenly into their groups, rotated dims come in pairs, and each MTP head has one loss weight.
    """

    vocab_size: int = key(
        64256,
        "Token ids, the 5 special and the 256 byte tokens included.",
        within=f"[{SPECIAL_TOKENS + BYTE_TOKENS + 1}, 16777216]",
    )
    max_seq_len: int = key(4096, "Longest sequence the model is meant for, in tokens.", within="[1, 16777216]")
    tie_embeddings: bool = key(True, "Whether the output head is the embedding table, transposed.")
    n_layers: int = key(32, "Layers, of both kinds together.", within="[1, 1000]")
    dim: int = key(896, "Width of the residual stream.", within="[1, 65536]")
    mla_every: int = key(4, "One layer in so many is an MLA layer.", within="[1, 1000]")
    mla_offset: int = key(0, "Index of the first MLA layer; below `mla_every`.", within="[0, 1000)")
    n_heads: int = key(16, "MLA query heads; a multiple of `n_kv_groups`.", within="[1, 4096]")
    n_kv_groups: int = key(4, "MLA key/value heads; each serves n_heads / n_kv_groups of them.", within="[1, 4096]")
    q_lora_rank: int = key(224, "MLA query latent width.", within="[1, 65536]")
    kv_lora_rank: int = key(
        128, "MLA key/value latent width; it and the rotary key are the cache.", within="[1, 65536]"
    )
    qk_nope_head_dim: int = key(96, "Dims of a query or key head that know no position.", within="[0, 4096]")
    qk_rope_head_dim: int = key(32, "Dims of a query or key head that rotate with position; even.", within="[0, 4096]")
    v_head_dim: int = key(128, "Dims of an MLA value head.", within="[1, 4096]")
    rope_theta: float = key(10000.0, "Base of the rotary wavelengths, in tokens, of MLA and GDN.", within="(1, 1e30]")
    gdn_n_heads: int = key(14, "GDN value heads, one memory each; a multiple of `gdn_n_key_heads`.", within="[1, 4096]")
    gdn_n_key_heads: int = key(14, "GDN query/key heads; a divisor of `gdn_n_heads`.", within="[1, 4096]")
    gdn_key_dim: int = key(128, "Dims of a GDN query or key head: rows of a memory.", within="[1, 4096]")
    gdn_value_dim: int = key(128, "Dims of a GDN value head: columns of a memory.", within="[1, 4096]")
    gdn_conv: int = key(4, "Taps of the causal convolution on queries, keys and values, in tokens.", within="[1, 256]")
    gdn_rule: Literal["gated_delta", "delta", "gated_linear"] = key(
        "gated_delta", "How a memory is written: erase and write under decay, without decay, or decay without erasing."
    )
    gdn_rope_fraction: float = key(
        0.25, "Fraction of `gdn_key_dim` that rotates with position: an even number of dims.", within="[0, 1]"
    )
    gdn_ffn_dim: int = key(0, "Hidden width of a SwiGLU after each GDN mixer; 0 for none.", within="[0, 65536]")
    gdn_value_skip: bool = key(False, "Whether a GDN read-out adds D times its value, D learned per head.")
    gdn_allow_neg_eigval: bool = key(False, "Whether GDN writes with strength in (0, 2), not (0, 1).")
    n_routed_experts: int = key(16, "Experts of an MLA layer that a router chooses from.", within="[1, 4096]")
    n_shared_experts: int = key(1, "Experts of an MLA layer that every token uses.", within="[0, 4096]")
    n_activated_experts: int = key(2, "Routed experts a token uses; at most `n_routed_experts`.", within="[1, 4096]")
    moe_inter_dim: int = key(2304, "Hidden width of one SwiGLU expert.", within="[1, 65536]")
    moe_capacity_factor: float = key(
        1.5, "Tokens of a row that an expert takes in training, over its even share.", within="(0, 1e6]"
    )
    moe_ema_alpha: float = key(
        0.02, "Weight of the newest step in the moving average of expert loads; 1 for no smoothing.", within="(0, 1]"
    )
    moe_bias_speed: float = key(
        0.001, "Router bias moved per step towards an even load, in router score.", within="[0, 1]"
    )
    mtp_depth: int = key(2, "Extra heads, the k-th of which predicts the token k + 1 ahead.", within="[0, 64]")
    mtp_loss_weights: tuple[float, ...] = key((0.3, 0.1), "Weight of each extra head's loss.", within="[0, 1e6]")
    mtp_inter_dim: int = key(2304, "Hidden width of the SwiGLU of an extra head.", within="[1, 65536]")
    logit_softcap: float = key(15.0, "Bound c of all logits, c tanh(logit / c), in nats.", within="[1e-6, 1e6]")
    norm_eps: float = key(1e-6, "Added to the mean square in every RMSNorm.", within="[1e-30, 1]")

    def rules(self) -> Iterator[Problem]:
        if self.mla_offset >= self.mla_every:
            yield _problem("mla_offset", f"expected less than mla_every ({self.mla_every}), got {self.mla_offset}")
        if self.n_heads % self.n_kv_groups:
            yield _indivisible("n_kv_groups", self.n_kv_groups, "n_heads", self.n_heads)
        if self.gdn_n_heads % self.gdn_n_key_heads:
            yield _indivisible("gdn_n_key_heads", self.gdn_n_key_heads, "gdn_n_heads", self.gdn_n_heads)
        if self.qk_rope_head_dim % 2:
            yield _problem("qk_rope_head_dim", f"expected an even number, got {self.qk_rope_head_dim}")
        if self.qk_head_dim == 0:
            yield _problem("qk_nope_head_dim", "expected at least 1 dim with qk_rope_head_dim, got 0 + 0")
        rotated = self.gdn_rope_fraction * self.gdn_key_dim
        if self.gdn_rope_dim % 2 or not math.isclose(rotated, self.gdn_rope_dim, abs_tol=1e-6):
            nearest = 2 * round(rotated / 2) / self.gdn_key_dim
            yield _problem(
                "gdn_rope_fraction",
                f"expected an even number of the {self.gdn_key_dim} key dims, got {self.gdn_rope_fraction} of them,"
                f" {rotated:g}; {nearest:g} would work",
            )
        if self.n_activated_experts > self.n_routed_experts:
            yield _problem(
                "n_activated_experts",
                f"expected at most n_routed_experts ({self.n_routed_experts}), got {self.n_activated_experts}",
            )
        if len(self.mtp_loss_weights) != self.mtp_depth:
            yield _problem(
                "mtp_loss_weights",
                f"expected one weight for each of mtp_depth ({self.mtp_depth}) heads, got {len(self.mtp_loss_weights)}",
            )

    @property
    def mla_layers(self) -> tuple[int, ...]:
        """Indices of the attention layers, which are the ones with experts."""
        return tuple(range(self.mla_offset, self.n_layers, self.mla_every))

    @property
    def gdn_layers(self) -> tuple[int, ...]:
        """Indices of the linear-attention layers."""
        return tuple(sorted(set(range(self.n_layers)) - set(self.mla_layers)))

    @property
    def qk_head_dim(self) -> int:
        """Dims of an MLA query or key head, rotated ones first or last as the layer likes."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def gdn_rope_dim(self) -> int:
        """Rotated dims of a GDN query or key head."""
        return round(self.gdn_rope_fraction * self.gdn_key_dim)

    @property
    def tokenizer_vocab_size(self) -> int:
        """Special and merged tokens: the vocabulary without its byte tokens, as `train_bpe_tokenizer` counts it."""
        return self.vocab_size - BYTE_TOKENS

    def moe_capacity(self, tokens: int) -> int:
        """How many tokens of a row one expert takes in training: its even share times the factor, rounded up."""
        share = tokens * self.n_activated_experts / self.n_routed_experts
        # 1.1 * 10 is a hair above 11 in binary; it must not buy a twelfth place.
        return min(tokens, max(1, math.ceil(self.moe_capacity_factor * share - 1e-6)))


@dataclass(frozen=True)
class OptimizerConfig(Section):
    """NorMuon for matrices, AdamW for embeddings, experts, gates, norms and other vectors.

    Sources: NorMuon arXiv:2510.05491, cautious weight decay arXiv:2510.12402, AdamW arXiv:1711.05101.
    """

    muon_lr: float = key(0.02, "Peak learning rate of NorMuon.", within="[0, 1e6]")
    muon_momentum: float = key(0.95, "Decay of NorMuon's (Nesterov) gradient average, per step.", within="[0, 1)")
    muon_beta2: float = key(0.95, "Decay of NorMuon's second moment of each neuron, per step.", within="[0, 1)")
    muon_eps: float = key(1e-8, "Added to the root of NorMuon's second moment.", within="[1e-30, 1]")
    muon_weight_decay: float = key(
        0.1, "Decoupled weight decay of NorMuon, times its learning rate.", within="[0, 1e6]"
    )
    muon_scale: Literal["spectral", "rms"] = key(
        "spectral",
        "Size of a NorMuon update: orthogonal x sqrt(max(1, out / in)), as in the official code; or RMS 0.2, as in the"
        " paper, which wants a `muon_lr` like AdamW's.",
    )
    normuon_experts: bool = key(False, "Whether NorMuon updates the expert matrices too, each by itself.")
    adamw_lr: float = key(3e-4, "Peak learning rate of AdamW.", within="[0, 1e6]")
    adamw_betas: tuple[float, float] = key((0.9, 0.95), "Decay of AdamW's two moments, per step.", within="[0, 1)")
    adamw_eps: float = key(1e-8, "Added to the root of AdamW's second moment.", within="[1e-30, 1]")
    adamw_weight_decay: float = key(
        0.0, "Decoupled weight decay of AdamW except embeddings, times its learning rate.", within="[0, 1e6]"
    )
    adamw_embed_weight_decay: float = key(
        0.1, "Decoupled weight decay of embeddings and output head, times AdamW's learning rate.", within="[0, 1e6]"
    )
    cautious_wd: bool = key(True, "Whether a weight decays only where its update shrinks it too.")


@dataclass(frozen=True)
class SchedulerConfig(Section):
    """Warmup, stable, decay: one factor of the step for both learning rates. The three fractions sum to 1."""

    total_steps: int = key(57220, "Optimiser steps of the whole run.", within="[1, 1e12]")
    warmup_frac: float = key(
        0.02, "Fraction of the steps in which learning rates rise linearly from 0.", within="[0, 1]"
    )
    stable_frac: float = key(0.83, "Fraction of the steps at the peak.", within="[0, 1]")
    decay_frac: float = key(0.15, "Fraction of the steps in which learning rates fall.", within="[0, 1]")
    min_lr_ratio: float = key(0.05, "Learning rates at the end, over their peaks.", within="[0, 1]")
    decay: Literal["linear", "cosine", "1-sqrt"] = key("linear", "Shape of the fall.")

    def rules(self) -> Iterator[Problem]:
        total = self.warmup_frac + self.stable_frac + self.decay_frac
        if not math.isclose(total, 1, abs_tol=1e-6):
            stable = 1 - self.warmup_frac - self.decay_frac
            hint = f"; {stable:.6g} would work" if stable >= 0 else ""
            yield _problem("stable_frac", f"expected warmup_frac + stable_frac + decay_frac = 1, got {total:.6g}{hint}")

    @property
    def warmup_steps(self) -> int:
        """Steps of the rise."""
        return round(self.warmup_frac * self.total_steps)

    @property
    def stable_steps(self) -> int:
        """Steps at the peak."""
        return round((self.warmup_frac + self.stable_frac) * self.total_steps) - self.warmup_steps

    @property
    def decay_steps(self) -> int:
        """Steps of the fall: what is left of the run."""
        return self.total_steps - self.warmup_steps - self.stable_steps


@dataclass(frozen=True)
class TrainingConfig(Section):
    """How a step is computed and how often the run saves, logs and evaluates. A row is `max_seq_len` tokens."""

    micro_batch_size: int = key(4, "Rows per rank in one forward pass.", within="[1, 1e6]")
    gradient_accumulation_steps: int = key(8, "Forward passes whose gradients make one step.", within="[1, 1e6]")
    global_batch_size: int | None = key(
        None,
        "Rows per step over all ranks, checked: micro_batch_size x gradient_accumulation_steps x ranks; null for any.",
        within="[1, 1e18]",
    )
    max_seq_len: int = key(4096, "Tokens of a row; at most `model.max_seq_len`.", within="[1, 16777216]")
    precision: Literal["float32", "bfloat16"] = key(
        "bfloat16", "Type of activations and matrix products; master weights and moments are always float32."
    )
    compile: Literal["inductor", "aot_eager", "none"] = key(
        "inductor", "What runs the step: one graph of generated kernels, the same graph op by op, or plain Python."
    )
    cuda_graph: bool = key(
        True, "Whether one GPU records the inductor step as a CUDA graph and replays it; its memory then stays taken."
    )
    backend: Literal["auto", "eager", "triton"] = key(
        "auto", "Kernels of the scan and its like: Triton's, plain PyTorch, or Triton's where there is a GPU."
    )
    sharding: Literal["fsdp2", "none"] = key(
        "fsdp2", "Whether parameters and moments are split over the ranks; with one rank it makes no difference."
    )
    shard_ranks: int | None = key(
        None,
        "Ranks that hold one copy of the state together; null for all. With fewer there are copies (HSDP): ranks /"
        " shard_ranks of them.",
        within="[1, 1e6]",
    )
    grad_clip: float = key(1.0, "Largest global gradient norm; .inf for no clipping.", within="[1e-30, inf]")
    nan_skip_budget: int = key(10, "Non-finite steps skipped in a row before the run ends.", within="[0, 1e12]")
    save_interval: int | None = key(
        4000,
        "Steps between checkpoints, one more at the end; null for none but of a run that is asked to stop.",
        within="[1, 1e12]",
    )
    keep_last: int = key(2, "Newest checkpoints that are kept.", within="[1, 1e6]")
    keep_every: int | None = key(
        None, "A checkpoint is kept for good if its step is a multiple of this; null for none.", within="[1, 1e12]"
    )
    async_save: bool = key(
        False, "Whether training goes on while a checkpoint is written, from a copy of the state on the host."
    )
    log_interval: int = key(50, "Steps between progress lines.", within="[1, 1e12]")
    eval_interval: int = key(2000, "Steps between evaluations.", within="[1, 1e12]")
    seed: int = key(42, "Source of all randomness: initial weights and order of the data.", within="[0, 4294967296)")

    def rules(self) -> Iterator[Problem]:
        if self.sharding == "none" and self.shard_ranks not in (None, 1):
            yield _problem("shard_ranks", f"expected null or 1 with sharding none, got {self.shard_ranks}")

    @property
    def rows_per_rank(self) -> int:
        """Rows of one optimiser step on one rank."""
        return self.micro_batch_size * self.gradient_accumulation_steps

    def rows_per_step(self, world_size: int = 1) -> int:
        """Rows of one optimiser step over `world_size` ranks. Raises ConfigError if global_batch_size differs."""
        rows = self.rows_per_rank * world_size
        if self.global_batch_size not in (None, rows):
            message = (
                f"expected micro_batch_size x gradient_accumulation_steps x ranks = {self.micro_batch_size} x"
                f" {self.gradient_accumulation_steps} x {world_size} = {rows}, got {self.global_batch_size}"
            )
            raise ConfigError([Problem(("training", "global_batch_size"), message)])
        return rows

    def tokens_per_step(self, world_size: int = 1) -> int:
        """Tokens of one optimiser step over `world_size` ranks. Raises like `rows_per_step`."""
        return self.rows_per_step(world_size) * self.max_seq_len


@dataclass(frozen=True)
class SourceConfig(Section):
    """One source of text in the mixture."""

    name: str = key(REQUIRED, "Name in the prepared folder, in metrics and in reports.")
    weight: float = key(REQUIRED, "Fraction of the training windows that come from it.", within="(0, 1]")
    shards: str | None = key(None, "Training shards: a folder or a glob; null for those in `data.folder`.")
    tokens: int | None = key(
        None, "Tokens there are, for a dry run's count of epochs; null if unknown.", within="[1, 1e18]"
    )

    def rules(self) -> Iterator[Problem]:
        yield from _misplaced(self, "shards")


# Sizes as published by each source's authors, in their own tokenizer's tokens.
V1_SOURCES = (
    SourceConfig("fineweb_edu_q3", 0.50, tokens=100_000_000_000),
    SourceConfig("fineweb", 0.14, tokens=10_000_000_000),
    SourceConfig("stack_python", 0.10),
    SourceConfig("stack_java", 0.03),
    SourceConfig("stack_cpp", 0.02),
    SourceConfig("slimpajama", 0.08, tokens=6_000_000_000),
    SourceConfig("dclm_baseline", 0.05, tokens=4_000_000_000_000),
    SourceConfig("dolma_wiki", 0.04),
    SourceConfig("dolma_books", 0.03),
    SourceConfig("cosmopedia", 0.01, tokens=25_000_000_000),
)


@dataclass(frozen=True)
class DataConfig(Section):
    """What is read. The sources' weights sum to 1; the embedded corpus has the sources `prose` and `code`."""

    corpus: Literal["embedded"] | None = key(
        None, "Text prepared on the spot: what each Python installation carries; null for prepared shards."
    )
    sources: tuple[SourceConfig, ...] = key(V1_SOURCES, "The mixture.")
    folder: str | None = key(
        None,
        "Prepared folder: manifest.json, tokenizer.json, shards of each source; filled at first use from a corpus;"
        " null for `data` in the run's folder.",
    )
    tokenizer: str | None = key(None, "Tokenizer file; null for the tokenizer.json in `folder`.")
    validation: str | None = key(None, "Held-out shards: a folder or a glob; null for those in `folder`.")
    val_tokens: int = key(4194304, "Tokens that one evaluation scores, at most, over all sources.", within="[1, 1e18]")

    def rules(self) -> Iterator[Problem]:
        names = [each.name for each in self.sources]
        if not names:
            yield _problem("sources", "expected at least one source, got none")
            return
        for index, name in enumerate(names):
            if name in names[:index]:
                yield Problem(("sources", index, "name"), f"expected a name of its own, got {name!r} again")
            if not is_file_name(name):
                yield Problem(("sources", index, "name"), f"expected a name that can be a folder's, got {name!r}")
            if self.corpus == "embedded" and name not in EMBEDDED_SOURCES:
                yield Problem(("sources", index, "name"), f"expected {' or '.join(EMBEDDED_SOURCES)}, got {name!r}")
            if self.corpus == "embedded" and self.sources[index].shards is not None:
                yield Problem(("sources", index, "shards"), "expected null with corpus embedded, got a path")
        yield from _misplaced(self, "folder", "tokenizer", "validation")
        total = math.fsum(each.weight for each in self.sources)
        if not math.isclose(total, 1, abs_tol=1e-6):
            yield _problem("sources", f"expected weights that sum to 1, got {total:.6g}")


@dataclass(frozen=True)
class RunConfig(Section):
    """The run's identity."""

    name: str = key("hymo_750m", "Name in reports, and of the run's folder.")
    output_dir: str | None = key(
        None, "Folder for metrics, checkpoints and report; null for a new one, runs/NAME-NUMBER, each time."
    )
    trackers: tuple[Literal["tensorboard", "wandb"], ...] = key((), "Where metrics go beside metrics.jsonl.")
    profile: tuple[int, int] | None = key(
        None, "First and last step of a profiler's trace, written to `profile`; null for none.", within="[1, 1e12]"
    )

    def rules(self) -> Iterator[Problem]:
        if not is_file_name(self.name):
            yield _problem("name", f"expected a name that can be a folder's, got {self.name!r}")
        yield from _misplaced(self, "output_dir")
        if self.profile and self.profile[0] > self.profile[1]:
            yield _problem("profile", f"expected a first step and one not before it, got {list(self.profile)}")


@dataclass(frozen=True)
class HyMoConfig(Section):
    """A whole run. `HyMoConfig()` is hymo v1.0."""

    model: ModelConfig = field(default_factory=ModelConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    data: DataConfig = field(default_factory=DataConfig)
    run: RunConfig = field(default_factory=RunConfig)

    def rules(self) -> Iterator[Problem]:
        tokens = self.training.max_seq_len
        if tokens > self.model.max_seq_len:
            message = f"expected at most model.max_seq_len ({self.model.max_seq_len}), got {tokens}"
            yield Problem(("training", "max_seq_len"), message)
        if self.training.micro_batch_size * tokens > MICRO_BATCH_TOKENS:
            most = MICRO_BATCH_TOKENS // tokens
            message = f"expected at most {most} rows of max_seq_len ({tokens}), got {self.training.micro_batch_size}"
            yield Problem(("training", "micro_batch_size"), message)
        if tokens <= self.model.mtp_depth:
            message = f"expected more than model.mtp_depth ({self.model.mtp_depth}), got {tokens}"
            yield Problem(("training", "max_seq_len"), message)
        if self.data.val_tokens < tokens:
            message = f"expected at least training.max_seq_len ({tokens}), one row, got {self.data.val_tokens}"
            yield Problem(("data", "val_tokens"), message)

    def total_tokens(self, world_size: int = 1) -> int:
        """Tokens of the whole run over `world_size` ranks. Raises ConfigError like `TrainingConfig.rows_per_step`."""
        return self.scheduler.total_steps * self.training.tokens_per_step(world_size)

    def epochs(self, world_size: int = 1) -> dict[str, float | None]:
        """How often the run sees each source, by name; None where `tokens` is unknown. Raises like `total_tokens`."""
        total = self.total_tokens(world_size)
        return {each.name: each.weight * total / each.tokens if each.tokens else None for each in self.data.sources}


def derive_config(config: HyMoConfig, **changes: Any) -> HyMoConfig:
    """`config` with some keys replaced, everything checked again: the way to write an ablation.

        derive_config(config, model={"dim": 512, "n_layers": 8}, run=RunConfig("trial"))
        derive_config(config, **{"optimizer.muon_lr": 0.01, "model.gdn_rule": "delta"})

    Args:
        changes: under a section's name some of its keys or a whole section; under `section.key` a value.

    Raises:
        ConfigError: with all unknown and wrong keys at once.
    """
    raw = {name: _keys(section) for name, section in _keys(config).items()}
    for name, value in changes.items():
        section, _, inner = name.partition(".")
        keys = {inner: value} if inner else _keys(value) if isinstance(value, Section) else value
        raw[section] = {**raw.get(section, {}), **keys} if isinstance(keys, Mapping) else keys
    return build(HyMoConfig, raw)


def _keys(section: Section) -> dict[str, Any]:
    return {each.name: getattr(section, each.name) for each in fields(section)}

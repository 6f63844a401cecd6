"""What each rank does in the tests of sharding: importable, since every rank is a process of its own."""

from functools import partial
from typing import Any, NamedTuple

import torch
from configs import setup, windows
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import hymo.optim.normuon
from hymo import tree
from hymo.backend import EAGER, STACKED
from hymo.batch import Batch, make_batch
from hymo.config import HyMoConfig
from hymo.distributed import ALONE, SHARDS, Ranks, joined
from hymo.jit import Compile, jit
from hymo.loss import label_counts, loss
from hymo.model import ModelParams
from hymo.optim import build_optimizer
from hymo.params import initialize, partition
from hymo.region import region
from hymo.sharding import placements, shard_params, sharded_backend, whole_params, whole_views
from hymo.step import gradients, init_train_state, stacks_of, train_step


class Trained(NamedTuple):
    """What some steps left on one rank.

    Args:
        state: whole, by path.
        metrics: of each step, by path.
        runs: of the step in Python; of a compiled one while it is traced only.
    """

    state: dict[str, Tensor]
    metrics: list[dict[str, Tensor]]
    runs: int


def rows_of_step(cfg: HyMoConfig, step: int, rows: int, ranks: Ranks) -> Batch:
    """A rank's part of the rows of a step, a micro-batch each; the same rows for any number of ranks."""
    batch = make_batch(windows(step, rows, 1, cfg.training.max_seq_len + 1, vocab=cfg.model.vocab_size, document=8))
    each = rows // ranks.world
    return tree.map(lambda leaf: leaf[ranks.rank * each : (ranks.rank + 1) * each], batch)


def whole(state: Any) -> dict[str, Tensor]:
    """Leaves by path, whole."""
    leaves = tree.paths(state).items()
    return {name: (leaf.full_tensor() if isinstance(leaf, DTensor) else leaf).clone() for name, leaf in leaves}


def train(
    cfg: HyMoConfig,
    rows: int,
    *,
    steps: int,
    shards: int | None = None,
    compile: Compile = "none",
    regions: Compile = "none",
) -> Trained:
    """Some steps on the ranks that there are."""
    with joined("cpu", shards=shards) as (ranks, _):
        return train_on(ranks, cfg, rows, steps=steps, compile=compile, regions=regions)


def train_on(
    ranks: Ranks,
    cfg: HyMoConfig,
    rows: int,
    *,
    steps: int,
    compile: Compile = "none",
    regions: Compile = "none",
    spoiled: int | None = None,
) -> Trained:
    """Some steps; in step `spoiled` the last rank's attention is not finite."""
    spec = setup(cfg).spec
    optimizer = build_optimizer(cfg.optimizer, cfg.scheduler, spec, ranks=ranks)
    poison = torch.zeros(())

    def poisoned(*args: Any, **options: Any) -> Tensor:
        return EAGER.attend(*args, **options) + poison

    chosen = EAGER._replace(region=partial(region, compile=regions), stacked=0 if regions == "none" else STACKED)
    backend = sharded_backend(chosen if spoiled is None else chosen._replace(attend=poisoned), torch.float32, ranks)
    init = partial(init_train_state, spec=spec, optimizer=optimizer, backend=backend)
    params = initialize(spec, 0)
    state = init(shard_params(params, spec, ranks) if ranks.world > 1 else params)
    pure = partial(train_step, cfg=cfg, spec=spec, optimizer=optimizer, backend=backend, ranks=ranks)
    runs: list[int] = []

    def counted(*args: Any) -> Any:
        runs.append(1)
        return pure(*args)

    step, seen = jit(counted, compile=compile, donate=True), []
    for i in range(steps):
        poison.fill_(torch.nan if i == spoiled and ranks.rank == ranks.world - 1 else 0.0)
        state, metrics = step(state, rows_of_step(cfg, i, rows, ranks))
        seen.append(tree.map(torch.clone, tree.paths(metrics)))
    apart = stacks_of(spec, backend).split(state)
    views = whole_views(apart, placements(spec, init), ranks) if ranks.world > 1 else apart
    return Trained(whole(views), seen, len(runs))


def spoil(cfg: HyMoConfig, rows: int, spoiled: int) -> tuple[Trained, Trained]:
    """Training in which one rank's step is not finite: up to and with that step, and a step further."""
    with joined("cpu") as (ranks, _):
        first = train_on(ranks, cfg, rows, steps=spoiled + 1, spoiled=spoiled)
        return first, train_on(ranks, cfg, rows, steps=spoiled + 2, spoiled=spoiled)


def matrices_worked_on(cfg: HyMoConfig, shards: int | None) -> list[tuple[int, ...]]:
    """The shapes of all matrices with anything in them that this rank has orthogonalised in one step."""
    worked: list[tuple[int, ...]] = []
    neuron_scales = hymo.optim.normuon.neuron_scales

    def counting(polar: Tensor, square: Tensor, **options: Any) -> Any:
        worked.extend(tuple(matrix.shape) for matrix in polar.flatten(0, -3) if matrix.any())
        return neuron_scales(polar, square, **options)

    hymo.optim.normuon.neuron_scales = counting
    train(cfg, 4, steps=1, shards=shards)
    return worked


class Twin(nn.Module):
    """The model as an ordinary module: its parameters are its own, and `torch.autograd` differentiates it."""

    def __init__(self, params: ModelParams, cfg: HyMoConfig) -> None:
        super().__init__()
        trainable, self.others = partition(setup(cfg).spec, params)
        leaves, self.structure = tree.flatten(trainable)
        self.cfg, self.count = cfg, len(leaves)
        for i, leaf in enumerate(leaves):
            self.register_parameter(f"p{i}", nn.Parameter(leaf.clone()))

    def forward(self, batch: Batch, counts: Tensor) -> Tensor:
        trainable = tree.unflatten([getattr(self, f"p{i}") for i in range(self.count)], self.structure)
        capacity = self.cfg.model.moe_capacity(batch.tokens.shape[-1])
        params: ModelParams = tree.combine(trainable, self.others)
        return loss(params, batch, counts, cfg=self.cfg.model, capacity=capacity)[0]


def gradient_and_twin(cfg: HyMoConfig, rows: int, shards: int | None) -> tuple[Any, Any]:
    """(loss, gradient) of the functional gather and of FSDP-2's own runtime, whole."""
    with joined("cpu", shards=shards) as (ranks, _):
        spec, params = setup(cfg).spec, initialize(setup(cfg).spec, 0)
        batch = rows_of_step(cfg, 0, rows, ranks)
        ours = gradients(
            shard_params(params, spec, ranks),
            batch,
            cfg=cfg,
            spec=spec,
            backend=sharded_backend(EAGER, torch.float32, ranks),
            ranks=ranks,
        )
        # A gradient is split like its parameter.
        trainable, buffers = partition(spec, params)
        grads, _ = partition(spec, whole_params(tree.combine(ours[0], buffers), spec, ranks))

        assert ranks.mesh is not None
        twin = Twin(params, cfg)
        fully_shard(twin, mesh=ranks.mesh if ranks.copies > 1 else ranks.mesh[SHARDS])
        counts = label_counts(batch, cfg.model.mtp_depth, ranks=ranks)
        micros = (Batch(*leaves) for leaves in zip(*batch, strict=True))
        values = [twin(micro, counts) for micro in micros]
        total = torch.stack(values).sum()
        total.backward()
        # It takes the mean over ranks, where ours is a sum.
        theirs = [parameter.grad.full_tensor() * ranks.world for parameter in twin.parameters()]
        names = tree.paths(trainable)
        return (ours[1], dict(zip(names, tree.leaves(grads), strict=True))), (
            ranks.sum(total.detach()),
            dict(zip(names, theirs, strict=True)),
        )


def agreements() -> dict[str, Any]:
    """What ranks tell each other around the step."""
    with joined("cpu") as (ranks, _):
        told: dict[str, Any] = {"everywhere": ranks.everywhere(ranks.rank), "worst": ranks.worst(10 - ranks.rank)}
        told["led"] = ranks.led(lambda: ranks.rank)

        def fail_alone() -> None:
            if ranks.rank == 1:
                raise FileNotFoundError(2, "No such file", "shard")

        def fail_with(error: Exception) -> None:
            raise error

        for name, job in (
            ("together", lambda: ranks.together(fail_alone)),
            ("led fails", lambda: ranks.led(lambda: fail_with(ValueError("no folder")))),
            ("lead first", lambda: ranks.lead_first(lambda: fail_with(ValueError(f"rank {ranks.rank}")))),
        ):
            try:
                job()
            except (ValueError, OSError) as error:
                told[name] = f"{type(error).__name__}: {error}"
        return told


def alone(cfg: HyMoConfig, rows: int, *, steps: int) -> Trained:
    """The same steps in one process."""
    return train_on(ALONE, cfg, rows, steps=steps)

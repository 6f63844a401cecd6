"""Train variants of one model on the same tokens, over some seeds, and compare them in a table.

    python recipes/ablate.py recipes/configs/tiny.yaml --arms base all-mla all-gdn --seeds 3 run.output_dir=ablation
    python recipes/ablate.py recipes/configs/hymo_100m.yaml --arms base value-skip --jobs 2 run.output_dir=ablation ...
    python recipes/ablate.py --list

An arm is the base configuration with a few keys changed. Where that changes how many parameters a token meets, one
width makes up for it. Every arm is a process, --jobs of them at a time; every seed of it is a run of `pretrain.py` in a
folder of its own, one after the other, compiled once. The table is written anew whenever a run is done. Called again,
what is done stays, and what was interrupted goes on. What is asked wrongly is a line a problem and exit code 2, before
any run begins; runs that failed are named at the end, with exit code 1.
"""

import json
import multiprocessing
import os
import statistics
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, NamedTuple

import pretrain
from command_line import Parser, available_cores, execute, user_errors

from hymo.accounting import model_parts
from hymo.config import HyMoConfig, ModelConfig, derive_config
from hymo.config_yaml import load_config, to_yaml
from hymo.run_folder import CONFIG, METRICS, REPORT, holds_run, write_whole
from hymo.trainer import TrainingStopped

TINY = Path(__file__).parent / "configs" / "tiny.yaml"
TABLE, RESULTS = "ablation.txt", "ablation.json"
LOOK_INTERVAL = 5.0
"""Seconds between two looks at which runs are done."""


class Arm(NamedTuple):
    """A variant of the base configuration.

    Args:
        family: the part of the model that it changes.
        changes: keys as `section.key`, made of the base's model.
        width: the key of `model` that makes up for parameters gained or lost.
    """

    family: str
    changes: Callable[[ModelConfig], dict[str, Any]]
    width: str | None = None


def narrow_heads(model: ModelConfig) -> dict[str, Any]:
    """Four heads for each, a quarter as wide: a quarter of the memory at the same projections."""
    return {
        "model.gdn_n_heads": 4 * model.gdn_n_heads,
        "model.gdn_n_key_heads": 4 * model.gdn_n_key_heads,
        "model.gdn_key_dim": model.gdn_key_dim // 4,
        "model.gdn_value_dim": model.gdn_value_dim // 4,
    }


ARMS: dict[str, Arm] = {
    "base": Arm("", lambda model: {}),
    "all-gdn": Arm(
        "mixers",
        lambda model: {"model.mla_every": model.n_layers + 1, "model.mla_offset": model.n_layers},
        width="gdn_ffn_dim",
    ),
    "all-mla": Arm("mixers", lambda model: {"model.mla_every": 1, "model.mla_offset": 0}, width="moe_inter_dim"),
    "delta": Arm("GDN", lambda model: {"model.gdn_rule": "delta"}),
    "gated-linear": Arm("GDN", lambda model: {"model.gdn_rule": "gated_linear"}),
    "narrow-heads": Arm("GDN", narrow_heads),
    "no-gdn-rotary": Arm("GDN", lambda model: {"model.gdn_rope_fraction": 0.0}),
    "value-skip": Arm("GDN", lambda model: {"model.gdn_value_skip": True}),
    "negative-eigenvalues": Arm("GDN", lambda model: {"model.gdn_allow_neg_eigval": True}),
    "no-balance": Arm("MoE", lambda model: {"model.moe_bias_speed": 0.0}),
    "no-mtp": Arm("MTP", lambda model: {"model.mtp_depth": 0, "model.mtp_loss_weights": ()}),
    "normuon-experts": Arm("optimiser", lambda model: {"optimizer.normuon_experts": True}),
    "no-cautious-decay": Arm("optimiser", lambda model: {"optimizer.cautious_wd": False}),
}


class Result(NamedTuple):
    """What one run of an arm came to."""

    bits_per_byte: float
    sources: dict[str, float]
    tokens_per_second: float | None


def main(argv: Sequence[str] | None = None) -> int:
    """Trains what is missing, prints the table, and returns the exit code."""
    return execute("ablate", lambda: ablate(sys.argv[1:] if argv is None else list(argv)))


def ablate(arguments: list[str]) -> None:
    """The whole job."""
    parser = Parser("Compare variants of one model.")
    parser.add_argument("values", nargs="*", metavar="[CONFIG] section.key=value", help=f"default {TINY.name}")
    parser.add_argument("--arms", nargs="+", default=["base", "all-gdn", "all-mla"], metavar="ARM")
    parser.add_argument("--seeds", type=int, default=3, metavar="N", help="runs of each arm, from training.seed on")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="arms at a time; they share cores and GPU")
    parser.add_argument("--list", action="store_true", help="print the arms and stop")
    with user_errors():
        asked = parser.parse_intermixed_args(arguments)
        # Keys that stand behind the arms are keys all the same.
        asked.values += [word for word in asked.arms if "=" in word]
        asked.arms = [word for word in asked.arms if "=" not in word]
        if asked.list:
            print("\n".join(f"{name:22s} {arm.family}" for name, arm in ARMS.items()))
            return
        is_named = bool(asked.values) and "=" not in asked.values[0]
        base = load_config(Path(asked.values[0]) if is_named else TINY, asked.values[is_named:])
        if asked.jobs < 1:
            raise ValueError(f"--jobs: expected at least 1, got {asked.jobs}")
        configs, folder = plan(base, asked.arms, seeds=asked.seeds)
    failures = train(configs, folder, jobs=asked.jobs)
    print(f"\n{tell(configs, folder)}\n\n{folder / TABLE}", flush=True)
    if failures:
        raise TrainingStopped("\n".join(failures), exit_code=1)


def plan(base: HyMoConfig, arms: Sequence[str], *, seeds: int) -> tuple[dict[tuple[str, int], HyMoConfig], Path]:
    """The configuration of every arm and seed, arm by arm, and their folder.

    Raises:
        ValueError: for an arm that there is not, fewer than one seed, no folder, or keys that do not fit together.
    """
    unknown = [name for name in arms if name not in ARMS]
    if unknown:
        raise ValueError(f"--arms: there is no {', '.join(map(repr, unknown))}; these work: {', '.join(ARMS)}")
    if len(set(arms)) < len(arms):
        raise ValueError(f"--arms: expected each once, got {' '.join(arms)}")
    if seeds < 1:
        raise ValueError(f"--seeds: expected at least 1, got {seeds}")
    if base.run.output_dir is None:
        raise ValueError("run.output_dir: expected the folder of the ablation, got null")
    folder = Path(base.run.output_dir)
    derived = {name: variant(base, name) for name in arms}
    first = base.training.seed
    return {
        (name, seed): derive_config(
            config,
            **{
                "training.seed": seed,
                "run.name": run_name(name, seed),
                "run.output_dir": str(folder / run_name(name, seed)),
            },
        )
        for name, config in derived.items()
        for seed in range(first, first + seeds)
    }, folder


def run_name(arm: str, seed: int) -> str:
    """The name of a run and of its folder."""
    return f"{arm}-{seed}"


def variant(base: HyMoConfig, name: str) -> HyMoConfig:
    """An arm's configuration, with as many parameters a token as the base has, as nearly as its width allows."""
    arm = ARMS[name]
    config = derive_config(base, **arm.changes(base.model))
    if arm.width is None:
        return config
    key, wanted = f"model.{arm.width}", active(base)

    def with_width(width: int) -> HyMoConfig:
        return derive_config(config, **{key: width})

    low, high = 8, 8
    while active(with_width(high)) < wanted and high < 2**16:
        low, high = high, 2 * high
    while high - low > 8:
        middle = (low + high) // 16 * 8
        low, high = (middle, high) if active(with_width(middle)) < wanted else (low, middle)
    return min((with_width(low), with_width(high)), key=lambda each: abs(active(each) - wanted))


def active(config: HyMoConfig) -> float:
    """Parameters that a token meets."""
    return sum(part.active for part in model_parts(config.model, config.training.max_seq_len))


def train(configs: dict[tuple[str, int], HyMoConfig], folder: Path, *, jobs: int) -> list[str]:
    """Trains what is not done, `jobs` arms at a time, and keeps the table; returns a line for each arm that failed."""
    folder.mkdir(parents=True, exist_ok=True)
    waiting: dict[str, list[Path]] = {}
    for (arm, seed), config in configs.items():
        run = folder / run_name(arm, seed)
        if (run / REPORT).exists():
            print(f"{run}: done before", flush=True)
            continue
        if not holds_run(run):
            write_whole(source_of(run), to_yaml(config))
        waiting.setdefault(arm, []).append(run)
    if jobs > 1:
        for name in ("OMP_NUM_THREADS", "TORCHINDUCTOR_COMPILE_THREADS"):
            os.environ.setdefault(name, str(max(1, available_cores() // min(jobs, max(1, len(waiting))))))
    order, failures, told = deque(waiting), [], 0
    # Of a GPU that another process has opened a fork could not use its own.
    context = multiprocessing.get_context("spawn")
    running: dict[int, tuple[str, Any]] = {}
    while order or running:
        while order and len(running) < jobs:
            arm = order.popleft()
            log = folder / f"{arm}.log" if jobs > 1 else None
            process = context.Process(target=train_arm, args=(waiting[arm], log))
            process.start()
            running[process.sentinel] = arm, process
            print(f"== {arm}: {len(waiting[arm])} runs{f', see {log}' if log else ''}", flush=True)
        for sentinel in wait(list(running), timeout=LOOK_INTERVAL):
            arm, process = running.pop(sentinel)
            process.join()
            missing = [run.name for run in waiting[arm] if not (run / REPORT).exists()]
            if missing:
                failures.append(f"{arm}: {', '.join(missing)} not done; its process ended with code {process.exitcode}")
                print(failures[-1], flush=True)
        done = results(configs, folder)
        if len(done) > told:
            told = len(done)
            tell(configs, folder)
            print(f"{told} of {len(configs)} runs done", flush=True)
    return failures


def train_arm(runs: Sequence[Path], log: Path | None) -> None:
    """The runs of an arm, one after the other, in a process of their own; ends it with the worst exit code."""
    if log:
        file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(file, 1)
        os.dup2(file, 2)
    worst = 0
    for run in runs:
        print(f"== {run.name}", flush=True)
        code = pretrain.main([str(run / CONFIG), "--resume"] if holds_run(run) else [str(source_of(run))])
        worst = max(worst, code)
        was_stopped = not code and not (run / REPORT).exists()
        if was_stopped or code > 2:
            break
    sys.exit(worst)


def source_of(run: Path) -> Path:
    """The configuration that a run begins from."""
    return run.with_name(f"{run.name}.yaml")


def results(configs: dict[tuple[str, int], HyMoConfig], folder: Path) -> dict[tuple[str, int], Result]:
    """What the runs that are done came to."""
    runs = {key: folder / run_name(*key) for key in configs}
    return {key: read(run) for key, run in runs.items() if (run / REPORT).exists()}


def read(folder: Path) -> Result:
    """The last evaluation of a run that is done, and its median speed."""
    records = [json.loads(line) for line in (folder / METRICS).read_text().splitlines()]
    scored = [record for record in records if record["kind"] == "eval"][-1]
    # The first figure of a run has no speed yet.
    speeds = [record["tokens_per_second"] for record in records if record.get("tokens_per_second") is not None]
    return Result(
        scored["bits_per_byte"],
        {name: source["bits_per_byte"] for name, source in scored["sources"].items()},
        statistics.median(speeds) if speeds else None,
    )


def tell(configs: dict[tuple[str, int], HyMoConfig], folder: Path) -> str:
    """Writes what is known by now, and returns it as a table."""
    found = results(configs, folder)
    text = "\n".join(table(found, {arm: config for (arm, _), config in configs.items()}))
    write_whole(folder / TABLE, text + "\n")
    rows = [{"arm": arm, "seed": seed, **result._asdict()} for (arm, seed), result in found.items()]
    write_whole(folder / RESULTS, json.dumps(rows, indent=1) + "\n")
    return text


def table(found: dict[tuple[str, int], Result], configs: dict[str, HyMoConfig]) -> Iterator[str]:
    """Bits per byte of every arm: mean and spread over seeds, how far from the first arm, and of each source."""
    runs = {arm: {seed: result for (name, seed), result in found.items() if name == arm} for arm in configs}
    first, base = next(iter(runs.items()))
    yield f"bits/byte on held-out text: mean ± standard deviation over seeds; difference to {first}, seed by seed"
    heads = ["parameters", "a token", "bits/byte", "difference", "tokens/s"]
    yield f"{'arm':22s} {'family':10s} {'seeds':>5s} " + " ".join(f"{head:>18s}" for head in heads)
    for arm, config in configs.items():
        parts, its = model_parts(config.model, config.training.max_seq_len), runs[arm]
        cells = [
            f"{sum(part.stored for part in parts):,.0f}",
            f"{active(config):,.0f}",
            spread([run.bits_per_byte for run in its.values()]),
            spread([run.bits_per_byte - base[seed].bits_per_byte for seed, run in its.items() if seed in base], "+"),
            speed([run.tokens_per_second for run in its.values() if run.tokens_per_second is not None]),
        ]
        yield f"{arm:22s} {ARMS[arm].family:10s} {len(its):5d} " + " ".join(f"{cell:>18s}" for cell in cells)
    sources = list(next(iter(found.values())).sources) if found else []
    yield ""
    yield f"{'bits/byte of a source':22s} " + " ".join(f"{source:>18s}" for source in sources)
    for arm, its in runs.items():
        cells = [spread([run.sources[source] for run in its.values()]) for source in sources]
        yield f"{arm:22s} " + " ".join(f"{cell:>18s}" for cell in cells)


def speed(values: list[float]) -> str:
    """The median."""
    return f"{statistics.median(values):,.0f}" if values else "-"


def spread(values: list[float], sign: str = "") -> str:
    """Mean and, of several, standard deviation."""
    if not values:
        return "-"
    mean = f"{statistics.fmean(values):{sign}.4f}"
    return f"{mean} ± {statistics.stdev(values):.4f}" if len(values) > 1 else mean


if __name__ == "__main__" and (code := main()):
    sys.exit(code)

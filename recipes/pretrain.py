"""Pre-train a model: `pretrain.py [CONFIG] [section.key=value ...] [--dry-run | --resume | --overwrite]`.

    python recipes/pretrain.py                                      a tiny model on the text that Python itself carries
    python recipes/pretrain.py scheduler.total_steps=50 run.output_dir=trial
    python recipes/pretrain.py recipes/configs/hymo_750m.yaml --dry-run
    python recipes/pretrain.py trial/config.yaml --resume           in the folder trial, wherever it was moved to
    torchrun --nproc-per-node 2 recipes/pretrain.py ...             the same on two ranks

What is asked wrongly is a line a problem and exit code 2, training that cannot go on one line and exit code 1.
"""

import argparse
import json
import os
import shlex
import sys
from collections.abc import Sequence
from contextlib import ExitStack, nullcontext
from pathlib import Path

# A step on a CPU is thousands of short parallel regions. Threads that spin at their ends make it several times slower
# as soon as anything else runs; OpenMP reads this when torch loads it.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch
from command_line import Parser, execute, user_errors

from hymo.accounting import describe, model_parts
from hymo.checkpoint import Damaged, candidates, find_latest, versions
from hymo.config import DELIMITER, HyMoConfig, derive_config
from hymo.config_yaml import load_config, to_yaml
from hymo.distributed import Ranks, joined, world_size
from hymo.evaluate import Evaluation
from hymo.generate import generate
from hymo.handle import HyMo
from hymo.interruption import stop_requests
from hymo.model import model_spec
from hymo.params import count
from hymo.report import write_report
from hymo.run_data import RunData, open_run_data
from hymo.run_folder import (
    CHECKPOINTS,
    CONFIG,
    REPORT,
    RUN,
    SAMPLE,
    TOKENIZER,
    choose_folder,
    fresh,
    held,
    holds_run,
    resolve,
    write_whole,
)
from hymo.trainer import Trainer, TrainingStopped, check_available

TINY = Path(__file__).parent / "configs" / "tiny.yaml"
SAMPLE_TOKENS = 200


def main(argv: Sequence[str] | None = None) -> int:
    """Parses the command line, trains, and returns the exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    command = shlex.join(["python", "recipes/pretrain.py", *arguments])
    return execute("pretrain", lambda: pretrain(parse(arguments), command=command))


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The command line; the first argument that is no `section.key=value` is the configuration."""
    parser = Parser("Pre-train a model.")
    parser.add_argument("values", nargs="*", metavar="[CONFIG] section.key=value", help=f"default {TINY.name}")
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--dry-run", action="store_true", help="print what the run would be and need, and stop")
    mode.add_argument("--resume", action="store_true", help="go on with the run in run.output_dir")
    mode.add_argument("--overwrite", action="store_true", help="replace the run in run.output_dir")
    asked = parser.parse_intermixed_args(arguments)
    is_named = bool(asked.values) and "=" not in asked.values[0]
    asked.config = Path(asked.values[0]) if is_named else TINY
    asked.overrides = asked.values[is_named:]
    return asked


def pretrain(asked: argparse.Namespace, *, command: str) -> None:
    """The whole job, on one of the ranks that a launcher has started or alone."""
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    with ExitStack() as closing:
        with user_errors():
            config = configure(asked)
            if asked.dry_run:
                if os.environ.get("RANK", "0") == "0":
                    print(describe(config, world_size()))
                return
            check_available(config, torch.device(kind))
            stop = closing.enter_context(stop_requests(is_patient=world_size() > 1))
            shards = 1 if config.training.sharding == "none" else config.training.shard_ranks
            ranks, device = closing.enter_context(joined(kind, shards=shards))
            folder = ranks.led(lambda: choose_folder(config.run, resume=asked.resume, overwrite=asked.overwrite))
            config = resolve(config, folder)
            ranks.led(lambda: closing.enter_context(held(folder)))

        # On a CPU one seed gives one run, bit by bit; on a GPU that would cost speed.
        torch.use_deterministic_algorithms(device.type == "cpu")
        with fresh(folder) if ranks.is_lead and not asked.resume else nullcontext():
            with user_errors():
                data = ranks.lead_first(lambda: open_run_data(config, folder))
                if not asked.resume:
                    ranks.led(lambda: write_identity(config, folder, data=data, command=command))
            trainer = Trainer(config, data=data, folder=folder, device=device, ranks=ranks, stop=stop)
        closing.callback(trainer.close)
        if asked.resume:
            with user_errors():
                resume(trainer, folder, ranks=ranks)
                ranks.led(lambda: write_identity(config, folder, data=data, command=command))
        train(trainer, folder, data=data, ranks=ranks)


def configure(asked: argparse.Namespace) -> HyMoConfig:
    """The configuration; one that is resumed from its run's folder is of the run there, which may be a copy."""
    config, folder = load_config(asked.config, asked.overrides), asked.config.parent
    is_named = any(each.startswith("run.output_dir=") for each in asked.overrides)
    if asked.resume and asked.config.name == CONFIG and not is_named and holds_run(folder):
        return derive_config(config, run={"output_dir": str(folder)})
    return config


def resume(trainer: Trainer, folder: Path, *, ranks: Ranks) -> None:
    """Goes on from the newest checkpoint that is whole; a run that was stopped before its first one begins anew.

    Raises:
        ValueError: if there are checkpoints and none is whole, or the newest whole one is of another run.
    """
    found = candidates(folder / CHECKPOINTS)
    for path in found:
        try:
            trainer.load(path)
            break
        except Damaged as damage:
            tell(ranks, f"{damage}: passed over")
    else:
        if found:
            raise ValueError(f"--resume: not one checkpoint in {folder / CHECKPOINTS} is whole")
    if trainer.step < trainer.config.scheduler.total_steps:
        tell(ranks, f"going on after step {trainer.step}")


def tell(ranks: Ranks, line: str) -> None:
    """Prints for all ranks."""
    if ranks.is_lead:
        print(line, flush=True)


def train(trainer: Trainer, folder: Path, *, data: RunData, ranks: Ranks) -> None:
    """Trains to the end, tells the result, and leaves a sample and a report."""
    config, training, threads = trainer.config, trainer.config.training, torch.get_num_threads()
    total = config.scheduler.total_steps
    if trainer.step == total:
        tell(ranks, f"done at step {total}; a higher scheduler.total_steps goes on")
        if not ranks.led((folder / REPORT).exists):
            # It was stopped after its last step, perhaps in the evaluation.
            evaluation = trainer.evaluate()
            if ranks.is_lead:
                compare(evaluation, data)
            finish(trainer, folder, data=data, ranks=ranks)
        return
    on = f"{ranks.world} x {trainer.device.type}" if ranks.world > 1 else trainer.device.type
    tell(
        ranks,
        f"{folder}: {count(model_spec(config.model)):,} parameters,"
        f" {total} steps of {training.rows_per_step(ranks.world)} x {training.max_seq_len} tokens"
        f" on {on} ({threads} threads), compile {training.compile}",
    )
    try:
        evaluation = trainer.train()
    except KeyboardInterrupt:
        saved = find_latest(folder / CHECKPOINTS)
        left = f"--resume goes on from {saved.name}" if saved else "there is no checkpoint yet"
        raise TrainingStopped(f"interrupted after step {trainer.step}; {left}", exit_code=130) from None
    if evaluation and ranks.is_lead:
        compare(evaluation, data)
    finish(trainer, folder, data=data, ranks=ranks)


def write_identity(config: HyMoConfig, folder: Path, *, data: RunData, command: str) -> None:
    """Writes what the run is: its configuration, tokenizer, command, versions, size, and what it has to beat."""
    write_whole(folder / CONFIG, to_yaml(config))
    data.tokenizer.save(folder / TOKENIZER)
    parts = model_parts(config.model, config.training.max_seq_len)
    run = {
        "name": config.run.name,
        "command": command,
        "versions": versions(),
        "parameters": {"stored": sum(part.stored for part in parts), "active": sum(part.active for part in parts)},
        "baselines": data.baselines,
    }
    write_whole(folder / RUN, json.dumps(run, indent=1) + "\n")


def compare(evaluation: Evaluation, data: RunData) -> None:
    """Prints the result beside what needs no model."""
    floors = {"order-0 entropy": "order0_bits_per_byte", "xz -9e": "xz_bits_per_byte"}
    known = [f"{name} {data.baselines[key]:.3f}" for name, key in floors.items() if key in data.baselines]
    print(f"validation: {evaluation.bits_per_byte:.3f} bits/byte ({', '.join(known) or 'baselines unknown'})\n")


def finish(trainer: Trainer, folder: Path, *, data: RunData, ranks: Ranks) -> None:
    """Lets the model write, and makes the report."""
    model = trainer.model
    if ranks.is_lead:
        text = write_sample(model, trainer.config.training.seed, data=data)
        write_whole(folder / SAMPLE, text + "\n")
        print(f"{text}\n\nreport: {write_report(folder)}")


def write_sample(model: HyMo, seed: int, *, data: RunData) -> str:
    """A text of `SAMPLE_TOKENS` tokens, from its beginning on; a delimiter in it begins another one.

    It has fewer if the model holds fewer, one that the delimiter fills writes nothing.
    """
    room = min(SAMPLE_TOKENS, model.config.max_seq_len - 1)
    if not room:
        return ""
    (sample,) = generate(
        model.params,
        [[DELIMITER]],
        cfg=model.config,
        backend=model.backend,
        max_new_tokens=room,
        temperature=0.8,
        stop_ids=(),
        suppressed=data.tokenizer.suppressed_ids,
        seeds=[seed],
    )
    return data.tokenizer.decode(sample.ids)


if __name__ == "__main__" and (code := main()):
    sys.exit(code)

"""Pre-train a model: `pretrain.py [CONFIG] [section.key=value ...] [--dry-run | --resume | --overwrite]`.

    python recipes/pretrain.py                                      a tiny model on the text that Python itself carries
    python recipes/pretrain.py scheduler.total_steps=50 run.output_dir=trial
    python recipes/pretrain.py recipes/configs/hymo_750m.yaml --dry-run
    python recipes/pretrain.py trial/config.yaml --resume

What is asked wrongly is one line and exit code 2, training that cannot go on one line and exit code 1.
"""

import argparse
import json
import os
import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import NoReturn

# A step on a CPU is thousands of short parallel regions. Threads that spin at their ends make it several times slower
# as soon as anything else runs; OpenMP reads this when torch loads it.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch

from hymo.accounting import describe, model_parts
from hymo.checkpoint import find_latest, versions
from hymo.config import DELIMITER, HyMoConfig
from hymo.config_yaml import load_config, to_yaml
from hymo.evaluate import Evaluation
from hymo.generate import generate
from hymo.report import write_report
from hymo.run_data import RunData, open_run_data
from hymo.run_folder import (
    CHECKPOINTS,
    CONFIG,
    RUN,
    SAMPLE,
    TOKENIZER,
    choose_folder,
    new_folder,
    resolve,
    write_whole,
)
from hymo.trainer import Trainer, TrainingStopped, check_available

TINY = Path(__file__).parent / "configs" / "tiny.yaml"
SAMPLE_TOKENS = 200


class Refusal(Exception):
    """What was asked cannot be done; the message says what would work."""


@contextmanager
def user_errors() -> Iterator[None]:
    """Around what reads the user's input: there a ValueError or OSError is about that, elsewhere it is our mistake."""
    try:
        yield
    except OSError as error:
        raise Refusal(f"{error.filename}: {error.strerror}" if error.filename else str(error)) from error
    except ValueError as error:
        raise Refusal(str(error)) from error


class Parser(argparse.ArgumentParser):
    """Says what is wrong in one line."""

    def error(self, message: str) -> NoReturn:
        raise Refusal(message)


def main(argv: Sequence[str] | None = None) -> int:
    """Parses the command line, trains, and returns the exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        pretrain(parse(arguments), command=shlex.join(["python", "recipes/pretrain.py", *arguments]))
    except Refusal as refusal:
        print(refusal, file=sys.stderr)
        return 2
    except TrainingStopped as stopped:
        print(stopped, file=sys.stderr)
        return stopped.exit_code
    except KeyboardInterrupt:
        print("interrupted; --resume goes on from the last checkpoint", file=sys.stderr)
        return 130
    return 0


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The command line; the first argument that is no `section.key=value` is the configuration."""
    parser = Parser(description="Pre-train a model.")
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
    """The whole job."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with user_errors():
        config = load_config(asked.config, asked.overrides)
        if asked.dry_run:
            print(describe(config))
            return
        check_available(config, device)
        folder = choose_folder(config.run, resume=asked.resume, overwrite=asked.overwrite)
        config = resolve(config, folder)

    # On a CPU one seed gives one run, bit by bit; on a GPU that would cost speed.
    torch.use_deterministic_algorithms(device.type == "cpu")
    with user_errors(), nullcontext() if asked.resume else new_folder(folder):
        data = open_run_data(config, folder)
        if not asked.resume:
            write_identity(config, folder, data=data, command=command)
    trainer = Trainer(config, data=data, folder=folder, device=device)
    if asked.resume:
        with user_errors():
            resume(trainer, folder)
            write_identity(config, folder, data=data, command=command)

    training, threads = config.training, torch.get_num_threads()
    print(
        f"{folder}: {trainer.model.num_parameters(only_trainable=True):,} parameters,"
        f" {config.scheduler.total_steps} steps of {training.rows_per_step()} x {training.max_seq_len} tokens"
        f" on {device.type} ({threads} threads), compile {training.compile}",
        flush=True,
    )
    evaluation = trainer.train() or trainer.evaluate()
    finish(trainer, folder, data=data, evaluation=evaluation)
    trainer.close()


def resume(trainer: Trainer, folder: Path) -> None:
    """Goes on from the newest complete checkpoint; a run that was stopped before its first one begins anew."""
    checkpoint = find_latest(folder / CHECKPOINTS)
    step = trainer.load(checkpoint) if checkpoint else 0
    print(f"going on after step {step}")


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


def finish(trainer: Trainer, folder: Path, *, data: RunData, evaluation: Evaluation) -> None:
    """Compares the result with what needs no model, lets the model write, and makes the report."""
    floors = {"order-0 entropy": "order0_bits_per_byte", "xz -9e": "xz_bits_per_byte"}
    known = [f"{name} {data.baselines[key]:.3f}" for name, key in floors.items() if key in data.baselines]
    print(f"validation: {evaluation.bits_per_byte:.3f} bits/byte ({', '.join(known) or 'baselines unknown'})\n")
    text = write_sample(trainer, data)
    write_whole(folder / SAMPLE, text + "\n")
    print(f"{text}\n\nreport: {write_report(folder)}")


def write_sample(trainer: Trainer, data: RunData) -> str:
    """A text of `SAMPLE_TOKENS` tokens, from its beginning on; a delimiter in it begins another one."""
    model = trainer.model
    (sample,) = generate(
        model.params,
        [[DELIMITER]],
        cfg=model.config,
        backend=model.backend,
        max_new_tokens=min(SAMPLE_TOKENS, model.config.max_seq_len - 1),
        temperature=0.8,
        stop_ids=(),
        suppressed=data.tokenizer.suppressed_ids,
        seeds=[trainer.config.training.seed],
    )
    return data.tokenizer.decode(sample.ids)


if __name__ == "__main__":
    sys.exit(main())

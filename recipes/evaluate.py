"""Score a trained model on its validation text: one line of JSON.

    python recipes/evaluate.py runs/tiny-1
    python recipes/evaluate.py runs/tiny-1 data.validation=other/shards data.val_tokens=1e6

Whole documents are isolated from each other, every token is served by all its experts, and the MTP heads are off.
A figure that is not finite is null. What is asked wrongly is a line a problem and exit code 2.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from command_line import Parser, execute, user_errors

from hymo.data import validation_batches
from hymo.evaluate import compute_validation_loss, open_validation, windows_per_source
from hymo.handle import open_run
from hymo.progress import plain
from hymo.run_folder import DATA


def main() -> int:
    """Scores, and returns the exit code."""
    return execute("evaluate", evaluate)


def evaluate() -> None:
    """Reads the command line, scores and prints."""
    parser = Parser("Score a trained model on its validation text.")
    parser.add_argument("run", help="folder of the run, e.g. runs/tiny-1")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="on top of the run's config.yaml")
    args = parser.parse_args()
    with user_errors():
        print(json.dumps(plain(score(Path(args.run), args.overrides)), allow_nan=False))


def score(folder: Path, overrides: list[str]) -> dict[str, Any]:
    """The evaluation, with what is needed to compare it: tokenizer, text, context length, precision."""
    began = time.perf_counter()
    run = open_run(folder, overrides, device="cuda" if torch.cuda.is_available() else "cpu")
    data, training, seq_len = run.config.data, run.config.training, run.config.training.max_seq_len
    sources = open_validation(data, data.folder or folder / DATA, tokenizer=run.tokenizer.fingerprint)
    limit = windows_per_source(data, seq_len=seq_len, sources=len(sources))
    evaluation = compute_validation_loss(
        run.model.params,
        validation_batches(sources, seq_len=seq_len, rows=training.micro_batch_size, limit=limit),
        cfg=run.model.config,
        token_bytes=run.tokenizer.token_bytes(),
        sources=[source.name for source in sources],
        # One evaluation is over before a graph of it would be compiled.
        backend=run.model.backend,
    )
    return {
        "kind": "eval",
        "step": run.step,
        **evaluation.record(),
        "seconds": round(time.perf_counter() - began, 3),
        "max_seq_len": seq_len,
        "precision": training.precision,
        "tokenizer": run.tokenizer.fingerprint,
        "validation": {source.name: source.sha256 for source in sources},
    }


if __name__ == "__main__" and (code := main()):
    sys.exit(code)

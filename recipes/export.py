"""Take a model out of its run: `export.py RUN OUT [--dtype bfloat16]`.

    python recipes/export.py runs/tiny-1 exported

OUT is a new folder with model.safetensors, config.json and a tokenizer that transformers opens; `hymo.open_export`
reads it back, in float32 with the same logits to the bit. What is asked wrongly is a line a problem and exit code 2.
"""

import sys
from collections.abc import Sequence

import torch
from command_line import Parser, execute, user_errors

from hymo.export import WEIGHTS, export_model
from hymo.handle import open_run


def main(argv: Sequence[str] | None = None) -> int:
    """Exports, and returns the exit code."""
    return execute("export", lambda: run(list(sys.argv[1:] if argv is None else argv)))


@user_errors()
def run(arguments: Sequence[str]) -> None:
    """Reads the command line and writes the folder."""
    parser = Parser("Take a model out of its run.")
    parser.add_argument("run", help="folder of the run, e.g. runs/tiny-1")
    parser.add_argument("output", help="new folder")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32", help="of matrices")
    asked = parser.parse_args(arguments)
    opened = open_run(asked.run)
    folder = export_model(
        asked.output,
        opened.model,
        tokenizer=opened.tokenizer,
        step=opened.step,
        dtype=getattr(torch, asked.dtype),
        notes=f"\nTrained as `{opened.config.run.name}`.\n",
    )
    size = (folder / WEIGHTS).stat().st_size
    print(f"{folder}: step {opened.step}, {opened.model.num_parameters():,} numbers, {size / 1e6:,.1f} MB")


if __name__ == "__main__" and (code := main()):
    sys.exit(code)

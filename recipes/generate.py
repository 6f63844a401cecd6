"""Write text with a trained model.

    python recipes/generate.py runs/tiny-1 --prompt "The with statement" --temperature 0.8 --stream

Text goes to stdout, everything else to stderr. What is asked wrongly is a line a problem and exit code 2.
"""

import argparse
import sys
import time
from collections.abc import Iterator

import torch
from command_line import Parser, execute, user_errors

from hymo.generate import NewToken, generate, stream
from hymo.handle import Run, open_run


def main() -> int:
    """Writes, and returns the exit code."""
    return execute("generate", lambda: write(parse()))


def parse() -> argparse.Namespace:
    """The command line."""
    parser = Parser("Write text with a trained model.")
    parser.add_argument("run", help="folder of the run, e.g. runs/tiny-1")
    parser.add_argument(
        "--prompt", action="append", metavar="TEXT", help="how the text begins; may be given repeatedly"
    )
    parser.add_argument("--max-new-tokens", type=int, default=200, help="length at most, in tokens (default 200)")
    parser.add_argument("--temperature", type=float, default=0.8, help="0 always takes the likeliest (default 0.8)")
    parser.add_argument("--top-k", type=int, help="draw from the K likeliest tokens")
    parser.add_argument(
        "--top-p", type=float, default=1.0, help="draw from the likeliest that have probability P together"
    )
    parser.add_argument(
        "--min-p", type=float, default=0.0, help="draw from those at least P times as likely as the best"
    )
    parser.add_argument("--seed", type=int, default=0, help="the same seed, the same text (default 0)")
    parser.add_argument(
        "--num-samples", type=int, default=1, help="texts of each prompt, with seeds SEED, SEED + 1, ..."
    )
    parser.add_argument("--stream", action="store_true", help="show the text as it comes; for one text")
    return parser.parse_args()


@user_errors()
def write(args: argparse.Namespace) -> None:
    """Loads the run and prints the texts."""
    texts = [text for text in args.prompt or [""] for _ in range(args.num_samples)]
    if args.num_samples < 1:
        raise ValueError(f"--num-samples: expected at least 1, got {args.num_samples}")
    if args.stream and len(texts) > 1:
        raise ValueError(f"--stream: expected one prompt and one sample, got {len(texts)} texts to show at once")
    run = open_run(args.run, device="cuda" if torch.cuda.is_available() else "cpu")
    prompts = [run.tokenizer.encode(text) for text in texts]
    options = {
        "cfg": run.model.config,
        "backend": run.model.backend,
        "max_new_tokens": args.max_new_tokens,
        "temperature": args.temperature,
        "top_k": args.top_k,
        "top_p": args.top_p,
        "min_p": args.min_p,
        "suppressed": run.tokenizer.suppressed_ids,
        "seeds": [args.seed + sample for _ in args.prompt or [""] for sample in range(args.num_samples)],
    }
    began = time.perf_counter()
    if args.stream:
        count = show(run, texts[0], stream(run.model.params, prompts, **options))
    else:
        made = generate(run.model.params, prompts, **options)
        for text, each in zip(texts, made, strict=True):
            print(text + run.tokenizer.decode(each.ids))
            if len(made) > 1:
                print("-" * 80)
        count = sum(len(each.ids) for each in made)
    seconds = time.perf_counter() - began
    print(f"step {run.step}, {count} tokens, {count / seconds:.0f} tokens/s", file=sys.stderr)


def show(run: Run, text: str, steps: Iterator[tuple[NewToken, ...]]) -> int:
    """Prints one text as its tokens arrive, whole characters at a time; the number of tokens."""
    ids: list[int] = []

    def arriving() -> Iterator[int]:
        for (new,) in steps:
            if new.finish_reason != "stop":
                ids.append(new.id)
                yield new.id

    print(text, end="", flush=True)
    for piece in run.tokenizer.stream(arriving()):
        print(piece, end="", flush=True)
    print()
    return len(ids)


if __name__ == "__main__" and (code := main()):
    sys.exit(code)

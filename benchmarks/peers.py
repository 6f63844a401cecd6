"""Compiles in many processes what other packages would compile one by one at their first call.

fla's Triton path tries some hundred tilings of its kernels, FlashQLA has some ten large ones; on one core that is
minutes. Here every process makes the call with launches left out, and compiles its share of what the call asks for into
the caches on disk. The first true call then finds all of it, and times fla's tilings with nothing else on the GPU.
"""

import argparse
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from itertools import count
from typing import Any, NamedTuple

import torch

LARGE = {"fla": 0.6, "flashqla": 0.4}
"""The packages that compile for long, and their shares of the processes."""


class Share(NamedTuple):
    """Of everything that is compiled, in the order in which it is asked for: each `parts`-th from `part` on."""

    part: int
    parts: int

    def turns(self) -> Iterator[bool]:
        return (number % self.parts == self.part for number in count())


def compile_beforehand(names: list[str], shapes: list[str], norm: str, processes: int) -> str:
    """Fills the caches for the calls of these implementations; what was done and what failed, in a line each."""
    start = time.perf_counter()
    running = []
    for name in names:
        parts = max(1, round(LARGE[name] / sum(LARGE[each] for each in names) * processes))
        for part in range(parts):
            command = [sys.executable, "-W", "ignore", __file__, name, f"{part}/{parts}", norm, *shapes]
            running.append(subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True))
    complaints = [process.communicate()[1] for process in running]
    failed = {complaint.splitlines()[-1] for complaint in complaints if complaint.strip()}
    done = f"compiled beforehand by {len(running)} processes in {time.perf_counter() - start:.0f} s: {', '.join(names)}"
    return "\n".join([done, *sorted(failed)])


@contextmanager
def only_compiled(name: str, share: Share) -> Iterator[None]:
    """Calls of a package compile a share of its kernels and run none."""
    with {"fla": _triton_only_compiles, "flashqla": _tilelang_only_compiles}[name](share):
        yield


@contextmanager
def _triton_only_compiles(share: Share) -> Iterator[None]:
    from triton.runtime.autotuner import Autotuner
    from triton.runtime.jit import JITFunction

    launch, turns, seen = JITFunction.run, share.turns(), set()

    def compile_only(kernel: Any, *args: Any, **kwargs: Any) -> Any:
        return launch(kernel, *args, **kwargs | {"warmup": True})

    def compile_tilings(tuner: Any, *args: Any, **kwargs: Any) -> None:
        tuner.nargs = dict(zip(tuner.arg_names, args, strict=False))
        given = tuner.nargs | kwargs
        key = (tuner, *(given[name] for name in tuner.keys if name in given))
        if key in seen:
            return
        seen.add(key)
        for config in tuner.prune_configs(kwargs):
            if next(turns):
                # The tuner passes over a tiling that does not compile.
                with suppress(Exception):
                    tuner.fn.run(*args, **kwargs, **config.all_kwargs())

    with _replaced(JITFunction, "run", compile_only), _replaced(Autotuner, "run", compile_tilings):
        yield


@contextmanager
def _tilelang_only_compiles(share: Share) -> Iterator[None]:
    from tilelang.jit import JITImpl

    build, turns = JITImpl.compile, share.turns()

    def compile_share(kernel: Any, *args: Any, **kwargs: Any) -> Callable[..., None]:
        if next(turns):
            build(kernel, *args, **kwargs)
        return lambda *operands: None

    # FlashQLA has a few small kernels in Triton; every process compiles them.
    with _replaced(JITImpl, "compile", compile_share), _triton_only_compiles(Share(0, 1)):
        yield


@contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def main() -> None:
    from scan import IMPLEMENTATIONS, Shape, both, first_line, inputs

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=LARGE)
    parser.add_argument("share", help="PART/PARTS, counted from 0")
    parser.add_argument("norm", choices=["before", "inside"])
    parser.add_argument("shapes", nargs="+", help="batch x time x heads x key x value")
    options = parser.parse_args()
    share = Share(*(int(number) for number in options.share.split("/")))
    call = partial(both, options={"use_qk_l2norm_in_kernel": True} if options.norm == "inside" else {})
    rule = IMPLEMENTATIONS[options.name]()
    with only_compiled(options.name, share):
        for text in options.shapes:
            x = inputs(Shape.of(text), "cuda", torch.bfloat16)
            try:
                call(rule, x, x[2])
            except Exception as error:
                print(f"{options.name} {text}: {type(error).__name__}: {first_line(error)}", file=sys.stderr)
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()

"""What the recipes share: what is asked wrongly is a line a problem and exit code 2, what cannot go on exit code 1."""

import argparse
import io
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import NoReturn

import torch

from hymo.trainer import TrainingStopped


class Refusal(Exception):
    """What was asked cannot be done; the message says what would work."""


class Parser(argparse.ArgumentParser):
    """Refuses what it cannot read, and an option that is not written out."""

    def __init__(self, description: str) -> None:
        super().__init__(description=description, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        raise Refusal(message)


@contextmanager
def user_errors() -> Iterator[None]:
    """Around what reads the user's input: there a ValueError or OSError is about that, elsewhere it is our mistake."""
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        raise Refusal(_told(error)) from error
    except ValueError as error:
        raise Refusal(str(error)) from error


def execute(name: str, job: Callable[[], object]) -> int:
    """Does `job` and returns the exit code; what ends it early is told on stderr, after the recipe's `name`."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        # A letter that the terminal does not have must not end a run of hours.
        sys.stdout.reconfigure(errors="replace")
    is_alone = False
    try:
        job()
        sys.stdout.flush()
        return 0
    except BrokenPipeError:
        # Who read has gone, as `| head` does. Python would write the rest at its end; code as of SIGPIPE.
        with suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except Refusal as refusal:
        code, message = 2, str(refusal)
    except TrainingStopped as stopped:
        code, message = stopped.exit_code, str(stopped)
    except KeyboardInterrupt:
        code, message = 130, "interrupted"
    except OSError as error:
        code, message = 1, _told(error)
    except (MemoryError, RuntimeError) as error:
        if not _is_out_of_memory(error):
            raise
        code, message = 1, f"memory is not enough: {(str(error).splitlines() or ['no more'])[0]}"
        is_alone = True
    # What ranks find together the first one of each machine tells; it may lack a file that others have.
    rank = os.environ.get("RANK", "0")
    teller = os.environ.get("LOCAL_RANK", rank) == "0"
    who = name if rank == "0" else f"{name}: rank {rank}"
    for line in message.splitlines() if teller or is_alone else ():
        print(f"{who}: {line}", file=sys.stderr)
    return code


def available_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _told(error: OSError) -> str:
    return f"{error.filename}: {error.strerror}" if error.filename else error.strerror or str(error)


def _is_out_of_memory(error: Exception) -> bool:
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or "DefaultCPUAllocator" in str(error)

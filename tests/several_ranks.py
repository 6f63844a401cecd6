"""Several ranks on this machine: a function runs in a process for each, and what they return comes back."""

import multiprocessing
import os
import pickle
import socket
import traceback
from collections.abc import Callable
from typing import Any

import torch

CONTEXT = multiprocessing.get_context("forkserver")
# Imported once; every rank is then a fork of that process.
CONTEXT.set_forkserver_preload(["configs", "hymo.trainer", "torch.distributed.fsdp"])


def on_ranks(world: int, program: Callable[..., Any], *args: Any, timeout: float = 120.0) -> list[Any]:
    """What `program(*args)` returns on each of `world` ranks, by rank; it may be any function of a module.

    Raises:
        AssertionError: with the traceback of the first rank that fails, or naming one that does not end in time.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    pipes, processes = [], []
    for rank in range(world):
        ours, theirs = CONTEXT.Pipe(duplex=False)
        process = CONTEXT.Process(target=_rank, args=(rank, world, port, theirs, program, args), daemon=True)
        process.start()
        theirs.close()
        pipes.append(ours)
        processes.append(process)
    try:
        outcomes = []
        for rank, pipe in enumerate(pipes):
            assert pipe.poll(timeout), f"rank {rank} of {world} did not end in {timeout} s"
            outcomes.append(pickle.loads(pipe.recv_bytes()))
        for rank, (_, failure) in enumerate(outcomes):
            assert failure is None, f"rank {rank} of {world}:\n{failure}"
        return [result for result, _ in outcomes]
    finally:
        for process in processes:
            process.kill()
            process.join()


def _rank(rank: int, world: int, port: int, pipe: Any, program: Callable[..., Any], args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    try:
        outcome = program(*args), None
    except BaseException:
        outcome = None, traceback.format_exc()
    # By value: torch would send a tensor as shared memory, which ends with this process.
    pipe.send_bytes(pickle.dumps(outcome))

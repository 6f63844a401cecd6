"""Replay: a program's launches, recorded once as a CUDA graph and then launched as one.

A step of v1.0 is five thousand launches, which take the host longer than their work takes the GPU. Replayed, they are
one launch, and the host has nothing to do with what runs.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch._prims_common import compute_required_storage_length

Run = Callable[[list[Tensor]], list[Tensor]]


class Recording(NamedTuple):
    """A program as recorded.

    Args:
        places: addresses of the arguments that it reads and writes where they are.
        given: copies of the other arguments, which it reads in their place.
        results: what it writes, beside the arguments.
        graph: its launches.
    """

    places: tuple[int, ...]
    given: list[Tensor]
    results: list[Tensor]
    graph: torch.cuda.CUDAGraph


def replayed(program: Run, fixed: int) -> Run:
    """`program`, recorded at its second call and replayed from then on.

    The first call runs as it is: there kernels are loaded and libraries take their workspaces. Where the fixed
    arguments have moved, for example because a checkpoint was loaded, it is recorded anew.

    Args:
        program: from tensors on one GPU to tensors there, the first of which are its fixed arguments; it launches the
            same kernels for all numbers and never waits for one.
        fixed: how many of the first arguments keep their addresses from call to call.

    Raises:
        RuntimeError: while recording, from CUDA, if the program waits for the GPU.
    """
    is_warm = False
    recording: Recording | None = None

    def call(leaves: list[Tensor]) -> list[Tensor]:
        nonlocal is_warm, recording
        if not is_warm:
            is_warm = True
            return program(leaves)
        if recording is None or recording.places != _places(leaves[:fixed]):
            # Its memory goes back before the next one takes as much.
            recording = None
            recording = record(program, leaves, fixed)
        for own, given in zip(recording.given, leaves[fixed:], strict=True):
            _line(own).copy_(_line(given))
        recording.graph.replay()
        return leaves[:fixed] + [result.clone() for result in recording.results]

    return call


def record(program: Run, leaves: Sequence[Tensor], fixed: int) -> Recording:
    """What `program` launches for these arguments; nothing runs."""
    kept, given = list(leaves[:fixed]), [copied(leaf) for leaf in leaves[fixed:]]
    graph = torch.cuda.CUDAGraph()
    # Other threads go on meanwhile: they read batches and write checkpoints.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        results = program(kept + given)
    return Recording(_places(kept), given, results[fixed:], graph)


def copied(x: Tensor) -> Tensor:
    """The same numbers with the same strides, which a clone of elements that lie upon each other would not have."""
    return _line(x).clone().as_strided(x.shape, x.stride(), 0)


def _line(x: Tensor) -> Tensor:
    """The memory from a tensor's first element to its last."""
    return x.as_strided((compute_required_storage_length(x.shape, x.stride(), 0),), (1,))


def _places(leaves: Sequence[Tensor]) -> tuple[int, ...]:
    return tuple(leaf.data_ptr() for leaf in leaves)

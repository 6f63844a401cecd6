"""The bytes that a function and its backward take, counted on fake tensors: its code runs, but nothing is computed."""

import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from hymo import tree

aten = torch.ops.aten
INDEX_MAPS = (
    *(aten._to_copy, aten.clone, aten.gather, aten.index, aten.embedding, aten.constant_pad_nd, aten.roll, aten.tril),
    *(aten.cat, aten.stack, aten.slice_backward, aten.select_backward, aten.zeros, aten.zeros_like, aten.new_zeros),
    *(aten.ones, aten.ones_like, aten.full, aten.full_like, aten.arange, aten.scalar_tensor),
)
"""Operations that fuse like pointwise ones."""
REDUCTIONS = (
    *(aten.sum, aten.mean, aten.amax, aten.cumsum, aten._softmax, aten._log_softmax),
    *(aten.scatter, aten.scatter_add, aten.index_put, aten.embedding_dense_backward),
)
"""Operations whose result takes memory, but which compute what they read on the fly."""
VIEWS = (aten._unsafe_view, aten.detach)
MOST_READS = 4
"""A fused result with more reads than these gets memory: `torch._inductor.config.realize_reads_threshold`."""


class Footprint(NamedTuple):
    """Bytes beside a function's inputs.

    Args:
        forward: the most that exist at once while the function runs.
        kept: those that live on afterwards because the backward reads them, the result included.
        backward: the most that exist at once while the gradient is pulled back, gradients included.
    """

    forward: int
    kept: int
    backward: int


class Entry(NamedTuple):
    """A storage: its bytes, whether it takes memory, and what is read to compute it if not."""

    storage: weakref.ref[Any]
    size: int
    has_memory: bool
    reads: dict[Any, Any]


class Ledger(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Bytes of the tensors made under it that are alive, and the most there ever were.

    Args:
        fused: whether elementwise operations are fused into their readers, as inductor does. A result then takes memory
            only if something that cannot be fused reads it, such as a matrix product, or if it reads too much itself;
            otherwise what it reads lives on in its place.
    """

    def __init__(self, *, fused: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.fused = fused
        self.live = self.peak = 0
        self.known: dict[int, Entry] = {}

    def __torch_dispatch__(
        self, func: Any, types: Sequence[Any], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result, read = func(*args, **(kwargs or {})), (args, kwargs or {})
        # A question such as `x.device` reads nothing.
        if not _tensors(result):
            return result
        fusible = self.fused and (torch.Tag.pointwise in func.tags or func.overloadpacket in INDEX_MAPS)
        if self.fused and not (fusible or func.is_view or func.overloadpacket in (*VIEWS, *REDUCTIONS)):
            self.materialize(read)
        for tensor in _tensors(result):
            self._enter(tensor, read if fusible else None)
        return result

    def exclude(self, nest: Any) -> None:
        """Leaves tensors that are there anyway out of the count."""
        for tensor in _tensors(nest):
            storage = tensor.untyped_storage()
            self.known[id(storage)] = Entry(weakref.ref(storage), 0, True, {})

    def materialize(self, nest: Any) -> None:
        """Gives memory to those tensors that are results of fused operations."""
        for tensor in _tensors(nest):
            name = id(tensor.untyped_storage())
            entry = self.known.get(name)
            if entry and not entry.has_memory:
                self.known[name] = entry._replace(has_memory=True, reads={})
                self._count(entry.size)

    def _enter(self, tensor: Tensor, computed_from: Any) -> None:
        storage = tensor.untyped_storage()
        name = id(storage)
        if name in self.known:
            return
        reads = self._reads(computed_from)
        has_memory = computed_from is None or len(reads) > MOST_READS
        left = weakref.ref(storage, partial(self._leave, name))
        self.known[name] = Entry(left, storage.nbytes(), has_memory, {} if has_memory else reads)
        if has_memory:
            self._count(storage.nbytes())

    def _reads(self, nest: Any) -> dict[Any, Any]:
        """The storages that a fused result reads, by where it reads them: a shifted view is another read."""
        found: dict[Any, Any] = {}
        for tensor in _tensors(nest):
            storage, shift = tensor.untyped_storage(), tensor.storage_offset()
            entry = self.known.get(id(storage))
            if entry and entry.has_memory:
                found[id(storage), shift] = storage
            elif entry:
                found |= {(place, shift): source for place, source in entry.reads.items()}
        return found

    def _leave(self, name: int, storage: Any) -> None:
        entry = self.known.pop(name)
        if entry.has_memory:
            self._count(-entry.size)

    def _count(self, size: int) -> None:
        self.live += size
        self.peak = max(self.peak, self.live)


def footprint(f: Callable[..., Tensor], *inputs: Any, ledger: Ledger) -> Footprint:
    """What `f` and its vector-Jacobian product take in a graph that frees each tensor after its last use.

    Args:
        inputs: trees of fake tensors, made under the `FakeTensorMode` that this is called in.
        ledger: a fresh one.
    """
    ledger.exclude(inputs)
    with ledger:
        result, pull_back, *_ = torch.func.vjp(f, *inputs)
        forward, kept = ledger.peak, ledger.live
        ledger.peak = kept
        pull_back(torch.ones_like(result), retain_graph=False, create_graph=False)
    return Footprint(forward, kept, ledger.peak)


def uncompiled_peak(f: Callable[..., Tensor], *inputs: Any) -> int:
    """The most bytes that exist at once in `torch.func.grad` of `f`, summed if it is no scalar, run op by op.

    All that the backward reads, and most of what it makes, stays until it is done.
    """

    def scalar(*moved: Any) -> Tensor:
        result = f(*moved)
        # A layer's cotangent depends on the inputs, as it does inside a model.
        return result.square().sum() if result.ndim else result

    ledger = Ledger(fused=False)
    ledger.exclude(inputs)
    with ledger:
        torch.func.grad(scalar, argnums=tuple(range(len(inputs))))(*inputs)
    return ledger.peak


def _tensors(nest: Any) -> list[Tensor]:
    return [leaf for leaf in tree.leaves(nest) if isinstance(leaf, Tensor)]

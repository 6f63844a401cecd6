"""Hypothesis strategies: they draw dimensions, regimes and a seed; tensors are built from the seed, so cases replay."""

from typing import NamedTuple

import torch
from hypothesis import strategies as st
from torch import Tensor

from tests.close import gaussian

GATES = ("gentle", "strong", "zero", "reset")
KEYS = ("random", "cos .9", "cos .99", "identical")
BETAS = ("below 1", "below 2", "one", "two")


def seeds() -> st.SearchStrategy[int]:
    return st.integers(0, 2**31 - 1)


def lengths(longest: int = 40, most: int = 5) -> st.SearchStrategy[list[int]]:
    """Lengths of packed sequences, empty ones among them."""
    return st.lists(st.one_of(st.just(0), st.integers(1, longest)), min_size=1, max_size=most)


class ScanCase(NamedTuple):
    """A gated delta rule problem; `build` makes its tensors."""

    batch: int
    time: int
    heads: int
    group: int
    key: int
    value: int
    gates: str
    keys: str
    betas: str
    seed: int

    def build(self) -> "ScanInputs":
        """fp64 tensors: unit q and k, standard normal v and state."""
        generator = torch.Generator().manual_seed(self.seed)
        shape = (self.batch, self.time, self.heads * self.group)

        def uniform(*shape: int) -> Tensor:
            return torch.rand(*shape, generator=generator, dtype=torch.float64)

        gate = {"gentle": 0.1, "strong": 16.0, "zero": 0.0, "reset": 0.1}[self.gates]
        g = -gate * uniform(*shape)
        if self.gates == "reset":  # in all heads of some tokens, and in single heads
            g = torch.where((uniform(*shape[:2], 1) < 0.08) | (uniform(*shape) < 0.04), -torch.inf, g)
        beta = {"below 1": 1.0, "below 2": 2.0, "one": 0.0, "two": 0.0}[self.betas] * uniform(*shape)
        beta = beta + {"one": 1.0, "two": 2.0}.get(self.betas, 0.0)
        keys = (self.batch, self.time, self.heads, self.key)
        shared = {"random": 0.0, "cos .9": 0.9, "cos .99": 0.99, "identical": 1.0}[self.keys]
        common = unit(gaussian(generator, self.batch, 1, self.heads, self.key))
        k = unit(shared**0.5 * common + (1 - shared) ** 0.5 * unit(gaussian(generator, *keys)))
        return ScanInputs(
            q=unit(gaussian(generator, *keys)),
            k=k,
            v=gaussian(generator, *shape, self.value),
            g=g,
            beta=beta,
            initial_state=gaussian(generator, shape[0], shape[2], self.key, self.value),
        )


class ScanInputs(NamedTuple):
    """Differentiable arguments of the scan."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor
    initial_state: Tensor

    def to(self, dtype: torch.dtype) -> "ScanInputs":
        return ScanInputs(*(x.to(dtype) for x in self))


def unit(x: Tensor) -> Tensor:
    return x / x.norm(dim=-1, keepdim=True)


@st.composite
def scan_cases(draw: st.DrawFn, max_time: int = 100) -> ScanCase:
    return ScanCase(
        batch=draw(st.integers(1, 2)),
        time=draw(st.integers(1, max_time)),
        heads=draw(st.integers(1, 2)),
        group=draw(st.sampled_from([1, 2, 3])),
        key=draw(st.sampled_from([4, 7, 16, 32])),
        value=draw(st.sampled_from([3, 8, 16, 32])),
        gates=draw(st.sampled_from(GATES)),
        keys=draw(st.sampled_from(KEYS)),
        betas=draw(st.sampled_from(BETAS)),
        seed=draw(seeds()),
    )

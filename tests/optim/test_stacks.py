"""Stacks: leaves of one shape and role as one, and back, without a number changed."""

import pytest
import torch

from hymo import build_hymo, model_spec, tree
from hymo.optim.stacks import Stacks, everywhere
from hymo.params import partition
from tests.configs import tiny_config


@pytest.mark.parametrize("largest", [0, 64, 2**21])
def test_what_is_joined_is_split_again(largest: int) -> None:
    cfg = tiny_config()
    spec = model_spec(cfg.model)
    trainable, _ = partition(spec, build_hymo(cfg).params)
    stacks = Stacks(spec, largest=largest)
    joined = stacks.join(trainable)
    few, many = len(tree.leaves(joined)), len(tree.leaves(trainable))
    assert few == many if largest == 0 else few < many
    assert sum(x.numel() for x in tree.leaves(joined)) == sum(x.numel() for x in tree.leaves(trainable))
    for leaves in stacks.classes:
        assert len(leaves) > 1
    split = stacks.split(joined)
    assert tree.flatten(split)[1] == tree.flatten(trainable)[1]
    assert all(torch.equal(a, b) for a, b in zip(tree.leaves(split), tree.leaves(trainable), strict=True))


def test_everywhere_reaches_subtrees_of_a_kind_alone() -> None:
    cfg = tiny_config()
    params = build_hymo(cfg).params
    state = {"a": (params, torch.ones(())), "b": params}
    found = everywhere(lambda p: tree.map(torch.zeros_like, p), state, type(params))
    assert float(found["a"][1]) == 1.0
    assert all(not x.any() for x in tree.leaves((found["a"][0], found["b"])))

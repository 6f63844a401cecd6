"""Stacks: leaves of one shape and role as one, and back, without a number changed or copied."""

import pytest
import torch

from hymo import build_hymo, model_spec, tree
from hymo.backend import EAGER
from hymo.optim.stacks import Stacks
from hymo.params import partition
from hymo.step import stacks_of
from tests.configs import setup, tiny_config


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
    for split in (stacks.split(joined), stacks.parts(joined)):
        assert tree.flatten(split)[1] == tree.flatten(trainable)[1]
        assert all(torch.equal(a, b) for a, b in zip(tree.leaves(split), tree.leaves(trainable), strict=True))


def test_parts_are_views_that_begin_at_multiples_of_16_bytes_and_copies_where_they_would_not() -> None:
    cfg = tiny_config(model={"gdn_n_heads": 6})
    spec, params = model_spec(cfg.model), build_hymo(cfg).params
    stacks = Stacks(spec, largest=2**21)
    joined = stacks.join(params)
    own = {x.untyped_storage().data_ptr() for x in tree.leaves(joined)}
    assert all(x.untyped_storage().data_ptr() in own for x in tree.leaves(stacks.split(joined)))
    parts = tree.leaves(stacks.parts(joined))
    assert all(x.data_ptr() % 16 == 0 for x in parts)
    copied = [x for x in parts if x.untyped_storage().data_ptr() not in own]
    assert 0 < len(copied) < len(parts)
    assert {x.numel() % 4 for x in copied} == {2}


def test_a_state_is_joined_wherever_it_is_like_the_parameters() -> None:
    parts, backend = setup(tiny_config()), EAGER._replace(stacked=2**21)
    plain, joined = parts.state(), parts.state(backend=backend)
    assert len(tree.leaves(joined.params)) < len(tree.leaves(plain.params))
    assert len(tree.leaves(joined.optimizer)) < len(tree.leaves(plain.optimizer))
    split = stacks_of(parts.spec, backend).split(joined)
    assert list(tree.paths(split)) == list(tree.paths(plain))
    assert all(torch.equal(a, b) for a, b in zip(tree.leaves(split), tree.leaves(plain), strict=True))


def test_a_state_that_is_not_joined_is_named() -> None:
    parts, backend = setup(tiny_config()), EAGER._replace(stacked=2**21)
    with pytest.raises(ValueError, match=r"norm .* is not joined with the \d+ others .* `init_train_state`"):
        stacks_of(parts.spec, backend).parts(parts.state().params)

"""The state before every chunk, by pairs, is what a loop over the chunks finds."""

import pytest
import torch

from hymo_kernels.host.prefix_states import prefix_states
from tests.close import assert_same_bits, gaussian


@pytest.mark.parametrize("act", [torch.matmul, torch.mul])
@pytest.mark.parametrize("chunks", [0, 1, 7, 8, 9, 18, 37, 64])
def test_pairing_equals_a_loop(chunks: int, act):
    generator = torch.Generator().manual_seed(chunks)
    transition = gaussian(generator, 2, chunks, 4, 4 if act is torch.matmul else 1) / 2
    write, initial = gaussian(generator, 2, chunks, 4, 3), gaussian(generator, 2, 4, 3)
    states, final = prefix_states(transition, write, initial=initial, act=act)
    state = initial
    for i in range(chunks):
        torch.testing.assert_close(states[:, i], state, rtol=1e-12, atol=1e-12)
        state = act(transition[:, i], state) + write[:, i]
    torch.testing.assert_close(final, state, rtol=1e-12, atol=1e-12)


def test_later_chunks_change_no_bit():
    generator = torch.Generator().manual_seed(0)
    transition, write = gaussian(generator, 1, 21, 4, 4) / 2, gaussian(generator, 1, 21, 4, 3)
    later = torch.arange(21)[:, None, None] >= 10
    states, _ = prefix_states(transition, write, initial=write[:, 0])
    other, _ = prefix_states(torch.where(later, 7.0, transition), torch.where(later, 5.0, write), initial=write[:, 0])
    assert_same_bits(other[:, :11], states[:, :11])

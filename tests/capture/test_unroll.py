"""Loops over experts that a trace repeats for every expert."""

from __future__ import annotations

import torch

from mla_compile.capture.unroll import UnrolledExperts


def test_a_loop_over_chosen_experts_visits_every_one():
    """As transformers writes it: experts that some token chose, and the tokens of each."""
    weights = torch.randn(4, 3, generator=torch.Generator().manual_seed(0)).double()

    def experts(x, chosen):  # [T,3], [T]
        out = torch.zeros_like(x)
        hit = torch.nonzero(torch.bincount(chosen, minlength=4))
        for (expert,) in hit.unbind():
            (tokens,) = torch.where(chosen == expert)
            out = out.index_add(0, tokens, x[tokens] * weights[expert])
        return out

    x, chosen = torch.randn(5, 3).double(), torch.tensor([2, 0, 2, 1, 0])
    with UnrolledExperts():
        torch.testing.assert_close(experts(x, torch.tensor([0, 1, 2, 3, 0])), x * weights[[0, 1, 2, 3, 0]])
        assert torch.nonzero(torch.eye(2)).shape == (2, 2)  # of no vector: as it is
    assert torch.equal(experts(x, chosen), x * weights[chosen])

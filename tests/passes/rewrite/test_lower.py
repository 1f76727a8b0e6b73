"""The operator for rows that see no key, as plain ATen, against its reference."""

from __future__ import annotations

import pytest
import torch
from torch import fx
from torch.fx.passes.fake_tensor_prop import FakeTensorProp

from mla_compile.kernels.alike import weigh_alike
from mla_compile.passes.rewrite.lower import lower_to_aten

LOW = torch.finfo(torch.float64).min


class Hidden(torch.nn.Module):
    def forward(self, out, lse, values, mask, indices):
        return torch.ops.mla_compile.weigh_alike(out, lse, values, -1e29, mask, indices, LOW)


@pytest.mark.parametrize("heads", [1, 4])
def test_rows_that_see_no_key_get_the_mean_of_the_greatest(heads):
    """Entries of -1 and of T and more name no key."""
    generator = torch.Generator().manual_seed(3)
    out, values = (torch.randn(*shape, generator=generator).double() for shape in ((3, 2, 4, 5), (3, 7, 5)))
    lse = torch.randn(3, 2, 4, generator=generator).double()
    lse[0], lse[2, 1] = -torch.inf, LOW
    numbers = torch.tensor([LOW, LOW / 2, 0.0], dtype=torch.float64)
    mask = numbers[torch.randint(3, (3, heads, 2, 7), generator=generator)]
    indices = torch.randint(-1, 12, (3, 2, 6), generator=generator, dtype=torch.int32)
    assert (indices > 7).any()
    given = (out, lse, values, mask, indices)

    program = fx.symbolic_trace(Hidden())
    fakes = FakeTensorProp(program)
    fakes.propagate(*given)
    lower_to_aten(program.graph, fakes._mode)
    program.recompile()
    assert not any("weigh_alike" in str(node.target) for node in program.graph.nodes)
    torch.testing.assert_close(program(*given), weigh_alike(out, lse, values, -1e29, mask, indices, LOW))


class Attends(torch.nn.Module):
    def __init__(self, **how):
        super().__init__()
        self.how = how

    def forward(self, query, latent, rope, lengths):
        return torch.ops.mla_compile.decode_attention(query, latent, rope, seq_lens=lengths, scale=0.3, **self.how)[0]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [0, 3])
@pytest.mark.parametrize("queries", [1, 4])
def test_queries_see_keys_of_the_length_of_their_sequence(queries, causal, window):
    """Without ``causal``, each of several queries sees all of them."""
    generator = torch.Generator().manual_seed(5)
    sizes = ((3, queries, 2, 7), (3, 9, 5), (3, 9, 2))
    given = [torch.randn(*size, generator=generator).double() for size in sizes]
    given.append(torch.tensor([9, 4, 6], dtype=torch.int32))
    module = Attends(causal=causal, window=window)
    program = fx.symbolic_trace(module)
    fakes = FakeTensorProp(program)
    fakes.propagate(*given)
    assert lower_to_aten(program.graph, fakes._mode) == 1
    program.recompile()
    assert not any("mla_compile" in str(node.target) for node in program.graph.nodes)
    torch.testing.assert_close(program(*given), module(*given))

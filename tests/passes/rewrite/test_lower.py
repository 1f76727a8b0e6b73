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

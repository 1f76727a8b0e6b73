"""Products of operands whose sizes are symbolic and 1 in this call: no guard tells the size, and numbers stay."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch._C import DispatchKey
from torch._dispatch.python import enable_python_dispatcher
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental import _config as config
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from mla_compile.dynamo.products import of_any_size

PRODUCT = torch.ops.aten.matmul.default


@pytest.fixture
def env() -> Iterator[ShapeEnv]:
    with config.patch(backed_size_oblivious=True, use_duck_shape=False):
        yield ShapeEnv(specialize_zero_one=False)


def rows(env: ShapeEnv, *sizes: int) -> Tensor:
    """[B,T,W] in a trace, of any number of rows T."""
    kinds = [DimDynamic.STATIC, DimDynamic.DYNAMIC, DimDynamic.STATIC]
    context = StatelessSymbolicContext(dynamic_sizes=kinds)
    return FakeTensorMode(shape_env=env).from_tensor(
        torch.empty(*sizes), symbolic_context=context, source=ConstantSource("rows")
    )


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("T", [1, 3])
def test_one_row_is_traced_as_several_are(env: ShapeEnv, batch: int, T: int) -> None:
    x = rows(env, batch, T, 4)
    with x.fake_mode, enable_python_dispatcher(), of_any_size():
        q = torch.empty(batch, 3, 2, 4)
        scores = torch.matmul(q, x.double().float().mT[:, None])
        out = torch.matmul(scores, x[:, None].expand(-1, 3, -1, -1))
    assert scores.shape[-1] == x.shape[1]
    assert (tuple(out.shape), out.is_contiguous()) == ((batch, 3, 2, 4), True)
    (size,) = x.shape[1].node.expr.free_symbols
    told = [guard.expr for guard in env.guards if guard.expr.free_symbols == {size}]
    assert all(expr.subs(size, n) for expr in told for n in (2, 3, 7)), told
    assert T != 1 or all(expr.subs(size, 1) for expr in told), told


def test_products_are_torchs_own_again() -> None:
    def fails() -> None:
        with of_any_size():
            assert PRODUCT.py_kernels[DispatchKey.CompositeImplicitAutograd] is not given
            raise ValueError("within")

    given = PRODUCT.py_kernels[DispatchKey.CompositeImplicitAutograd]
    with pytest.raises(ValueError, match="within"):
        fails()
    assert PRODUCT.py_kernels[DispatchKey.CompositeImplicitAutograd] is given


def test_numbers_are_those_of_torch() -> None:
    a, b = torch.randn(2, 1, 3, 4), torch.randn(2, 5, 4).mT[:, None]
    with enable_python_dispatcher(), of_any_size():
        assert torch.equal(torch.matmul(a, b), a @ b)

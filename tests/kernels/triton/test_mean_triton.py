"""The mean of rows that is asked for, in Triton's interpreter."""

import pytest
import torch


def means(B, T, width, transposed):
    """In the interpreter's process: the kernel's means, and torch's."""
    from mla_compile.kernels import alike

    values = torch.randn(B, T, width, generator=torch.Generator().manual_seed(T))
    if transposed:
        values = values.mT.contiguous().mT
    wanted = torch.arange(B) % 2 == 0
    given = values.clone()
    given[~wanted] = torch.nan  # not read
    return alike._means(given, wanted), alike.mean_of(values) * wanted[:, None]


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(("B", "T", "width"), [(3, 130, 96), (2, 1, 64), (1, 64, 512), (2, 0, 8), (4, 77, 3)])
def test_means(run, B, T, width, transposed):
    found, want = run(means, B, T, width, transposed)
    torch.testing.assert_close(found, want, rtol=1e-5, atol=1e-6)

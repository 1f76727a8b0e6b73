"""The record of a call: the ops' arguments in their order, and the letters."""

from __future__ import annotations

import torch

from mla_compile import ops
from mla_compile.kernels.call import DENSE, PAGED, TENSORS, CallLetters, DecodeCall
from tests.support.paged_calls import PAGE, B, H, L, R, S, pages


def test_the_fields_are_the_arguments_of_the_dense_op():
    names = [argument.name for argument in ops.decode_attention._schema.arguments]
    assert [name for name in DecodeCall._fields if name != "block_table"] == names
    assert DecodeCall._fields[TENSORS] == "scale"


def test_a_call_over_pages_is_made_of_the_paged_ops_arguments():
    x = pages()
    cache = x["kv_pages"]
    given = (x["query"], cache[..., :L], cache[..., L:], x["block_table"], x["seq_lens"])
    call = DecodeCall.paged(*given, scale=0.3, window=5)
    assert (call.op, call.scale, call.window) == (PAGED, 0.3, 5)
    assert (call.values, call.mask) == (None, None)
    taken = (call.query, call.latent, call.rope, call.block_table, call.seq_lens)
    assert all(a is b for a, b in zip(taken, given, strict=True))
    assert call.sizes == CallLetters(B, S, H, 4 * PAGE, L, R, L, PAGE)


def test_the_letters_of_a_contiguous_call():
    call = DecodeCall(torch.empty(2, 3, 4, 16), torch.empty(2, 9, 16), values=torch.empty(2, 9, 5), scale=1.0)
    assert call.op == DENSE
    assert call.sizes == CallLetters(B=2, S=3, H=4, T=9, L=16, R=0, V=5, page=0)
    assert call.summed is call.values
    assert call._replace(values=None).summed is call.latent

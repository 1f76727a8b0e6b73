"""Quantized models as ``from_pretrained`` loads them from files that the libraries' own tools write."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mla_compile import explain, optimize
from tests.support import checkpoints
from tests.support.checkpoints import CHANNEL, FLOAT8, INT4, INT8, TOKEN
from tests.support.models import prompt
from tests.support.tiers import also

pytest.importorskip("compressed_tensors")
pytest.importorskip("accelerate")

FAST: dict[str, Any] = {"codegen": "eager", "lowering": "aten", "strict": True}
ATTENTION, UP = "re:.*self_attn.*", "re:.*kv_b_proj"

INT4_ALL = (INT4, None, [])
INT4_EXPERTS = (INT4, None, [ATTENTION])
FLOAT8_ALL = ({**FLOAT8, **CHANNEL}, {**FLOAT8, **TOKEN}, [])
INT8_ALL = ({**INT8, **CHANNEL}, {**INT8, **TOKEN}, [])
INT8_LESS = ({**INT8, **CHANNEL}, {**INT8, **TOKEN}, [UP])


@pytest.mark.parametrize(
    ("weights", "rows", "ignore"),
    [
        pytest.param(*INT4_ALL, id="int4"),
        *also("family", FLOAT8_ALL, INT4_EXPERTS, INT8_ALL, INT8_LESS),
    ],
)
def test_compressed_tensors(weights: Any, rows: Any, ignore: list[str], tmp_path: Path) -> None:
    """The first call unpacks the model by a hook that removes itself, and wraps forwards; the second is as good."""
    model = checkpoints.compressed_tensors(tmp_path, weights, rows, ignore)
    fast = optimize(model, **FAST)
    with torch.inference_mode():
        report = explain(model, **prompt(), forms="absorbed")
    assert [str(site.code) for site in report.sites] == ["absorbed"]
    got = steps(fast)
    assert {str(site.code) for site in fast.mla_report.sites} == {"cost_prefill", "absorbed"}
    want = steps(model)
    # Rounded rows: a difference in the last place may be a whole step, and the up-projection's are not rounded.
    torch.testing.assert_close(got, want, rtol=0, atol=(1e-4 if rows is None else 0.2) * want.std().item())
    assert rows is not None or torch.equal(got.argmax(-1), want.argmax(-1))
    assert not model._forward_pre_hooks
    assert not hasattr(model.model.layers[0].mlp.gate_proj, "weight_packed")


def steps(model: nn.Module) -> Tensor:
    """Logits of a prompt's last token and of given tokens after it, in float32 [B,tokens,vocabulary]."""
    inputs, cache, found = prompt(), None, []
    ids = inputs["input_ids"]
    with torch.inference_mode():
        for given in (ids, ids[:, :1], ids[:, 1:2], ids[:, 2:3]):
            done = model(given, past_key_values=cache, use_cache=True)
            cache = done.past_key_values
            found.append(done.logits[:, -1].float())
    return torch.stack(found, 1)

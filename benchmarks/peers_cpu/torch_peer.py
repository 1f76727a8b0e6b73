"""The peers that run in PyTorch: eager, Inductor, and mla_compile. Started by the driver with form and sizes."""

from __future__ import annotations

import sys
from typing import Any

import torch  # isort: skip  # before common: threads wait as torch has it, as those of other programs do

from benchmarks.common import DTYPES, MODELS, build
from benchmarks.peers_cpu.protocol import serve, timed
from mla_compile.workbench.decode_steps import DecodeSteps, variants


def weights(model: str, layers: int, longest: int) -> Any:
    """The model whose weights all peers have: seeded, rounded to bfloat16."""
    return build(model, torch.bfloat16, layers, longest + 16)


class TorchPeer:
    """One model in one form: ``eager``, ``inductor``, ``mla``; ``mla int8`` and ``mla int4``: of torchao's weights."""

    def __init__(self, form: str, model: str, dtype: str, layers: int, batch: int, longest: int) -> None:
        self.form, _, bits = form.partition(" ")
        self.batch = batch
        self.model = weights(model, layers, longest).to(DTYPES[dtype])
        if bits:
            self._quantize(bits)
        d = MODELS[model].dims
        slots = [(1, d.L, 1, d.R)] * layers
        calls = variants(self.model, [self.form])
        self.steps = DecodeSteps(self.model, calls, slots, batch=batch, longest=longest + 1, dtype=DTYPES[dtype])

    def _quantize(self, bits: str) -> None:
        from torchao.quantization import Int8WeightOnlyConfig, IntxWeightOnlyConfig, PerGroup, quantize_

        int4 = IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=PerGroup(32))  # the groups of Q4_K_M
        quantize_(self.model, {"int8": Int8WeightOnlyConfig(), "int4": int4}[bits])

    def logits(self, prompt: list[int], token: int) -> list[float]:
        """Logits after ``prompt`` and a step with ``token``, of the first sequence."""
        cache = self._cache()
        for ids in (prompt, [token]):
            out = self._call(torch.tensor([ids] * self.batch), cache)
        return list(out.logits[0, -1].float().tolist())

    def step(self, tokens: int) -> float:
        """Seconds of one step after ``tokens`` tokens, of which the cache holds random rows."""
        return self.steps.step(self.form, tokens, None)[0]

    def prompt(self, tokens: int) -> float:
        """Seconds of a prompt on an empty cache."""
        ids, cache = torch.arange(tokens).repeat(self.batch, 1) % 250, self._cache()
        return timed(lambda: self._call(ids, cache))

    def _cache(self) -> Any:
        from transformers import DynamicCache

        return DynamicCache(config=self.model.config)

    def _call(self, ids: torch.Tensor, cache: Any) -> Any:
        return self.steps.calls[self.form](input_ids=ids, past_key_values=cache, use_cache=True)


if __name__ == "__main__":
    form, model, dtype, *sizes = sys.argv[1:]
    with torch.no_grad():
        peer = TorchPeer(form, model, dtype, *map(int, sizes))
        serve({"logits": peer.logits, "step": peer.step, "prompt": peer.prompt})

"""Export a transformers model to ONNX and generate with ONNX Runtime: the same tokens, nothing of PyTorch at run time.

The model is tiny and has random weights, so that the example runs anywhere. Needs the extra ``onnx``.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import torch
from transformers import MiniCPM3Config, MiniCPM3ForCausalLM

import mla_compile
from mla_compile.onnx import Session, generate


def tiny_model() -> MiniCPM3ForCausalLM:
    """MiniCPM3's architecture with one small layer."""
    torch.manual_seed(0)
    config = MiniCPM3Config(
        vocab_size=256,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=4,
        q_lora_rank=48,
        kv_lora_rank=64,
        qk_nope_head_dim=32,
        qk_rope_head_dim=16,
        v_head_dim=24,
        initializer_range=0.1,
        eos_token_id=None,
        pad_token_id=0,
    )
    return MiniCPM3ForCausalLM(config).eval()


def main(arguments: list[str] | None = None) -> None:
    """Export, load, generate."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=16)
    given = parser.parse_args(arguments)
    model = tiny_model()
    prompt = torch.randint(2, 256, (1, 12))
    expected = model.generate(prompt, max_new_tokens=given.tokens, do_sample=False)[0, 12:].tolist()
    with tempfile.TemporaryDirectory() as folder:
        done = mla_compile.export_onnx(model, Path(folder) / "model", profile="inplace")
        print(done.verification)
        session = Session(Path(folder) / "model")
        (tokens,) = generate(session, prompt.tolist(), max_new_tokens=given.tokens)
    print("tokens: ", tokens)
    print("the same as the original's:", tokens == expected)


if __name__ == "__main__":
    main()

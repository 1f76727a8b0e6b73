"""llama.cpp, through the bindings of llama-cpp-python, in an environment without torch.

Weights come as arrays of 16 bits in a ``.npz`` file under their names in transformers, and become a GGUF file, once
for each precision. The file is read as a script: nothing of mla_compile is installed where it runs.
"""

from __future__ import annotations

import ctypes
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import llama_cpp as api
import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
from protocol import serve, timed  # isort: skip  # by its path

PIECE = 512
"""Tokens of a prompt that are run at once, llama.cpp's own default."""

NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.q_a_proj": "attn_q_a",
    "self_attn.q_a_layernorm": "attn_q_a_norm",
    "self_attn.q_b_proj": "attn_q_b",
    "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa",
    "self_attn.kv_a_layernorm": "attn_kv_a_norm",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
OUTER = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def tensors(stored: Any, sizes: dict[str, int]) -> Iterator[tuple[str, np.ndarray]]:
    """Names and bfloat16 bits of all tensors as llama.cpp has them: W_kc [H,L,N] and W_v [H,V,L] of kv_b_proj apart."""
    for name in stored.files:
        bits, path = stored[name], name.removesuffix(".weight")
        if path in OUTER:
            yield OUTER[path] + ".weight", bits
            continue
        layer, _, part = path.removeprefix("model.layers.").partition(".")
        if part == "self_attn.kv_b_proj":
            heads = bits.reshape(sizes["H"], sizes["N"] + sizes["V"], sizes["L"])
            keys, values = heads[:, : sizes["N"]], heads[:, sizes["N"] :]
            yield f"blk.{layer}.attn_k_b.weight", np.ascontiguousarray(keys.transpose(0, 2, 1))
            yield f"blk.{layer}.attn_v_b.weight", np.ascontiguousarray(values)
        else:
            yield f"blk.{layer}.{NAMES[part]}.weight", bits


def write(folder: Path, out: Path) -> None:
    """The GGUF file of a model with dense MLPs, in bfloat16."""
    sizes = json.loads((folder / "sizes.json").read_text())
    writer = gguf.GGUFWriter(str(out), "deepseek2")
    writer.add_context_length(sizes["context"])
    writer.add_embedding_length(sizes["D"])
    writer.add_block_count(sizes["layers"])
    writer.add_leading_dense_block_count(sizes["layers"])
    writer.add_feed_forward_length(sizes["ffn"])
    writer.add_head_count(sizes["H"])
    writer.add_head_count_kv(1)
    writer.add_layer_norm_rms_eps(sizes["eps"])
    writer.add_rope_freq_base(sizes["theta"])
    writer.add_rope_dimension_count(sizes["R"])
    writer.add_kv_lora_rank(sizes["L"])
    if sizes["Q"]:
        writer.add_q_lora_rank(sizes["Q"])
    writer.add_key_length(sizes["L"] + sizes["R"])
    writer.add_value_length(sizes["L"])
    writer.add_key_length_mla(sizes["N"] + sizes["R"])
    writer.add_value_length_mla(sizes["V"])
    writer.add_vocab_size(sizes["vocabulary"])
    # No layer has experts, but llama.cpp reads their sizes for every model of this architecture.
    writer.add_expert_count(4)
    writer.add_expert_used_count(2)
    writer.add_expert_shared_count(1)
    writer.add_expert_feed_forward_length(sizes["ffn"])
    writer.add_expert_weights_scale(1.0)
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SOFTMAX)
    writer.add_tokenizer_model("no_vocab")
    with np.load(folder / "weights.npz") as stored:
        for name, bits in tensors(stored, sizes):
            if bits.ndim == 1:
                writer.add_tensor(name, (bits.astype(np.uint32) << 16).view(np.float32))
            else:
                writer.add_tensor(name, bits.view(np.uint8), raw_dtype=gguf.GGMLQuantizationType.BF16)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
    writer.close()


FILE_TYPES = {"q8_0": "LLAMA_FTYPE_MOSTLY_Q8_0", "q4_k_m": "LLAMA_FTYPE_MOSTLY_Q4_K_M"}


def prepared(folder: Path, precision: str) -> Path:
    """The model's file in a precision, written where it is not there yet."""
    file = folder / f"{precision}.gguf"
    if file.exists():
        return file
    part = file.with_suffix(".part")
    if precision == "bfloat16":
        write(folder, part)
    else:
        given = api.llama_model_quantize_default_params()
        given.ftype = getattr(api, FILE_TYPES[precision])
        source = prepared(folder, "bfloat16")
        if api.llama_model_quantize(str(source).encode(), str(part).encode(), ctypes.byref(given)):
            raise RuntimeError(f"llama.cpp cannot write {precision}")
    part.rename(file)
    return file


class LlamaPeer:
    """One model with flash attention, which measures better than without, and a cache in float16, its default."""

    def __init__(self, file: Path, batch: int, longest: int, threads: int) -> None:
        api.llama_backend_init()
        given = api.llama_model_default_params()
        self.model = api.llama_model_load_from_file(str(file).encode(), given)
        if not self.model:
            raise RuntimeError("llama.cpp does not load the file")
        self.batch, self.held = batch, 0
        context = api.llama_context_default_params()
        context.n_ctx, context.n_batch, context.n_ubatch = batch * (longest + PIECE), PIECE, PIECE
        context.n_seq_max, context.n_threads, context.n_threads_batch = batch, threads, threads
        context.flash_attn_type = api.LLAMA_FLASH_ATTN_TYPE_ENABLED
        self.context = api.llama_init_from_model(self.model, context)
        if not self.context:
            raise RuntimeError("llama.cpp has no context of this size")
        self.memory = api.llama_get_memory(self.context)
        self.vocabulary = api.llama_vocab_n_tokens(api.llama_model_get_vocab(self.model))
        self.tokens = api.llama_batch_init(PIECE, 0, 1)

    def _run(self, rows: list[tuple[int, int, int]]) -> None:
        """Run (token, position, sequence); logits are made for the last token of each sequence."""
        last = {sequence: k for k, (_, _, sequence) in enumerate(rows)}
        for k, (token, position, sequence) in enumerate(rows):
            self.tokens.token[k], self.tokens.pos[k] = token, position
            self.tokens.n_seq_id[k], self.tokens.seq_id[k][0] = 1, sequence
            self.tokens.logits[k] = last[sequence] == k
        self.tokens.n_tokens = len(rows)
        if (failed := api.llama_decode(self.context, self.tokens)) != 0:
            raise RuntimeError(f"llama_decode says {failed}")

    def _fill(self, tokens: int) -> None:
        """All sequences hold ``tokens`` tokens from now on."""
        if tokens < self.held:
            for sequence in range(self.batch):
                api.llama_memory_seq_rm(self.memory, sequence, tokens, -1)
            self.held = tokens
        while self.held < tokens:
            end = min(self.held + PIECE, tokens)
            for sequence in range(self.batch):
                self._run([(place % 250, place, sequence) for place in range(self.held, end)])
            self.held = end

    def logits(self, prompt: list[int], token: int) -> list[float]:
        """Logits after ``prompt`` and a step with ``token``, of the first sequence."""
        self._fill(0)
        for sequence in range(self.batch):
            self._run([(one, place, sequence) for place, one in enumerate(prompt)])
        self._run([(token, len(prompt), sequence) for sequence in range(self.batch)])
        found = api.llama_get_logits_ith(self.context, 0)
        self.held = len(prompt) + 1
        made = [float(found[k]) for k in range(self.vocabulary)]
        self._fill(0)
        return made

    def step(self, tokens: int) -> float:
        """Seconds of one step after ``tokens`` tokens."""
        self._fill(tokens)
        seconds = timed(lambda: self._run([(7, tokens, sequence) for sequence in range(self.batch)]))
        self.held += 1
        self._fill(tokens)
        return seconds

    def prompt(self, tokens: int) -> float:
        """Seconds of a prompt on an empty cache."""
        self._fill(0)
        return timed(lambda: self._fill(tokens))


@ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)
def quiet(*_: Any) -> None:
    """Take llama.cpp's messages, hundreds of lines, and drop them."""


if __name__ == "__main__":
    api.llama_log_set(quiet, ctypes.c_void_p())
    place, precision, *given = sys.argv[1:]
    peer = LlamaPeer(prepared(Path(place), precision), *map(int, given))
    serve({"logits": peer.logits, "step": peer.step, "prompt": peer.prompt})

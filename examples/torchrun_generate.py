"""Generate with a model whose heads are shared by several processes, each with its absorbed part of the attention.

    torchrun --nproc-per-node 2 examples/torchrun_generate.py [--share-cache]

The model is tiny and has random weights; it is saved to a folder and loaded from there with the tensor parallel plan
that its class in transformers has (``DistributedConfig(tp_plan="auto")``), as a checkpoint would be. The number of
heads (4) has to be a multiple of the number of processes.
"""

from __future__ import annotations

import argparse
import tempfile

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from transformers import MiniCPM3Config, MiniCPM3ForCausalLM
from transformers.distributed import DistributedConfig

import mla_compile


def tiny_model() -> MiniCPM3ForCausalLM:
    """MiniCPM3's architecture with two small layers."""
    torch.manual_seed(0)
    config = MiniCPM3Config(
        vocab_size=256,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        q_lora_rank=48,
        kv_lora_rank=64,
        qk_nope_head_dim=32,
        qk_rope_head_dim=16,
        v_head_dim=24,
        scale_emb=1.0,
        dim_model_base=64,
        initializer_range=0.2,
    )
    return MiniCPM3ForCausalLM(config).eval()


def main(arguments: list[str] | None = None) -> None:
    """Generate with one process and with all of them, and print what each of them absorbed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--codegen", choices=("inductor", "eager"), default="inductor")
    parser.add_argument("--share-cache", action="store_true", help="each process keeps its share of the cached rows")
    given = parser.parse_args(arguments)
    if not dist.is_torchelastic_launched():
        parser.error("start it with torchrun: torchrun --nproc-per-node 2 examples/torchrun_generate.py")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, count = dist.get_rank(), dist.get_world_size()

    whole = tiny_model()
    with tempfile.TemporaryDirectory() as own:
        folder = [own]
        dist.broadcast_object_list(folder)  # that of rank 0, which alone writes
        whole.save_pretrained(folder[0])
        dist.barrier()
        parts = DistributedConfig(tp_plan="auto", tp_size=count)
        model = MiniCPM3ForCausalLM.from_pretrained(folder[0], distributed_config=parts).eval()
        dist.barrier()
    context = init_device_mesh("cpu", (count,)) if given.share_cache else None
    fast = mla_compile.optimize(model, codegen=given.codegen, context_parallel=context)

    torch.manual_seed(0)
    prompt = torch.randint(2, 256, (1, 12))
    settings = {"max_new_tokens": given.tokens, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    expected = whole.generate(prompt, **settings)
    tokens = fast.generate(prompt, **settings)
    for turn in range(count):  # one after the other, so that the lines do not mix
        if turn == rank:
            print(f"rank {rank} of {count}:", tokens[0, 12:].tolist())
            print("the same as one process's:", torch.equal(tokens, expected))
            print(fast.mla_report, flush=True)
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""Generate with data-parallel attention and tensor-parallel experts: each process decodes sequences of its own.

    torchrun --nproc-per-node 2 examples/torchrun_data_parallel.py

Latent rows belong to all heads, so processes that divide the heads among them hold the same rows each. Here every
process has all of the attention, its own sequences and the rows of these alone. The routed experts, most of the weights
of a large model, are divided: each process has a slice of every expert. The tokens of all processes are gathered before
the experts, each computes its part for all of them, and the parts are summed on the process that has the token.

The processes have to call the model together, with equal numbers of sequences and of tokens: prompts are padded to one
length, and a process whose sequences have ended goes on (``synced_gpus=True``) until those of the others have. The
lengths of the prompts, and which sequences end when, are each process's own.

The model is tiny and has random weights. The number of processes has to divide the width of an expert (64).
"""

from __future__ import annotations

import argparse
import copy
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_gather_tensor, reduce_scatter_tensor
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

import mla_compile

WIDTH = 12


class ExpertsForAll(nn.Module):
    """A slice of every expert, for the tokens of all processes."""

    def __init__(self, whole: Any, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.group = group
        self.slices = copy.deepcopy(whole)
        rank, count = dist.get_rank(group), dist.get_world_size(group)
        gate, up = whole.gate_up_proj.chunk(2, dim=1)  # experts, columns, hidden
        own = [part.chunk(count, dim=1)[rank] for part in (gate, up)]
        self.slices.gate_up_proj = nn.Parameter(torch.cat(own, dim=1), requires_grad=False)
        self.slices.down_proj = nn.Parameter(whole.down_proj.chunk(count, dim=2)[rank].clone(), requires_grad=False)

    def forward(self, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """What the chosen experts make of this process's tokens."""
        hidden, chosen, weights = (all_gather_tensor(x, 0, self.group) for x in (hidden, chosen, weights))
        return reduce_scatter_tensor(self.slices(hidden, chosen, weights), "sum", 0, self.group)


def tiny_model() -> DeepseekV3ForCausalLM:
    """DeepSeek-V3's architecture with two small layers, the second with experts."""
    torch.manual_seed(0)
    config = DeepseekV3Config(
        vocab_size=256,
        hidden_size=128,
        intermediate_size=256,
        moe_intermediate_size=64,
        num_hidden_layers=2,
        first_k_dense_replace=1,
        n_routed_experts=8,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        num_attention_heads=4,
        num_key_value_heads=4,
        q_lora_rank=48,
        kv_lora_rank=64,
        qk_nope_head_dim=32,
        qk_rope_head_dim=16,
        v_head_dim=24,
        initializer_range=0.2,
    )
    return DeepseekV3ForCausalLM(config).eval()


def own_prompts(rank: int, sequences: int) -> dict[str, Tensor]:
    """The prompts of a process: of different lengths, padded on the left to the width that all processes have."""
    draw = torch.Generator().manual_seed(rank)
    padding = torch.arange(sequences)[:, None] + rank
    mask = (torch.arange(WIDTH) >= padding).long()
    return {"input_ids": torch.randint(2, 256, (sequences, WIDTH), generator=draw) * mask, "attention_mask": mask}


def main(arguments: list[str] | None = None) -> None:
    """Generate with each process's own model and with the divided one, and print what each of them absorbed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sequences", type=int, default=2, help="of each process")
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--end", type=int, default=170, help="the token that ends a sequence: this one ends rank 1's")
    parser.add_argument("--codegen", choices=("inductor", "eager"), default="inductor")
    given = parser.parse_args(arguments)
    if not dist.is_torchelastic_launched():
        parser.error("start it with torchrun: torchrun --nproc-per-node 2 examples/torchrun_data_parallel.py")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, count, group = dist.get_rank(), dist.get_world_size(), dist.group.WORLD
    assert group is not None

    whole = tiny_model()
    divided = copy.deepcopy(whole)
    for layer in divided.model.layers:
        if hasattr(layer.mlp, "experts"):
            layer.mlp.experts = ExpertsForAll(layer.mlp.experts, group)
    fast = mla_compile.optimize(divided, codegen=given.codegen)

    prompts = own_prompts(rank, given.sequences)
    settings = {"max_new_tokens": given.tokens, "do_sample": False, "pad_token_id": 0, "eos_token_id": given.end}
    expected = whole.generate(**prompts, **settings)
    tokens = fast.generate(**prompts, **settings, synced_gpus=True)
    for turn in range(count):  # one after the other, so that the lines do not mix
        if turn == rank:
            print(f"rank {rank} of {count}:", tokens[:, WIDTH:].tolist())
            print("the same as one process's:", torch.equal(tokens, expected))
            print(fast.mla_report, flush=True)
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

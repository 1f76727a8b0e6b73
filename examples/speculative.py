"""Speculative decoding: a draft guesses some tokens, and one call of the optimized target checks all of them.

Such a call has a few queries where plain decoding has one, which is still far below the number from which expanding K
and V is cheaper. The draft here is the target with coarsely rounded weights: any other would guess nothing of a model
with random weights. generate() does the rest, and its tokens are those of plain greedy decoding.
"""

from __future__ import annotations

import argparse
import copy
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

import mla_compile


def tiny_model() -> DeepseekV3ForCausalLM:
    """DeepSeek-V3's architecture with one small layer."""
    torch.manual_seed(0)
    config = DeepseekV3Config(
        vocab_size=256,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=1,
        first_k_dense_replace=1,
        num_attention_heads=4,
        num_key_value_heads=4,
        q_lora_rank=48,
        kv_lora_rank=64,
        qk_nope_head_dim=48,
        qk_rope_head_dim=16,
        v_head_dim=40,
        initializer_range=0.1,
    )
    return DeepseekV3ForCausalLM(config).eval()


def make_draft(model: DeepseekV3ForCausalLM, levels: int, guesses: int) -> DeepseekV3ForCausalLM:
    """A copy whose weights have so many levels on each side of zero, and that always guesses so many tokens."""
    draft = copy.deepcopy(model)
    with torch.no_grad():
        for weight in draft.parameters():
            if weight.dim() == 2:
                step = weight.abs().amax(dim=1, keepdim=True) / levels
                weight.copy_((weight / step).round() * step)
    draft.generation_config.num_assistant_tokens = guesses
    draft.generation_config.num_assistant_tokens_schedule = "constant"
    draft.generation_config.assistant_confidence_threshold = 0.0
    return draft


def watch(model: torch.nn.Module, run: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, list[tuple[int, str]]]:
    """What ``run`` returns, and for each call of ``model`` its number of tokens and the form it took."""
    ranges: list[record_function] = []

    def start(_: Any, args: Any, kwargs: Any) -> None:
        ranges.append(record_function(f"target {(args[0] if args else kwargs['input_ids']).shape[1]}").__enter__())

    hooks = [
        model.register_forward_pre_hook(start, with_kwargs=True),
        model.register_forward_hook(lambda *_: ranges.pop().__exit__(None, None, None)),
    ]
    with profile(activities=[ProfilerActivity.CPU]) as done:
        result = run()
    for hook in hooks:
        hook.remove()
    events = done.events() or []
    # The absorbed form is the one that calls our operator.
    absorbed = [e.time_range.start for e in events if e.name == "mla_compile::decode_attention"]
    calls = []
    for call in (e for e in events if e.name.startswith("target ")):
        inside = any(call.time_range.start <= moment <= call.time_range.end for moment in absorbed)
        calls.append((int(call.name.split()[1]), "absorbed" if inside else "expanded"))
    return result, calls


def main(arguments: list[str] | None = None) -> None:
    """Greedy decoding of the original, then speculative decoding with the optimized target."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--guesses", type=int, default=5, help="tokens the draft guesses each time")
    parser.add_argument("--levels", type=int, default=16, help="levels of the draft's weights: fewer guess worse")
    parser.add_argument("--codegen", choices=("inductor", "eager"), default="inductor")
    given = parser.parse_args(arguments)
    target = tiny_model()
    draft = make_draft(target, given.levels, given.guesses)
    fast = mla_compile.optimize(target, codegen=given.codegen)
    prompt = torch.randint(2, 256, (1, 12))
    settings = {"max_new_tokens": given.tokens, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    expected = target.generate(prompt, **settings)

    def speculate() -> torch.Tensor:
        return fast.generate(prompt, assistant_model=draft, **settings)

    speculate()  # compiles what is needed
    tokens, calls = watch(fast, speculate)
    print("tokens:", tokens[0, 12:].tolist())
    print("the same as the original's, decoded one by one:", torch.equal(tokens, expected))
    for (queries, form), count in sorted(Counter(calls).items(), reverse=True):
        print(f"calls of {queries} tokens, {form}: {count}")
    guessed = sum(queries - 1 for queries, _ in calls[1:]) + given.guesses  # the first call has the prompt too
    accepted = given.tokens - len(calls)  # every call adds one token of the target's own
    print(f"{accepted} of {guessed} guesses accepted: {given.tokens} tokens in {len(calls)} calls of the target")
    print(fast.mla_report.summary())


if __name__ == "__main__":
    main()

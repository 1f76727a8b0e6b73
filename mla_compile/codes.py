"""Stable codes for the outcome at an attention site. Each code has a one-line meaning and advice for the user.

Codes are part of the public interface, because scripts and tests match on them. A code is never renamed and never gets
another meaning.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Literal

VerdictName = Literal["absorbed", "kept", "refused", "not_mla"]


class Code(str, Enum):
    """Why a site has its verdict: absorbed, kept, refused or not MLA. Each code equals its plain string."""

    ABSORBED = "absorbed"

    COST_PREFILL = "cost_prefill"
    COST_LATENT_WIDE = "cost_latent_wide"
    FORMS_EXPANDED = "forms_expanded"
    KEYS_USED_ELSEWHERE = "keys_used_elsewhere"
    VALUES_USED_ELSEWHERE = "values_used_elsewhere"
    PER_HEAD_ROPE = "per_head_rope"
    VERIFY_FAILED = "verify_failed"
    CODE_FAILED = "code_failed"
    TOO_MANY_SOURCES = "too_many_sources"
    TRAINING = "training"
    RANKS_DIFFER = "ranks_differ"
    ALREADY_ABSORBED = "already_absorbed"
    SHARED_ROWS = "shared_rows"

    POSITION_DEPENDENT = "position_dependent"
    NONLINEAR = "nonlinear"
    TOKEN_MIXING = "token_mixing"
    HEAD_DEPENDENT_LATENT = "head_dependent_latent"
    SOFTMAX_AXIS = "softmax_axis"
    NOT_SOFTMAX = "not_softmax"
    DROPOUT = "dropout"
    MASK_DEPENDS_ON_KEYS = "mask_depends_on_keys"
    UNSUPPORTED_WEIGHT = "unsupported_weight"
    QUANTIZED_ROWS = "quantized_rows"
    UNKNOWN_PRODUCT = "unknown_product"
    UNSUPPORTED_OP = "unsupported_op"
    COLLECTIVE = "collective"
    GRAPH_BREAK = "graph_break"
    WRAPPED_FORWARD = "wrapped_forward"
    EXPANDED_INPUTS = "expanded_inputs"
    EXPANDED_CACHE = "expanded_cache"

    NOT_MLA = "not_mla"

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True)
class CodeInfo:
    """The usual verdict of a code, its one-line meaning, and generic advice (``None`` if there is none)."""

    verdict: VerdictName
    meaning: str
    fix: str | None = None


PLAIN = "MHA, GQA or MQA"
"""The kinds of attention that are not MLA."""


CODES: dict[Code, CodeInfo] = {
    Code.ABSORBED: CodeInfo("absorbed", "decode attention reads the latent rows; K and V are not expanded"),
    Code.COST_PREFILL: CodeInfo(
        "kept",
        "this call has so many queries that expanding K and V once is cheaper",
        'forms="absorbed" forces the absorbed form; needed only where all calls need the same numerics',
    ),
    Code.COST_LATENT_WIDE: CodeInfo(
        "kept",
        "the rows are as wide as the K and V computed from them, and the graph does not show that the rows are cached",
    ),
    Code.FORMS_EXPANDED: CodeInfo(
        "kept", 'the option forms="expanded" asks for the original form', 'use forms="auto" or forms="absorbed"'
    ),
    Code.KEYS_USED_ELSEWHERE: CodeInfo(
        "kept",
        "something besides this attention reads the expanded keys, so they are computed anyway",
        "cache or return the latent instead of the expanded keys",
    ),
    Code.VALUES_USED_ELSEWHERE: CodeInfo(
        "kept",
        "something besides this attention reads the expanded values, so they are computed anyway",
        "cache or return the latent instead of the expanded values",
    ),
    Code.PER_HEAD_ROPE: CodeInfo(
        "kept",
        "each head has its own rotary key, so the cached rows would be as wide as K",
        "share one rotary key between the heads, as MLA does",
    ),
    Code.VERIFY_FAILED: CodeInfo(
        "kept",
        "the rewritten attention failed its check against float64: its error exceeds what the original's error allows",
        "please report it with the dims and dtype shown; run this site in float32 to see whether rounding is the cause",
    ),
    Code.CODE_FAILED: CodeInfo(
        "kept",
        "Inductor could not compile the rewritten graph, so the original graph is compiled",
        'please report it with the message shown; codegen="eager" runs the rewritten graph without Inductor',
    ),
    Code.TOO_MANY_SOURCES: CodeInfo(
        "kept",
        "K or V is assembled from more source tensors than the absorbed form takes",
        "concatenate the sources into one latent before the up-projection",
    ),
    Code.TRAINING: CodeInfo(
        "kept",
        "gradients are enabled, and training runs in the original form",
        "call it under torch.no_grad() or torch.inference_mode()",
    ),
    Code.RANKS_DIFFER: CodeInfo(
        "kept",
        "another rank of the group does not absorb this attention, and all ranks run the same form",
        "see the report of the named rank for its reason",
    ),
    Code.ALREADY_ABSORBED: CodeInfo(
        "kept",
        "absorbed by hand: heads share one row per token, which is both key and value, and nothing is expanded",
    ),
    Code.SHARED_ROWS: CodeInfo(
        "kept",
        "heads share one row per token, which is both key and value, and no weight expands it: nothing to absorb",
    ),
    Code.POSITION_DEPENDENT: CodeInfo(
        "refused",
        "a factor that differs from token to token, such as RoPE's, lies between the up-projection and the scores",
        "apply RoPE to a separate key shared by all heads and leave the up-projected part unrotated",
    ),
    Code.NONLINEAR: CodeInfo(
        "refused",
        "a norm or another nonlinear function lies between the up-projection and the attention",
        "apply it to the latent, before the up-projection",
    ),
    Code.TOKEN_MIXING: CodeInfo(
        "refused",
        "tokens are mixed or reordered between the latent and the attention, so a key is made of rows of other tokens",
        "mix or reorder the latent rows, before the up-projection",
    ),
    Code.HEAD_DEPENDENT_LATENT: CodeInfo(
        "refused",
        "heads read different latents, so there is no one row per token that all heads share",
        "project all heads from one latent",
    ),
    Code.SOFTMAX_AXIS: CodeInfo(
        "refused",
        "the softmax does not run over the keys",
        "normalise the scores over the key axis",
    ),
    Code.NOT_SOFTMAX: CodeInfo(
        "refused",
        "the values are weighted by a function of the scores that is not a softmax, such as a sigmoid or a ReLU",
        "use a softmax; or absorb by hand, which works without one: multiply the queries by W_k and the weighted sum "
        "by W_v, add a key bias to the scores, and add a value bias times the sum of the weights to the output",
    ),
    Code.DROPOUT: CodeInfo(
        "refused", "attention dropout is active", "call model.eval(), or set the attention dropout to 0"
    ),
    Code.MASK_DEPENDS_ON_KEYS: CodeInfo(
        "refused",
        "the mask is computed from the expanded keys or values, which the absorbed form does not have",
        "compute the mask from positions or from the latent",
    ),
    Code.UNSUPPORTED_WEIGHT: CodeInfo(
        "refused",
        "an up-projection weight has a layout or dtype that cannot be used (sparse, float8), or comes from the inputs",
        "dequantize the up-projection weight in the graph, or keep it dense in bfloat16, float16 or float32; and let a "
        "module hold it, as an nn.Parameter or by register_buffer",
    ),
    Code.QUANTIZED_ROWS: CodeInfo(
        "refused",
        'rows are rounded to few bits before the up-projection, and the option quantized="exact" keeps that rounding',
        'use quantized="absorb", which multiplies unrounded rows with the dequantized weight',
    ),
    Code.UNKNOWN_PRODUCT: CodeInfo(
        "refused",
        "an operator of a library multiplies the latent by a weight in a format of its own",
        "register how the weight is dequantized, with mla_compile.register_quantized_linear",
    ),
    Code.UNSUPPORTED_OP: CodeInfo(
        "refused",
        "an operation between the latent and the attention is not known to be linear along features",
        "write that step with linear, matmul, view, transpose, slice, cat, add or mul by a constant",
    ),
    Code.COLLECTIVE: CodeInfo(
        "refused",
        "values of other ranks enter between the up-projection and the attention, so no weight of this rank makes K",
        "shard the up-projection by heads (columns), and gather or reduce after the attention or before the latent",
    ),
    Code.GRAPH_BREAK: CodeInfo(
        "refused",
        "K and V, or the scores, come from before a graph break, so what makes them is in another graph",
        "remove the graph break between the up-projection and the attention (TORCH_LOGS=graph_breaks names it); if a "
        "library wrapped the forwards of layers (quantization, placement), call mla_compile.optimize(model), which "
        "removes such wrappers or calls the layer as one operator",
    ),
    Code.WRAPPED_FORWARD: CodeInfo(
        "refused",
        "a library wrapped the forwards of modules in code that Dynamo does not trace, so the graph breaks around each "
        "of them, and K and V enter it as inputs",
        "with accelerate: load the whole model onto one device (no device_map that spreads or offloads it), or remove "
        "its hooks (accelerate.hooks.remove_hook_from_module(model, recurse=True)), then optimize() it; for several "
        "devices, use tensor parallelism; with other wrappers: restore the layer's own forward, or register its class "
        "with register_quantized_linear",
    ),
    Code.EXPANDED_INPUTS: CodeInfo(
        "refused",
        "K and V are inputs of this graph: its caller made them, so it contains neither latent nor up-projection",
        "let one module compute K and V from the latent and attend to them, and optimize that module; or pass the "
        "latent instead of K and V",
    ),
    Code.EXPANDED_CACHE: CodeInfo(
        "refused",
        "the cache holds K and V per head, so the graph does not have the latent of the cached tokens",
        "cache the latent and the rotary key; or let K and V grow by cat from an empty cache (DynamicCache); or "
        "let a module own the buffers that they are written into, with zeros in them before "
        "the first call, and use optimize(); or export the model with its "
        'cache (buffers too) as inputs of its forward and optimize that program with cache="latent"',
    ),
    Code.NOT_MLA: CodeInfo("not_mla", f"K and V are not a linear image of a narrower latent: plain {PLAIN}"),
}


OVER_ROWS = frozenset({Code.ALREADY_ABSORBED, Code.SHARED_ROWS})
"""Codes of attentions that already read shared rows. One operator may still replace such an attention."""


def section(code: Code | str) -> str:
    """Return the link to the documentation of ``code``, which shows an example module and the fix.

    Raises ``ValueError`` for a string that is not a code.
    """
    return f"docs/refusals.md#{Code(code)}"

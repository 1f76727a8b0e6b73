"""Export a causal language model: a graph for decoding, usually a second graph for prompts, and a manifest."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import onnx
import onnx_ir as ir
import torch

from mla_compile.capture.causal_lm import CacheTensor, CausalLM, export_program
from mla_compile.errors import ExportError
from mla_compile.onnx import artifact, genai, verify
from mla_compile.onnx.assemble import CacheIO, Wires, assemble
from mla_compile.onnx.attach import signature
from mla_compile.onnx.convert import Converted, convert, convert_prompt
from mla_compile.onnx.exported import DTYPES, Exported, Progress, Verification
from mla_compile.onnx.interface import attention_nodes
from mla_compile.onnx.manifest import MANIFEST, WEIGHTS, AttentionNode, Cache, Manifest
from mla_compile.onnx.profile import Profile
from mla_compile.options import Options
from mla_compile.version import __version__

_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def export(lm: CausalLM, stage: Path, profile: Profile, options: Options, *, prefill: bool, say: Progress) -> Exported:
    """Write everything except the report into ``stage``. ``options`` apply to the decode graph only."""
    dtype = _NAMES[lm.dtype]
    one_graph = bool(profile.runner)
    say("tracing and rewriting the decode graph")
    decode, one_token = _decode(lm, options, profile)
    wires = Wires(
        tuple(f"{c.attribute}.{c.layer}" + ("" if c.key is None else f".{c.key}") for c in lm.caches),
        tuple(c.axis is not None for c in lm.caches),
    )
    caches = assemble(decode, wires, profile)
    file = "model.onnx" if one_graph else "decode.onnx"
    graphs = {file: decode}
    if prefill and not one_graph and not one_token:
        say("tracing the prompt's graph")
        program = export_program(lm, last_only=True, experts="eager")
        second = convert_prompt(program, profile.opset)
        assemble(second, wires, profile, [c.past.removeprefix("past_") for c in caches])
        graphs["prefill.onnx"] = second
    say("writing weights")
    nodes = [_node(n) for n in attention_nodes(decode.model.graph)]
    files = artifact.write_graphs({name: made.model for name, made in graphs.items()}, stage)
    for name in graphs:
        onnx.checker.check_model(str(stage / name), full_check=True)
    verification = _verify(lm, stage, graphs, caches, profile, dtype, say, one_token=one_token, check=options.verify)
    manifest = Manifest(
        profile=profile.name,
        dtype=dtype,
        opset=profile.opset,
        minimum_onnxruntime=profile.minimum_onnxruntime,
        created_by=f"mla_compile {__version__}",
        graphs={name.removesuffix(".onnx").replace("model", "decode"): name for name in graphs},
        files=files,
        decode_query=1 if one_token else None,
        caches=tuple(_cache(c, entry.dtype) for c, entry in zip(caches, _entries(lm, caches), strict=True)),
        attention=tuple(nodes),
        weights_sha256=files[WEIGHTS].sha256,
        **_vocabulary(lm.model),
    )
    (stage / MANIFEST).write_text(manifest.to_json())
    if profile.layout == "halves":
        genai.write_config(lm.model, manifest, stage)
    return Exported(stage, profile.name, decode.report, verification)


def _decode(lm: CausalLM, options: Options, profile: Profile) -> tuple[Converted, bool]:
    """Return the decode graph, and whether it takes only one token per call.

    A model that cannot be traced with several tokens is traced with one.
    """
    try:
        program = export_program(lm, last_only=False, experts="batched_mm")
    except ExportError as several:
        if profile.runner:
            raise
        try:
            program = export_program(lm, last_only=False, experts="batched_mm", one_token=True)
        except ExportError:
            raise several from None
        return convert(program, options, profile.opset), True
    return convert(program, options, profile.opset), False


def _verify(
    lm: CausalLM,
    stage: Path,
    graphs: Mapping[str, Converted],
    caches: list[CacheIO],
    profile: Profile,
    dtype: str,
    say: Progress,
    *,
    one_token: bool,
    check: bool,
) -> Verification:
    if not check:
        return Verification(reason="verify=False")
    say("comparing with the original")
    why_not = verify.runs_here(dtype, profile)
    readers: list[verify.TokenReader]
    if why_not:
        readers = [verify.ProgramRunner(made.program, lm) for made in graphs.values()]
    else:
        dtypes = [_NAMES[c.dtype] for c in _entries(lm, caches)]
        readers = [verify.Runner(stage / name, caches, profile, dtypes) for name in graphs]
    return verify.verify(lm, readers[0], readers[1] if len(readers) > 1 else None, dtype, why_not, one_token=one_token)


def _entries(lm: CausalLM, caches: list[CacheIO]) -> list[CacheTensor]:
    """Return the model's cache tensor for each cache of the graph.

    If their numbers differ (pages hold whole rows), every cache gets the model's first tensor.
    """
    return list(lm.caches) if len(lm.caches) == len(caches) else [lm.caches[0]] * len(caches)


def _cache(cache: CacheIO, dtype: torch.dtype) -> Cache:
    axis = next((i for i, d in enumerate(cache.shape) if d is None and i > 0), None)
    return Cache(cache.past, cache.present, axis, ("batch", *cache.shape[1:]), _NAMES[dtype], cache.grows)


def _node(node: ir.Node) -> AttentionNode:
    s = signature(node)
    query = node.inputs[0]
    assert query is not None
    assert query.shape is not None
    out = node.outputs[0].shape
    assert out is not None
    mask = None if s.mask is None else "bool" if s.mask == onnx.TensorProto.BOOL else "float"
    softcap, window = node.attributes.get("softcap"), node.attributes.get("window")
    return AttentionNode(
        H=int(query.shape[2]),
        La=s.La,
        Lb=s.Lb,
        Lv=int(out[3]),
        mask=mask,
        sinks=s.sinks,
        softcap=float(softcap.value) if softcap else 0.0,
        window=int(window.value) if window else 0,
        values=s.values,
        value_width=s.value_width,
    )


def _vocabulary(model: torch.nn.Module) -> dict[str, Any]:
    config = getattr(model, "config", None)
    generation = getattr(model, "generation_config", None)

    def first(name: str) -> Any:
        return next((v for source in (generation, config) if (v := getattr(source, name, None)) is not None), None)

    eos = first("eos_token_id")
    eos_ids = tuple(eos) if isinstance(eos, (list, tuple)) else () if eos is None else (int(eos),)
    pad = first("pad_token_id")
    limit = getattr(config, "max_position_embeddings", None)
    return {
        "vocab_size": verify.vocabulary(model),
        "max_position": int(limit) if limit else None,
        "eos_token_ids": eos_ids,
        "pad_token_id": int(pad) if pad is not None else eos_ids[0] if eos_ids else 0,
    }

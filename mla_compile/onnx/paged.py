"""Profile ``ort-paged``: ``com.microsoft::PagedAttention`` over pages of latent rows (ONNX Runtime 1.29, CUDA).

Before: ``DecodeAttention(query, Concat(past, new), ..., mask)`` on [B,S,...].

After: ``PagedAttention(query, new rows, pages, lengths, block table)`` on packed tokens, [1,tokens,...]. The operator
appends the rows and hides only later tokens, so the model's mask must not hide any other key. To check this, the mask
is evaluated.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from mla_compile.errors import ExportError
from mla_compile.onnx.engine import cpu_session, errors, onnxruntime
from mla_compile.onnx.interface import GrowingCache, Site
from mla_compile.onnx.ir_tools import Editor, consumers, remove_unread, replace_input, shape_range

DOMAIN = "com.microsoft"
LENGTHS = (
    ("cumulative_sequence_length", ["sequences_plus_one"]),
    ("past_seqlens", ["sequences"]),
    ("block_table", ["sequences", "blocks_per_sequence"]),
)
_SIZES = ((1, 5, 0), (1, 1, 9), (1, 4, 7), (2, 3, 6))  # batch, new tokens, cached tokens


def in_pages(
    graph: ir.Graph, appends: Sequence[GrowingCache], found: Sequence[Site]
) -> list[tuple[ir.Value, ir.Value]]:
    """Replace every attention, and remove the caches from the graph. Return the new input and output of each attention.

    Raises :class:`ExportError` if the operator does not support what the model does.
    """
    used = {index for site in found for index in (site.latent, site.rope) if index is not None}
    if len(used) != len(appends) or any(site.latent is None for site in found):
        raise ExportError("profile 'ort-paged' keeps latent rows only, and this model has caches of another kind")
    tokens, attention_mask = graph.inputs[0], graph.inputs[1]
    for mask, causal in dict.fromkeys(_mask_of(site.node) for site in found):
        if mask is not None:
            _check_causal(graph, mask, tokens, attention_mask, [a.past for a in appends], causal=causal)
    lengths = []
    for name, shape in LENGTHS:
        lengths.append(ir.Value(name=name, type=ir.TensorType(ir.DataType.INT32), shape=ir.Shape(shape)))
    pages = [_replace(graph, number, site, appends, lengths) for number, site in enumerate(found)]
    del graph.outputs[1:]
    remove_unread(graph)
    for append in appends:
        _batch_from(graph, append.past, tokens)
        if consumers(append.past):
            readers = ", ".join(sorted({n.op_type for n, _ in consumers(append.past)}))
            raise ExportError(f"profile 'ort-paged' cannot be made: {readers} reads {append.past.name!r} directly")
    if consumers(attention_mask):
        raise ExportError("profile 'ort-paged' cannot be made: the model uses its attention mask outside of attention")
    logits, positions = graph.outputs[0], graph.inputs[2]
    del graph.inputs[1:]
    graph.inputs.extend([positions, *lengths, *(past for past, _ in pages)])
    graph.outputs.extend([present for _, present in pages])
    remove_unread(graph)
    assert graph.outputs[0] is logits
    return pages


def _batch_from(graph: ir.Graph, past: ir.Value, tokens: ir.Value) -> None:
    """Read the batch size from the token ids wherever the graph reads it from ``past``."""
    for node, _ in consumers(past):
        if node.op_type == "Shape" and shape_range(node, 3) == (0, 1):
            batch = Editor(graph, node, f"{past.name}/batch").op("Shape", tokens, start=0, end=1)
            replace_input(node.outputs[0], batch, consumers(node.outputs[0]))
    remove_unread(graph)


def _replace(
    graph: ir.Graph, number: int, site: Site, appends: Sequence[GrowingCache], lengths: Sequence[ir.Value]
) -> tuple[ir.Value, ir.Value]:
    node = site.node
    attributes = {name: a.value for name, a in node.attributes.items()}
    extra = [n for n in ("softcap", "window", "causal") if attributes.get(n)]
    if any(v is not None for v in node.inputs[4:]) or [n for n in extra if n != "causal"]:
        raise ExportError(
            "profile 'ort-paged' cannot be made: PagedAttention with latent rows has no sinks, soft-cap, window or "
            "values of their own"
        )
    assert site.latent is not None
    rows = [appends[site.latent], *([appends[site.rope]] if site.rope is not None else [])]
    query = node.inputs[0]
    assert query is not None
    assert query.shape is not None
    H, width = query.shape[2], query.shape[3]
    L = rows[0].past.shape[2] if rows[0].past.shape is not None else 0
    assert isinstance(H, int)
    assert isinstance(width, int)
    assert isinstance(L, int)
    dtype = rows[0].past.dtype
    assert dtype is not None
    edit = Editor(graph, node, f"layer.{number}/paged")
    flat = edit.op("Reshape", query, edit.ints(-1, H * width))
    if query.dtype != dtype:
        flat = edit.op("Cast", flat, to=int(dtype))
    key = rows[0].new if len(rows) == 1 else edit.op("Concat", *(a.new for a in rows), axis=2)
    key = edit.op("Reshape", key, edit.ints(-1, width))
    pages = ir.Value(
        name=f"past_rows.{number}", type=ir.TensorType(dtype), shape=ir.Shape(["blocks", "block_size", 1, width])
    )
    paged = ir.node(
        "PagedAttention",
        [flat, key, None, pages, None, *lengths],
        domain=DOMAIN,
        attributes={
            "num_heads": H,
            "kv_num_heads": 1,
            "kv_cache_layout": "LATENT",
            "v_head_size": L,
            "scale": float(attributes["scale"]),
        },
        num_outputs=2,
        name=f"layer.{number}/paged_attention",
    )
    out, present = paged.outputs
    out.name, present.name = f"layer.{number}/attended", f"present_rows.{number}"
    present.type, present.shape = pages.type, pages.shape
    graph.insert_before(node, paged)
    out = edit.op("Reshape", out, edit.ints(1, -1, H, L))
    if query.dtype != dtype and query.dtype is not None:
        out = edit.op("Cast", out, to=int(query.dtype))
    replace_input(node.outputs[0], out, consumers(node.outputs[0]))
    return pages, present


def _mask_of(node: ir.Node) -> tuple[ir.Value | None, bool]:
    """Return an attention's mask, and whether the attention is also causal."""
    causal = node.attributes.get("causal")
    return node.inputs[3] if len(node.inputs) > 3 else None, causal is not None and bool(causal.as_int())


def _check_causal(
    graph: ir.Graph,
    mask: ir.Value,
    tokens: ir.Value,
    attention_mask: ir.Value,
    caches: Sequence[ir.Value],
    *,
    causal: bool,
) -> None:
    """Evaluate the model's mask, and check that each token sees itself and all earlier tokens, but no later token.

    ``causal``: whether the attention operator itself hides later tokens.
    """
    needed, read = _ancestors(mask), _ancestors(mask, contents=True)
    inputs = [v for v in graph.inputs if v in needed]
    # The evaluation below is valid for all calls only if the mask depends on no token's id and on no row's content.
    foreign = [v for v in inputs if v is not attention_mask and (v in read or v not in (tokens, *caches))]
    if foreign or mask.dtype is None:
        raise ExportError(
            "profile 'ort-paged' cannot be made: the mask depends on more than lengths and padding "
            f"({', '.join(str(v.name) for v in foreign)})"
        )
    ort = onnxruntime()
    proto = ir.to_proto(_extracted(graph, inputs, mask))
    try:
        session = cpu_session(ort, proto.SerializeToString())
        for B, S, P in _SIZES:
            feeds = {v.name: _zeros(v, tokens, attention_mask, B, S, P) for v in inputs}
            (got,) = session.run(None, feeds)
            expected = np.arange(P + S)[None] <= np.arange(S)[:, None] + P
            seen = got if got.dtype == np.bool_ else got == 0
            seen = seen & expected if causal else seen
            if not np.array_equal(np.broadcast_to(seen, (B, seen.shape[1], S, P + S))[:, 0], [expected] * B):
                raise ExportError(
                    "profile 'ort-paged' cannot be made: the model's mask is not the causal one (a window, blocks, or "
                    "tokens chosen by content); use portable or inplace"
                )
    except errors(ort) as error:
        raise ExportError(f"profile 'ort-paged' cannot be made: the mask cannot be evaluated: {error}") from error


def _ancestors(value: ir.Value, *, contents: bool = False) -> set[ir.Value]:
    """Return the values from which ``value`` is computed, and ``value`` itself.

    ``contents``: leave out values of which only the shape is read.
    """
    found, queue = {value}, [value]
    while queue:
        producer = queue.pop().producer()
        if producer is None or (contents and producer.op_type in ("Shape", "Size")):
            continue
        for source in producer.inputs:
            if source is not None and source not in found:
                found.add(source)
                queue.append(source)
    return found


def _extracted(graph: ir.Graph, inputs: Sequence[ir.Value], mask: ir.Value) -> ir.Model:
    """Return the part of the graph that computes the mask, as a separate model."""
    needed = _ancestors(mask)
    # Caches are passed in float32, because some dtypes cannot be passed. The mask depends only on the caches' shapes.
    floating = ir.TensorType(ir.DataType.FLOAT)
    copies = {
        v: ir.Value(name=v.name, type=v.type if v.dtype == ir.DataType.INT64 else floating, shape=v.shape)
        for v in inputs
    }
    initializers = []
    for v in needed:
        if v.const_value is not None and v.producer() is None:
            copies[v] = ir.Value(name=v.name, type=v.type, shape=v.shape, const_value=v.const_value)
            initializers.append(copies[v])
    nodes = []
    for node in graph:
        if any(v in needed for v in node.outputs):
            copied = ir.Node(
                node.domain,
                node.op_type,
                [copies[v] if v is not None else None for v in node.inputs],
                list(node.attributes.values()),
                num_outputs=len(node.outputs),
                name=node.name,
            )
            for old, new in zip(node.outputs, copied.outputs, strict=True):
                new.name, new.type, new.shape = old.name, old.type, old.shape
                copies[old] = new
            nodes.append(copied)
    made = ir.Graph(
        [copies[v] for v in inputs], [copies[mask]], nodes=nodes, initializers=initializers,
        opset_imports={"": graph.opset_imports[""]}, name="mask",
    )  # fmt: skip
    return ir.Model(made, ir_version=10)


def _zeros(
    value: ir.Value, tokens: ir.Value, attention_mask: ir.Value, B: int, S: int, P: int
) -> npt.NDArray[np.generic]:
    if value is tokens:
        return np.zeros((B, S), np.int64)
    if value is attention_mask:
        return np.ones((B, P + S), np.int64)
    assert value.shape is not None
    sizes = [B, *(P if not isinstance(d, int) else d for d in value.shape[1:])]
    return np.zeros(sizes, np.float32)

"""Reports with a site of each kind."""

from __future__ import annotations

from mla_compile.codes import Code
from mla_compile.core.dims import Dims
from mla_compile.core.records import Location, PassRecord, SiteReport
from mla_compile.report.report import Report

V3 = Dims(H=128, L=512, R=64, N=128, V=128, Q=1536, D=7168)


FILE = "/lib/site-packages/transformers/models/deepseek_v3/modeling_deepseek_v3.py"


def absorbed(layer: int, **changes: object) -> SiteReport:
    fields = {
        "index": layer,
        "where": Location(
            node=f"scaled_dot_product_attention_{layer}",
            op="aten.scaled_dot_product_attention",
            module=f"model.layers.{layer}.self_attn",
            file=FILE,
            line=77,
            code="    attn_output = attention(query, key, value)",
        ),
        "verdict": "absorbed",
        "form": "chained",
        "code": "absorbed",
        "reason": "K and V are linear images of one latent (512 wide) and a rotary key all heads share (64)",
        "dims": V3,
        "values_read_before": 40960,
        "values_read_after": 576,
        "decode_flops_before": 33_636_352,
        "decode_flops_after": 278_528,
        "decode_bytes_before": 164_992,
        "decode_bytes_after": 1152,
        "break_even_S": 512 / 3,
        "precision_ratio": 0.5 + layer / 100,
        "fold_error": 1e-7 * (layer + 1),
        "notes": ("the mask is carried as it is",),
    }
    return SiteReport(**{**fields, **changes})


REFUSED = SiteReport(
    index=3,
    where=Location("softmax_3", "aten.softmax", "model.layers.3.self_attn", FILE, 91, "p = scores.softmax(-1)"),
    verdict="refused",
    code=Code.POSITION_DEPENDENT,
    reason="aten.mul with cos lies between the up-projection and the scores",
    blame=Location("mul_7", "aten.mul", "model.layers.3.self_attn", FILE, 52, "k = (k * cos) + (rotate(k) * sin)"),
    dims=V3,
    values_read_before=40960,
    values_read_after=576,
)


NOT_MLA = SiteReport(
    index=4, where=Location("sdpa", "aten.sdpa"), verdict="not_mla", code=Code.NOT_MLA, reason="K is a graph input"
)


REPORT = Report(
    sites=(absorbed(0), absorbed(1), absorbed(2), REFUSED, NOT_MLA),
    graph="decode",
    passes=(PassRecord("normalize", 12, 0.25), PassRecord("absorb", 3, 0.5)),
    messages=("Dynamo stopped recompiling after 8 graphs",),
)

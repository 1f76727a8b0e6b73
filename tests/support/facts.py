"""Models as ``plan`` sees them, without tracing them."""

from __future__ import annotations

from dataclasses import replace

from mla_compile.core.dims import Dims
from mla_compile.report.facts import CachedLayers, Drafting, Facts, LatentSites, Weights
from mla_compile.report.stored import StoredPart, StoredWeights, UpProjections

V3_DIMS = Dims(H=128, L=512, R=64, N=128, V=128, Q=1536, D=7168)
V3_WEIGHTS = Weights(671_026_404_352, 926_679_040, 653_908_770_816, 256, 8.0, 129_280)
V3 = Facts(
    "V3", "MLA", (), (LatentSites(V3_DIMS, 61, absorbed=True),), (CachedLayers(1, 512, 1, 64, 61),), V3_WEIGHTS,
    heads=128, width=7168,
)  # fmt: skip
# With the layer that drafts: 11.5 billion weights (README_WEIGHTS.md of DeepSeek-V3), and 2 x 7168 x 7168 that join.
V3_LAYER = Facts(
    "V3", "MLA", (), (LatentSites(V3_DIMS, 1, absorbed=True),), (CachedLayers(1, 512, 1, 64, 1),),
    Weights(11_610_067_968, 0, 256 * 3 * 2048 * 7168, 256, 8.0, 129_280), heads=128, width=7168,
)  # fmt: skip
V3_MTP = replace(V3, drafting=Drafting(1, V3_LAYER))
# As it is published, in fp8 with block scales.
V3_STORED = StoredWeights(
    "fp8", ("fp8 with a scale for 128 x 128",), "bf16", "fp8",
    (
        StoredPart("attention", 11_413_547_008, 11_413_422_080, 11_416_465_248, 2_793_312),
        StoredPart("routed experts", 653_908_770_816, 653_908_770_816, 654_068_416_512, 159_645_696),
        StoredPart("rest", 5_704_086_528, 3_743_416_320, 7_665_670_656, 913_920),
    ),
    2 * 926_679_040, ("lm_head",),
    UpProjections(("kv_b_proj",), 61, 61 * 2**24, 61 * (2**24 + 2**12), "fp8 with a scale for 128 x 128"),
)  # fmt: skip
GROUPED = Facts(
    "Grouped", "GQA", (), (), (CachedLayers(8, 128, 8, 128, 80),), Weights(70_553_706_496, 1_050_673_152),
    heads=64, width=8192,
)  # fmt: skip
# V3.2 has V3's sizes, and in every layer 64 heads of 128 values that choose 2,048 tokens.
V3_2 = Facts(
    "V3.2", "MLA", (),
    (LatentSites(V3_DIMS, 61, absorbed=True, chosen=2048, choosing_flops=2 * 64 * 129, choosing_bytes=256),),
    (CachedLayers(1, 512, 1, 64, 61, besides=128),), V3_WEIGHTS, heads=128, width=7168,
)  # fmt: skip

"""Models as ``plan`` sees them, without tracing them."""

from __future__ import annotations

from mla_compile.core.dims import Dims
from mla_compile.report.facts import CachedLayers, Facts, LatentSites, Weights

V3_DIMS = Dims(H=128, L=512, R=64, N=128, V=128, Q=1536, D=7168)
V3_WEIGHTS = Weights(671_026_404_352, 926_679_040, 653_908_770_816, 256, 8.0)
V3 = Facts(
    "V3", "MLA", (), (LatentSites(V3_DIMS, 61, absorbed=True),), (CachedLayers(1, 512, 1, 64, 61),), V3_WEIGHTS,
    heads=128, width=7168,
)  # fmt: skip
GROUPED = Facts(
    "Grouped", "GQA", (), (), (CachedLayers(8, 128, 8, 128, 80),), Weights(70_553_706_496, 1_050_673_152),
    heads=64, width=8192,
)  # fmt: skip

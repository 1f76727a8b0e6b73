"""Records, text and an HTML page about what was done to a model, and why not more.

``Report`` and ``SiteReport`` are imported on first use. If ``TORCH_LOGS`` names this package, torch imports the
package's modules before torch itself is usable.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mla_compile.core.lazy import lazy

if TYPE_CHECKING:
    from mla_compile.core.records import SiteReport
    from mla_compile.report.report import Report

__all__ = ["Report", "SiteReport"]

__getattr__, __dir__ = lazy(__name__, {"Report": "mla_compile.report.report", "SiteReport": "mla_compile.core.records"})

"""The built documentation loads nothing from another host, and every code of a report has its anchor.

python .ci/check_site.py build/site
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from mla_compile.codes import CODES

# What a browser fetches by itself; a link that a person may follow is no request.
_FETCHED = re.compile(
    r"""<(?:script|img|iframe|source|video|audio)\b[^>]*\bsrc=["']?(?:https?:)?//[^\s"'>]+"""
    r"""|<link\b(?![^>]*\brel=["']?(?:canonical|prev|next)\b)[^>]*\bhref=["']?(?:https?:)?//[^\s"'>]+"""
    r"""|@import\s+["'](?:https?:)?//[^"']+|url\(["']?(?:https?:)?//[^)]+""",
    re.IGNORECASE,
)


def main() -> int:
    """Exit code 1, with a line for each finding."""
    site = Path(sys.argv[1])
    pages = [p for p in sorted(site.rglob("*")) if p.suffix in (".html", ".css")]
    found = [f"{p.relative_to(site)}: {m[0]}" for p in pages for m in _FETCHED.finditer(p.read_text())]
    refusals = (site / "refusals.html").read_text()
    found += [f"refusals.html: no anchor for {code}" for code in CODES if f'id="{code}"' not in refusals]
    if not any("<math" in p.read_text() for p in pages):
        found.append("no page has an equation")
    print("\n".join(found) or f"{len(pages)} files, nothing from another host")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())

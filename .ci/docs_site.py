"""What the documentation needs to be a site, as hooks of mkdocs: equations, files from outside docs/, links to others.

Equations are written as TeX, in ```` ```math ```` blocks and between ``$``, which the repository's pages show too. Here
they become MathML when the site is built: browsers draw it themselves, so no script is loaded, from any host.
"""

from __future__ import annotations

import html
import json
import posixpath
import re
import sys
from pathlib import Path
from typing import Any

import latex2mathml.converter
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from benchmarks.gpu import compiled  # noqa: E402  mkdocs runs this file by its path

PAGES = {
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "README.md": "index.md",
    "benchmarks/results/README.md": "tables.md",
}
"""Files outside of docs/ that are pages of the site."""
_MATH = re.compile(r'<(span|div) class="arithmatex">\s*\\([\[(])(.*?)\\[\])]\s*</\1>', re.DOTALL)
_CODE_OR_LINK = re.compile(
    r"^```.*?^```[ ]*$|`[^`\n]*`|\[([^\]\n]+)\]\((?!\w+:)([^)#\s]+)(#[^)\s]*)?\)", re.MULTILINE | re.DOTALL
)


def on_files(files: Any, config: Any) -> Any:
    """Pages from outside of docs/, and the rows of compiled kernels as a script, which opens from a folder as well."""
    for name, page in PAGES.items():
        files.append(File.generated(config, page, content=(ROOT / name).read_text()))
    rows = f"const KERNEL_ROWS = {json.dumps(compiled.rows())};\n"
    files.append(File.generated(config, "kernel_rows.js", content=rows))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Links, written for the repository, lead to a page where there is one, else name the path: no repository here."""
    outside = {built: posixpath.dirname(name) for name, built in PAGES.items()}
    folder = outside.get(page.file.src_uri, posixpath.join("docs", posixpath.dirname(page.file.src_uri)))

    def linked(match: re.Match[str]) -> str:
        words, path, anchor = match.groups()
        if path is None:  # code
            return match[0]
        path = posixpath.normpath(posixpath.join(folder, path))
        if not (ROOT / path).exists():
            raise PluginError(f"{page.file.src_uri}: there is no {path} in the repository")
        if path in PAGES:
            path = f"docs/{PAGES[path]}"
        if path.startswith("docs/"):
            target = posixpath.relpath(path.removeprefix("docs/"), posixpath.dirname(page.file.src_uri) or ".")
            return f"[{words}]({target}{anchor or ''})"
        return words if words.strip("`") == path else f"{words} (`{path}`)"

    return _CODE_OR_LINK.sub(linked, markdown)


def on_page_content(content: str, **_: Any) -> str:
    """Every equation as MathML. A formula that cannot be read fails the build."""

    def mathml(match: re.Match[str]) -> str:
        tag, kind, tex = match.groups()
        display = "block" if kind == "[" else "inline"
        drawn = latex2mathml.converter.convert(html.unescape(tex).strip(), display=display)
        return f'<{tag} class="math">{drawn}</{tag}>'

    return _MATH.sub(mathml, content)

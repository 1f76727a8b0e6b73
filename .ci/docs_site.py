"""What the documentation needs to be a site, as hooks of mkdocs: equations, files from outside docs/, links to others.

Equations are written as TeX, in ```` ```math ```` blocks and between ``$``, which the repository's pages show too. Here
they become MathML when the site is built: browsers draw it themselves, so no script is loaded, from any host.
"""

from __future__ import annotations

import html
import posixpath
import re
from pathlib import Path
from typing import Any

import latex2mathml.converter
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parent.parent
PAGES = {"CHANGELOG.md": "changelog.md", "CONTRIBUTING.md": "contributing.md", "README.md": "index.md"}
_MATH = re.compile(r'<(span|div) class="arithmatex">\s*\\([\[(])(.*?)\\[\])]\s*</\1>', re.DOTALL)
_OUTSIDE = re.compile(r"\[([^\]\n]+)\]\((?:\.\./)+([^)#\s]*)(#[^)\s]*)?\)")
_IN_DOCS = re.compile(r"\]\(docs/([^)\s]+)\)")
_CODE = re.compile(r"(^```.*?^```[ ]*$|`[^`\n]*`)", re.MULTILINE | re.DOTALL)


def on_files(files: Any, config: Any) -> Any:
    """The changelog and the contributor's rules stand at the top of the repository and are pages here."""
    for name in ("CHANGELOG.md", "CONTRIBUTING.md"):
        files.append(File.generated(config, PAGES[name], content=(ROOT / name).read_text()))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Links into the rest of the repository: a page where there is one, else the path (the site has no repository)."""

    def outside(match: re.Match[str]) -> str:
        words, path, anchor = match.groups()
        if not (ROOT / path).exists():
            raise PluginError(f"{page.file.src_uri}: there is no {path} in the repository")
        if path in PAGES:
            return f"[{words}]({PAGES[path]}{anchor or ''})"
        path = posixpath.normpath(path)
        return words if words.strip("`") == path else f"{words} (`{path}`)"

    # Code stays as it is written; an odd number of the pieces are code.
    pieces = _CODE.split(markdown)
    pieces[::2] = [_IN_DOCS.sub(r"](\1)", _OUTSIDE.sub(outside, text)) for text in pieces[::2]]
    return "".join(pieces)


def on_page_content(content: str, **_: Any) -> str:
    """Every equation as MathML. A formula that cannot be read fails the build."""

    def mathml(match: re.Match[str]) -> str:
        tag, kind, tex = match.groups()
        display = "block" if kind == "[" else "inline"
        drawn = latex2mathml.converter.convert(html.unescape(tex).strip(), display=display)
        return f'<{tag} class="math">{drawn}</{tag}>'

    return _MATH.sub(mathml, content)

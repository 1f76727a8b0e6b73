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
"""Files at the top of the repository that are pages of the site."""
_MATH = re.compile(r'<(span|div) class="arithmatex">\s*\\([\[(])(.*?)\\[\])]\s*</\1>', re.DOTALL)
_CODE_OR_LINK = re.compile(
    r"^```.*?^```[ ]*$|`[^`\n]*`|\[([^\]\n]+)\]\((?!\w+:)([^)#\s]+)(#[^)\s]*)?\)", re.MULTILINE | re.DOTALL
)


def on_files(files: Any, config: Any) -> Any:
    """The front page, the changelog and the rules for contributors stand at the top of the repository."""
    for name, page in PAGES.items():
        files.append(File.generated(config, page, content=(ROOT / name).read_text()))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Links, written for the repository, lead to a page where there is one, else name the path: no repository here."""
    folder = "" if page.file.src_uri in PAGES.values() else "docs"

    def linked(match: re.Match[str]) -> str:
        words, path, anchor = match.groups()
        if path is None:  # code
            return match[0]
        path = posixpath.normpath(posixpath.join(folder, path))
        if not (ROOT / path).exists():
            raise PluginError(f"{page.file.src_uri}: there is no {path} in the repository")
        if path in PAGES:
            return f"[{words}]({PAGES[path]}{anchor or ''})"
        if path.startswith("docs/"):
            return f"[{words}]({path.removeprefix('docs/')}{anchor or ''})"
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

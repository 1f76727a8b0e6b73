"""Write the page as a file that loads nothing and runs no script. Equal reports give equal files."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from mla_compile.core.files import umask
from mla_compile.core.quantities import BYTES
from mla_compile.core.records import SiteReport
from mla_compile.errors import InputError, OptionError, nearest
from mla_compile.report.explained import Explained, explained
from mla_compile.report.facts import facts_of
from mla_compile.report.page.content import content


def write_report(
    sites: tuple[SiteReport, ...],
    messages: tuple[str, ...],
    path: str | os.PathLike[str],
    *,
    title: str = "",
    dtype: str = "bf16",
) -> None:
    """Write the page of a report, without facts about the model; see :meth:`mla_compile.Report.to_html`."""
    target = checked(path)
    _write(render_report(sites, messages, title=title, dtype=dtype), target)


def render_report(
    sites: tuple[SiteReport, ...], messages: tuple[str, ...], *, title: str = "", dtype: str = "bf16"
) -> str:
    """Return the page of a report as text."""
    if dtype not in BYTES:
        raise OptionError(f"dtype is {dtype!r}, expected one of {', '.join(BYTES)}{nearest(str(dtype), BYTES)}")
    facts = facts_of(sites, messages, "this model")
    return render(explained(facts, dtype, BYTES[dtype]), title or "Attention report")


def write_page(result: Explained, path: Path, title: str = "") -> None:
    """Write the page of an explained model. An existing file stays until the new page is complete."""
    _write(render(result, title), path)


def _write(page: str, path: Path) -> None:
    data = page.encode("utf-8", "replace")  # a lone surrogate cannot be encoded
    try:
        handle, draft = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".partial", dir=path.parent)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(data)
            os.chmod(draft, _mode(path))
            os.replace(draft, path)
        except BaseException:  # raised again: even an interrupt must not leave a draft
            os.unlink(draft)
            raise
    except OSError as error:
        raise InputError(f"{path} cannot be written: {error.strerror or error}") from error


def render(result: Explained, title: str = "") -> str:
    """Return the page as text."""
    from jinja2 import Environment, PackageLoader, StrictUndefined  # imported here, because only pages need it

    environment = Environment(
        loader=PackageLoader("mla_compile", "report/page/templates"),
        autoescape=True,  # names of models and source lines may contain any text
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    return environment.get_template("page.html.j2").render(page=content(result, title))


def checked(path: str | os.PathLike[str]) -> Path:
    """Return the path if a file can be written there. Call this before slow work. Raises :class:`InputError`."""
    target = Path(path).resolve()  # a symbolic link stays and points to the new file
    if target.is_dir():
        raise InputError(f"{target} is a directory, expected the name of a file")
    if not target.parent.is_dir():
        raise InputError(f"{target.parent} is not a directory to write {target.name} to")
    if target.exists() and not target.is_file():  # a device would be replaced by a file
        raise InputError(f"{target} is not an ordinary file")
    if not os.access(target if target.exists() else target.parent, os.W_OK):
        raise InputError(f"{target} cannot be written to")
    if not os.access(target.parent, os.W_OK):
        raise InputError(f"{target.parent} cannot be written to")
    return target


def _mode(path: Path) -> int:
    """Return the permissions of the old file, or the default permissions."""
    if path.exists():
        return path.stat().st_mode & 0o777
    return 0o666 & ~umask()

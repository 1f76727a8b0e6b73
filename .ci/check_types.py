"""Check the types of mla_compile and of the examples, strictly.

A type checker reads folders, not the ``package-dir`` mapping of pyproject.toml, so it cannot see that ``passes/`` and
``kernels/`` are ``mla_compile.passes`` and ``mla_compile.kernels``. This makes ``build/types/mla_compile``, a tree of
links to the live files in the shape a wheel has, and runs mypy on it. Arguments are passed on to mypy.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def link_tree(root: Path) -> Path:
    """Make ``build/types`` anew below ``root`` and return it."""
    tree = root / "build" / "types"
    shutil.rmtree(tree, ignore_errors=True)
    package = tree / "mla_compile"
    package.mkdir(parents=True)
    for source in [*(root / "mla_compile").glob("*.py"), root / "mla_compile" / "py.typed"]:
        (package / source.name).symlink_to(source)
    for folder in ("onnx", "page"):
        (package / folder).symlink_to(root / "mla_compile" / folder, target_is_directory=True)
    for folder in ("passes", "kernels"):
        (package / folder).symlink_to(root / folder, target_is_directory=True)
    (tree / "examples").symlink_to(root / "examples", target_is_directory=True)
    return tree


def main() -> int:
    """Return mypy's exit status."""
    link_tree(ROOT)
    return subprocess.run([sys.executable, "-m", "mypy", *sys.argv[1:]], cwd=ROOT, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())

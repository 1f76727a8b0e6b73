"""Build the wheel and test what is in it, not what is in the checkout.

Clears ``build/`` first (a module deleted from the checkout would still be shipped from ``build/lib``), compares the
wheel's files with the checkout's, installs it into an environment of its own that borrows the packages of this one, and
runs tests from a copy of ``tests/`` in a folder where no source of the package lies. Arguments are passed on to pytest.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TESTS = ["tests/test_package.py", "tests/cli/test_demo.py"]


def main(arguments: list[str]) -> None:
    """Raise ``SystemExit`` with a message when a step fails."""
    with tempfile.TemporaryDirectory(prefix="mla_compile-wheel-") as name:
        work = Path(name)
        wheel = build(work / "dist")
        compare(wheel)
        python = environment(work / "venv")
        run(python, "-m", "pip", "install", "--quiet", "--no-deps", str(wheel))
        borrow(python)
        shutil.copytree(ROOT / "tests", work / "run" / "tests", ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(ROOT / "pyproject.toml", work / "run")
        where = run(python, "-P", "-c", "import mla_compile; print(mla_compile.__file__)", capture=True).strip()
        if not Path(where).is_relative_to(work / "venv"):
            raise SystemExit(f"the wheel's package should be imported, got {where}")
        run(python, "-P", "-m", "pytest", "-q", *(arguments or TESTS), cwd=work / "run")


def build(target: Path) -> Path:
    """The wheel of this checkout, built anew."""
    shutil.rmtree(ROOT / "build" / "lib", ignore_errors=True)
    for stale in (ROOT / "build").glob("bdist.*"):
        shutil.rmtree(stale)
    run(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(target), str(ROOT))
    (wheel,) = target.glob("*.whl")
    return wheel


def compare(wheel: Path) -> None:
    """Every module of the checkout is in the wheel, and nothing else is."""
    expected = {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "mla_compile").rglob("*")
        if path.suffix in (".py", ".json", ".typed") or path.parent.name in ("csrc", "templates")
    }
    with zipfile.ZipFile(wheel) as archive:
        shipped = {name for name in archive.namelist() if ".dist-info/" not in name}
        licensed = any(name.endswith("licenses/LICENSE") for name in archive.namelist())
    if shipped != expected or not licensed:
        raise SystemExit(
            f"{wheel.name}: missing {sorted(expected - shipped)}, unexpected {sorted(shipped - expected)}, "
            f"licence {'present' if licensed else 'missing'}"
        )


def environment(home: Path) -> str:
    """The Python of a new, empty environment."""
    venv.create(home, with_pip=True)
    return str(home / ("Scripts" if os.name == "nt" else "bin") / "python")


def borrow(python: str) -> None:
    """Let an environment see the packages of this one, after its own.

    A line in a ``.pth`` file adds the folder, but the ``.pth`` files in it, an editable install of ours among them, are
    not read.
    """
    site = run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", capture=True).strip()
    Path(site, "borrowed.pth").write_text(sysconfig.get_path("purelib") + "\n")


def run(*command: str, cwd: Path | None = None, capture: bool = False) -> str:
    """Run a command to its end; ``SystemExit`` with the command when it fails."""
    done = subprocess.run(command, cwd=cwd, check=False, text=True, stdout=subprocess.PIPE if capture else None)
    if done.returncode:
        raise SystemExit(f"failed with {done.returncode}: {' '.join(command)}")
    return done.stdout or ""


if __name__ == "__main__":
    main(sys.argv[1:])

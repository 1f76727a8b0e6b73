"""Virtual environments for peers, each with packages of its own from the registry that pip is configured for."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from pathlib import Path

from benchmarks.peers_cpu.protocol import PeerError

PACKAGES = {
    # Built from its source for this processor; pip brings the compiler's tools but not the compiler.
    "llama": ["llama-cpp-python>=0.3.36", "gguf>=0.19", "numpy"],
}


def python_of(name: str, folder: Path) -> str:
    """The interpreter of the environment ``name`` in ``folder``, which is made where it is not there yet.

    Raises :class:`PeerError` if its packages cannot be installed.
    """
    wanted = PACKAGES[name]
    place = folder / f"{name}-{hashlib.sha256(json.dumps(wanted).encode()).hexdigest()[:8]}"
    python, complete = place / "bin" / "python", place / "complete"
    if not complete.exists():
        print(f"making the environment of {name} in {place}: this can take 20 minutes", file=sys.stderr, flush=True)
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(place)], check=True)
        install = [str(python), "-m", "pip", "install", "--quiet", *wanted]
        done = subprocess.run(install, capture_output=True, text=True, check=False)
        if done.returncode:
            raise PeerError(f"{' '.join(wanted)} cannot be installed: {done.stderr.strip().splitlines()[-1]}")
        complete.touch()
    return str(python)

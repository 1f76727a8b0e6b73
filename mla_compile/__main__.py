"""The program ``mla-compile``. Without an installation, ``python -m mla_compile`` runs it from a checkout."""

from __future__ import annotations

import sys

from mla_compile.version import __version__


def main() -> None:
    """Run the command line, or name a required package that is missing."""
    if sys.argv[1:] == ["--version"]:  # works without torch and other packages
        sys.stdout.write(f"{__version__}\n")
        return
    try:
        from mla_compile.cli.app import app
    except ModuleNotFoundError as error:
        package = (error.name or "mla_compile").partition(".")[0]
        if package == "mla_compile":
            raise
        sys.stderr.write(f"error: {package} is not installed: pip install mla-compile\n")
        raise SystemExit(2) from None
    except KeyboardInterrupt:  # importing torch takes a while
        sys.stderr.write("error: interrupted\n")
        raise SystemExit(130) from None
    app(prog_name="mla-compile")


if __name__ == "__main__":
    main()

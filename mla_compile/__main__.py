"""``python -m mla_compile`` is ``mla-compile``, for a checkout that is not installed."""

from mla_compile.cli import app

if __name__ == "__main__":
    app(prog_name="mla-compile")

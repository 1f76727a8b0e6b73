"""An OpenAI-compatible server in a program of one's own, ready when it listens; ``mla-compile serve`` has all options.

    pip install "mla-compile[server]"
    python examples/torch_server.py MODEL
    curl localhost:8000/v1/completions -H 'content-type: application/json' -d '{"prompt": "Once", "max_tokens": 20}'

MODEL is a directory or a name that ``from_pretrained`` takes.
"""

from __future__ import annotations

import argparse

from mla_compile.serving.server import Server
from mla_compile.serving.settings import Settings


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("model", metavar="MODEL", help="what from_pretrained takes")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--blocks", type=int, help="pages of the pool; default: what memory allows")
    parser.add_argument("--page", type=int, default=256, help="tokens of a page, a power of two up to 256")
    parser.add_argument("--codegen", choices=("inductor", "eager"), default="inductor")
    given = parser.parse_args()
    options = {"codegen": given.codegen}
    server = Server(
        Settings(given.model, port=given.port, page_size=given.page, pages=given.blocks, options=options), told=print
    )
    server.load()
    server.run()


if __name__ == "__main__":
    main()

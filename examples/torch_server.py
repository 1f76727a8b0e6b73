"""An OpenAI-compatible server for a model with latent attention: ``transformers serve``, over pages of latent rows.

    pip install "mla-compile[server]"
    python examples/torch_server.py MODEL
    curl localhost:8000/v1/completions -H 'content-type: application/json' -d '{"prompt": "Once", "max_tokens": 20}'

MODEL is a directory or a name that ``from_pretrained`` takes. All of the server is that of transformers: its routes
(/v1/completions, /v1/chat/completions, /v1/responses, /health), streams and batching. The one difference is that the
model it loads goes through ``mla_compile.continuous_batching`` first. It listens on this machine only.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from transformers.cli import serve
from transformers.cli.serving import model_manager

import mla_compile


def serving(**options: Any) -> type[model_manager.ModelManager]:
    """The model manager of ``transformers serve``, whose models serve from latent pages."""

    class Manager(model_manager.ModelManager):
        def _load_model(self, *args: Any, **kwargs: Any) -> Any:
            return mla_compile.continuous_batching(super()._load_model(*args, **kwargs), **options)

    return Manager


def start(model: str, codegen: str = "inductor", cache_dtype: str = "model", **settings: Any) -> Any:
    """The server, which runs until it is interrupted, or in a thread with ``non_blocking=True``."""
    model_manager.ModelManager = serving(codegen=codegen, cache_dtype=cache_dtype)
    return serve.Serve(model, continuous_batching=True, **settings)


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("model", metavar="MODEL", help="what from_pretrained takes")
    parser.add_argument("--host", default="localhost")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--blocks", type=int, help="blocks of the pool; default: what memory allows")
    parser.add_argument("--page", type=int, default=256, help="tokens of a page, a power of two up to 256")
    parser.add_argument("--cache-dtype", choices=("model", "fp8"), default="model")
    parser.add_argument("--codegen", choices=("inductor", "eager"), default="inductor")
    given = parser.parse_args(arguments)
    start(
        given.model,
        given.codegen,
        given.cache_dtype,
        host=given.host,
        port=given.port,
        dtype=given.dtype,
        device=given.device,
        cb_num_blocks=given.blocks,
        cb_block_size=given.page,
    )


if __name__ == "__main__":
    main()

"""``mla-compile serve``: an OpenAI-compatible server of one model."""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

from mla_compile.cli.common import ending, say_aside

_CACHES = {"auto": "model", "fp8": "fp8"}


def serve(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A folder, or a name that `from_pretrained` takes.")],
    host: Annotated[
        str, typer.Option(metavar="ADDRESS", help="The address to listen on; `0.0.0.0` admits other machines.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(metavar="N", min=1, max=65535, help="The port to listen on.")] = 8000,
    served_model_name: Annotated[
        str, typer.Option(metavar="NAME", help="The model's name for clients. Default: MODEL.")
    ] = "",
    api_key: Annotated[
        str | None,
        typer.Option(envvar="MLA_COMPILE_API_KEY", show_envvar=True, metavar="KEY", help="The key that clients send."),
    ] = None,
    dtype: Annotated[str, typer.Option(metavar="DTYPE", help="auto: the weights' dtype.")] = "auto",
    device: Annotated[str, typer.Option(metavar="DEVICE", help="auto, cpu, cuda:0 and the like.")] = "auto",
    quantization: Annotated[str | None, typer.Option(metavar="NAME", help="bnb-4bit or bnb-8bit.")] = None,
    tensor_parallel_size: Annotated[
        int | None,
        typer.Option(
            "--tensor-parallel-size",
            "-tp",
            min=1,
            metavar="N",
            help="Ranks that hold the weights together; else all.",
        ),
    ] = None,
    decode_context_parallel_size: Annotated[
        int,
        typer.Option(
            "--decode-context-parallel-size", "-dcp", min=1, metavar="N", help="Ranks that share the rows of a request."
        ),
    ] = 1,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run Python code that lies beside the weights. Off by default.")
    ] = False,
    max_model_len: Annotated[
        int | None, typer.Option(min=2, metavar="N", help="The most tokens of a request, with its answer.")
    ] = None,
    block_size: Annotated[
        int,
        typer.Option("--block-size", "--cb-block-size", metavar="N", help="Tokens per page, up to 256."),
    ] = 256,
    num_blocks: Annotated[
        int | None,
        typer.Option(
            "--num-blocks", "--cb-num-blocks", min=1, metavar="N", help="Pages in the pool. Default: what fits."
        ),
    ] = None,
    max_num_batched_tokens: Annotated[
        int | None,
        typer.Option(
            "--max-num-batched-tokens", "--cb-max-batch-tokens", min=1, metavar="N", help="Prompt tokens per step."
        ),
    ] = None,
    max_num_seqs: Annotated[int, typer.Option(min=1, metavar="N", help="The most requests in a step.")] = 64,
    max_waiting: Annotated[int, typer.Option(min=1, metavar="N", help="The most requests that wait.")] = 256,
    max_body_bytes: Annotated[int, typer.Option(min=1, metavar="N", help="The most bytes of a request.")] = 4 << 20,
    request_timeout: Annotated[float, typer.Option(min=0.001, metavar="S", help="Time limit of a request.")] = 600.0,
    grace: Annotated[float, typer.Option(min=0, metavar="S", help="Seconds that requests get after SIGTERM.")] = 30.0,
    kv_cache_dtype: Annotated[str, typer.Option(metavar="DTYPE", help="auto, or fp8 for rows in float8.")] = "auto",
    codegen: Annotated[str, typer.Option(metavar="HOW", help="inductor, or eager: compile nothing.")] = "inductor",
    warm_up: Annotated[
        bool, typer.Option("--warm-up/--no-warm-up", help="Compile all sizes before `/health` says so.")
    ] = True,
) -> None:
    """Serve a model to clients of OpenAI's interface.

    Many requests run together, over pages of latent rows. `/health` answers 503 with the current stage until everything
    is compiled, and then 200. Prometheus reads `/metrics`. After SIGTERM, running requests may finish, then the server
    ends.

    `torchrun --nproc-per-node 2 -m mla_compile serve MODEL` splits the weights between two ranks.

    Exits with 0 after SIGTERM, and with 2 if the model or the options cannot be used or one of several ranks fails.
    """
    with ending():
        # Imported here, because only this command needs the extra ``server``.
        from mla_compile.errors import OptionError
        from mla_compile.serving.ranks import ServerRanks
        from mla_compile.serving.server import Server, follow
        from mla_compile.serving.settings import Settings

        if kv_cache_dtype not in _CACHES:
            raise OptionError(f"kv_cache_dtype is {kv_cache_dtype!r}, expected auto or fp8")
        options: dict[str, object] = {"codegen": codegen, "cache_dtype": _CACHES[kv_cache_dtype]}
        settings = Settings(
            model,
            name=served_model_name,
            host=host,
            port=port,
            dtype=dtype,
            device=device,
            quantization=quantization,
            tensor_parallel=tensor_parallel_size,
            context_parallel=decode_context_parallel_size,
            trust_remote_code=trust_remote_code,
            max_model_len=max_model_len,
            page_size=block_size,
            pages=num_blocks,
            max_batch_tokens=max_num_batched_tokens,
            max_requests=max_num_seqs,
            max_waiting=max_waiting,
            max_body=max_body_bytes,
            timeout=request_timeout,
            grace=grace,
            api_key=api_key,
            warm_up=warm_up,
            options=options,
        )
        if ServerRanks.of(settings).number:
            follow(settings)
            os._exit(0)
        code = "may run (--trust-remote-code)" if trust_remote_code else "is not run"
        say_aside(f"serving {settings.name} at http://{host}:{port}; Python code beside the weights {code}")
        Server(settings, say_aside).run()
    # Exit at once. Waiting for a running compiler and for the interpreter's shutdown (3 s with torch) would delay the
    # end.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)

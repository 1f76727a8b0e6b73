"""``mla-compile export``: writes a model directory of ONNX graphs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from mla_compile.errors import MlaCompileError
from mla_compile.onnx.profile import PROFILES

_out = Console(highlight=False)
_err = Console(stderr=True, highlight=False)


def export(
    source: Annotated[
        str,
        typer.Argument(
            metavar="MODEL", help="A directory of a transformers model, a config.json, or python:MODULE:FUNCTION."
        ),
    ],
    directory: Annotated[Path, typer.Argument(metavar="MODEL_DIR", help="The directory to write.")],
    profile: Annotated[str, typer.Option(help=f"One of {', '.join(PROFILES)}.")] = "portable",
    prefill: Annotated[bool, typer.Option(help="Also a graph for prompts.")] = True,
    dtype: Annotated[str | None, typer.Option(help="float32, float16 or bfloat16; the model's where left out.")] = None,
    fold: Annotated[str, typer.Option(help="auto, never or always.")] = "auto",
    verify: Annotated[bool, typer.Option(help="Compare with the original before anything is written.")] = True,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a directory that is there.")] = False,
    random_weights: Annotated[
        int | None, typer.Option(metavar="SEED", help="Build the model from its config with random weights.")
    ] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Also write the report to this file.")] = None,
) -> None:
    """Export a model to ONNX, decoding in absorbed form.

    Exits with 1 where the model cannot be read or exported; nothing is written then.
    """
    from mla_compile.onnx.export import export_onnx  # on use: numpy and the extra onnx
    from mla_compile.sources import load

    try:
        with _err.status("reading the model") as status:
            model = load(source, random_weights=random_weights)
            exported = export_onnx(
                model, directory, profile=profile, prefill=prefill, dtype=dtype, fold=fold, verify=verify,
                overwrite=overwrite, progress=status.update,
            )  # fmt: skip
        if json_file is not None:
            json_file.write_text(json.dumps(exported.to_dict(), indent=2, allow_nan=False) + "\n")
    except (MlaCompileError, OSError) as error:
        _err.print(f"error: {' '.join(str(error).split())}", style="red", markup=False, soft_wrap=True)
        raise typer.Exit(1) from None
    _out.print(exported.text(), markup=False, soft_wrap=True)
    _out.print(f"written to {exported.directory}", markup=False, soft_wrap=True)

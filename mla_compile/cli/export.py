"""``mla-compile export``: write a model directory of ONNX graphs."""

from __future__ import annotations

import sys
import warnings
from contextlib import redirect_stdout
from pathlib import Path
from typing import Annotated

import typer

from mla_compile.cli.common import AsJson, ending, err, print_json, say
from mla_compile.errors import ExportError, InputError
from mla_compile.models.sources import load
from mla_compile.onnx.export import export_onnx, require_packages
from mla_compile.onnx.profile import PROFILES


def export(
    source: Annotated[
        str,
        typer.Argument(
            metavar="MODEL", help="A directory of a transformers model, a config.json, or python:MODULE:FUNCTION."
        ),
    ],
    directory: Annotated[Path, typer.Argument(metavar="MODEL_DIR", help="The directory to write.")],
    profile: Annotated[str, typer.Option(metavar="NAME", help=f"One of {', '.join(PROFILES)}.")] = "portable",
    prefill: Annotated[bool, typer.Option(help="Also write a graph for prompts.")] = True,
    dtype: Annotated[
        str | None, typer.Option(metavar="DTYPE", help="float32, float16 or bfloat16. Default: the model's.")
    ] = None,
    fold: Annotated[str, typer.Option(metavar="WHEN", help="auto, never or always.")] = "auto",
    sparse: Annotated[
        str, typer.Option(metavar="WHEN", help="auto, or never: read all rows even if an indexer chose keys.")
    ] = "auto",
    verify: Annotated[bool, typer.Option(help="Compare with the original before anything is written.")] = True,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a directory that an export wrote.")] = False,
    random_weights: Annotated[
        int | None, typer.Option(metavar="SEED", help="Build the model from its config with random weights.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Export a model to ONNX, with decoding in absorbed form.

    Exits with 0 after writing, 1 if the model cannot be exported, 2 for input that cannot be used. In the last two
    cases nothing is written.
    """
    # torch gives this warning when it copies the input tree of an exported program.
    warnings.filterwarnings("ignore", r"`isinstance\(treespec, LeafSpec\)` is deprecated", FutureWarning)
    with ending():
        try:
            require_packages()
        except ExportError as error:
            raise InputError(str(error)) from None
        if directory.exists() and not overwrite:
            raise InputError(f"{directory} exists; pass --overwrite to replace it, or choose another path")
        with err.status("reading the model") as status, redirect_stdout(sys.stderr):  # redirect what the model prints
            model = load(source, random_weights=random_weights)
            exported = export_onnx(
                model, directory, profile=profile, prefill=prefill, dtype=dtype, fold=fold, sparse=sparse,
                verify=verify, overwrite=overwrite, progress=status.update,
            )  # fmt: skip
        if as_json:
            print_json(exported.to_dict())
        else:
            say(exported.text(), f"written to {exported.directory}")

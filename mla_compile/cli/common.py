"""Code that all commands share: consoles, exit codes, and the progress bar.

Results are printed to stdout, everything else to stderr. :data:`EXIT_CODES` explains the exit codes.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Annotated

import typer
from rich.console import Console
from rich.measure import Measurement
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from mla_compile.errors import ExportError, MlaCompileError, NothingToCompareError, TargetError, VerificationError

out = Console(highlight=False)
err = Console(stderr=True, highlight=False)

OK, NEGATIVE, BAD_INPUT, INTERRUPTED = 0, 1, 2, 130
EXIT_CODES = (
    "Every command exits with 0 on success, 1 if the answer is no (nothing is absorbed, results differ, the users do "
    "not fit, the model cannot be exported), 2 for input that cannot be used, and 130 if it is interrupted."
)
# These errors answer a question about a model. All other errors are about the input.
_ANSWERS = (ExportError, NothingToCompareError, VerificationError)
_EXTRAS = {
    "fastapi": "[server]",
    "jinja2": "",
    "matplotlib": "[plot]",
    "numpy": "[onnx]",
    "onnx": "[onnx]",
    "onnx_ir": "[onnx]",
    "onnxruntime": "[onnx]",
    "onnxscript": "[onnx]",
    "openai": "[server]",
    "prometheus_client": "[server]",
    "starlette": "[server]",
    "transformers": "[demo]",
    "uvicorn": "[server]",
}

_QUIET = {
    # If an operator fails on fake tensors, torch logs a whole traceback. The one-line error already says what failed.
    "torch._subclasses.fake_tensor": logging.CRITICAL,
    # Libraries warn about missing GPUs and deprecations in the middle of the output.
    "torch.utils.cpp_extension": logging.ERROR,
    "torch.utils._pytree": logging.ERROR,
    "torchao": logging.ERROR,
}

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object to stdout instead.")]


@contextmanager
def ending() -> Iterator[None]:
    """Turn expected errors into one line on stderr and an exit code. Bugs of mla_compile keep their traceback."""
    for name, level in _QUIET.items():
        logging.getLogger(name).setLevel(level)
    try:
        yield
    except BrokenPipeError:  # the reader has closed the pipe, and click ends quietly
        raise
    except TargetError as error:
        raise failed(error, BAD_INPUT) from None
    except _ANSWERS as error:
        raise failed(error, NEGATIVE) from None
    except MlaCompileError as error:
        raise failed(error, BAD_INPUT) from None
    except OSError as error:  # for example, a file has vanished or the disk is full
        where = f"{error.filename}: " if error.filename else ""
        raise failed(f"{where}{error.strerror or error}", BAD_INPUT) from None
    except ImportError as error:
        package = (error.name or "").partition(".")[0]
        if package not in _EXTRAS:
            raise
        raise failed(f'{package} is not installed: pip install "mla-compile{_EXTRAS[package]}"', BAD_INPUT) from None
    except MemoryError as error:
        raise failed(f"there is not enough memory: {error}", BAD_INPUT) from None
    except KeyboardInterrupt:
        raise failed("interrupted", INTERRUPTED) from None


def failed(error: object, code: int) -> typer.Exit:
    """Print an error on one line, and return the exit to raise."""
    err.print(f"error: {' '.join(str(error).split())}", style="red", markup=False, soft_wrap=True)
    return typer.Exit(code)


def print_json(record: Mapping[str, object]) -> None:
    """Print one JSON object to stdout."""
    typer.echo(json.dumps(record, indent=2, allow_nan=False))


def say(*lines: str) -> None:
    """Print lines to stdout without markup."""
    for line in lines:
        out.print(line, markup=False, soft_wrap=True)


def show_table(table: Table) -> None:
    """Print a table to stdout without cutting numbers.

    A file or a pipe gets the full width. A narrow terminal gets the table row by row.
    """
    needed = Measurement.get(out, out.options.update(max_width=10_000), table).maximum
    if needed <= out.width:
        out.print(table)
    elif not out.is_terminal:
        Console(file=out.file, width=needed, highlight=False).print(table)
    else:
        if table.title:
            out.print(table.title, style="italic")
        for cells in zip(*(column.cells for column in table.columns), strict=True):
            for column, cell in zip(table.columns, cells, strict=True):
                if cell:
                    out.print(f"{column.header}: {cell}" if column.header else str(cell))
            out.print()


def say_aside(*lines: str) -> None:
    """Print lines to stderr without markup."""
    for line in lines:
        err.print(line, markup=False, soft_wrap=True)


@contextmanager
def progress(total: int) -> Iterator[Stages]:
    """Show a bar on stderr for ``total`` stages, with the name of the current stage."""
    columns = (
        SpinnerColumn(),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.description}"),
    )
    with Progress(*columns, console=err, transient=True) as bar:
        yield Stages(bar, total)


class Stages:
    """Advances a progress bar. It is called with the name of each new stage."""

    def __init__(self, bar: Progress, total: int) -> None:
        self._bar, self._task, self._begun = bar, bar.add_task("", total=total), False

    def __call__(self, stage: str) -> None:
        """Advance past the previous stage, and show the name of ``stage``."""
        self._bar.update(self._task, description=stage, advance=int(self._begun))
        self._begun = True

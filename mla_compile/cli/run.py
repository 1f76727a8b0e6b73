"""``mla-compile run``: generate token ids with an exported model, and print each id immediately."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mla_compile.cli.common import AsJson, ending, print_json, say_aside
from mla_compile.errors import InputError

if TYPE_CHECKING:
    from mla_compile.onnx.generation import Generation
    from mla_compile.onnx.session import Session


_MOST_TOKENS = 2**24


def run(
    model: Annotated[Path, typer.Argument(metavar="MODEL_DIR", help="A directory that `mla-compile export` wrote.")],
    prompt_ids: Annotated[
        list[str], typer.Option(metavar="ID,ID,...", help="Token ids, such as 1,2,3; repeated for a batch.")
    ],
    max_new_tokens: Annotated[int, typer.Option(metavar="N", help="The most new tokens per prompt.")] = 32,
    temperature: Annotated[float, typer.Option(metavar="T", help="0 takes the most probable token.")] = 0.0,
    top_k: Annotated[int, typer.Option(metavar="N", help="Draw from the k most probable tokens; 0 from all.")] = 0,
    top_p: Annotated[
        float,
        typer.Option(metavar="SHARE", help="Draw from the most probable tokens that together have this probability."),
    ] = 1.0,
    seed: Annotated[int | None, typer.Option(metavar="N", help="The same seed gives the same tokens.")] = None,
    provider: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Execution provider, such as cuda or cpu; repeated in order of preference."),
    ] = None,
    library: Annotated[str, typer.Option(metavar="FILE", help="Native library: a file, auto or none.")] = "auto",
    verify_files: Annotated[
        bool, typer.Option(" /--no-verify-files", help="Do not check the hashes of all files first.")
    ] = True,
    as_json: AsJson = False,
) -> None:
    """Generate token ids with an exported model.

    New ids are printed to stdout as they are generated. One prompt gives one line. Several prompts give a line per step
    with a column per prompt. A - in a column means that this prompt has ended. Everything else is printed to stderr.

    Exits with 0 after generating, 2 if the model or its options cannot be used.
    """
    with ending():
        prompts = [_ids(text) for text in prompt_ids]
        if max_new_tokens > _MOST_TOKENS:
            raise InputError(f"max_new_tokens is {max_new_tokens}, expected a whole number from 1 to {_MOST_TOKENS:,}")
        # Imported here, because most commands do not need the extra ``onnx``.
        from mla_compile.onnx.generation import Generation
        from mla_compile.onnx.sampling import Sampling
        from mla_compile.onnx.session import Session

        sampling = Sampling(temperature, top_k, top_p, seed)
        session = Session(
            model,
            providers=provider or None,
            library=None if library == "none" else library,
            verify_files=verify_files,
        )
        say_aside(f"{', '.join(session.providers)}; {session.decision}")
        steps = Generation(session, prompts, max_new_tokens=max_new_tokens, sampling=sampling)
        outcome = _stream(session, prompts, steps, quiet=as_json)
        if as_json:
            print_json(outcome)


def _ids(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise InputError(f"--prompt-ids is {text!r}, expected whole numbers such as 1,2,3") from None


def _stream(session: Session, prompts: list[list[int]], steps: Generation, *, quiet: bool) -> dict[str, object]:
    rows: list[list[int]] = [[] for _ in prompts]
    times = [time.perf_counter()]
    for tokens in steps:
        times.append(time.perf_counter())
        for row, token in zip(rows, tokens, strict=True):
            if token is not None:
                row.append(token)
        if quiet:
            continue
        shown = " ".join("-" if token is None else str(token) for token in tokens)
        if len(rows) > 1:
            typer.echo(shown)
        else:
            typer.echo(shown if len(times) == 2 else f" {shown}", nl=False)
    if len(rows) == 1 and not quiet:
        typer.echo()
    first, rest = times[1] - times[0], times[-1] - times[1]
    decoded = sum(map(len, rows)) - len(rows)  # the first token of each row is timed with the prompt
    rate = decoded / rest if decoded else None
    said = f"prompt: {sum(map(len, prompts))} tokens in {first * 1000:.1f} ms"
    if rate is not None:
        said += f"; decode: {decoded} tokens in {rest * 1000:.1f} ms, {rate:.1f} tokens/s"
    say_aside(said)
    return {
        "prompts": prompts,
        "tokens": rows,
        "prompt_seconds": first,
        "decode_seconds": rest,
        "tokens_per_second": rate,
        "providers": list(session.providers),
        "library": None if session.decision.library is None else str(session.decision.library),
        "library_decision": session.decision.reason,
    }

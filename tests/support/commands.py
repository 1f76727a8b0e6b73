"""Every command of the README, the documentation and the examples, and where a test runs it.

Pages are read for commands in blocks and in lines of text. Each is in one of the three tables below, so that a new one
cannot be forgotten: it is run as it stands, another test runs it, or there is a reason why none does.
"""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

EXAMPLES = {
    "aoti_package": "the same as the original's: True",
    "compile_backend": "the same as the original's: True",
    "from_scratch": "1 absorbed",
    "hf_generate": "the same as the original's: True",
    "lora": "the same as the original's: True",
    "onnx_generate": "the same as the original's: True",
    "speculative": "the same as the original's, decoded one by one: True",
    "train_tiny": "the same as the original's: True",
}

RUN = {
    **{f"python examples/{name}.py": text for name, text in EXAMPLES.items()},
    "torchrun --nproc-per-node 2 examples/torchrun_generate.py": "the same as one process's: True",
    "torchrun --nproc-per-node 2 examples/torchrun_generate.py --share-cache": "the same as one process's: True",
    "torchrun --nproc-per-node 2 examples/torchrun_data_parallel.py": "the same as one process's: True",
    "mla-compile --version": "",
    "mla-compile demo": "tokens: all",
    "mla-compile demo --quick": "tokens: all",
    "mla-compile explain --help": "--html",
    "mla-compile explain examples/configs/deepseek-v2-lite.json": "absorbed (chained)",
    "mla-compile explain examples/configs/deepseek-v3.json": "absorbed (chained)",
    "mla-compile explain examples/configs/deepseek-v3.json --html deepseek-v3.html": "absorbed (chained)",
    "mla-compile plan examples/configs/deepseek-v3.json --gpu h200 --tp 8 --context 128k --users 64": "from --tp 16 on",
    "mla-compile serve --help": "--served-model-name",
}
"""What ``tests/examples/test_commands.py`` types, and what then stands in the output."""

STATUS = {"mla-compile plan examples/configs/deepseek-v3.json --gpu h200 --tp 8 --context 128k --users 64": 1}
"""The exit status of those of them that answer no: here, so many users do not fit."""

ELSEWHERE = {
    "make": "tests/test_repository.py::test_every_verb_of_the_makefile_can_be_said",
    "make test-times": "tests/test_repository.py::test_every_verb_of_the_makefile_can_be_said",
    "mla-compile export MODEL MODEL_DIR": "tests/cli/test_export.py::test_export_and_run",
    "mla-compile run model_dir --prompt-ids 5,9,17": "tests/cli/test_run.py::test_the_command_shows_ids_as_they_come",
    "mla-compile serve MODEL": "tests/serving/test_process.py::test_from_nothing_to_ready_and_to_its_end",
    "python examples/onnx_server.py MODEL_DIR": "tests/examples/test_onnx_server.py::test_a_completion",
    "python examples/torch_server.py MODEL": "tests/serving/test_process.py::test_the_example",
    "python mine.py": "tests/test_docs_snippets.py::test_the_quickstart",
    "torchrun --nproc-per-node 2 -m mla_compile serve MODEL": "tests/serving/test_process.py::test_ranks",
    **{
        f"{variable} python program.py": "tests/dynamo/test_logging.py::test_logs_and_trace_of_a_process"
        for variable in (
            'TORCH_LOGS="mla_compile"', 'TORCH_LOGS="+mla_compile"', 'TORCH_LOGS="-mla_compile"',
            'TORCH_LOGS="+mla_compile,recompiles,graph_breaks"', "TORCH_TRACE=trace_dir",
        )
    },
}  # fmt: skip
"""Commands that need a model, a client or a program, and the tests that give them one."""

_GPU = "needs a GPU"
_MINUTES = "measures full sizes for minutes; tests/cli/test_bench.py has small ones"
_TESTS = "runs the tests themselves"

NOT_RUN = {
    ".ci/full": _TESTS,
    ".ci/full tests 3/10": _TESTS,
    ".ci/matrix": f"{_TESTS}, and downloads releases of torch",
    ".ci/run": _TESTS,
    "mla-compile --install-completion": "changes the files of the user's shell",
    'mla-compile bench --dims "H=16 L=512 R=64 N=128 V=128 D=2048"': _MINUTES,
    "mla-compile bench examples/configs/minicpm3-4b.json --contexts 512,4k,32k --dtype bf16": _MINUTES,
    "python -m benchmarks.gpu.offline": "compiles every GPU kernel, for an hour; .ci/run compiles some",
    "python -m benchmarks.pages": "writes into the documentation; .ci/run checks that nothing changes",
    "python -m benchmarks.support_matrix": "runs every family through every door, for an hour",
    "python -m mla_compile.onnx.build": "compiles for every GPU, for minutes; tests/onnx/test_build.py builds less",
    "python -m tests.support.executed lines": "reads what a run of all tests wrote",
    "python -m tests.support.mutation lines recipe.jsonl --modules mla_compile/passes/cache/recipe.py": _TESTS,
    "python -m tests.support.mutation lines again.jsonl --modules mla_compile/passes/cache/recipe.py "
    "--again recipe.jsonl -- -m full": _TESTS,
    "python benchmarks/gpu/run_all.py --sections tune": _GPU,
    "python benchmarks/gpu/tune.py --write": _GPU,
    "python3 -m venv venv": "makes an environment, into which a package registry's files go",
}
"""Commands that no test runs, and why."""

_COMMAND = re.compile(r"(?:[A-Z_]+=\S+ )*(?:mla-compile|python3?|torchrun|pytest|make|\.ci/\w+)(?: |$)")
_NAMES = re.compile(
    r"mla-compile(?! demo)( \w+)?|torchrun( --nproc-per-node 2 \.\.\.)?|python -m mla_compile|python examples/x\.py"
)
"""What names a program in a sentence, and is no command that someone types."""


def pages() -> list[Path]:
    """The README, the documentation and the examples."""
    found = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md", ROOT / "examples" / "README.md"]
    return [*found, *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "examples").glob("*.py"))]


def commands_of(page: Path) -> set[str]:
    """The commands that a page has; an argument in brackets makes two commands of one."""
    text = page.read_text()
    lines = [line for line in text.splitlines() if line.startswith("    ")]
    blocks = {part for line in lines for part in re.sub(r"\s+# .*", "", line).strip().split(" && ")}
    inline = {one for one in re.findall(r"`([^`\n]+)`", text) if not _NAMES.fullmatch(one)}
    typed = {one for one in blocks | inline if _COMMAND.match(one)}
    if page.suffix == ".py" and page.stem in EXAMPLES:
        typed.add(f"python examples/{page.name}")
    return {re.sub(r"\s*\[(.+?)\]", with_it, one) for one in typed for with_it in ("", r" \1")}


def is_pytest(command: str) -> bool:
    """Whether a command runs tests."""
    return re.match(r"(?:[A-Z_]+=\S+ )*pytest(?: |$)", command) is not None

"""The examples run, at small sizes, and what they print holds."""

from __future__ import annotations

import ast
import logging
import os
import re
import subprocess
import sys
from importlib import metadata, util
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.support.tiers import full

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
SAME = "the same as the original's: True"


@pytest.fixture
def output(capsys, monkeypatch):
    """Runs an example's ``main`` here and returns what it printed: Python, torch and transformers are imported once."""

    def run(name, *arguments):
        spec = util.spec_from_file_location(f"example_{Path(name).stem}", EXAMPLES / name)
        module = util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, spec.name, module)  # Dynamo imports the module of the code it traces
        spec.loader.exec_module(module)
        module.main(list(arguments))
        return capsys.readouterr().out

    return run


@pytest.mark.parametrize("file", sorted(EXAMPLES.glob("*.py")), ids=lambda file: file.stem)
def test_one_main_and_a_line_in_the_list(file):
    functions = [node.name for node in ast.parse(file.read_text()).body if isinstance(node, ast.FunctionDef)]
    assert functions.count("main") == 1
    assert f"]({file.name})" in (EXAMPLES / "README.md").read_text()


@full("command")
def test_hf_generate(output):
    out = output("hf_generate.py", "--tokens=6")
    assert out.count(SAME) == 2
    assert "4 absorbed" in out  # two layers in a step of each kind of cache


@pytest.fixture
def of_two_processes():
    """Runs an example with torchrun and returns what its processes printed, by rank."""
    if not (dist.is_available() and dist.is_gloo_available()):
        pytest.skip("torch has no gloo here")

    def run(name, *arguments):
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
        done = subprocess.run(
            [*command, str(EXAMPLES / name), *arguments], capture_output=True, text=True, timeout=240, check=True,
            env={**os.environ, "PYTHONPATH": str(EXAMPLES.parent)},
        )  # fmt: skip
        return re.split(r"^rank . of 2: ", done.stdout, flags=re.MULTILINE)[1:]

    return run


@full("command")
def test_torchrun_generate(of_two_processes):
    first, second = of_two_processes("torchrun_generate.py", "--tokens=5")  # through Inductor, as it is documented
    for out in (first, second):
        assert "the same as one process's: True" in out
        assert out.count("absorbed (chained)") == 1
    assert first.splitlines()[0] == second.splitlines()[0]


@full("command")
def test_torchrun_data_parallel(of_two_processes):
    first, second = of_two_processes("torchrun_data_parallel.py", "--tokens=8")
    for out in (first, second):
        assert "the same as one process's: True" in out
        assert " 2 absorbed" in out
        assert "reduce_scatter_tensor" in out
    lengths = [{len(one) for one in ast.literal_eval(out.splitlines()[0])} for out in (first, second)]
    assert lengths == [{8}, {7}], "the second ends sooner, and goes on for the first"


@full("command")
def test_compile_backend(output, caplog):
    try:
        metadata.distribution("mla-compile")
    except metadata.PackageNotFoundError:
        pytest.skip("torch finds the backend by name through the installed package's entry point")
    caplog.set_level(logging.INFO, "mla_compile")
    assert output("compile_backend.py", "--tokens=5").count(SAME) == 2
    assert [line.count(" 2 absorbed") for line in caplog.messages if "attention sites" in line] == [1, 1]


@full("command")
def test_from_scratch(output):
    out = output("from_scratch.py")
    assert "1 absorbed" in out
    difference = re.search(r"largest difference: (\S+)", out)
    assert difference is not None
    assert float(difference[1]) < 1e-5


@full("command")
def test_aoti_package(output):
    out = output("aoti_package.py", "--context=12")
    assert "1 absorbed" in out
    assert SAME in out


@full("command")
def test_onnx_generate(output):
    assert SAME in output("onnx_generate.py")


@full("command")
def test_lora(output):
    out = output("lora.py", "--tokens=6", "--steps=10")
    lines = dict(re.findall(r"(.*): (\[.*\]), the same as the original's: True", out))
    assert list(lines) == ["without adapters", "attached, still zero", "trained", "merged"]
    assert lines["without adapters"] == lines["attached, still zero"] != lines["trained"] == lines["merged"]
    assert " 0 absorbed" not in out


@full("command")
def test_speculative(output):
    out = output("speculative.py", "--tokens=14")
    assert "the same as the original's, decoded one by one: True" in out
    calls = [(int(n), form, int(count)) for n, form, count in re.findall(r"calls of (\d+) tokens, (\w+): (\d+)", out)]
    assert calls[0] == (17, "expanded", 1)  # the prompt and the first guesses
    assert {form for _, form, _ in calls[1:]} == {"absorbed"}
    assert calls[1][0] == 6
    accepted, guessed = map(int, re.findall(r"(\d+) of (\d+) guesses accepted", out)[0])
    assert 0 < accepted < guessed
    assert accepted + sum(count for _, _, count in calls) == 14


@full("command")
def test_train_tiny(output):
    out = output("train_tiny.py", "--steps=12", "--context=20", "--windows=3")
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in out.splitlines() if line.startswith("│")]
    assert [row[:2] for row in rows] == [
        [dtype, form]
        for dtype in ("float32", "bfloat16")
        for form in ("as trained", "optimized, fold=never", "optimized, fold=always")
    ]
    assert {row[2] for row in rows} == {"", "3 of 3"}
    assert 1 < float(rows[0][3]) < 200  # 256 without training
    assert all(abs(float(row[4])) < (1e-6 if row[0] == "float32" else 1e-2) for row in rows)
    assert SAME in out

"""The examples have one form, and the list of examples has all of them; that they run: test_commands.py."""

from __future__ import annotations

import ast
from importlib import util
from pathlib import Path

import pytest
import torch

from tests.support.tiers import full

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@pytest.mark.parametrize("file", sorted(EXAMPLES.glob("*.py")), ids=lambda file: file.stem)
def test_one_main_and_a_line_in_the_list(file):
    functions = [node.name for node in ast.parse(file.read_text()).body if isinstance(node, ast.FunctionDef)]
    assert functions.count("main") == 1
    assert f"]({file.name})" in (EXAMPLES / "README.md").read_text()


@full("command")
def test_training_ends_with_its_time():
    """As the command has it that is typed; the test of the command says after how many steps."""
    spec = util.spec_from_file_location("example_train_tiny", EXAMPLES / "train_tiny.py")
    example = util.module_from_spec(spec)
    spec.loader.exec_module(example)
    text = torch.arange(256).repeat(2)
    assert example.train(example.Model(layers=1), text, 8, 1e-9, None) == 1

"""``save`` and ``load``: what runs is what was compiled, and what does not fit is refused by name before it is read."""

from __future__ import annotations

import copy
import json
import os
import pickle
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

import mla_compile
from mla_compile import ExportError, InputError, ModelFileError
from mla_compile.errors import TargetError
from mla_compile.saved import door, kind
from mla_compile.saved import folder as files
from mla_compile.saved.calls import NATIVE
from mla_compile.saved.entries import Entries, Entry
from mla_compile.saved.facts import told, told_apart
from tests.support.latent_modules import D, OneLayer
from tests.support.programs import seeded
from tests.support.tiers import full

FAST: dict[str, Any] = {"codegen": "eager", "lowering": "aten", "verify": False}
CALLS = ((2, 3, 1), (3, 5, 1))
"""Of each text: sequences, tokens of the prompt, steps."""
OTHERS = ((2, 9, 4), (4, 2, 3))


@torch.no_grad()
def texts(model: Any, sizes: Any = CALLS) -> list[Tensor]:
    """The outputs of prompts and of steps behind them."""
    found = []
    for batch, prompt, steps in sizes:
        y, past = model(seeded(batch, prompt, D, seed=batch + prompt))
        found.append(y)
        for step in range(steps):
            y, past = model(seeded(batch, 1, D, seed=step), past)
            found.append(y)
    return found


def assert_same(found: list[Tensor], expected: list[Tensor]) -> None:
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)


def other_weights(model: nn.Module) -> nn.Module:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.25).add_(0.01)
    return model


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("saved") / "code"
    mla_compile.save(mla_compile.optimize(OneLayer(), **FAST), path, texts)
    return path


@pytest.fixture
def copied(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "copy"))


def rewrite(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    path = folder / files.MANIFEST
    manifest = json.loads(path.read_text())
    change(manifest)
    path.write_text(json.dumps(manifest))


PROCESS = """
import sys, torch
from torch._dynamo.utils import counters
import mla_compile
from tests.doors.test_saved import OTHERS, OneLayer, assert_same, other_weights, texts
fast = mla_compile.load(sys.argv[1], other_weights(OneLayer()))
assert_same(texts(fast, OTHERS), texts(other_weights(OneLayer()), OTHERS))
assert fast.mla_report.absorbed and not counters["frames"], counters
"""


def test_another_process_runs_it_with_other_weights_and_traces_nothing(saved: Path):
    subprocess.run([sys.executable, "-c", PROCESS, str(saved)], check=True, cwd=Path(__file__).parents[2])


class WithConstants(OneLayer):
    """A graph with tensors of its own, as where transformers' caches begin with empty ones."""

    def forward(self, x: Tensor, past: Any = None) -> Any:
        return super().forward(x * torch.tensor([1.5, 0.5]).sum().to(x.dtype), past)


@full("inductor")
def test_constants_of_a_graph_are_saved_with_inductors_code(tmp_path: Path):
    mla_compile.save(mla_compile.optimize(WithConstants(), **{**FAST, "codegen": "inductor"}), tmp_path / "code", texts)
    fast = mla_compile.load(tmp_path / "code", other_weights(WithConstants()))
    assert_same(texts(fast), texts(other_weights(WithConstants())))


def test_our_kernels_are_saved_only_with_code_that_calls_them(saved: Path):
    assert FAST["lowering"] == "aten"
    assert NATIVE not in os.listdir(saved)


def test_changes_after_loading_are_followed_or_refused(saved: Path):
    model = OneLayer()
    fast = mla_compile.load(saved, model)
    assert_same(texts(fast, OTHERS), texts(OneLayer(), OTHERS))
    other_weights(model)
    assert_same(texts(fast), texts(other_weights(OneLayer())))
    model.load_state_dict(OneLayer().state_dict())
    assert_same(texts(fast), texts(OneLayer()))
    handle = model.layer.up.register_forward_hook(lambda *_: None)
    with pytest.raises(ModelFileError, match="_forward_hooks"):
        texts(fast)
    handle.remove()
    with torch.inference_mode(), pytest.raises(ModelFileError, match="dispatch key"):
        texts(fast)
    model.layer.style = "written_out"
    with pytest.raises(ModelFileError, match="style"):
        texts(fast)
    model.layer.style = "plain"
    model.float()
    with pytest.raises(ModelFileError, match="dtype"):
        texts(fast)


def test_a_call_like_none_that_was_saved_is_refused_by_name(saved: Path):
    fast = mla_compile.load(saved, OneLayer())
    with (
        torch.no_grad(),
        pytest.raises(ModelFileError, match=r"no code for this call: .*expected Double, actual Float"),
    ):
        fast(seeded(2, 3, D).float())
    assert_same(texts(fast), texts(OneLayer()))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda model: model.double().float(), r"layer.q.weight: Parameter \[18, 7\] torch.float32"),
        (lambda model: setattr(model.layer, "extra", nn.Linear(2, 2)), "layer.extra.weight"),
        (lambda model: model.layer.up.register_buffer("more", torch.ones(1)), "layer.up.more"),
        (lambda model: setattr(model.layer, "style", "written_out"), "style.*written_out"),
        (lambda model: model.layer.norm.register_forward_hook(lambda *_: None), "_forward_hooks"),
        (lambda model: setattr(model.layer.norm, "eps", 0.5), "layer.norm: .*eps=float 0.5"),
    ],
    ids=["dtype", "a layer", "a buffer", "an attribute", "a hook", "an attribute of torch's"],
)
def test_another_model_is_refused_by_name(saved: Path, change: Callable[[Any], object], named: str):
    model: Any = OneLayer()
    change(model)
    with pytest.raises(ModelFileError, match=named):
        texts(mla_compile.load(saved, model))


def _version(manifest: dict[str, Any]) -> None:
    manifest["kind"]["versions"]["torch"] = "2.12.0"


def _instructions(manifest: dict[str, Any]) -> None:
    manifest["kind"]["machine"]["instructions"].append("amx_fp512")


def _code(manifest: dict[str, Any]) -> None:
    manifest["kind"]["code"] = dict.fromkeys(manifest["kind"]["code"], "0")


def _path(manifest: dict[str, Any]) -> None:
    manifest["files"]["../call_0.pickle"] = "0"


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (_version, "versions torch: .*, saved for 2.12.0"),
        (_instructions, "the processor lacks amx_fp512"),
        (_code, "tests.support.latent_modules"),
        (_path, "names a file '../call_0.pickle'"),
        (lambda manifest: manifest.update(format=7), "format"),
        (lambda manifest: manifest["kind"].pop("machine"), "machine"),
        (lambda manifest: manifest["files"].pop("guards_0.pickle"), "guards_0.pickle"),
    ],
)
def test_what_a_folder_was_not_made_for_is_refused_by_name(copied: Path, change: Callable[[Any], object], named: str):
    rewrite(copied, change)
    with pytest.raises(ModelFileError, match=named):
        mla_compile.load(copied, OneLayer())


def test_other_options_are_refused_by_name(saved: Path):
    mla_compile.load(saved, OneLayer(), **FAST)
    with pytest.raises(ModelFileError, match="options forms: absorbed, saved for auto"):
        mla_compile.load(saved, OneLayer(), forms="absorbed")


class Ran:
    def __reduce__(self) -> Any:
        return os.mkdir, ("ran",)


@pytest.mark.parametrize("of", ["a writable file", "a writable folder", "another digest", "a cut file", "no manifest"])
def test_nothing_of_a_damaged_or_foreign_folder_runs(copied: Path, of: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(copied)
    path = copied / "call_0.pickle"
    if of == "another digest":
        path.write_bytes(pickle.dumps(Ran()))
    elif of == "a cut file":
        path.write_bytes(path.read_bytes()[:-9])
    elif of == "no manifest":
        (copied / files.MANIFEST).unlink()
    else:
        path.write_bytes(pickle.dumps(Ran()))
        rewrite(copied, lambda manifest: manifest["files"].update({path.name: files.digest(path.read_bytes())}))
        (path if of == "a writable file" else copied).chmod(0o777)
    with pytest.raises(ModelFileError, match=r"everybody may write|digest differs|no folder that mla_compile"):
        mla_compile.load(copied, OneLayer())
    assert not (copied / "ran").exists()


def test_a_file_of_another_user_is_refused(copied: Path):
    if os.geteuid():
        pytest.skip("takes root, who may give files away")
    os.chown(copied / "guards_0.pickle", 12345, -1)
    with pytest.raises(ModelFileError, match=r"guards_0.pickle belongs to user 12345"):
        mla_compile.load(copied, OneLayer())


def test_an_older_torch_is_refused_by_name(saved: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(door, "_OLDEST", "99.1")
    with pytest.raises(ModelFileError, match=r"takes torch 99\.1 or newer, this is"):
        mla_compile.load(saved, OneLayer())


class Breaks(OneLayer):
    def forward(self, x: Tensor, past: Any = None) -> Any:
        y, past = super().forward(x, past)
        torch._dynamo.graph_break()
        return y * 2, past


def test_what_cannot_be_saved_is_said_and_nothing_is_written(tmp_path: Path):
    fast = mla_compile.optimize(Breaks(), **FAST)
    with pytest.raises(ExportError, match="graph breaks"):
        mla_compile.save(fast, tmp_path / "code", lambda model: texts(model, ((2, 3, 0),)))
    with pytest.raises(ExportError, match="give run="):
        mla_compile.save(fast, tmp_path / "code")
    with pytest.raises(ExportError, match="nothing was compiled"):
        mla_compile.save(fast, tmp_path / "code", lambda model: None)
    with pytest.raises(InputError, match=r"that optimize\(\) returned, got Breaks"):
        mla_compile.save(Breaks(), tmp_path / "code", texts)
    changed = mla_compile.optimize(OneLayer(), inductor={"post_grad_custom_post_pass": print})
    with pytest.raises(ExportError, match=r"inductor=\{'post_grad_custom_post_pass': .*\} cannot be saved"):
        mla_compile.save(changed, tmp_path / "code", texts)
    assert not any(tmp_path.iterdir())
    (tmp_path / "mine").touch()
    with pytest.raises(TargetError, match="exists already"):
        mla_compile.save(fast, tmp_path, texts)
    with pytest.raises(InputError, match=r"takes a folder and an nn.Module, got int"):
        mla_compile.load(tmp_path, 3)  # type: ignore[type-var]
    assert os.listdir(tmp_path) == ["mine"]


def test_folded_weights_follow_those_of_the_model_that_is_given(tmp_path: Path):
    fast = mla_compile.optimize(OneLayer(), **FAST, fold="always", forms="absorbed")
    sizes = ((1, 3, 1),)
    mla_compile.save(fast, tmp_path / "code", lambda model: texts(model, sizes))
    model = other_weights(OneLayer())
    fast = mla_compile.load(tmp_path / "code", model)
    assert {site.form for site in fast.mla_report.sites} == {"folded"}
    assert_same(texts(fast, sizes), texts(other_weights(OneLayer()), sizes))
    other_weights(model)
    assert_same(texts(fast, sizes), texts(other_weights(other_weights(OneLayer())), sizes))


@full("inductor")
def test_inductors_code_in_another_process(tmp_path: Path):
    """Neither a compiler nor anything in Inductor's caches is there."""
    path = tmp_path / "code"
    code = "from tests.doors import test_saved; test_saved.{}({!r})"
    for name, more in (("save_inductor", {}), ("load_inductor", {"CXX": "none", "PATH": str(tmp_path)})):
        caches = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / name)}
        command = [sys.executable, "-c", code.format(name, str(path))]
        subprocess.run(command, env={**os.environ, **caches, **more}, check=True, cwd=Path(__file__).parents[2])


PROMPTS = ((1, 9, 2), (1, 12, 3))


def one_layer() -> Any:
    """A model of transformers, which the process of the default tier need not import."""
    from tests.support import models

    return models.build("deepseek_v3", num_hidden_layers=1)


def generations(model: Any, sizes: Any, **settings: Any) -> list[Tensor]:
    """The tokens of generations of (sequences, tokens of the prompt, new tokens)."""
    prompts = ((torch.arange(batch * prompt).view(batch, prompt) % 190 + 3, new) for batch, prompt, new in sizes)
    return [model.generate(ids, max_new_tokens=new, do_sample=False, **settings) for ids, new in prompts]


def save_inductor(path: str) -> None:
    mla_compile.save(mla_compile.optimize(one_layer()), path, lambda model: generations(model, PROMPTS[:1]))


def load_inductor(path: str) -> None:
    model = other_weights(one_layer())
    fast = mla_compile.load(path, model)
    assert all(map(torch.equal, generations(fast, PROMPTS[:1]), generations(model, PROMPTS[:1])))
    assert not counters["frames"]


@full("combination")
@pytest.mark.parametrize("of", ["static", "dynamic"])
def test_generations_of_all_sizes(tmp_path: Path, of: str):
    model = one_layer()
    settings = {"cache_implementation": "static"} if of == "static" else {}
    run = None if of == "dynamic" else lambda model: generations(model, (*PROMPTS, (2, 9, 2)), **settings)
    mla_compile.save(mla_compile.optimize(model, codegen="eager", verify=False), tmp_path / "code", run)
    fast = mla_compile.load(tmp_path / "code", other_weights(model))
    sizes = ((1, 30, 9), (4, 5, 8), (2, 70, 3))
    assert all(map(torch.equal, generations(fast, sizes, **settings), generations(model, sizes, **settings)))
    other = {} if of == "static" else {"cache_implementation": "static"}
    with pytest.raises(ModelFileError, match=r"has no code for this call: .*cache"):
        generations(fast, PROMPTS, **other)


def test_what_python_notes_in_a_class_is_no_difference():
    """Copying an object of it notes its slots, which happened in the process that saved."""

    class Held:
        rows = 3

    before = told(dict(vars(Held)))
    copy.copy(Held())
    assert "__slotnames__" in vars(Held)
    assert told(dict(vars(Held))) == before
    Held.rows = 4
    assert told(dict(vars(Held))) != before


def test_long_descriptions_are_shown_where_they_differ():
    assert told_apart("a", "b") == ("a", "b")
    values = (1, 2)
    shown = told_apart(*(f"{'x' * 900}{value}{'y' * 900}" for value in values))
    assert all(f"x{value}y" in text and len(text) < 210 for value, text in zip(values, shown, strict=True))


def test_values_are_told_apart_where_guards_tell_them_apart():
    def one(x: int) -> bool:
        return x in {1, 2, 3}

    def other(x: int) -> bool:
        return x in {1, 2, 4}

    values = [
        *(None, 0, False, 0.0, "0", slice(0, 5), slice(0, 6), int, torch.float32, torch.nn.functional, "ab".upper),
        *(one, other, one.__code__, [1, (2, "a")], [1, (2, "b")], {1: 2}, {1: 3}, frozenset("ab")),
        *(torch.ones(1), torch.ones(1).int(), OneLayer()),
    ]
    assert len({told(value) for value in values}) == len(values)
    assert told(frozenset("abcdef")) == told(frozenset("fedcba"))


def test_differences_are_told_in_few_words():
    before = {"a": {str(n): n for n in range(9)}, "b": 1}
    found = kind.differences(before, {"a": {str(n): n + 1 for n in range(9)}})
    assert found[:2] == ["a 0: 1, saved for 0", "a 1: 2, saved for 1"]
    assert found[3:] == ["6 more of a", "b: none, saved for 1"]


def test_of_relations_between_sizes_the_one_that_fails_is_named():
    """Dynamo checks all of them in one guard, and lists all of them if one does not hold."""
    whole, several = "L['kwargs']['x'].size()[1] == 4", "2 <= L['kwargs']['x'].size()[0]"
    said = SimpleNamespace(verbose_code_parts=[f"{relation}  # of x" for relation in (whole, several)])
    guards = SimpleNamespace(check=lambda _: False, check_verbose=lambda _: said)
    entries = Entries([Entry(lambda: guards, lambda *_: None)], "the folder")
    for shape, failing in (((2, 8), whole), ((1, 4), several)):
        with pytest.raises(ModelFileError, match=rf"no code for this call: {re.escape(failing)}\. Save"):
            entries(nn.Identity(), (), {"x": torch.zeros(shape)}, None)

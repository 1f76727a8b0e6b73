"""``mla-compile bench`` on small models: figures, an interruption, wrong results, and memory that is too small."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from mla_compile.cli import bench as cli_bench
from mla_compile.cli.app import app
from mla_compile.models import config_file
from mla_compile.models.survey import survey_config
from mla_compile.workbench import bench
from tests.support.tiers import full

CONFIG = {
    "model_type": "minicpm3", "vocab_size": 997, "hidden_size": 48, "intermediate_size": 56, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 4, "kv_lora_rank": 20, "q_lora_rank": 28, "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 6, "v_head_dim": 10, "eos_token_id": 996,
}  # fmt: skip


ROW = ("--rounds", "3", "--dtype", "fp32")


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A config, graphs that run as they are, and the model in place of the one that Inductor compiles."""
    monkeypatch.chdir(tmp_path)
    trace = torch.compile

    @functools.wraps(trace)
    def by_our_backend_alone(model: Any, *, backend: Any, **how: Any) -> Any:
        return model if backend == "eager" else trace(model, backend=backend, **how)

    monkeypatch.setattr(torch, "compile", by_our_backend_alone)
    monkeypatch.setattr(cli_bench, "BenchSettings", functools.partial(bench.BenchSettings, codegen="eager"))
    Path("config.json").write_text(json.dumps(CONFIG))
    return tmp_path


@functools.cache
def _surveyed():
    return survey_config(config_file.parse({**CONFIG, "num_hidden_layers": 1}, Path())[0], "fp32")


@pytest.fixture
def surveyed(here, monkeypatch):
    """The same, surveyed once for all tests, with steps that take no time."""
    monkeypatch.setattr(bench, "survey_config", lambda config, dtype: _surveyed())
    monkeypatch.setattr(bench.Bench, "_build", lambda self: Steps())
    return here


class Steps:
    """Stands for a model: says what it is told to."""

    dtype, device = torch.float32, torch.device("cpu")

    def __init__(self) -> None:
        self.seen: list[int] = []

    def step(self, variant, tokens):
        self.seen.append(tokens)
        if self.seen.count(160) == 3 * 2 + 3 * 2 + 2:  # twice for the check, two rounds, two variants of the third
            raise KeyboardInterrupt
        return 0.001, torch.ones(2) * (1.01 if variant == "mla" and tokens == 333 else 1.0)


def call(*arguments: str):
    return CliRunner(env={"COLUMNS": "140", "NO_COLOR": "1"}).invoke(app, ["bench", *arguments])


@full("command")
def test_figures_of_a_config(here):
    done = call(".", "--contexts", "200,150", *ROW, "--json")
    assert done.exit_code == 0, done.output
    said = json.loads(done.stdout)
    assert said["schema"] == "mla_compile.bench/1"
    assert said["dims"] == {"H": 4, "L": 20, "R": 6, "N": 12, "V": 10, "Q": 28, "D": 48, "A": 0, "G": 1}
    assert said["notes"] == ["measured with 1 of 3 layers and a vocabulary of 256 instead of 997"]
    assert said["machine"]["threads"] == torch.get_num_threads()
    assert said["complete"]
    assert [row["context"] for row in said["rows"]] == [150, 200]
    for row in said["rows"]:
        assert set(row["ms"]) == {"eager", "inductor", "mla"}
        for times in row["ms"].values():
            assert 0 < times["best"] <= times["p10"] <= times["median"] <= times["p90"]
            assert times["count"] == 3
        assert set(row["faster_than"]) == {"eager", "inductor"}
        assert max(row["error"].values()) < 1e-4


def test_sizes_as_explain_prints_them(here):
    """With queries that are not compressed: Q is the width of the model."""
    done = call("--dims", "H=3 L=20 R=6 N=12 V=10 Q=40 D=40", "--contexts", "130", *ROW)
    assert done.exit_code == 0, done.output
    assert "with H=3 L=20 R=6 N=12 V=10 Q=40 D=40, fp32, batch 1" in done.stdout
    (row,) = [line for line in done.stdout.splitlines() if "130" in line]
    cells = [cell.strip() for cell in row.split("│") if cell.strip()]  # as wide as the terminal allows: some are cut
    assert len(cells) == 1 + 3 + 2 + 1
    assert [("[" in cell) for cell in cells] == [False, *[True] * 3, *[False] * 3]


def test_an_interruption_shows_what_there_is(surveyed):
    """The first length is whole, the second has two rounds and a piece of the third."""
    done = call(".", "--contexts", "120,160,170", *ROW, "--json")
    assert done.exit_code == 130, done.output
    assert "interrupted; 2 of 3 lengths were measured" in done.stderr
    said = json.loads(done.stdout)
    assert not said["complete"]
    assert [[t["count"] for t in row["ms"].values()] for row in said["rows"]] == [[3, 3, 3], [2, 2, 2]]


def test_a_plot(surveyed):
    pytest.importorskip("matplotlib")
    done = call(".", "--contexts", "120,150", *ROW, "--plot", "bench.svg")
    assert done.exit_code == 0, done.output
    assert "<svg" in (surveyed / "bench.svg").read_text()


def test_nothing_is_timed_on_wrong_results(surveyed):
    done = call(".", "--contexts", "333", *ROW)
    assert done.exit_code == 1, done.output
    assert "the logits of mla differ from those of eager by 1.0e-02" in done.stderr
    assert not done.stdout


@pytest.mark.parametrize(
    ("arguments", "free", "text"),
    [
        ((".",), 4e4, "the weights of one layer of this model take 0.0 GiB"),
        ((".",), 4e4, "--dims 'H=4 L=20 R=6 N=12 V=10 Q=28 D=48'"),
        ((".", "--layers", "2"), 4e4, "give fewer --layers"),
        ((".", "--contexts", "128m"), 1e9, "a step at 134,217,728 tokens with a batch of 1 takes"),
    ],
)
def test_what_does_not_fit_is_said_before_it_is_built(surveyed, monkeypatch, arguments, free, text):
    monkeypatch.setattr(bench, "available_bytes", lambda device: free)
    monkeypatch.setattr(bench.Bench, "run", None)
    done = call(*arguments)
    assert done.exit_code == 2, done.output
    assert text in done.stderr


def test_expanded_forms_that_do_not_fit_are_left_out(surveyed, monkeypatch):
    """Room for the keys and values of 150 tokens, and for the latent rows of many more."""
    made = bench.Subject(None, _surveyed().facts, bench.BenchSettings(dtype="fp32"), ())
    room = (made.bytes_at(150, expanded=True) - made.bytes_at(0, expanded=False)) / 0.8
    rooms = iter([1e9, room, room])
    monkeypatch.setattr(bench, "available_bytes", lambda device: next(rooms))
    done = call(".", "--contexts", "110,200", *ROW)
    assert done.exit_code == 0, done.output
    first, second = [line for line in done.stdout.splitlines() if "110" in line or "200" in line]
    assert (first.count("["), second.count("["), second.count("too large")) == (3, 1, 2)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ((), "give either a MODEL"),
        ((".", "--dims", "H=1"), "--dims has no L, R, N, V, D"),
        (("--dims", "H=2 L=3 R=2 N=4 V=5 D=6 X=7"), "--dims has 'X=7'"),
        (("--dims", "H=2 L=3 R=3 N=4 V=5 D=6"), "R is 3, expected an even number"),
        (("--dims", "H=1000000000000 L=3 R=2 N=4 V=5 D=6"), "--dims: H is '1000000000000'"),
        (("--dims", "H=-2 L=3 R=2 N=4 V=5 D=6"), "--dims: H is '-2'"),
        (("--dims", "H=2 H=3 L=3 R=2 N=4 V=5 D=6"), "--dims has H twice"),
        ((".", "--layers", "0"), "expected a whole number from 1 to 1,024, such as 8"),
        (("python:module:function",), "bench builds its model from a config"),
        ((".", "--dtype", "fp8"), "dtype is 'fp8'"),
        ((".", "--device", "tpu"), "expected cpu, cuda or cuda:N"),
        ((".", "--device", "cuda:99"), "sees"),
        ((".", "--plot", "bench.pdf"), "neither .svg nor .png"),
    ],
)
def test_bad_input_is_one_line(here, arguments, text):
    done = call(*arguments)
    assert done.exit_code == 2, done.output
    assert text in done.stderr
    assert not done.stdout


def test_a_config_of_several_parts_is_cut_in_its_text_part(here):
    Path("outer.json").write_text(
        json.dumps({"model_type": "llava", "text_config": {**CONFIG, "model_type": "llama", "layer_types": ["a"] * 3}})
    )
    seen = {}

    def parse(raw, path):
        seen.update(raw["text_config"])
        return raw, ()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bench.config_file, "parse", parse)
        bench.config_of("outer.json", 2)
    assert (seen["num_hidden_layers"], seen["layer_types"], seen["vocab_size"], seen["eos_token_id"]) == (
        2, ["a", "a"], 256, None,
    )  # fmt: skip


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_figures_on_a_gpu(here):
    done = call(".", "--contexts", "150", "--rounds", "3", "--device", "cuda", "--json")
    assert done.exit_code == 0, done.output
    said = json.loads(done.stdout)
    assert said["machine"]["device"]
    assert set(said["rows"][0]["ms"]) == {"eager", "inductor", "mla"}

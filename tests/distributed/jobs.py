"""What the ranks of these tests run: every function is called on each of them, with its rank first."""

from __future__ import annotations

import contextlib
import copy
import datetime
import os
import warnings
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import transformers
from torch import fx, nn
from torch.distributed import _functional_collectives as collectives
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from transformers.distributed import DistributedConfig

import mla_compile
from mla_compile import backend
from mla_compile.dynamo.code import CodeGenerator
from mla_compile.passes.verify.comparison import Check, Comparison
from tests.support import latent_modules, models
from tests.support.modules import MLA, inputs
from tests.support.programs import seeded

EAGER = {"codegen": "eager"}


def mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))


def by_heads(model: nn.Module, over: DeviceMesh | None = None) -> nn.Module:
    """Each rank its heads, by a plan of ``parallelize_module``."""
    over = over or mesh()
    for module in model.modules():
        if isinstance(getattr(module, "kv_b_proj", None), nn.Linear):
            columns = [name for name, _ in module.named_children() if name in ("q_proj", "q_b_proj", "kv_b_proj")]
            plan = {**dict.fromkeys(columns, ColwiseParallel()), "o_proj": RowwiseParallel()}
            parallelize_module(module, over, plan)
    return model


def fsdp(model: Any) -> nn.Module:
    over = mesh()
    for layer in getattr(model, "model", model).layers:
        fully_shard(layer, mesh=over)
    return fully_shard(model, mesh=over)


def by_transformers(model: Any, directory: str) -> nn.Module:
    """The plan that the model of transformers has itself."""
    loaded = type(model).from_pretrained(
        directory, distributed_config=DistributedConfig(tp_plan="auto", tp_size=dist.get_world_size())
    )
    loaded.generation_config = copy.deepcopy(model.generation_config)
    return loaded.eval().requires_grad_(False)


def small(**config: Any) -> Any:
    return models.build("deepseek_v3", num_hidden_layers=1, **config)


def generated(model: Any, steps: int, **more: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """The tokens [B,steps] and the logits [B,steps,vocabulary]."""
    return generated_with_cache(model, steps, **more)[:2]


def generated_with_cache(model: Any, steps: int, **more: Any) -> tuple[torch.Tensor, torch.Tensor, Any]:
    """What :func:`generated` returns, and the cache."""
    with torch.no_grad():
        done = model.generate(
            **models.prompt(2, 9), max_new_tokens=steps, do_sample=False, output_logits=True,
            return_dict_in_generate=True, **more,
        )  # fmt: skip
    return done.sequences[:, -steps:], torch.stack(done.logits, 1), done.past_key_values


def same_as_one_process(
    rank: int,
    family: str,
    layers: int,
    how: str,
    directory: str | None,
    steps: int,
    door: str = "optimize",
    codegen: str = "eager",
) -> dict[str, Any]:
    """Generates with one process and with all of them; what differs, and what the report of this rank says."""
    whole = models.build(family, num_hidden_layers=layers)
    tokens, logits = generated(whole, steps)
    if how == "plan":
        model = by_transformers(whole, str(directory))
    else:
        model = by_heads(whole) if how == "heads" else fsdp(whole)
    before = len(backend.reports())
    if door == "optimize":
        fast = mla_compile.optimize(model, codegen=codegen)
        ours, numbers = generated(fast, steps)
        sites = fast.mla_report.sites
    else:
        model.forward = torch.compile(model.forward, backend="mla", options={**EAGER, "verify": True})
        ours, numbers = generated(model, steps)
        sites = tuple(site for report in backend.reports()[before:] for site in report.sites)
    return {
        "tokens": torch.equal(ours, tokens),
        "logits": float((numbers - logits).abs().max() / logits.abs().max().clamp_min(1)),
        "codes": sorted({str(s.code) for s in sites}),
        "absorbed": [(s.dims.H, s.decode_flops_after, s.values_read_after) for s in sites if s.verdict == "absorbed"],
    }


def sharded(rank: int) -> dict[str, Any]:
    """A prompt and a step of one layer whose weights ranks have shares of, and of the whole layer."""
    whole, fast = latent_modules.Model(layers=1), fsdp(latent_modules.Model(layers=1))
    assert all(isinstance(weight, DTensor) for weight in fast.parameters())
    fast = mla_compile.optimize(fast, **EAGER)
    caches, off = [latent_modules.Cache(1) for _ in range(2)], []
    for start, count in ((0, 5), (5, 1)):
        x = seeded(2, count, latent_modules.D, seed=start)
        with torch.no_grad():
            expected, result = (m(x, cache, start) for m, cache in zip((whole, fast), caches, strict=True))
        off.append(float((result - expected).abs().max()))
    return {
        "off": max(off),
        "absorbed": [(s.dims.H, s.values_read_after) for s in fast.mla_report.sites if s.verdict == "absorbed"],
    }


def shared_rows(rank: int, steps: int) -> dict[str, Any]:
    """Generates with a tiny DeepSeek-V4 whose weights ranks have shares of, and with the whole one."""
    from tests.support import compressed_rows  # older releases of transformers do not have the model

    kinds = compressed_rows.SLIDING, compressed_rows.SPARSE, compressed_rows.HEAVY
    whole, shares = (compressed_rows.tiny(*kinds, vocab_size=models.VOCAB).requires_grad_(False) for _ in range(2))
    tokens, logits = generated(whole, steps, eos_token_id=None, pad_token_id=0)
    fast = mla_compile.optimize(fsdp(shares), **EAGER)
    ours, numbers = generated(fast, steps, eos_token_id=None, pad_token_id=0)
    sites = fast.mla_report.sites
    return {
        "tokens": torch.equal(ours, tokens),
        "logits": float((numbers - logits).abs().max()),
        "codes": {site.code for site in sites},
        "operators": [any("one operator" in note for note in site.notes) for site in sites],
    }


def layers_once(rank: int) -> dict[str, Any]:
    """Code for one layer of four, with its collectives, on every rank."""
    whole = models.build("minicpm3", num_hidden_layers=4)
    tokens, _ = generated(whole, 4)
    made: list[int] = []
    of_inductor = CodeGenerator.whole

    def counted(self: CodeGenerator, gm: fx.GraphModule, inputs: Any, layers: int = 1) -> Any:
        made.append(sum("all_reduce" in str(node.target) for node in gm.graph.nodes))
        return of_inductor(self, gm, inputs, layers)

    with mock.patch.object(CodeGenerator, "whole", counted):
        ours, _ = generated(mla_compile.optimize(by_heads(whole), strict=True, verify=False), 4)
    return {"tokens": torch.equal(ours, tokens), "collectives": made}


def _reports(fast: Any) -> list[tuple[str, str]]:
    return [(str(s.code), s.reason) for s in fast.mla_report.sites]


class Summed(MLA):
    """One attention, of whose results all ranks take the mean: they run its graph together."""

    def __init__(self) -> None:
        super().__init__()
        self.group = mesh().get_group().group_name

    def finish(self, out: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return collectives.all_reduce(super().finish(out, x), "sum", self.group) / dist.get_world_size()


Called = Callable[[Any], torch.Tensor]


def together(family: str) -> tuple[torch.Tensor, nn.Module, Called]:
    """What one process computes, a model that ranks run together, and a call of it."""
    if family == "one attention":
        given = inputs()
        with torch.no_grad():
            return MLA()(*given), Summed().eval().requires_grad_(False), lambda model: model(*given)
    return generated(small(), 1)[0], by_heads(small()), lambda model: generated(model, 1)[0]


def alike(ours: torch.Tensor, expected: torch.Tensor) -> bool:
    return torch.allclose(ours.double(), expected.double(), rtol=1e-9, atol=1e-9)


def told_to_differ() -> contextlib.AbstractContextManager[Any]:
    """Whatever is compared in here differs."""
    return mock.patch.object(Comparison, "check", return_value=Check(None, "is told to differ"))


def another_verdict(rank: int, which: int, family: str) -> dict[str, Any]:
    """Rank ``which`` finds that rewritten attentions differ from the original."""
    expected, model, call = together(family)
    fast = mla_compile.optimize(model, forms="absorbed", **EAGER)
    with warnings.catch_warnings(), told_to_differ() if rank == which else contextlib.nullcontext():
        warnings.simplefilter("ignore")
        with torch.no_grad():
            ours = call(fast)
    return {"alike": alike(ours, expected), "sites": _reports(fast)}


def a_failure(rank: int, which: int, strict: bool, family: str) -> dict[str, Any]:
    """Rank ``which`` cannot rewrite anything."""
    from mla_compile import pipeline

    expected, model, call = together(family)
    fast = mla_compile.optimize(model, strict=strict, **EAGER)
    honest = pipeline.run

    def fails(*_: Any, **__: Any) -> Any:
        raise mla_compile.CaptureError("this rank has had enough")

    if rank == which:
        pipeline.run = fails
    try:
        with warnings.catch_warnings(record=True) as caught, torch.no_grad():
            warnings.simplefilter("always")
            ours = call(fast)
        said = [str(w.message) for w in caught if issubclass(w.category, mla_compile.MlaCompileWarning)]
        return {"alike": alike(ours, expected), "said": said, "sites": _reports(fast)}
    except Exception as error:  # noqa: BLE001  what is raised is what the test is about
        return {"raised": str(error)}
    finally:
        pipeline.run = honest


def other_options(rank: int, family: str) -> str:
    _, model, call = together(family)
    fast = mla_compile.optimize(model, fold="always" if rank else "auto", **EAGER)
    try:
        with torch.no_grad():
            call(fast)
    except Exception as error:  # noqa: BLE001  likewise
        return str(error)
    return ""


def alone(rank: int, family: str) -> str:
    """Rank 0 compiles, and no other does."""
    _, model, call = together(family)
    if rank:
        return ""
    dist.distributed_c10d._get_default_store().set_timeout(datetime.timedelta(seconds=1))
    fast = mla_compile.optimize(model, **EAGER)
    try:
        with torch.no_grad():
            call(fast)
    except Exception as error:  # noqa: BLE001  likewise
        return str(error)
    return ""


def dies(rank: int, which: int, after: int) -> str:
    """Rank ``which`` ends in the middle of a generation; what the others are told."""
    return until_a_rank_ends(mla_compile.optimize(by_heads(small()), **EAGER), rank == which, after)


def until_a_rank_ends(fast: Any, ends: bool, after: int) -> str:
    """A generation, in which this rank ``ends`` after so many calls; else the error that it is told, if any."""
    calls = [0]

    def count(*_: Any) -> None:
        calls[0] += 1
        if ends and calls[0] > after:
            os._exit(1)

    fast.register_forward_pre_hook(count)
    try:
        generated(fast, after + 20)
    except Exception as error:  # noqa: BLE001  likewise
        return f"after {calls[0]}: {type(error).__name__}: {error}"
    return ""


def heads_that_cannot_be_divided(rank: int) -> str:
    fast = mla_compile.optimize(by_heads(small(num_attention_heads=3)), **EAGER)
    try:
        generated(fast, 1)
    except Exception as error:  # noqa: BLE001  likewise
        return str(error)
    return ""


def saved(family: str, directory: str, **config: Any) -> None:
    transformers.utils.logging.disable_progress_bar()
    models.build(family, **config).save_pretrained(directory)

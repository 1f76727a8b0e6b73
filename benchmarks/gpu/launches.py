"""What a decode step launches on a GPU, counted without one: Inductor's code for a Hopper GPU, generated and read.

    python -m benchmarks.gpu.launches                          # three layers of the sizes of MiniCPM3 and DeepSeek-V3
    python -m benchmarks.gpu.launches --models tiny,minicpm3
    python -m benchmarks.gpu.launches --models v32 --tokens 4096    # room for more tokens than an indexer chooses

A step in a ``StaticCache`` is compiled on the CPU up to the graph that Inductor is given. That graph is traced again
with fake tensors on a GPU and lowered, with stand-ins for what Inductor asks a device; nothing is compiled further or
run. The launches of one layer are those from one attention to the next. ``attention`` is one launch here; it may
prepare and combine by itself.

The stand-ins are for the Inductor of torch 2.13. Passes of Inductor that match patterns are left out: they ask for a
device that can be used.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

from benchmarks.common import MODELS, build, names, table

import torch  # isort: skip  # after common, which sets the environment
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import mla_compile
from mla_compile.dynamo.code import CodeGenerator

SMS, WARP, REGISTERS, THREADS, SHARED = 132, 32, 65536, 2048, 232448  # of an H100 and an H200
_CALL = re.compile(r"^\s*(?:\w+ = )?(?:(triton_\w+)\.run|extern_kernels\.(\w+)|torch\.ops\.(\w+\.\w+))", re.MULTILINE)


def step_graph(model: Any, batch: int, tokens: int = 256) -> tuple[fx.GraphModule, list[Any]]:
    """The graph of a decode step in a cache of so many tokens, as Inductor is given it, and its example inputs."""
    from transformers import StaticCache

    given: list[tuple[fx.GraphModule, list[Any]]] = []

    def kept(_: CodeGenerator, gm: fx.GraphModule, example_inputs: Any) -> fx.GraphModule:
        given.append((gm, list(example_inputs)))
        return gm

    with mock.patch.object(CodeGenerator, "whole", kept), torch.no_grad():
        # A GPU's graph has the compiler's own products; here they might be this CPU's, where those are faster.
        fast = mla_compile.optimize(model, strict=True, verify=False, products="torch", layers="whole")
        cache: Any = StaticCache(config=model.config, max_cache_len=tokens)
        for count in (6, 1):  # a prompt, then a step
            fast(torch.ones(batch, count, dtype=torch.long), past_key_values=cache)
    return given[-1]


def on_gpu(gm: fx.GraphModule, example_inputs: list[Any], mode: FakeTensorMode) -> tuple[fx.GraphModule, list[Any]]:
    """The graph on fake tensors of a GPU, decomposed and functional as AOTAutograd leaves it."""
    from torch._inductor.decomposition import select_decomp_table
    from torch.func import functionalize

    def moved(x: Any) -> Any:
        if not isinstance(x, torch.Tensor):
            return x
        sizes, strides = map(int, x.shape), map(int, x.stride())
        return torch.empty_strided(tuple(sizes), tuple(strides), dtype=x.dtype, device="cuda")

    for node in gm.graph.nodes:
        if "device" in node.kwargs:
            node.update_kwarg("device", torch.device("cuda"))
    gm.recompile()
    with mode, torch.no_grad():
        for name, value in list(gm.named_buffers(recurse=False)):
            setattr(gm, name, moved(value))
        inputs = [moved(x) for x in example_inputs]
        traced = make_fx(functionalize(gm, remove="mutations"), decomposition_table=select_decomp_table())(*inputs)
    return traced, inputs


@contextlib.contextmanager
def stand_ins() -> Iterator[None]:
    """What Inductor asks a device and Triton before it generates code."""
    from torch._dynamo.device_interface import CudaInterface
    from torch._inductor import scheduler
    from torch._inductor.runtime import hints

    asked = SimpleNamespace(
        type="cuda", index=0, name="H200", major=9, minor=0, multi_processor_count=SMS, warp_size=WARP,
        regs_per_multiprocessor=REGISTERS, max_threads_per_multi_processor=THREADS, max_threads_per_block=1024,
        shared_memory_per_block_optin=SHARED, total_memory=141 << 30, gcnArchName="",
    )  # fmt: skip
    told = hints.DeviceProperties("cuda", 0, SMS, 90, 9, REGISTERS, THREADS, 1024, WARP)
    with contextlib.ExitStack() as stack:
        for name, answer in (
            ("torch.cuda.get_device_properties", asked),
            ("torch.cuda.get_device_capability", (9, 0)),
            ("torch.cuda.is_available", True),
            ("torch.cuda.current_device", 0),
            ("torch.cuda.device_count", 1),
            ("torch.utils._triton.triton_hash_with_backend", "none"),
        ):
            stack.enter_context(mock.patch(name, return_value=answer))
        stack.enter_context(mock.patch.object(hints.DeviceProperties, "create", return_value=told))
        stack.enter_context(mock.patch.object(CudaInterface, "is_available", return_value=True))
        stack.enter_context(mock.patch.object(CudaInterface, "get_device_properties", return_value=asked))
        stack.enter_context(mock.patch.object(scheduler, "has_triton", return_value=True))
        yield


def generated(gm: fx.GraphModule, example_inputs: list[Any]) -> str:
    """Inductor's code for a graph."""
    from torch._inductor.compile_fx import _recursive_post_grad_passes, view_to_reshape
    from torch._inductor.debug import DebugContext
    from torch._inductor.graph import GraphLowering
    from torch._inductor.virtualized import V

    mode = FakeTensorMode()
    traced, inputs = on_gpu(gm, example_inputs, mode)
    with stand_ins(), V.set_fake_mode(mode), torch.no_grad():
        view_to_reshape(traced)
        with mode:
            _recursive_post_grad_passes(traced, is_inference=True)
        lowering = GraphLowering(traced, example_inputs=inputs, is_inference=True)
        with V.set_debug_handler(DebugContext()), V.set_graph_handler(lowering):
            lowering.run(*inputs)
            code, _ = lowering.codegen()
    return str(code.value)


def launches(code: str) -> list[str]:
    """What the generated code calls, in order: ``triton``, ``product``, ``attention``, or the operator that it is."""
    found = []
    for kernel, product, operator in _CALL.findall(code[code.index("def call(") :]):
        attention = operator == "mla_compile.decode_attention"
        found.append("triton" if kernel else "product" if product else "attention" if attention else operator)
    return found


def per_layer(found: list[str]) -> list[str]:
    """The launches of one layer: those after the first attention, up to the second, which must not be the last."""
    first, second = [i for i, name in enumerate(found) if name == "attention"][:2]
    return found[first + 1 : second + 1]


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", type=names(list(MODELS)), default=["minicpm3", "v3"])
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=256, help="that the cache has room for")
    parser.add_argument("--out", type=Path, help="also write the counts here, as JSON")
    args = parser.parse_args()
    rows = []
    for name in args.models:
        torch._dynamo.reset()
        model = build(name, torch.bfloat16, 3, 2 * args.tokens)
        counts = Counter(per_layer(launches(generated(*step_graph(model, args.batch, args.tokens)))))
        rows.append({"model": name, "batch": args.batch, "launches": dict(counts)})
    print(table([list(row.values()) for row in rows], ("model", "batch", "launches of a layer")))
    if args.out:
        args.out.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()

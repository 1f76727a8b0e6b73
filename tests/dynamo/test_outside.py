"""The line at which Dynamo ended a graph."""

from pathlib import Path
from traceback import FrameSummary
from types import SimpleNamespace

import torch
from torch import fx

from mla_compile.dynamo.outside import end_of

TORCH = Path(torch.__file__).parent


def graph_ended_at(*files: Path) -> fx.GraphModule:
    gm = fx.GraphModule({}, fx.Graph())
    stack = [FrameSummary(str(file), 7, "forward", line="y = x.item()") for file in files]
    gm.compile_subgraph_reason = SimpleNamespace(graph_break=True, reason="an item", user_stack=stack)
    return gm


def test_the_innermost_line_that_is_not_of_torch_is_named():
    beside_torch = TORCH.parent / "torchao" / "linear.py"  # its path begins with torch's
    end = end_of(graph_ended_at(Path("model.py"), beside_torch, TORCH / "nn" / "functional.py"))
    assert end == f"an item ({beside_torch}:7: y = x.item())"


def test_a_graph_that_ends_with_its_function_has_no_end_to_tell():
    gm = fx.GraphModule({}, fx.Graph())
    gm.compile_subgraph_reason = SimpleNamespace(graph_break=False, reason="return_value", user_stack=[])
    assert end_of(gm) is None

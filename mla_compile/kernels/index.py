"""Computes the scores of sparse attention's indexer, with the kernel for the device.

:class:`mla_compile.kernels.call.IndexCall` has the equation and the arguments. A GPU from sm_80 on uses a Triton
kernel, a CPU uses a CPU kernel, and other devices use the reference. On a GPU, the host launches on the current
stream and does not wait. After one call of the same kind, a call can be captured in a CUDA graph.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mla_compile.kernels import checks, launch, reference
from mla_compile.kernels.call import IndexCall
from mla_compile.kernels.cpu import index as cpu
from mla_compile.kernels.devices import Device
from mla_compile.kernels.kinds import rounded
from mla_compile.kernels.known import remember
from mla_compile.kernels.plan import MIN_CAPABILITY
from mla_compile.kernels.triton import runner
from mla_compile.kernels.triton.index_steps import BUFFERS, index_step
from mla_compile.kernels.triton.runner import Launch

_PLACES = {name: i for i, name in enumerate((*BUFFERS, "T", "keys_b"))}  # positions in the argument list of a launch
_bound: dict[object, Launch] = {}


def run(call: IndexCall) -> Tensor:
    """Return the scores, [B,S,T] float32 (float64 for float64 keys).

    Raises :class:`InputError` if the arguments do not fit together.
    """
    checks.check_index(call)
    if call.query.is_cpu:
        return cpu.index_scores(call)
    if suits(call):
        return launched(call)
    with torch.autocast(call.query.device.type, enabled=False):  # the reference chooses its own precision
        return reference.index_scores(call)


def suits(call: IndexCall) -> bool:
    """Whether the Triton kernel takes this call: not empty, not float64, on a GPU from sm_80 on, with Triton."""
    query, keys, *_ = call
    some = query.numel() > 0 and keys.numel() > 0
    if not (query.is_cuda and keys.dtype != torch.float64 and some and launch.available()):
        return False
    return Device.of(query.device).capability >= MIN_CAPABILITY


def launched(call: IndexCall) -> Tensor:
    """Compute the scores with the Triton kernel."""
    query, keys, *_ = call
    index = query.get_device()
    if torch.cuda.current_device() != index:
        with torch.cuda.device(index):
            return launched(call)
    out = torch.empty(*query.shape[:2], keys.shape[1], dtype=torch.float32, device=query.device)
    key = (index, call.scale, *map(_form, (query, call.weights)), _grown(keys))
    bound = _bound.get(key)
    if bound is None:
        bound = remember(_bound, key, runner.launch_of(index_step(call, rounded(keys.shape[1])), _PLACES, index))
    stream: int = torch._C._cuda_getCurrentRawStream(index)
    addresses = [x.data_ptr() for x in (*call[:3], out)]
    bound(stream, [*addresses, keys.shape[1], keys.stride(0)])
    return out


def _form(x: Tensor) -> tuple[object, ...]:
    """Return the properties of a tensor on which a launch depends."""
    return x.dtype, x.shape, x.stride(), x.data_ptr() & 15


def _grown(keys: Tensor) -> tuple[object, ...]:
    """Return the properties of ``keys`` on which a launch depends. The number of keys may grow (kernels/kinds.py)."""
    (B, T, D), (outer, *inner) = keys.shape, keys.stride()
    # Strides of 0 and 1 are constants to the compiler. For other strides, the compiler only knows whether 16 divides
    # them and whether they need 64 bits.
    told = outer if outer in (0, 1) else (outer % 16 == 0, outer >= 1 << 31)
    return keys.dtype, B, D, rounded(T), told, *inner, keys.data_ptr() & 15

"""Random MLA attentions: a :class:`Case` is every choice written out; generated_module.py has the module.

What varies is what published code varies: sizes (equal ones on purpose), the layout of the up-projection, how the
shared rotary key is rotated, broadcast and joined, the spelling of the attention core, where scale and mask stand, the
cache protocol (``apart``: K and V of cached and of new tokens are made apart and joined), images of other rows that are
added, latents of groups of heads, what reads a token of V beside the attention, whether K and V are cut to a part of a
static cache, biases, LoRA, dequantized weights. ``fault`` puts one step where absorption is illegal.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

T = TypeVar("T")
LEGAL = "none"
FAULTS = (
    "rope_on_keys",
    "norm_on_keys",
    "tanh_on_keys",
    "silu_on_values",
    "latent_per_head",
    "roll_tokens",
    "cumsum_tokens",
    "conv_tokens",
    "softmax_over_heads",
    "mask_from_keys",
    "expanded_cache",
    "keys_returned",
)


@dataclass(frozen=True)
class Case:
    """One generated module and how it is compiled and called. Sizes are the letters of mla_compile.core.dims."""

    B: int = 2
    T: int = 5
    D: int = 7
    H: int = 3
    L: int = 4
    Q: int = 0
    N: int = 3
    R: int = 2
    V: int = 5
    groups: int = 1
    steps: int = 2
    chunk: int = 1
    dtype: str = "float64"
    up: str = "per_head"
    weight: str = "plain"
    values_first: bool = False
    bias: bool = False
    lora: bool = False
    tied: bool = False
    latent_norm: bool = True
    latent_scale: str = "none"
    key_scale: str = "none"
    query_scale: str = "none"
    rope: str = "half"
    rotate: str = "on_write"
    share: str = "expand"
    join: str = "cat"
    layout: str = "heads_first"
    pad_values: bool = False
    core: str = "sdpa"
    scale: str = "scores"
    factor: float = 0.0
    mask: str = "none"
    mask_rank: int = 4
    padded: bool = False
    softmax: str = "plain"
    extra: str = "none"
    gate: bool = False
    cache: str = "tensors"
    cut: bool = False
    fault: str = LEGAL
    door: str = "trace"
    forms: str = "auto"
    fold: str = "auto"
    lowering: str = "op"
    seed: int = 0
    library: str = ""
    beside: str = "none"
    latents: int = 1
    reads: bool = False

    @property
    def legal(self) -> bool:
        return self.fault == LEGAL

    @property
    def capacity(self) -> int:
        return self.T + self.steps * self.chunk + 1

    def __repr__(self) -> str:
        """Only what differs from the defaults, so that a failing case can be read and pasted."""
        shown = (f for f in fields(self) if getattr(self, f.name) != f.default)
        return f"Case({', '.join(f'{f.name}={getattr(self, f.name)!r}' for f in shown)})"


@st.composite
def cases(draw: st.DrawFn, *, legal: bool | None = None) -> Case:
    """Any case; ``legal`` restricts it to cases with or without a fault."""

    def pick(*options: Any) -> Any:
        return draw(st.sampled_from(options))

    def rarely(common: Any, *others: Any) -> Any:
        return pick(common, common, common, *others)

    palette = draw(st.lists(st.integers(1, 8), min_size=1, max_size=4))
    D, H, L, N, V = (pick(*palette) for _ in range(5))
    R = rarely(pick(*palette), 0)
    rope = pick("half", "interleaved", "complex", "none") if R and R % 2 == 0 else "none"
    beside = rarely("none", "rows", "gated", "key")
    fault = LEGAL if legal or (legal is None and draw(st.booleans())) else pick(*FAULTS)
    if fault == "rope_on_keys":
        N += N % 2
    core = pick("sdpa", "sdpa", "matmul", "einsum", "einsum_heads_last", "bmm")
    core = "matmul" if core == "sdpa" and fault == "softmax_over_heads" else core
    written = core != "sdpa"
    cache = pick("none", "tensors", "apart", "joint", "head_axis", "index_copy", "slice")
    cache = "tensors" if fault == "expanded_cache" else cache
    fills = ("fill", "fill_min", "where", "compare", "visible_fill") if written else ()
    mask = pick("keep", "add", "add_min", *fills)
    if cache not in ("index_copy", "slice") and draw(st.booleans()):
        mask = "none" if written else pick("none", "is_causal")
    extras = ("none", "none", "probs", "softcap", "sink", "max")
    door = pick(*["trace"] * 9, "dynamo", "dynamo", "symbolic")  # by what they cost
    case = Case(
        B=pick(1, 2, 3),
        T=draw(st.integers(1, 6)),
        D=D,
        H=H,
        L=L,
        Q=rarely(0, *palette),
        N=N,
        R=R,
        V=V,
        groups=rarely(1, 2),
        steps=rarely(1, 2) if door == "trace" else 2,
        chunk=rarely(1, 1, 2, 3),
        dtype=rarely("float64", "float64", "float32", "bfloat16", "float16"),
        up=pick("per_head", "blocks", "two", "raw", "einsum", "batched", *(("select", "unbind") if N == V else ())),
        weight=rarely("plain", "dequant", "merged"),
        values_first=draw(st.booleans()),
        bias=draw(st.booleans()),
        lora=rarely(False, True),
        tied=N == V and draw(st.booleans()),
        # Without the norm, and nothing cached, all heads' latents are images of one row: the hidden state.
        latent_norm=draw(st.booleans()) or fault == "latent_per_head",
        latent_scale=rarely("none", "constant", "vector"),
        key_scale=rarely("none", "constant", "vector", "heads"),
        query_scale=rarely("none", "constant", "positions", "norm"),
        rope=rope,
        rotate=rarely("on_write", "on_read"),
        share=pick("expand", "repeat", "repeat_interleave"),
        join=pick("cat", "cat_reversed", "assign", *(("sum",) if written and R else ())),
        layout=pick("heads_first", "heads_last"),
        pad_values=core == "sdpa" and N + R > V and draw(st.booleans()),
        core=core,
        scale=pick(
            *(("scores", "query", "divide", "after_mask", "both") if written else ("argument", "query", "default"))
        ),
        factor=pick(0.0, 0.0, 1.0, 0.37),
        mask=mask,
        mask_rank=pick(2, 3, 4),
        padded=rarely(False, True),
        softmax=rarely("plain", "cast") if written else "plain",
        extra=rarely(*extras) if written and fault != "softmax_over_heads" else "none",
        gate=rarely(False, True),
        cache=cache,
        cut=cache in ("index_copy", "slice") and draw(st.booleans()),
        fault=fault,
        door=door,
        forms=rarely("auto", "absorbed", "expanded"),
        fold=rarely("auto", "never", "always"),
        lowering=pick("op", "aten"),
        seed=draw(st.integers(0, 9)),
        library=rarely("", "flash", "xformers") if core == "sdpa" else "",
        beside=beside,
        latents=1 if fault in ("latent_per_head", "expanded_cache") else rarely(1, 2, 3),
        reads=rarely(False, True),
    )
    # With latents for each of several single heads, every head has rows of its own: that is the fault latent_per_head.
    apart = case.H == case.groups == 1
    # In half precision a sum of two products of one latent, or a product of rows with factors, is not rounded as one
    # product would be that makes a token of it alone.
    rounded = case.up in ("per_head", "blocks") and (case.lora or case.latent_scale == "constant")
    # So is a product of a product, if no norm stands between the two and no cache.
    rounded = rounded or case.beside in ("rows", "gated") or (case.cache == "none" and not case.latent_norm)
    rounded = rounded and case.dtype in ("bfloat16", "float16")
    latents = 1 if apart or case.cache == "apart" else case.latents
    return replace(case, latents=latents, reads=case.reads and not rounded)


def drawn(count: int, start: int, what: st.SearchStrategy[T] | None = None) -> list[T]:
    """Examples of ``what`` (legal cases), the same for each ``start``."""
    found: list[T] = []

    # Not shrunk: a case prints what differs from the defaults, and hypothesis would compile for minutes to shorten it.
    @seed(start)
    @settings(
        max_examples=count,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
        phases=(Phase.generate,),
    )
    @given(cases(legal=True) if what is None else what)
    def collect(one: T) -> None:
        found.append(one)

    collect()
    return found


def check_each(examples: Iterable[T], check: Callable[[T], None]) -> None:
    """Raises AssertionError with all examples that ``check`` raises anything for, each once.

    A run does not end at the first of them, which would hide those behind it.
    """
    wrong: dict[str, str] = {}
    count = 0
    for one in examples:
        count += 1
        try:
            check(one)
        except Exception as error:  # noqa: BLE001  the other examples are checked, whatever was raised
            wrong.setdefault(repr(one), f"{type(error).__name__}: {error}")
    assert not wrong, f"{len(wrong)} of {count}\n" + "\n".join(f"{one}: {error}" for one, error in wrong.items())

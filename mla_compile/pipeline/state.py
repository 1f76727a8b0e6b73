"""The state of the passes over one program: what was requested, the current graph, and the findings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from torch import fx

from mla_compile.codes import Code
from mla_compile.core.choices import Fold
from mla_compile.core.program import Program
from mla_compile.core.records import PassRecord
from mla_compile.options import Options
from mla_compile.passes.cache.held import HeldValues
from mla_compile.passes.decide.head_groups import SplitSite
from mla_compile.passes.ir.graph import ORIGIN
from mla_compile.passes.ir.stop import Stop
from mla_compile.passes.report.draw import Sketch
from mla_compile.passes.rewrite.records import Absorbed, Folded
from mla_compile.passes.sources.records import Verdict
from mla_compile.passes.verify.comparison import Check
from mla_compile.pipeline.analyses import Judgement, copy_with_origins
from mla_compile.pipeline.manager import Analyses
from mla_compile.pipeline.target import Target, this_machine


@dataclass(frozen=True)
class PassRequest:
    """What is requested of the passes. :func:`mla_compile.pipeline.run` describes the flags."""

    options: Options
    frozen: bool = False
    own_cache: bool = False
    draw: bool = False
    recompiles: bool = False
    target: Target = field(default_factory=this_machine)

    @property
    def fold(self) -> Fold:
        """The option ``fold``. "auto" becomes "never" unless weights are frozen.

        If weights can change, every call compares each fold's weights with copies. The comparison reads more bytes than
        the fold saves.
        """
        return "never" if self.options.fold == "auto" and not self.frozen else self.options.fold

    @property
    def judgement(self) -> Judgement:
        """The analysis that judges the attentions under these options."""
        return Judgement(self.options.forms, self.fold, sparse=self.options.sparse == "auto")


@dataclass
class PassState:
    """One program on its way through the passes.

    Attributes:
        captured: the captured program, which is never changed.
        base: the program before absorption: ``captured``, or a copy that preparing passes have changed.
        failed: maps the name of each attention that must stay unchanged to a code and a reason.
    """

    request: PassRequest
    captured: Program
    base: Program
    failed: Mapping[str, tuple[Code, str]]
    analyses: Analyses
    records: list[PassRecord] = field(default_factory=list)
    verdicts: list[Verdict] = field(default_factory=list)
    splits: list[SplitSite] = field(default_factory=list)
    lost: list[tuple[fx.Node, Stop]] = field(default_factory=list)
    sketch: Sketch | None = None
    rewritten: list[Absorbed] = field(default_factory=list)
    fused: list[Absorbed] = field(default_factory=list)
    held: dict[str, HeldValues] = field(default_factory=dict)
    checks: dict[str, Check] = field(default_factory=dict)
    folded: dict[str, list[Folded]] = field(default_factory=dict)
    messages: tuple[str, ...] = ()
    by_heads: int = 0
    faster: int = 0
    expanded: Program | None = None
    head_notes: dict[str, str] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()
    shared: set[fx.Node] = field(default_factory=set)

    @classmethod
    def begin(
        cls,
        request: PassRequest,
        captured: Program,
        failed: Mapping[str, tuple[Code, str]],
        base: Program | None = None,
    ) -> PassState:
        """Return the state before the passes, on a copy of ``base``. ``base`` defaults to ``captured``."""
        base = captured if base is None else base
        return cls(request, captured, base, failed, Analyses(copy_with_origins(base)))

    @property
    def options(self) -> Options:
        """The options of the request."""
        return self.request.options

    @property
    def program(self) -> Program:
        """The current program."""
        return self.analyses.program

    @property
    def graph(self) -> fx.Graph:
        """The current graph."""
        return self.program.gm.graph

    @property
    def chosen(self) -> list[Verdict]:
        """The verdicts of the attentions to absorb."""
        return [v for v in self.verdicts if v.absorb]

    def rebase(self) -> None:
        """Make a copy of the current program the new ``base``."""
        self.base = copy_with_origins(self.program)
        for node in self.graph.nodes:
            node.meta[ORIGIN] = node.name

    @cached_property
    def untouched(self) -> Mapping[str, fx.Node] | None:
        """The nodes of ``base``, by name, for comparison with rewrites; None if nothing is verified."""
        if not self.options.verify:
            return None
        own = copy_with_origins(self.base) if self.base is self.captured else self.base
        return own.named()

"""``continuous_batching``: serve many users of a transformers model over pages of latent rows."""

from __future__ import annotations

import copy
import logging
from typing import TYPE_CHECKING, Any

import torch

from mla_compile.api import explain, optimize, plain_copy
from mla_compile.batching.check import check, page_size, pages_needed
from mla_compile.batching.graphs import Graph, StepGraphs
from mla_compile.batching.traced import NotMlaError
from mla_compile.capture.causal_lm import wire
from mla_compile.capture.dtensors import shared_weight
from mla_compile.core.tracing import one_at_a_time
from mla_compile.dynamo.ranks import Meeting, OtherRankFailedError, meeting_of
from mla_compile.errors import (
    CaptureError,
    ExportError,
    InputError,
    MlaCompileError,
    RankError,
    warn,
)
from mla_compile.options import Options
from mla_compile.report.report import Report

if TYPE_CHECKING:
    from transformers import ContinuousBatchingConfig, GenerationConfig, PreTrainedModel

    from mla_compile.batching.manager import LatentManager

logger = logging.getLogger(__name__)


def continuous_batching(model: Any, *, warm_up: Any = None, **options: Any) -> Any:
    """Return a model whose ``generate_batch`` and ``init_continuous_batching`` run on pages of latent rows.

    The result is the model that :func:`mla_compile.optimize` returns. It shares the weights of ``model``. The scheduler
    of transformers can drive it like any other model, including in ``transformers serve --continuous-batching``. Each
    request gets the tokens that ``generate()`` gives for this request alone. Decoding reads the pages through
    ``mla_compile::paged_decode_attention``. The scheduler cuts prompts into pieces. A ``ContinuousBatchingConfig`` sets
    page size, number of blocks, memory budget, prefix sharing and eviction. Sizes are counted in latent rows. The
    result's attribute ``mla_batching`` (a :class:`Batching`) has the report, the bytes per token, and the compiled
    graphs.

    A model without latent attention is returned unchanged, with a warning.

    Args:
        model: a causal language model of transformers (5.23 or 5.24), on the device where it is to run.
        warm_up: a ``ContinuousBatchingConfig``, or True for the default config. The graphs are then compiled before
            this function returns, for all sizes that can occur with this config: up to ``max_requests_per_batch``
            requests (at most 256), any number of pages per request, and prompt pieces of up to 512 tokens. If the
            memory budget determines ``num_blocks``, a later pool may have another size, and the decode step is then
            compiled again.
        **options: as for :func:`mla_compile.optimize`. ``cache_dtype="fp8"`` keeps latent rows in float8 with one scale
            per row, so tokens may differ. ``context_parallel`` makes the ranks of a mesh share the pages.

    Raises:
        InputError: ``model`` is no causal language model, the scheduler does not know the mesh of the weights, or
            transformers is missing or too old.
        OptionError: an option does not exist or has an invalid value, or the ranks of ``context_parallel`` do not run
            the same steps.
        CaptureError: the model has latent attention but cannot be decoded over pages; the message says why. The error
            is raised on all ranks that hold the weights together.
        RankError: the ranks would serve different models, or one rank does not take part.
    """
    if not isinstance(model, torch.nn.Module) or not hasattr(model, "init_continuous_batching"):
        raise InputError(
            f"continuous_batching() takes a causal language model of transformers, got {type(model).__name__}"
        )
    parsed = _options(options)
    # This call comes first, so that an unsuitable transformers release or mesh of ranks is reported at once.
    _manager().mesh_of(model, parsed.context_parallel)
    fast = optimize(model, **options)
    try:
        graphs = _graphs(plain_copy(fast), parsed)
    except (CaptureError, ExportError, InputError, NotMlaError) as error:
        if not isinstance(error, NotMlaError) and _has_latent_attention(model):
            raise error if isinstance(error, CaptureError) else CaptureError(str(error)) from error
        # If the model has no latent attention, users need not know why tracing failed.
        logger.debug("%s is served by transformers alone: %s", type(model).__name__, error)
        warn(f"{type(model).__name__} has no latent attention to absorb: it runs as in transformers")
        return model
    Batching(fast, parsed, graphs).install()
    if warm_up is not None and warm_up is not False:
        _warm_up(fast, None if warm_up is True else warm_up)
    return fast


def _warm_up(fast: PreTrainedModel, config: ContinuousBatchingConfig | None) -> None:
    manager = fast.init_continuous_batching(continuous_batching_config=copy.copy(config))
    manager.warm_up_for_all(logger.info)
    manager.destroy()


class Batching:
    """The serving side of an optimized model: ``model.mla_batching``. Each copy of the model has its own object.

    This object is also the model's ``init_continuous_batching``.
    """

    def __init__(self, model: PreTrainedModel, options: Options, steps: StepGraphs | None = None) -> None:
        self.model, self.options = model, options
        self._steps = steps

    @property
    def steps(self) -> StepGraphs:
        """The graphs, traced on first access."""
        with one_at_a_time():
            if self._steps is None:
                self._steps = _graphs(plain_copy(self.model), self.options)
            return self._steps

    @property
    def report(self) -> Report:
        """The report on every attention in a decode step and in a piece of a prompt."""
        return self.steps.report

    @property
    def graphs(self) -> tuple[Graph, ...]:
        """All compiled graphs, with the sizes that have been run."""
        return tuple(self.steps.graphs)

    @property
    def bytes_of_token(self) -> int:
        """The bytes per token in the pools of all layers; an average if ranks share a context."""
        return -(-self.steps.bytes_of_row() // self.steps.tokens_of_page(1))

    def install(self) -> None:
        """Attach this object to the model as ``init_continuous_batching``, and attach the report."""
        vars(self.model)["init_continuous_batching"] = vars(self.model)["mla_batching"] = self
        vars(self.model)["mla_report"] = self.report

    @torch.no_grad()
    def __call__(
        self,
        generation_config: GenerationConfig | None = None,
        continuous_batching_config: ContinuousBatchingConfig | None = None,
        workload_hints: object = None,
    ) -> LatentManager:
        """Return a manager over latent pages, like ``init_continuous_batching`` of transformers."""
        from transformers import ContinuousBatchingConfig  # imported on use, as everywhere in this file

        cached: LatentManager | None = getattr(self.model, "_cached_continuous_batching_manager", None)
        if cached is not None:
            return cached
        config = generation_config if generation_config is not None else self.model.generation_config
        if config.eos_token_id is None:
            config = copy.deepcopy(config)
            config.eos_token_id = -1  # transformers writes -1 for "none"
        return _manager()(
            self.model,
            self.steps,
            generation_config=config,
            continuous_batching_config=continuous_batching_config or ContinuousBatchingConfig(),
            workload_hints=workload_hints,
        )

    def __deepcopy__(self, memo: dict[int, object]) -> Batching:
        made = Batching(None, self.options)
        memo[id(self)] = made  # the model refers back to this object
        made.model = copy.deepcopy(self.model, memo)
        return made

    def __reduce__(self) -> tuple[type[Batching], tuple[object, ...]]:
        return Batching, (self.model, self.options)


def _options(options: dict[str, object]) -> Options:
    ours = {name: value for name, value in options.items() if name not in ("mode", "dynamic", "fullgraph")}
    return Options.parse(ours, verify=True)


@one_at_a_time()
def _graphs(model: PreTrainedModel, options: Options) -> StepGraphs:
    """Build the graphs on all ranks that hold the weights together, or on none."""
    ranks = meeting_of(model, options)
    try:
        graphs = _verified(model, options, ranks)
        if ranks is not None:
            ranks.ready()
        return graphs
    except RankError:
        raise
    except OtherRankFailedError as error:
        raise CaptureError(f"{type(model).__name__} is not served, because another rank cannot: {error}") from error
    except Exception as error:
        if ranks is not None:
            ranks.failed(error)
        raise


def _verified(model: PreTrainedModel, options: Options, ranks: Meeting | None) -> StepGraphs:
    lm = wire(model)
    graphs = StepGraphs(lm, options, ranks=ranks)
    if options.verify:
        # The check covers the graphs, not Inductor, so the graphs run uncompiled.
        plain = StepGraphs(lm, options, like=graphs)
        pools = plain.make_pools(pages_needed(), page_size(), next(model.parameters()).device)
        check(lm, plain, plain.decode(pools))
    return graphs


def _manager() -> type[LatentManager]:
    try:
        from mla_compile.batching.manager import LatentManager
    except ImportError as error:
        raise InputError(
            f"continuous batching needs the scheduler of transformers 5.23 or 5.24 ({error}): "
            "pip install 'transformers>=5.23'"
        ) from error
    return LatentManager


def _has_latent_attention(model: PreTrainedModel) -> bool:
    ids = torch.arange(3, 8, device=next(model.parameters()).device)[None]
    try:
        report = explain(model, input_ids=ids, use_cache=False, forms="absorbed")
    except MlaCompileError:
        return shared_weight(model) is not None  # a guess, because a sharded model may be impossible to copy
    return any(site.latent for site in report.sites)

"""Load, rewrite and compile the model of a server."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

from fastapi import HTTPException
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig, PreTrainedModel
from transformers.cli.serving.model_manager import ModelManager
from transformers.cli.serving.utils import split_revision

from mla_compile.batching.door import continuous_batching
from mla_compile.batching.manager import LatentManager
from mla_compile.errors import InputError
from mla_compile.serving.generation import LATER, ServedGeneration
from mla_compile.serving.ranks import ServerRanks
from mla_compile.serving.reading import HANDLERS, RequestReader, ServedModel
from mla_compile.serving.settings import Settings

logger = logging.getLogger("mla_compile")


class Loaded:
    """The state of the model while it is loaded and served. ``told`` is called with each new stage.

    Attributes:
        stage: the current stage in words.
        problem: the error that keeps the model from being served, or None.
        ready: whether requests are answered.
    """

    def __init__(self, settings: Settings, told: Callable[[str], None] = lambda _: None) -> None:
        self._settings, self.ranks = settings, ServerRanks.of(settings)
        self._told = told
        self.stage, self.ready, self.stopping = "starting", False, False
        self.problem: Exception | None = None
        self.readers: dict[str, RequestReader] = {}
        self.manager: Any = None
        self.generation: ServedGeneration | None = None
        self.room = 0

    def load(self, try_out: Callable[[], None] = lambda: None) -> None:
        """Load the weights, rewrite and compile the graphs, start the loop and call ``try_out``.

        All ranks except the first only run the steps that the first rank requests. Raises :class:`InputError` if the
        model cannot be loaded, has no latent attention, or cannot be divided among ranks by transformers.
        """
        begin = time.monotonic()
        settings = self._settings
        self._begin("loading the weights")
        models = _Models(settings, self.ranks)
        tokenizer, model = models.read(settings.model)
        self._begin("rewriting the model")
        fast = continuous_batching(model, **settings.options, **self.ranks.sharing())
        if not hasattr(fast, "mla_batching"):
            raise InputError(f"{settings.model} has no latent attention; serve it by `transformers serve`")
        self.manager = self._manager(fast)
        if self.manager.distributed_helper.tp_size != self.ranks.count:
            raise InputError(f"{settings.model} has no plan in transformers by which ranks hold its weights together")
        self._begin("compiling")
        if settings.warm_up:
            self.manager.warm_up_for_all(self._compiling)
        else:
            self.manager.warmup()
        self.room = min(self.manager.room(), settings.max_model_len or self.manager.room(), _positions(fast))
        self.manager.start()
        if self.ranks.number:
            return
        self.generation = ServedGeneration(self.manager, settings.timeout)
        state = ServedModel(settings.name, fast, tokenizer, self.generation)
        self.readers = {path: RequestReader(path, state) for path in HANDLERS}
        self._begin("trying out")
        try_out()
        self.ready = True
        self._begin(f"ready after {time.monotonic() - begin:.0f} s")
        for graph in fast.mla_batching.graphs:
            logger.info("%s", graph)

    def _manager(self, fast: PreTrainedModel) -> LatentManager:
        settings = self._settings
        asked = {
            "page_size": settings.page_size,
            "num_blocks": settings.pages,
            "max_batch_tokens": settings.max_batch_tokens,
            "max_requests_per_batch": settings.max_requests,
        }
        config = ContinuousBatchingConfig(**{name: value for name, value in asked.items() if value is not None})
        # Each request has its own sampling settings. Their defaults come from the model's config.
        greedy = GenerationConfig(do_sample=False, eos_token_id=fast.generation_config.eos_token_id, pad_token_id=0)
        manager: LatentManager = fast.init_continuous_batching(
            generation_config=greedy, continuous_batching_config=config
        )
        return manager

    def _begin(self, stage: str) -> None:
        self.stage = stage
        self._told(stage)

    def _compiling(self, what: str) -> None:
        self.stage = f"compiling {what}"

    def check(self) -> None:
        """Raise :class:`HTTPException` if no requests are answered now."""
        if (why := self.trouble()) is not None:
            raise HTTPException(503, f"the server is not ready: {why}", LATER)

    def trouble(self) -> str | None:
        """Return the reason why no requests are answered; None if requests are answered."""
        if self.stopping:
            return "it is stopping"
        if not self.ready:
            return self.stage
        status = self.manager.background_thread_status
        return (
            status.can_accept_new_requests() if status.fatal_error is None else f"its loop died: {status.fatal_error}"
        )

    def waiting(self, live: int) -> int:
        """Return the number of ``live`` requests that have not started."""
        processor = self.manager.batch_processor
        return live - (0 if processor is None else len(processor.scheduler.active_requests))

    def stop(self) -> None:
        """Stop the loop, and end the requests that are still running."""
        self.stopping = True
        if self.generation is not None:
            self.generation.stop()


class _Models(ModelManager):
    """Reads a tokenizer and a model, like ``transformers serve``."""

    def __init__(self, settings: Settings, ranks: ServerRanks) -> None:
        self._ranks = ranks
        super().__init__(
            device=settings.device,
            dtype=settings.dtype,
            trust_remote_code=settings.trust_remote_code,
            continuous_batching=True,
            quantization=settings.quantization,
        )

    def read(self, name: str) -> tuple[object, object]:
        """Return the tokenizer and the model. Raises :class:`InputError` if either cannot be loaded."""
        place = self.process_model_name(name)
        try:
            processor, model = self._load_processor(place), self._load_model(place)
        except (OSError, ValueError) as error:
            raise InputError(f"{name} cannot be loaded: {error}") from error
        return getattr(processor, "tokenizer", processor), model

    def _load_model(self, model_id_and_revision: str, *args: object, **kwargs: object) -> object:
        if self._ranks.count == 1:
            return super()._load_model(model_id_and_revision, *args, **kwargs)
        name, revision = split_revision(model_id_and_revision)
        quantization = self.get_quantization_config()
        more = {} if quantization is None else {"quantization_config": quantization}
        return AutoModelForCausalLM.from_pretrained(
            name,
            revision=revision,
            dtype=self.dtype,
            trust_remote_code=self.trust_remote_code,
            **self._ranks.placed(),
            **more,
        )


def _positions(model: PreTrainedModel) -> int:
    """Return the maximum sequence length of the model."""
    return int(getattr(model.config.get_text_config(), "max_position_embeddings", None) or 1 << 62)

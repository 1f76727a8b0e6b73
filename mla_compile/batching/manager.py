"""Plug latent pages into transformers with subclasses of its manager, processor and scheduler.

* mla_compile provides the pool and executes the steps. transformers provides queues, schedules, sharing, eviction,
  sampling and threads.
* Ranks that hold the weights together run the same steps. As in transformers, the first rank distributes the requests.
  A failure on only some ranks ends all ranks.
* A request that could never run is refused when it arrives. A request whose id is in use gets a new id. If a request
  fails or outgrows the pool, other requests continue. If the loop itself dies, all requests end with the loop's error.
  If there is only one rank, the loop then restarts with an empty pool.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.generation.continuous_batching.continuous_api import (
    ContinuousBatchingManager,
    ContinuousBatchProcessor,
)
from transformers.generation.continuous_batching.distributed import DistributedHelper
from transformers.generation.continuous_batching.initialization import update_cb_config_after_cache_creation
from transformers.generation.continuous_batching.requests import GenerationOutput, RequestState, RequestStatus
from transformers.generation.continuous_batching.scheduler import SCHEDULER_MAPPING, FIFOScheduler

from mla_compile.batching.figures import watch
from mla_compile.batching.graphs import StepGraphs
from mla_compile.batching.pages import LatentPages
from mla_compile.batching.replay import Replayed, can_record
from mla_compile.batching.router import Router
from mla_compile.batching.sampling import LatentRunner, Sampling
from mla_compile.batching.scheduling import latent_scheduler
from mla_compile.batching.steps import Steps
from mla_compile.capture.dtensors import weight_meshes
from mla_compile.core.counting import count, observe
from mla_compile.errors import InputError, OptionError, RankError, brief

logger = logging.getLogger("mla_compile")
_IN_VAIN = 2
_LONGEST_PIECE = 512
"""Warm-up covers prompt pieces of up to this many tokens. The code for this length also serves longer pieces."""
_MOST_REQUESTS = 256


class LatentProcessor(ContinuousBatchProcessor):
    """Prepares steps and processes the resulting tokens. If a request outgrows the pool, other requests continue."""

    steps: Steps

    def __init__(self, **arguments: object) -> None:
        super().__init__(**arguments)
        self.model_runner = LatentRunner(
            logit_processor=self.logit_processor,
            cb_config=self.cb_config,
            cache=self.cache,
            inputs_and_outputs=self.inputs_and_outputs,
            do_sample=self.do_sample,
            return_logprobs=self.return_logprobs,
        )

    def prepare_next_batch(self) -> bool:
        """Prepare a batch as transformers does. If the pool is full, fail one request instead of all.

        transformers raises an error if the pool is full and no request can be put back into the queue.
        """
        while True:
            try:
                return bool(super().prepare_next_batch())
            except RuntimeError as error:
                starved = self.scheduler.starved_requests
                if not starved:
                    raise
                state = starved[-1][0]
                room = self.steps.room()
                told = InputError(f"the pool of {room} tokens is full, and this request needs more of it ({error})")
                self.fail(told, state)

    def fail(self, error: Exception, state: RequestState) -> None:
        """End one request with the tokens generated so far, and free its pages."""
        self._handle_request_error(error, state)
        self.scheduler.finish_request(state.request_id)

    def update_batch(self) -> None:
        """Update as transformers does, and record each request's tokens and latencies."""
        with_token = [f.state for f in self.inputs_and_outputs.requests_in_batch if f.has_new_token]
        super().update_batch()
        now = time.perf_counter()
        count("generation_tokens", len(with_token))
        for state in with_token:
            before: float | None = getattr(state, "mla_last_token", None)
            if before is not None:
                observe("inter_token_latency_seconds", now - before)
            elif not state._true_initial_tokens:
                observe("time_to_first_token_seconds", now - state.created_time)
            state.mla_last_token = now
            if state.status is RequestStatus.FINISHED:
                observe("e2e_request_latency_seconds", now - state.created_time)
                ended = state.generated_tokens[-1:] and state.generated_tokens[-1] in state._eos_token_ids
                count("request_success", finished_reason="stop" if ended else "length")


class _OfOneKind:
    """Presents a model to transformers as if all layers were of one kind. transformers refuses other models.

    This is safe: mla_compile owns the pools, and tracing the step proved that every layer attends to all cached tokens.
    """

    def __init__(self, of: PreTrainedModel | PreTrainedConfig, mesh: DeviceMesh | _Ranks | None = None) -> None:
        self._of = of
        if mesh is not None:
            self._device_mesh = mesh  # transformers sets this attribute only for its own sharding plans

    def __getattr__(self, name: str) -> object:
        return getattr(self._of, name)

    @property
    def config(self) -> _OfOneKind:
        return _OfOneKind(self._of.config)

    layer_types = sliding_window = None

    def get_text_config(self) -> _OfOneKind:
        return _OfOneKind(self._of.get_text_config())

    def eval(self) -> object:
        self._of.eval()
        return self


class _Ranks:
    """Presents a process group as a mesh with one unnamed axis. transformers uses all ranks of such a mesh."""

    mesh_dim_names = None

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    def size(self) -> int:
        return dist.get_world_size(self._group)

    def get_group(self) -> dist.ProcessGroup:
        return self._group

    def get_local_rank(self) -> int:
        return dist.get_rank(self._group)


class _AlwaysAwake(threading.Event):
    """Keeps a rank's loop awake, because all other ranks would wait for a sleeping rank.

    Instead, the loop waits for the first rank.
    """

    def wait(self, timeout: float | None = None) -> bool:
        return True


class LatentManager(ContinuousBatchingManager):
    """The manager that ``init_continuous_batching`` of an optimized model returns."""

    def __init__(self, model: PreTrainedModel, graphs: StepGraphs, **arguments: Any) -> None:
        self.graphs = graphs
        self.batch_processor: LatentProcessor | None = None
        self._steps: Steps | None = None
        self._died: Exception | None = None
        self._in_vain = 0  # how many loops in a row have ended before their first step
        self._ends = False
        self._ending = threading.Lock()
        asked = arguments["continuous_batching_config"]
        super().__init__(_OfOneKind(model, self.mesh_of(model, graphs.options.context_parallel)), **arguments)
        self.model = model
        self.output_router: Router = Router()
        watch(self)
        if not self.is_tp_driver:
            self._wake_up_loop = _AlwaysAwake()
        self.logit_processor.supported_keys["mla_sampling"] = Sampling
        # Steps are recorded if the device can do so, unless the config forbids it. The default of transformers depends
        # on the attention mask, which is not needed here.
        wanted = asked.use_cuda_graph is None or asked.cuda_graph_booleans[1]
        alone = self.distributed_helper.tp_size == 1
        self._replays = Replayed if wanted and alone and can_record(model.device) else None
        config = self.continuous_batching_config
        # Capture and compilation in transformers apply only to its own steps, so they are turned off.
        config.use_cuda_graph, config.use_async_batching = (False, False), False
        config.varlen_compile_config = config.decode_compile_config = None
        if config.page_size & (config.page_size - 1) or config.page_size > 256:
            raise InputError(f"page_size is {config.page_size}, expected a power of two up to 256")

    @staticmethod
    def mesh_of(model: torch.nn.Module, context: DeviceMesh | None) -> DeviceMesh | _Ranks | None:
        """Return the mesh of the ranks that run the same steps; None if this rank runs steps alone.

        The ranks that hold the weights of ``model`` together run the same steps. So do the ranks of the mesh
        ``context``, which share pages.

        Raises :class:`InputError` if transformers would choose other ranks. Raises :class:`OptionError` unless
        ``context`` lies within the mesh of the weights, or the two meshes are the axes of a mesh of all ranks.
        """
        meshes = weight_meshes(model)
        mesh = meshes[0] if meshes else None
        noted = mesh if meshes else getattr(model, "_device_mesh", None)
        sizes = {1 if one is None else one.size() for one in (mesh, DistributedHelper.extract_tp_mesh(noted))}
        if len(meshes) > 1 or len(sizes) > 1:
            told = ", ".join(map(str, meshes)) or str(noted)
            raise InputError(
                "continuous batching: expected weights that are DTensors over one mesh of ranks, without names or with "
                f"the one axis 'tp', by which the scheduler of transformers knows them; got {told}"
            )
        if context is None or context.size() == 1:
            return mesh
        if mesh is None:
            return _Ranks(context.get_group())
        together = set(context.mesh.tolist()) & set(mesh.mesh.flatten().tolist())
        if len(together) == context.size():
            return mesh
        if len(together) == 1 and context.size() * mesh.size() == dist.get_world_size():
            return _Ranks(dist.distributed_c10d._get_default_group())
        raise OptionError(
            f"context_parallel is {context}, and {mesh} holds the weights: expected ranks within that mesh, or the "
            "other axis of a mesh of all ranks, because otherwise it is unknown which ranks run the same steps"
        )

    def switch_to_cb_friendly_attn(self, model: object, auto_switch_to_flash: bool = True) -> None:  # noqa: FBT001, FBT002  transformers calls it
        """Do nothing: the graphs are already traced and do not use the model's own attention."""

    def warmup(self) -> None:
        """Compile the graphs once, for symbolic sizes."""
        self.warm_up()

    def warm_up(self, told: Callable[[str], None] = lambda _: None, requests: int = 1, tokens: int = 2) -> None:
        """Compile for up to ``requests`` requests and ``tokens`` prompt tokens. Call ``told`` before each size."""
        if self.batch_processor is None:
            self.batch_processor = self._create_batch_processor()
        assert self._steps is not None
        self._steps.warm_up(told, requests, tokens)
        self.warmed_up = True

    def warm_up_for_all(self, told: Callable[[str], None]) -> None:
        """Compile for all sizes that a step can have. Call ``told`` with a description of each size."""
        config = self.continuous_batching_config
        tokens = min(_LONGEST_PIECE, config.max_batch_tokens or _LONGEST_PIECE)
        self.warm_up(told, min(_MOST_REQUESTS, config.max_requests_per_batch or _MOST_REQUESTS), tokens)

    def room(self) -> int:
        """Return the maximum number of tokens of one request. Call this after a warm-up or a start of the thread."""
        assert self._steps is not None
        return self._steps.room()

    def start(self) -> None:
        """Start the thread that generates."""
        self._ends, self._in_vain, self.current_batch = False, 0, 0
        super().start()

    def add_request(self, input_ids: object, request_id: str | None = None, *args: object, **how: object) -> str | None:
        """Add a request as transformers does, and return its id. ``mla_sampling`` tells how its tokens are drawn.

        If another unanswered request has this id, the new request gets a derived id.

        Raises :class:`InputError` if the id is not a string.
        """
        if not self.is_tp_driver:
            return None
        if request_id is None:
            with self._request_lock:
                request_id = f"req_{self._request_counter}"
                self._request_counter += 1
        drawn = how.get("mla_sampling")
        if isinstance(drawn, Sampling) and drawn.seed is None and self.distributed_helper.tp_size > 1:
            how["mla_sampling"] = replace(drawn, seed=secrets.randbits(63))  # all ranks draw the same tokens
        name = self.output_router.take(request_id, self.num_return_sequences)
        added: str | None = None
        try:
            added = super().add_request(input_ids, name, *args, **how)
        finally:
            if added is None:
                self.output_router.give_up(name, self.num_return_sequences)
        return added

    def add_requests(self, inputs: list[list[int]], *args: object, **how: object) -> list[str]:
        """Add requests as transformers does, with ids that no unanswered request has."""
        with self._request_lock:
            while not self.output_router.is_free(f"req_{self._request_counter + k}" for k in range(len(inputs))):
                self._request_counter += 1
        added: list[str] = super().add_requests(inputs, *args, **how)
        return added

    def register_result_handler(self, request_id: str, callback: Callable[[GenerationOutput], object]) -> None:
        """Register as transformers does; raise :class:`InputError` if a handler for this id exists already."""
        self.output_router.register(request_id)
        super().register_result_handler(request_id, callback)

    def cancel_request(self, request_id: str) -> None:
        """Cancel as transformers does; raise :class:`InputError` if the id is not a string."""
        if not isinstance(request_id, str):
            raise InputError(f"the id of a request is {request_id!r}, expected a string")
        super().cancel_request(request_id)

    def stop(self, *args: object, **kwargs: object) -> None:
        """Stop the loop as transformers does."""
        with self._ending:  # a thread about to restart its loop either sees the flag or is stopped afterwards
            self._ends = True
        super().stop(*args, **kwargs)

    def wait(self) -> None:
        """Wait until the generating thread has ended. Raises :class:`RankError` if an error ended the thread."""
        thread = self._generation_thread
        if thread is not None:
            thread.join()
        error = self.background_thread_status.fatal_error
        if error is not None:
            raise RankError(f"the generation loop died: {brief(error)}") from error

    def _run_generation_loop(self, **how: object) -> None:  # transformers 5.24 gives an inference-mode flag
        while True:
            self._died = None
            super()._run_generation_loop(**how)
            self._in_vain = 0 if self.current_batch else self._in_vain + 1
            with self._ending:
                if self._died is None or self._ends:
                    return
                logger.warning("the generation loop died and starts again", exc_info=self._died)
                self.batch_processor = self._steps = None
                self.background_thread_status.clear()

    def _handle_critical_error(self, error: Exception, batch_processor: LatentProcessor | None) -> None:
        # A restart would fail again if there is no pool, or if the loop has died several times before its first step.
        # If there are several ranks, other ranks may still run, and transformers makes all ranks stop.
        several = self.distributed_helper.tp_size > 1
        if several or batch_processor is None or (self._in_vain >= _IN_VAIN and not self.current_batch):
            with suppress(RuntimeError):  # raised if other ranks can no longer be reached
                super()._handle_critical_error(error, batch_processor)
            return
        self._died = error
        self._fail_all_remaining_requests(error, batch_processor)

    def _generation_step(self) -> None:
        if self.batch_processor is None:
            raise RuntimeError("a generation step without a batch processor")
        self.batch_processor._generation_step(self._steps)

    def _create_batch_processor(self) -> ContinuousBatchProcessor:
        if isinstance(self.batch_processor, LatentProcessor):
            self.batch_processor.reset()
            return self.batch_processor
        config, text = self.continuous_batching_config, self.model.config.get_text_config()
        pages = LatentPages(self.graphs, text, config, self.model.device, self.model.dtype, self.distributed_helper)
        self._use_prefix_sharing = pages.use_prefix_sharing
        update_cb_config_after_cache_creation(config, pages.num_blocks, pages.max_batch_tokens)
        self._steps = Steps(self.graphs, pages, self.graphs.vocabulary, self._replays)
        scheduler = latent_scheduler(SCHEDULER_MAPPING.get(config.scheduler_type, FIFOScheduler))(
            cache=pages, safety_margin=config.safety_margin, max_requests_per_batch=config.max_requests_per_batch
        )
        scheduler.vocabulary = self.model.get_input_embeddings().weight.shape[0]
        scheduler.gone = lambda state: self.output_router.give_up(state.request_id, state.num_children + 1)
        processor = LatentProcessor(
            cache=pages,
            # The processor reads only these attributes. It makes no mask for unknown attention implementations.
            config=SimpleNamespace(sliding_window=None, _attn_implementation="mla_compile"),
            generation_config=self.generation_config,
            continuous_batching_config=config,
            logit_processor=self.logit_processor,
            input_queue=self.input_queue,
            cancel_queue=self.cancel_queue,
            output_router=self.output_router,
            background_thread_status=self.background_thread_status,
            model_device=self.model.device,
            model_dtype=self.model.dtype,
            scheduler=scheduler,
            distributed_helper=self.distributed_helper,
        )
        pages.read_all()
        processor.steps = self._steps
        self._steps.batch = lambda: processor.inputs_and_outputs.requests_in_batch
        self._steps.fails = processor.fail
        self._steps.alike = self._on_all_ranks
        return processor

    def _on_all_ranks(self, works: bool, /) -> bool:  # noqa: FBT001
        # tp_all_reduce_state returns each number's maximum over the ranks. It uses the scheduler's group on the CPU.
        try:
            failed, worked, _ = self.distributed_helper.tp_all_reduce_state(int(not works), int(works))
        except RuntimeError as error:
            raise RankError(f"the other ranks did not report how a step went: {brief(error)}") from error
        return not (failed and worked)

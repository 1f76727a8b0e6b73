"""Plugs latent pages into transformers: its manager, processor and scheduler with what differs here.

* The pool, and what runs a step, are ours; queues, schedules, sharing, eviction, sampling and threads are theirs.
* Where ranks hold the weights together, they run the same steps, as transformers has it: the first of them hands out
  the requests. What fails on one rank alone ends them all.
* A request that could never run is refused when it comes, one whose id another has gets an id of its own, and one that
  fails, or that the pool becomes too small for, fails alone. Where the loop itself dies all the same, everybody is
  answered and it starts again with an empty pool.
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

import torch.distributed as dist
from transformers.generation.continuous_batching.continuous_api import (
    ContinuousBatchingManager,
    ContinuousBatchProcessor,
)
from transformers.generation.continuous_batching.distributed import DistributedHelper
from transformers.generation.continuous_batching.initialization import update_cb_config_after_cache_creation
from transformers.generation.continuous_batching.requests import RequestState, RequestStatus
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
"""Tokens of a prompt up to which sizes are warmed up; code for them serves longer pieces."""
_MOST_REQUESTS = 256


class LatentProcessor(ContinuousBatchProcessor):
    """Prepares steps and takes their tokens; a request that the pool is too small for does not end the others."""

    steps: Steps

    def __init__(self, **arguments: Any) -> None:
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
        """As in transformers, which gives up on everybody where the pool is full and nobody can wait."""
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
        """Ends one request, with the tokens that it has so far, and frees its pages."""
        self._handle_request_error(error, state)
        self.scheduler.finish_request(state.request_id)

    def update_batch(self) -> None:
        """As in transformers, and counts what each request got."""
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
    """A model whose layers are all of one kind to transformers, which takes no kind that it has no cache for.

    The pools are ours, and that nothing cached is hidden in any layer was proved when the step was made.
    """

    def __init__(self, of: Any, mesh: Any = None) -> None:
        self._of = of
        if mesh is not None:
            self._device_mesh = mesh  # transformers notes those of its own plans only

    def __getattr__(self, name: str) -> Any:
        return getattr(self._of, name)

    @property
    def config(self) -> Any:
        return _OfOneKind(self._of.config)

    layer_types = sliding_window = None

    def get_text_config(self) -> Any:
        return _OfOneKind(self._of.get_text_config())

    def eval(self) -> Any:
        self._of.eval()
        return self


class _Ranks:
    """The ranks of a group as a mesh of one axis without a name, of which transformers takes all."""

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
    """Lets a rank wait where the first one calls it, and not asleep, for which all would wait."""

    def wait(self, timeout: float | None = None) -> bool:
        return True


class LatentManager(ContinuousBatchingManager):
    """The manager that ``init_continuous_batching`` of an optimized model returns."""

    def __init__(self, model: Any, graphs: StepGraphs, **arguments: Any) -> None:
        self.graphs = graphs
        self.batch_processor: Any = None
        self._steps: Steps | None = None
        self._died: Exception | None = None
        self._in_vain = 0  # loops in a row that died before their first step
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
        # As asked, and by default where the device can: no mask, which is what transformers goes by, is needed here.
        wanted = asked.use_cuda_graph is None or asked.cuda_graph_booleans[1]
        alone = self.distributed_helper.tp_size == 1
        self._replays = Replayed if wanted and alone and can_record(model.device) else None
        config = self.continuous_batching_config
        # What transformers would capture or compile is its own path; steps are compiled and recorded here.
        config.use_cuda_graph, config.use_async_batching = (False, False), False
        config.varlen_compile_config = config.decode_compile_config = None
        if config.page_size & (config.page_size - 1) or config.page_size > 256:
            raise InputError(f"page_size is {config.page_size}, expected a power of two up to 256")

    @staticmethod
    def mesh_of(model: Any, context: Any) -> Any:
        """The mesh of the ranks that run the same steps; None where this one runs its own.

        Those that hold the weights of ``model`` together do, and those of the mesh ``context``, which share pages.

        Raises :class:`InputError` where transformers would have other ranks run the same steps, and
        :class:`OptionError` where ``context`` has neither ranks of the other mesh only nor is the other axis of all.
        """
        meshes = weight_meshes(model)
        mesh = meshes[0] if meshes else None
        noted = mesh if meshes else getattr(model, "_device_mesh", None)
        sizes = {1 if one is None else one.size() for one in (mesh, DistributedHelper.extract_tp_mesh(noted))}
        if len(meshes) > 1 or len(sizes) > 1:
            told = ", ".join(map(str, meshes or [noted]))
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
            f"context_parallel is {context}, and the weights are held by {mesh}: expected ranks of these, or the other "
            "axis of a mesh of all ranks, so that it is known who runs the same steps"
        )

    def switch_to_cb_friendly_attn(self, model: Any, auto_switch_to_flash: bool = True) -> None:
        """Nothing: the graphs have been traced, and the model's own attention is not asked for any more."""

    def warmup(self) -> None:
        """Compiles the graphs, which serve all sizes where code does."""
        self.warm_up()

    def warm_up(self, told: Callable[[str], None] = lambda _: None, requests: int = 1, tokens: int = 2) -> None:
        """Compiles the graphs, also where code depends on a number: see :meth:`Steps.warm_up`."""
        if self.batch_processor is None:
            self.batch_processor = self._create_batch_processor()
        assert self._steps is not None
        self._steps.warm_up(told, requests, tokens)
        self.warmed_up = True

    def warm_up_for_all(self, told: Callable[[str], None]) -> None:
        """Compiles what as many requests meet as a step takes; ``told`` what is being made."""
        config = self.continuous_batching_config
        tokens = min(_LONGEST_PIECE, config.max_batch_tokens or _LONGEST_PIECE)
        self.warm_up(told, min(_MOST_REQUESTS, config.max_requests_per_batch or _MOST_REQUESTS), tokens)

    def room(self) -> int:
        """The most tokens that one request can have, once the graphs are compiled or the thread runs."""
        assert self._steps is not None
        return self._steps.room()

    def start(self) -> None:
        """Starts the thread that generates."""
        self._ends, self._in_vain, self.current_batch = False, 0, 0
        super().start()

    def add_request(self, input_ids: Any, request_id: str | None = None, *args: Any, **how: Any) -> str | None:
        """As in transformers, with one more argument, ``mla_sampling``: how tokens of this request are drawn.

        A request whose id another one has that is under way gets one made of it, which is returned.

        Raises :class:`InputError` for an id that is no string.
        """
        if not self.is_tp_driver:
            return None
        if request_id is None:
            with self._request_lock:
                request_id = f"req_{self._request_counter}"
                self._request_counter += 1
        drawn = how.get("mla_sampling")
        if isinstance(drawn, Sampling) and drawn.seed is None and self.distributed_helper.tp_size > 1:
            how["mla_sampling"] = replace(drawn, seed=secrets.randbits(63))  # the same tokens on all ranks
        name = self.output_router.take(request_id, self.num_return_sequences)
        added: str | None = None
        try:
            added = super().add_request(input_ids, name, *args, **how)
        finally:
            if added is None:
                self.output_router.give_up(name, self.num_return_sequences)
        return added

    def add_requests(self, inputs: list[list[int]], *args: Any, **how: Any) -> list[str]:
        """As in transformers, by ids that no request under way has."""
        with self._request_lock:
            while not self.output_router.is_free(f"req_{self._request_counter + k}" for k in range(len(inputs))):
                self._request_counter += 1
        added: list[str] = super().add_requests(inputs, *args, **how)
        return added

    def register_result_handler(self, request_id: str, callback: Callable[..., Any]) -> None:
        """As in transformers; raises :class:`InputError` if somebody waits for a request of that id already."""
        self.output_router.register(request_id)
        super().register_result_handler(request_id, callback)

    def cancel_request(self, request_id: str) -> None:
        """As in transformers; raises :class:`InputError` for what cannot be an id."""
        if not isinstance(request_id, str):
            raise InputError(f"the id of a request is {request_id!r}, expected a string")
        super().cancel_request(request_id)

    def stop(self, *args: Any, **kwargs: Any) -> None:
        """Ends it, as in transformers."""
        with self._ending:  # a thread that is about to start its loop again sees it, or is told after
            self._ends = True
        super().stop(*args, **kwargs)

    def wait(self) -> None:
        """Returns when the thread that generates has ended; raises :class:`RankError` if an error ended it."""
        thread = self._generation_thread
        if thread is not None:
            thread.join()
        error = self.background_thread_status.fatal_error
        if error is not None:
            raise RankError(f"the generation loop died: {brief(error)}") from error

    def _run_generation_loop(self, **how: Any) -> None:  # from 5.24 on: whether in inference mode
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

    def _handle_critical_error(self, error: Exception, batch_processor: Any) -> None:
        # Without a pool, or where it has died a few times before its first step, to start again would fail again. Other
        # ranks may not have died: transformers has them all stop.
        several = self.distributed_helper.tp_size > 1
        if several or batch_processor is None or (self._in_vain >= _IN_VAIN and not self.current_batch):
            with suppress(RuntimeError):  # of ranks that cannot be told any more
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
            # All that is read of it: without one of the attentions that it names, no mask is made.
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

    def _on_all_ranks(self, works: bool) -> bool:
        # The largest of each number over the ranks, in the group that the scheduler has on the CPU.
        try:
            failed, worked, _ = self.distributed_helper.tp_all_reduce_state(int(not works), int(works))
        except RuntimeError as error:
            raise RankError(f"the other ranks do not say how a step went: {brief(error)}") from error
        return not (failed and worked)

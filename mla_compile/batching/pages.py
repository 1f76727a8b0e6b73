"""The pool of latent rows. transformers manages it: blocks, sharing, eviction, copies to the host.

A *page* holds the rows of ``page_size`` tokens in one layer. A *block* consists of the pages with one index in the
pools of all layers. transformers divides memory into sectors of equal size. Latent pages have only one kind of block,
so a sector is one block.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import NoReturn

import torch
from transformers.configuration_utils import PreTrainedConfig
from transformers.generation.configuration_utils import ContinuousBatchingConfig
from transformers.generation.continuous_batching.cache import PagedAttentionCache, PagedAttentionMemoryHandler
from transformers.generation.continuous_batching.cache_allocators import (
    FULL_ATTENTION,
    CachePool,
    FullAttentionCacheAllocator,
)
from transformers.generation.continuous_batching.distributed import DistributedHelper
from transformers.generation.continuous_batching.requests import RequestState

from mla_compile.batching.graphs import StepGraphs
from mla_compile.errors import InputError

TRASH = 1
"""The block that padding writes to. transformers never allocates the first two blocks."""
_RESERVED = 2


class LatentBlocks(FullAttentionCacheAllocator):
    """Allocates blocks to requests. The compiled graphs read and write the rows."""

    def __init__(self, layers: int, bytes_of_block: int, tokens: int, *, share: bool) -> None:
        self._before_cache_tensor_init(
            index=0,
            layer_indices=list(range(layers)),
            tokens_per_page=tokens,
            bytes_per_page=bytes_of_block // layers,  # an average, because layers may differ
            allow_block_sharing=share,
        )
        self.bytes_per_block = bytes_of_block

    def register_pools(self, pools: Sequence[torch.Tensor], pool: CachePool) -> None:
        """Adopt pools [blocks,page,width]; transformers may use all blocks except the reserved blocks."""
        self.pool = pool
        self.num_blocks = len(pools[0]) - _RESERVED
        self.num_pages = self.num_blocks * self.pages_per_block
        self.blocks_per_sector = 1
        pool.set_blocks_per_sector(0, 1)
        self.write_trash_index = self.read_trash_index = 0
        self._pools = tuple(pools)
        self._copy_view = _Blocks(pools)

    def copy_blocks(self, source_block_ids: list[int], dest_block_ids: list[int]) -> None:
        """Copy the rows of whole blocks when a request forks."""
        device = self._pools[0].device
        source = torch.tensor(source_block_ids, device=device, dtype=torch.long)
        dest = torch.tensor(dest_block_ids, device=device, dtype=torch.long)
        for pool in self._pools:
            pool.index_copy_(0, dest, pool.index_select(0, source))


class _Blocks:
    """The pools as one matrix of bytes [blocks, bytes_per_block], which transformers moves to and from the host.

    The class has only the three members of a tensor that offloading in transformers uses.
    """

    def __init__(self, pools: Sequence[torch.Tensor]) -> None:
        self._bytes = [pool.view(torch.uint8).flatten(1) for pool in pools]

    @property
    def device(self) -> torch.device:
        return self._bytes[0].device

    def index_select(self, dim: int, index: torch.Tensor) -> torch.Tensor:
        return torch.cat([pool.index_select(dim, index) for pool in self._bytes], dim=1)

    def index_copy_(self, dim: int, index: torch.Tensor, source: torch.Tensor) -> _Blocks:
        start = 0
        for pool in self._bytes:
            pool.index_copy_(dim, index, source[:, start : start + pool.shape[1]])
            start += pool.shape[1]
        return self


class LatentPages(PagedAttentionCache):
    """The cache that the scheduler of transformers sees. Its sizes are counted in latent rows.

    All ranks have the same blocks, because a row has no heads to divide. If ranks share a context, each rank holds some
    rows of every block, and a block has ``page_size`` tokens per rank. Raises :class:`InputError` if a rank's memory
    budget is too small for one block.
    """

    def __init__(
        self,
        graphs: StepGraphs,
        config: PreTrainedConfig,
        cb_config: ContinuousBatchingConfig,
        device: torch.device,
        dtype: torch.dtype,
        ranks: DistributedHelper,
    ) -> None:
        self.config, self.dtype, self.device = config, dtype, device
        self.max_blocks_per_request = 0  # transformers allocates no block table
        page, row = cb_config.page_size, graphs.bytes_of_row()
        tokens = graphs.tokens_of_page(page)
        blocks = LatentBlocks(len(graphs.rows), row * page, tokens, share=cb_config.allow_block_sharing)
        self.cache_allocators = {FULL_ATTENTION: blocks}
        self.layer_to_allocator = dict.fromkeys(blocks.layer_indices, blocks)
        self.bytes_per_sector = blocks.bytes_per_block
        self.tokens_per_sector = tokens
        memory = _BlockMemory(graphs, config, cb_config, device, dtype, self.bytes_per_sector, tokens)
        problem: Exception = RuntimeError("another rank has less memory")
        try:
            sizes = memory.infer_max_batch_tokens_and_num_sectors()
        except (ValueError, MemoryError) as error:
            sizes, problem = (0, 0), error
        least = ranks.tp_all_reduce_min(torch.tensor(sizes, device=device))  # even a rank without memory must take part
        self.max_batch_tokens, self.num_sectors = (int(size) for size in least)
        if not self.num_sectors:
            raise InputError(
                f"continuous batching: no room for a block of {tokens} tokens ({self.bytes_per_sector} bytes): "
                f"{problem}; set num_blocks, max_batch_tokens or max_memory_percent of the ContinuousBatchingConfig"
            ) from problem
        self.pools = graphs.make_pools(self.num_sectors + _RESERVED, page, device)
        self.pool = CachePool(self.num_sectors, 1)
        blocks.register_pools(self.pools, self.pool)
        self.blocks = blocks
        self.allow_block_sharing = cb_config.allow_block_sharing
        self.use_prefix_sharing = blocks.use_block_sharing and self.allow_block_sharing
        self.num_blocks = self.num_sectors
        self.read_cache_limit = None
        self.max_decode_fast_path_length = 0
        # transformers allocates this number of read indices, and latent pages need none. The number also limits how
        # many rows a step reads, so `read_all` raises it later.
        self.max_tokens_read = 0

    def read_all(self) -> None:
        """Let a step read any number of rows. Attention finds rows through block tables and needs no read indices."""
        self.max_tokens_read = 1 << 62

    def extend_read_and_write_indices(self, *_: object) -> None:
        """Do nothing: see :meth:`read_all`."""

    def update(self, *_: object) -> NoReturn:
        """Never called, because the graphs write the rows."""
        raise NotImplementedError("latent pages are written by the compiled decode step")

    def table(self, request_id: str) -> list[int]:
        """Return the blocks of a request in the order of its tokens."""
        blocks: list[int] = self.blocks.block_table[request_id]
        return blocks

    def room(self) -> int:
        """Return the maximum number of tokens of one request."""
        return int(self.num_blocks * self.blocks.tokens_per_page)

    def unheld(self) -> int:
        """Return the number of blocks that no request holds. Blocks kept for prefix sharing are included."""
        return int(self.pool.num_free_sectors + self.pool.count_free_blocks(0) + len(self.blocks.ledger.cached_blocks))

    def never_fits(self, state: RequestState) -> str | None:
        """Return why a request could not run even alone, or None."""
        tokens = len(state.initial_tokens) + (state.max_new_tokens or 1) - 1  # the last token is never read
        if tokens <= self.room():
            return None
        return f"the request may grow to {tokens} tokens, and the pool has room for {self.room()}; ask for fewer"


class _BlockMemory(PagedAttentionMemoryHandler):
    """Counts how many blocks fit in memory. Unlike transformers, it counts the tensors that latent pages need."""

    def __init__(
        self,
        graphs: StepGraphs,
        config: PreTrainedConfig,
        cb_config: ContinuousBatchingConfig,
        device: torch.device,
        dtype: torch.dtype,
        block: int,
        tokens: int,
    ) -> None:
        self._ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", "1")) if device.type == "cpu" else 1
        super().__init__(
            config=config,
            cb_config=cb_config,
            dtype=dtype,
            bytes_per_sector=block,
            tokens_per_sector=tokens,
            bytes_per_block=block,
            attn_types=[FULL_ATTENTION],
            model_supports_logits_to_keep=True,
        )
        self.num_attention_masks = 0
        self._to_read = graphs.bytes_to_read_token()

    def get_available_memory(self) -> int:
        """Return the available memory. On a CPU, it is divided among the ranks of this machine."""
        available: int = super().get_available_memory()
        return available // self._ranks_here

    @property
    def bytes_per_cache_token(self) -> int:
        """The bytes per earlier token that a prompt piece needs: rows from pages, and K and V of one layer."""
        return self._to_read

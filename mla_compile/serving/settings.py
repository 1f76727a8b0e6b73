"""The settings of a server."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from mla_compile.errors import OptionError


@dataclass(frozen=True)
class Settings:
    """The settings of one server.

    Attributes:
        model: a folder, or a name that ``from_pretrained`` takes.
        name: what clients call the model; by default ``model``.
        host, port: the server's address; by default other machines cannot reach it.
        dtype, device: see ``transformers serve``.
        quantization: "bnb-4bit" or "bnb-8bit".
        tensor_parallel: the number of ranks that hold the weights together; by default all ranks of torchrun.
        context_parallel: the number of ranks that share the rows of each request.
        trust_remote_code: whether to run the Python code that is stored with the weights.
        max_model_len: the maximum tokens of one request, prompt and answer together; by default the config's limit.
        page_size, pages: tokens per page, and pages in the pool (by default as many as fit in memory).
        max_batch_tokens: the maximum prompt tokens in one step.
        max_requests: the maximum requests in one step.
        max_waiting: the maximum waiting requests, at least 1; further requests are answered with 429.
        max_body: the maximum bytes of one request; larger requests are answered with 413.
        timeout: the seconds for a request to arrive. An equal limit applies from the submission of token ids to the
            last token of the answer.
        grace: the seconds that running requests have after SIGTERM.
        api_key: the key that clients must send as ``Authorization: Bearer``; None requires no key.
        warm_up: whether to compile for all expected sizes before the server is ready.
        options: the options of :func:`mla_compile.continuous_batching`.
    """

    model: str
    name: str = ""
    host: str = "127.0.0.1"
    port: int = 8000
    dtype: str = "auto"
    device: str = "auto"
    quantization: str | None = None
    tensor_parallel: int | None = None
    context_parallel: int = 1
    trust_remote_code: bool = False
    max_model_len: int | None = None
    page_size: int = 256
    pages: int | None = None
    max_batch_tokens: int | None = None
    max_requests: int = 64
    max_waiting: int = 256
    max_body: int = 4 << 20
    timeout: float = 600.0
    grace: float = 30.0
    api_key: str | None = None
    warm_up: bool = True
    options: Mapping[str, object] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.name:
            object.__setattr__(self, "name", self.model)
        if self.page_size not in (1 << n for n in range(9)):
            raise OptionError(f"page_size is {self.page_size}, expected a power of two up to 256")
        for what in (
            "max_requests",
            "max_waiting",
            "max_body",
            "timeout",
            "max_model_len",
            "pages",
            "max_batch_tokens",
            "tensor_parallel",
            "context_parallel",
        ):
            value = getattr(self, what)
            if value is not None and not value > 0:
                raise OptionError(f"{what} is {value}, expected a number above 0")
        if self.grace < 0:
            raise OptionError(f"grace is {self.grace}, expected 0 or more")
        if self.quantization not in (None, "bnb-4bit", "bnb-8bit"):
            raise OptionError(f"quantization is {self.quantization!r}, expected 'bnb-4bit' or 'bnb-8bit'")
        if self.api_key == "":
            raise OptionError("api_key is empty; leave it out if clients need none")

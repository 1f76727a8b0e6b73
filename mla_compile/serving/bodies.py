"""Requests as clients may send them: what this server reads is checked, and what it cannot do is refused.

Everything else that OpenAI's interface has is left to the handlers of transformers, which ignore it.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

MOST_STOPS = 16


def _only(*neutral: Any) -> Any:
    """A field that this server can do nothing with, at a value that asks for nothing."""

    def check(value: Any) -> Any:
        if value is None or any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in neutral):
            return value
        raise ValueError("this server cannot do that; leave the field out")

    return Annotated[Any, AfterValidator(check)]


class Body(BaseModel):
    """What all of them have."""

    model_config = ConfigDict(extra="allow", allow_inf_nan=False)

    model: str | None = Field(None, description="The name of the model; by default that of the server.")
    stream: bool | None = None
    temperature: float | None = Field(None, ge=0, le=2, description="0: the most probable token.")
    top_p: float | None = Field(None, gt=0, le=1)
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    n: _only(1) = None  # type: ignore[valid-type]
    logprobs: _only(False) = None  # type: ignore[valid-type]  # noqa: FBT003
    top_logprobs: _only(0) = None  # type: ignore[valid-type]
    presence_penalty: _only(0) = None  # type: ignore[valid-type]
    frequency_penalty: _only(0) = None  # type: ignore[valid-type]
    logit_bias: _only({}) = None  # type: ignore[valid-type]
    generation_config: _only() = None  # type: ignore[valid-type]


class _WithStops(Body):
    stop: Annotated[str, Field(min_length=1)] | list[Annotated[str, Field(min_length=1)]] | None = Field(
        None, description=f"Up to {MOST_STOPS} strings before which the answer ends."
    )
    max_tokens: int | None = Field(None, ge=1, description="More than there is room for means: as many as there is.")


class Completion(_WithStops):
    """``POST /v1/completions``."""

    prompt: str = Field(min_length=1)
    suffix: str | None = None
    echo: _only(False) = None  # type: ignore[valid-type]  # noqa: FBT003
    best_of: _only(1) = None  # type: ignore[valid-type]


class Part(BaseModel):
    """A piece of a message."""

    model_config = ConfigDict(extra="allow")
    type: Literal["text", "input_text", "output_text"]
    text: str


class Message(BaseModel):
    """One message of a chat."""

    model_config = ConfigDict(extra="allow")
    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | list[Part] | None = None


class Chat(_WithStops):
    """``POST /v1/chat/completions``."""

    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    tools: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    response_format: _only({"type": "text"}) = None  # type: ignore[valid-type]


class Response(Body):
    """``POST /v1/responses``."""

    input: str | list[dict[str, Any]] = Field(min_length=1)
    instructions: str | None = None
    max_output_tokens: int | None = Field(None, ge=1)
    tools: list[dict[str, Any]] | None = None

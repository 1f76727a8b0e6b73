"""The requests that clients may send. Fields that this server reads are checked, and unsupported features are refused.

The handlers of transformers receive all other fields of OpenAI's interface, and ignore them.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, StrictBool, WithJsonSchema

MOST_STOPS = 16
_NEUTRAL = object()
"""Marks unsupported fields. Only values that request nothing are permitted."""


def _only(*neutral: Any) -> Any:
    """Declare an unsupported field. ``neutral`` lists the permitted values, which request nothing."""

    def check(value: Any) -> Any:
        if value is None or any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in neutral):
            return value
        raise ValueError("this server cannot do that; leave the field out")

    shown = {"enum": [*neutral, None], "description": "This server can do no more than this."}
    return Annotated[Any, AfterValidator(check), WithJsonSchema(shown), _NEUTRAL]


def _number(value: Any) -> Any:
    if isinstance(value, bool | str):
        raise ValueError(f"Input should be a number, not {value!r:.40}")
    return value


_Count = Annotated[int, Field(ge=1), BeforeValidator(_number)]
_Text = Annotated[str, Field(min_length=1)]


class Body(BaseModel):
    """The fields that all requests have."""

    # transformers receives other fields, and refuses fields that OpenAI's interface does not have.
    model_config = ConfigDict(extra="allow", allow_inf_nan=False, json_schema_extra={"additionalProperties": False})

    model: str | None = Field(None, description="The name of the model; by default that of the server.")
    stream: StrictBool | None = None
    temperature: Annotated[float, Field(ge=0, le=2), BeforeValidator(_number)] | None = Field(
        None, description="0: the most probable token."
    )
    top_p: Annotated[float, Field(gt=0, le=1), BeforeValidator(_number)] | None = None
    seed: Annotated[int, BeforeValidator(_number)] | None = None
    n: _only(1) = None  # type: ignore[valid-type]
    logprobs: _only(False) = None  # type: ignore[valid-type]  # noqa: FBT003
    top_logprobs: _only(0) = None  # type: ignore[valid-type]
    presence_penalty: _only(0) = None  # type: ignore[valid-type]
    frequency_penalty: _only(0) = None  # type: ignore[valid-type]
    logit_bias: _only({}) = None  # type: ignore[valid-type]
    generation_config: _only() = None  # type: ignore[valid-type]
    # Fields of vLLM that OpenAI's interface does not have. Load generators send these fields.
    repetition_penalty: _only(1) = None  # type: ignore[valid-type]
    top_k: Annotated[int, Field(ge=-1), BeforeValidator(_number)] | None = Field(None, description="0 or -1: of all.")
    ignore_eos: StrictBool | None = Field(None, description="Only a length or a stop string ends the answer.")

    def asked(self) -> dict[str, Any]:
        """Return the fields for the handlers of transformers. Unsupported and unknown fields are left out."""
        nothing = {name for name, field in type(self).model_fields.items() if _NEUTRAL in field.metadata}
        return self.model_dump(exclude_unset=True, exclude={*nothing, "top_k", "ignore_eos"})


class _WithStops(Body):
    stop: _Text | Annotated[list[_Text], Field(max_length=MOST_STOPS)] | None = Field(
        None, description=f"Up to {MOST_STOPS} strings before which the answer ends."
    )
    max_tokens: _Count | None = Field(None, description="More than there is room for means: as many as there is.")


def _one(value: Any) -> Any:
    """Unpack a list of one prompt, which some clients send."""
    return value[0] if isinstance(value, list) and len(value) == 1 else value


class Completion(_WithStops):
    """``POST /v1/completions``."""

    prompt: Annotated[_Text, BeforeValidator(_one)]
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
    max_completion_tokens: _Count | None = None
    tools: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    response_format: _only({"type": "text"}) = None  # type: ignore[valid-type]


class Response(Body):
    """``POST /v1/responses``."""

    input: _Text | Annotated[list[dict[str, Any]], Field(min_length=1)]
    instructions: str | None = None
    max_output_tokens: _Count | None = None
    tools: list[dict[str, Any]] | None = None

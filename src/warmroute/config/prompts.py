"""How prompts are read."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from warmroute.config.section import Bytes, Count, Section


class Prompts(Section, frozen=True):
    """How prompts are turned into tokens."""

    cache_bytes: Annotated[
        Bytes, Meta(description="Memory for conversations whose tokens are known, for each model.")
    ] = 134_217_728
    discover: Annotated[
        bool,
        Meta(description="Whether a tokenizer is loaded from a local path that a node names in its /v1/models."),
    ] = True
    remote: Annotated[
        bool,
        Meta(description="Whether a node's /tokenize is asked where no tokenizer is at hand; costs a round trip."),
    ] = False
    loop_ms: Annotated[
        float, Meta(ge=0, description="Prompts that take longer than this to read are read in a thread.")
    ] = 1.0
    threads: Annotated[Count, Meta(description="Threads that read prompts.")] = 1
    max_waiting: Annotated[
        Count,
        Meta(description="Prompts that wait for a thread; above it a prompt is not read and is routed by load."),
    ] = 64


class ModelConfig(Section, frozen=True):
    """How the prompts of one model are read."""

    name: Annotated[str, Meta(min_length=1, description="The model's name, as requests say it.")]
    tokenizer: Annotated[
        str,
        Meta(description="Directory with the model's tokenizer files, or its tokenizer.json; empty: discovered."),
    ] = ""
    chat_template: Annotated[
        str, Meta(description="File with the chat template that the engines were given; empty: the model's own.")
    ] = ""
    chat_template_content_format: Annotated[
        Literal["auto", "string", "openai"],
        Meta(description="How message contents reach the template; `auto` tells it by the template, as vLLM does."),
    ] = "auto"
    default_chat_template_kwargs: Annotated[
        dict[str, bool | int | float | str],
        Meta(description="Template variables that the engines set where a request does not."),
    ] = msgspec.field(default_factory=dict)
    trust_request_chat_template: Annotated[
        bool, Meta(description="Whether the engines take a chat template from a request.")
    ] = False
    exclude_tools_when_tool_choice_none: Annotated[
        bool, Meta(description='Whether the engines leave tools out of the prompt where `tool_choice` is "none".')
    ] = False
    max_model_len: Annotated[
        int,
        Meta(
            ge=0,
            description="Tokens that prompt and answer may have together; 0: unknown, or as a discovered node says.",
        ),
    ] = 0

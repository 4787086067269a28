"""Settings of tokenizers and chat templates."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

import msgspec
from msgspec import Meta

from warmroute.config.section import REMOVED, Bytes, Count, Section


class Prompts(Section, frozen=True):
    """How the router converts prompts into tokens."""

    cache_bytes: Annotated[Bytes, REMOVED] = 134_217_728
    """Memory per model for the tokens of recent conversations. A longer one is encoded again."""
    discover_tokenizers: Annotated[bool, REMOVED] = True
    """Load a tokenizer from the local path that a node reports in its /v1/models, or from this machine's Hugging Face
    cache if the node reports a hub name. It needs no network."""
    download_tokenizers: Annotated[
        bool,
        Meta(
            description="Download the tokenizer files of a hub name that is not in the cache, from HF_ENDPOINT with "
            "HF_TOKEN."
        ),
    ] = False
    remote_tokenize: Annotated[
        bool,
        Meta(description="Use a node's /tokenize for models without a local tokenizer. This costs a round trip."),
    ] = False
    threads: Annotated[Count, REMOVED] = 1
    """Threads that tokenize prompts. One encodes faster than an engine prefills."""


class PromptDoctor(Section, frozen=True):
    """The prompt doctor, which finds what prevents prompts from sharing the KV cache (`warmroute doctor prompts`)."""

    enabled: Annotated[
        bool,
        Meta(
            description="Compare a sample of each route's prompts, at most one a second. Their text stays in the "
            "router's memory, 32 MiB at most, and is never logged."
        ),
    ] = True


class ModelConfig(Section, frozen=True):
    """The tokenizer and the chat template of a model. They must match those of its engines."""

    removed: ClassVar = {
        "max_model_len": "what the nodes report",
    }

    name: Annotated[str, Meta(min_length=1, description="Name of the model in requests.")]
    tokenizer: Annotated[
        str,
        Meta(description="Directory with the model's tokenizer files, or its tokenizer.json. Empty: discovered."),
    ] = ""
    chat_template: Annotated[
        str, Meta(description="File with the engines' chat template. Empty: the template of the model.")
    ] = ""
    chat_template_content_format: Annotated[
        Literal["auto", "string", "openai"],
        Meta(description="Format of message contents for the template. `auto`: detected, as vLLM does."),
    ] = "auto"
    default_chat_template_kwargs: Annotated[
        dict[str, bool | int | float | str],
        Meta(description="Template variables that the engines set if the request does not."),
    ] = msgspec.field(default_factory=dict)
    trust_request_chat_template: Annotated[
        bool, Meta(description="The engines accept a chat template in the request.")
    ] = False
    exclude_tools_when_tool_choice_none: Annotated[
        bool, Meta(description='The engines omit tools from the prompt if `tool_choice` is "none".')
    ] = False
    max_model_len: Annotated[int, Meta(ge=0), REMOVED] = 0
    """Maximum number of prompt and output tokens together. 0: as the nodes report, or unknown."""

"""Which requests may be split into a prefill and a decode request."""

from __future__ import annotations

import re
from typing import Final

import msgspec

from warmroute._kernel import ENGINE_FIELDS, Outline
from warmroute.prompt.request_body import Endpoint

_SPLITTABLE: Final = (Endpoint.CHAT.value, Endpoint.COMPLETION.value)
ONLY_VLLM: Final = (Endpoint.MESSAGES.value, Endpoint.RESPONSES.value)
"""Of the engines, only vLLM has its KV transfer parameters in these requests."""
_EXCLUDED: Final = (*ENGINE_FIELDS, "prompt_logprobs", "echo", "use_beam_search", "truncate_prompt_tokens")
"""The last four need the whole prompt on one node."""
_EXCLUDED_RESPONSES: Final = ("previous_response_id", "previous_input_messages", "conversation", "prompt")
"""Fields of /v1/responses whose meaning depends on what a node has stored."""
_ONE_ANSWER: Final = ("n", "best_of")
_FREE_CHOICES: Final = (b'"auto"', b'"none"', b"null")
"""Values of tool_choice for which an answer of one token is valid."""
_FREE_ANTHROPIC_CHOICE: Final = re.compile(rb'\{\s*"type"\s*:\s*"(?:auto|none)"\s*\}')


class _Tool(msgspec.Struct):
    type: str = ""


_tools: Final = msgspec.json.Decoder(list[_Tool])


def may_split(path: bytes, body: bytes, outline: Outline | None) -> bool:
    """Return whether one node may prefill the prompt, and another one decode the answer. On the paths of ONLY_VLLM,
    both nodes have to run vLLM."""
    if outline is None or not (path in _SPLITTABLE or path in ONLY_VLLM):
        return False
    if outline.engine_field is not None or outline.has_any(_EXCLUDED):
        return False
    fields = outline.fields
    for name in _ONE_ANSWER:
        span = fields.get(name)
        if span is not None and body[span[0] : span[1]] not in (b"1", b"null"):
            return False
    if path == Endpoint.RESPONSES.value and not _is_plain_response(body, outline):
        return False
    span = fields.get("tool_choice")
    if span is None:
        return True
    choice = body[span[0] : span[1]]
    return choice in _FREE_CHOICES or (
        path == Endpoint.MESSAGES.value and _FREE_ANTHROPIC_CHOICE.fullmatch(choice) is not None
    )


def _is_plain_response(body: bytes, outline: Outline) -> bool:
    """Return whether a request of /v1/responses is one prompt and one answer: tools that the engine itself calls make
    several."""
    if outline.has_any(_EXCLUDED_RESPONSES):
        return False
    fields = outline.fields
    span = fields.get("background")
    if span is not None and body[span[0] : span[1]] not in (b"false", b"null"):
        return False
    span = fields.get("tools")
    if span is None or body[span[0] : span[1]] == b"null":
        return True
    try:
        return all(tool.type == "function" for tool in _tools.decode(body[span[0] : span[1]]))
    except (ValueError, RecursionError):
        return False

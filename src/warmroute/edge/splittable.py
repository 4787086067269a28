"""Which requests may be split into a prefill and a decode request."""

from __future__ import annotations

from typing import Final

from warmroute._kernel import Outline
from warmroute.prompt.request_body import Endpoint

_SPLITTABLE: Final = (Endpoint.CHAT.value, Endpoint.COMPLETION.value)
_EXCLUDED: Final = (
    "kv_transfer_params", "bootstrap_host", "bootstrap_port", "bootstrap_room", "disaggregated_params",
    "prompt_logprobs", "echo", "use_beam_search", "truncate_prompt_tokens",
)  # fmt: skip
"""A client that sends one of the first five splits its request itself. The others need the whole prompt on one node."""
_ONE_ANSWER: Final = ("n", "best_of")
_FREE_CHOICES: Final = (b'"auto"', b'"none"', b"null")
"""Values of tool_choice for which an answer of one token is valid."""


def may_split(path: bytes, body: bytes, outline: Outline | None) -> bool:
    """Return whether one node may prefill the prompt, and another one decode the answer."""
    if outline is None or path not in _SPLITTABLE or outline.has_any(_EXCLUDED):
        return False
    fields = outline.fields
    for name in _ONE_ANSWER:
        span = fields.get(name)
        if span is not None and body[span[0] : span[1]] not in (b"1", b"null"):
            return False
    span = fields.get("tool_choice")
    return span is None or body[span[0] : span[1]] in _FREE_CHOICES

from typing import Final

MAX_LOOP_BYTES: Final[int]
"""Larger bodies are read in threads, without the interpreter lock where possible."""
MAX_LOOKUP_TOKENS: Final[int]
"""Tokens of a prompt that are looked up in the index. The rest of a longer prompt does not count."""
KEY_CHARACTERS: Final[int]
"""How many characters of the system prompt, and of the first user message, are in the routing key."""
TOKEN_BYTES: Final[int]
"""Bytes of a token id in packed tokens."""
ENGINE_FIELDS: Final[tuple[str, ...]]
"""Fields with which engines exchange KV caches and choose a rank. Only the router may set them."""
ENGINE_OPTIONS: Final[tuple[str, ...]]
"""Fields in which those count at any depth, too (vllm_xargs, …)."""

class Outline:
    """Where the fields and messages of a JSON body lie."""

    @property
    def fields(self) -> dict[str, tuple[int, int]]:
        """Where the value of each field begins and ends. Fields whose name is not ASCII are left out."""
    @property
    def engine_field(self) -> str | None:
        """The name of the first of ENGINE_FIELDS that the body sets; None where it sets none, or null."""
    @property
    def body_bytes(self) -> int: ...
    @property
    def cache_salt(self) -> str:
        """The field of this name; empty if it is missing or invalid."""
    @property
    def has_prompt_options(self) -> bool:
        """Whether there is a field that may change which tokens of a rendered chat the engine computes, or whether it
        uses its cache for them (truncate_prompt_tokens, prompt_logprobs, …)."""
    @property
    def plain_roles(self) -> bytes:
        """For each message: 1 for a plain message of the system, 2 of the user, 3 of the assistant, 0 for any other."""
    @property
    def message_count(self) -> int: ...
    @property
    def message_spans(self) -> bytes:
        """Where each item of the list `messages` begins and ends, as uint32."""
    def parameters(self, limits: int, default_max_tokens: int | None, /) -> tuple[int | None, int, bool]:
        """Return (max_tokens, priority, stream). Raises BadBody for a value of the wrong type.

        `limits`: which fields limit the output in this API, the first one that is given counts: 1 for
        max_completion_tokens, 2 for max_tokens, 4 for max_output_tokens. `default_max_tokens`: if the body has no
        max_tokens.
        """
    def chat_context(self) -> bytes:
        """Return a digest of the fields that change how a chat is rendered (tools, chat_template_kwargs, …)."""
    def plain_text(self, message: int, /) -> str | None:
        """Return the text of a plain message: one with a role, one text, and nothing else that a template gets.

        None for any other message.
        """
    def text_as_tokens(self) -> bytes:
        """Return the prompt's own bytes, TOKEN_BYTES to a token, the last token padded; at most MAX_LOOKUP_TOKENS."""
    def text_start(self, limit: int, /) -> bytes:
        """Return the first `limit` bytes of what `text_as_tokens` returns."""
    def has_any(self, names: tuple[str, ...], /) -> bool:
        """Return whether the body has a field with one of these names."""

class BadBody(ValueError):
    """The body is rejected. Arguments: what is wrong, and the name of the field that is wrong, or None."""

def scan_body(body: bytes, /) -> tuple[str, bytes | None, bytes | None, bytes, Outline]:
    """Return (model, start of the system prompt, start of the first user message, session, outline). Raises BadBody."""

def outline_body(body: bytes, /) -> Outline:
    """Return the outline. Raises BadBody."""

def is_utf8(data: bytes, start: int, end: int, /) -> bool:
    """Return whether data[start:end] is UTF-8 text."""

def decode_ms(body: bytes, start: int, end: int, /) -> float:
    """Return how long a JSON parser takes for body[start:end], which is well-formed: it holds the interpreter lock."""

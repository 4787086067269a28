from typing import Final

KEY_CHARACTERS: Final[int]
"""How many characters of the system prompt, and of the first user message, are in the routing key."""
TOKEN_BYTES: Final[int]
"""Bytes of a token id in packed tokens."""

class Outline:
    """Where the fields and messages of a JSON body lie."""

    @property
    def fields(self) -> dict[str, tuple[int, int]]:
        """Where the value of each field begins and ends. Fields whose name is not ASCII are left out."""
    @property
    def has_cache_salt(self) -> bool:
        """Whether there is a field `cache_salt`."""
    @property
    def may_change_tokens(self) -> bool:
        """Whether there is a field that may change the tokens of a rendered chat (truncate_prompt_tokens, …)."""
    @property
    def plain_roles(self) -> bytes:
        """For each message: 1 for a plain message of the system, 2 of the user, 3 of the assistant, 0 for any other."""
    @property
    def message_count(self) -> int: ...
    @property
    def message_spans(self) -> bytes:
        """Where each item of the list `messages` begins and ends, as uint32."""
    def parameters(self, default_max_tokens: int | None, /) -> tuple[str, int | None, int, str, bool] | None:
        """Return (model, max_tokens, priority, cache_salt, stream); None if a real parser has to read them.

        A value of the wrong type counts as missing. `default_max_tokens`: if the body gives none.
        """
    def chat_context(self) -> bytes:
        """Return a digest of the fields that change how a chat is rendered (tools, chat_template_kwargs, …)."""
    def plain_text(self, message: int, /) -> str | None:
        """Return the text of a plain message: one with a role, one text, and nothing else that a template gets.

        None for any other message, and for text that is no UTF-8.
        """
    def text_as_tokens(self) -> bytes:
        """Return the prompt's own bytes, TOKEN_BYTES to a token, the last token padded."""

def scan_body(body: bytes, /) -> tuple[str, bytes | None, bytes | None, bytes, Outline] | None:
    """Return (model, start of the system prompt, start of the first user message, session, outline).

    None if the body is malformed, or if a real parser has to read it.
    """

def outline_body(body: bytes, /) -> Outline | None:
    """Return the outline. There is one of some bodies, too, for which `scan_body` returns None."""

from typing import Final, TypeAlias

from warmroute._kernel.body_scan import Outline

MESSAGE_ROLES: Final[int]
"""How many roles a layout distinguishes: none (the start or the end of a chat), system, user and assistant."""

MissingMessage: TypeAlias = tuple[int, int, int, int]
"""Which message; the numbers of the half before its content and of the one after it; the size of its content."""

class ChatLayout:
    """What a chat template puts between the contents of messages, for `MessageTokens.join`.

    `separators`: for each three roles (two before, before, after), two int64: the number of the half that belongs to
    the message before (-1 where the layout does not cover these roles), and of the one that belongs to the message
    after.
    `first`: tokens before the first message's, by its role. `last`: tokens after the last message's, by the roles of
    the last two messages.
    """

    def __new__(cls, separators: bytes, first: tuple[bytes, ...], last: tuple[bytes, ...]) -> ChatLayout: ...

class MessageTokens:
    """The tokens of messages, by their bytes in requests, within a budget of bytes."""

    def __new__(cls, budget_bytes: int) -> MessageTokens: ...
    def __len__(self) -> int: ...
    def join(self, outline: Outline, layout: ChatLayout, count: int = ..., /) -> bytes | list[MissingMessage] | None:
        """Return the chat's tokens; or the messages whose tokens are missing; or None.

        With `count`, return the tokens of the first messages only, up to the cut after the last of them.

        None if a message is not plain, the layout does not cover the chat's roles, or `add` was called with None for
        one of its messages.
        """
    def add(self, outline: Outline, message: int, tokens: bytes | None, /) -> bool:
        """Add the tokens of a message that `join` named: those from the cut before its content to the cut after it.

        None: they cannot be made for this message alone. Return whether they are kept: they must fit the budget.
        """
    def clear(self) -> None: ...
    @property
    def bytes(self) -> int:
        """Memory allocated."""

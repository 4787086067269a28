from typing import TypeVar

Most = TypeVar("Most")

class Outline:
    """Where things lie in a JSON body."""

    @property
    def fields(self) -> dict[str, tuple[int, int]]:
        """Where the value of each field begins and ends. Names beyond ASCII are left out."""
    @property
    def spans(self) -> bytes:
        """Where each item of the list `messages` begins and ends, as uint32."""
    def about(self, unsaid: Most, /) -> tuple[str, int | Most, int, str, bool] | None:
        """Model, most tokens of the answer, priority, cache salt, whether it streams; nonsense is passed over.

        `unsaid` stands for max_tokens where the body has none. None where the real parser has to judge.
        """
    def stand_in(self) -> bytes:
        """The prompt's own bytes, four to a token, the last one filled up."""

def scan(body: bytes, /) -> tuple[str, bytes | None, bytes | None, bytes, Outline] | None:
    """Model, beginnings of the system prompt and of the first user message, session, and the outline.

    None where the body is malformed, or where the real parser has to judge.
    """

def outline_of(body: bytes, /) -> Outline | None:
    """The outline by itself: there is one of some bodies, too, that `scan` is unsure of."""

from collections.abc import Mapping
from typing import Final

from warmroute._kernel.accounting import NodeState

MAX_FIRST_TOKENS: Final[int]
"""The most first tokens that wait to be published, or to be learned. What is beyond is dropped."""

class FirstTokenOrder:
    """The first tokens of all processes in the order of time."""

    def join(self, nodes: Mapping[str, NodeState], /) -> None:
        """Let these nodes keep their first tokens here, instead of learning from them at once. `nodes` is a dict."""
    def take(self) -> tuple[tuple[str, ...], bytes]:
        """Return the first tokens of this process since the last call: the names of their nodes, and their records."""
    def add(
        self, nodes: Mapping[str, NodeState], names: tuple[str, ...], data: bytes, offset_s: float, now_s: float, /
    ) -> None:
        """Add a peer's first tokens, which were checked. `offset_s`: from its clock to this process's."""
    def learn(self, until_s: float, /) -> None:
        """Learn from all first tokens up to this time."""
    def clear(self) -> None:
        """Forget all first tokens."""
    def __len__(self) -> int:
        """Return how many wait to be learned."""

def check_first_tokens(data: bytes, names: int, /) -> bool:
    """Return whether the bytes are records of first tokens within their bounds, whose numbers of names are below
    `names`."""

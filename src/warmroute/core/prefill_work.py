"""Prefill work: what a prompt costs a node, in tokens of a short prompt. Attention makes later tokens more
expensive:

work(new, cached) = new + ATTENTION_WORK · new · (cached + new / 2)
"""

from __future__ import annotations

from warmroute._kernel import ATTENTION_WORK as ATTENTION_WORK


def work(new: float, cached: float, prompts: int = 1) -> float:
    """Return the prefill work of `new` tokens behind `cached` ones, in tokens of a short prompt.

    Both are divided among `prompts` prompts of equal length: attention does not reach from one to the other.
    """
    return new * (1.0 + ATTENTION_WORK * (cached + 0.5 * new) / prompts)

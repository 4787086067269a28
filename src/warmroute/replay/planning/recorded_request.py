"""One request of the recorded traffic."""

from __future__ import annotations

import msgspec

from warmroute.replay.workloads.workload_prompt import WorkloadPrompt


class RecordedRequest(msgspec.Struct, gc=False):
    prompt: WorkloadPrompt
    at_ms: float
    conversation: int
    """The same number for all turns of a conversation."""

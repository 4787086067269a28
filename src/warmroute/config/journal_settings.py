"""Settings of the decision journal."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from warmroute.config.section import Bytes, Section


class Journal(Section, frozen=True):
    """Recent routing decisions and their reasons, for `warmroute explain`. It never contains user text, except, with
    `error_text`, what engines repeat of it in errors."""

    max_decisions: Annotated[
        int, Meta(ge=0, le=1_000_000, description="Decisions kept in memory, 1 to 15 KB each. 0: none.")
    ] = 1000
    file: Annotated[str, Meta(description="File for finished requests, one JSON object per line. Empty: no file.")] = ""
    sample_ratio: Annotated[
        float, Meta(ge=0, le=1, description="Fraction of the finished requests that the router writes to the file.")
    ] = 1.0
    file_max_bytes: Annotated[
        Bytes, Meta(description="Size at which the router renames the file to `FILE.1` and starts a new one.")
    ] = 67_108_864
    error_text: Annotated[
        bool,
        Meta(
            description="Keep the first 1,000 characters of what a node says in an error response. Engines repeat "
            "parts of prompts in them."
        ),
    ] = False
    response_headers: Annotated[
        Literal["off", "on_request", "always"],
        Meta(
            description="When responses carry `X-Warmroute-Node` and `X-Warmroute-Hit`. `on_request`: if the request "
            "has `X-Warmroute-Explain: 1`. A node without a configured name appears with its address."
        ),
    ] = "off"

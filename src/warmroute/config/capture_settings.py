"""Settings of captures: traces of live traffic."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from warmroute.config.section import Bytes, Section


class Capture(Section, frozen=True):
    """A trace of all requests for `warmroute replay` and `warmroute plan`: lengths, times, and hashes of prompts under
    a random key. It never contains user text."""

    directory: Annotated[
        str, Meta(description="Directory for the trace. The router creates it if its parent exists. Empty: no trace.")
    ] = ""
    file_max_bytes: Annotated[Bytes, Meta(description="Size at which the router begins another file.")] = 67_108_864
    max_files: Annotated[
        int,
        Meta(ge=1, le=10_000, description="Files kept in the directory. The router removes the oldest ones."),
    ] = 16
    block_size: Annotated[
        int,
        Meta(
            ge=1,
            le=1024,
            description="Tokens for each hash of a prompt, a power of two; best the engines' block size. A larger one "
            "makes the trace smaller; replay then misses hits that end within a block.",
        ),
    ] = 16

"""What is kept of decisions, and to whom it is told."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from warmroute.config.section import Bytes, Count, Section


class Journal(Section, frozen=True):
    """Recent decisions and why they were taken, for `warmroute explain`. Never anything that a user typed."""

    keep: Annotated[
        int, Meta(ge=0, le=1_000_000, description="Decisions that are kept in memory: 1 to 15 KB each. 0 for none.")
    ] = 1000
    candidates: Annotated[
        Count, Meta(description="Nodes of a decision that are told with their price, the cheapest first.")
    ] = 8
    file: Annotated[
        str,
        Meta(description="File that decisions are written to once they have ended, a JSON object a line; empty: none."),
    ] = ""
    sample: Annotated[
        float, Meta(ge=0, le=1, description="Share of the decisions that is written to the file, by chance.")
    ] = 1.0
    max_bytes: Annotated[
        Bytes, Meta(description="Size at which the file is moved to `FILE.1`, over the one before, and begun anew.")
    ] = 67_108_864
    headers: Annotated[
        Literal["off", "asked", "always"],
        Meta(
            description="Whether answers carry `X-Warmroute-Node` and `X-Warmroute-Hit`: `asked` where the request has "
            "`X-Warmroute-Explain: 1`. A node without a name of its own is named by its address."
        ),
    ] = "off"

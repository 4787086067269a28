"""What routing knows about a request, besides its prompt. Built once, read-only afterwards."""

from __future__ import annotations

from typing import Final

from warmroute.config.priority import NORMAL


class RoutingRequest:
    __slots__ = (
        "_session",
        "_system",
        "_user",
        "arrived_s",
        "deadline_s",
        "max_output_tokens",
        "may_queue",
        "model",
        "priority",
        "route",
        "session_header",
        "streams",
        "tenant",
        "total_deadline_s",
    )

    def __init__(
        self,
        model: str,
        system: bytes | None = None,
        user: bytes | None = None,
        session: bytes = b"",
        *,
        tenant: str = "",
        route: str = "",
        priority: int = NORMAL,
        may_queue: bool = True,
        arrived_s: float = 0.0,
        deadline_s: float = 0.0,
        total_deadline_s: float = 0.0,
        session_header: bytes = b"",
        streams: bool = True,
        max_output_tokens: int | None = None,
    ) -> None:
        self.model: Final = model
        """Empty where the request names none and the fleet serves several."""
        self.tenant: Final = tenant
        """Empty where no keys are configured."""
        self.route: Final = route
        """The name of the route whose settings apply; empty where none matches."""
        self.priority: Final = priority
        self.may_queue: Final = may_queue
        """False where the client prefers a 429 to waiting."""
        self.arrived_s: Final = arrived_s
        self.deadline_s: Final = deadline_s
        """When the first token is due, on the router's clock; 0 without a deadline."""
        self.total_deadline_s: Final = total_deadline_s
        """When the whole response is due; 0 without a deadline."""
        self.session_header: Final = session_header
        self.streams: Final = streams
        """Whether the first byte comes with the first token; else the whole response comes at its end."""
        self.max_output_tokens: Final = max_output_tokens
        """The limit that the request sets; None where it sets none."""
        self._system = system
        self._user = user
        self._session: Final = session

    def prefix_key(self) -> bytes | None:
        """Model, first characters of the system prompt and of the first user message; None where there is neither."""
        if self._system is None and self._user is None:
            return None
        return b"%b\0%b\0%b" % (self.model.encode("utf-8", "surrogatepass"), self._system or b"", self._user or b"")

    def session(self) -> bytes:
        """The conversation's name: from a header, else from a field of the body; empty where there is none."""
        return self.session_header or self._session

"""Settings of alerts: where the router sends those that begin and end."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Final, Literal
from urllib.parse import urlsplit

from msgspec import Meta

from warmroute.config.section import REMOVED, Section

MAX_URL: Final = 2048
SET_BY_THE_ROUTER: Final = frozenset(
    {"accept", "connection", "content-length", "content-type", "expect", "host", "te", "transfer-encoding", "upgrade"}
)


class Alerts(Section, frozen=True):
    """Sends the alerts of the live page that begin and end to a webhook, as JSON."""

    webhook_url: Annotated[
        str,
        Meta(
            description="http or https URL that receives them, for example that of a chat or an incident service. The "
            "router follows no redirects, and logs the host only. Empty: none."
        ),
    ] = ""
    webhook_secret_env: Annotated[
        str, Meta(description="Environment variable with the value of `webhook_header`. Empty: no such header.")
    ] = ""
    webhook_header: Annotated[
        str,
        Meta(
            pattern=r"^[!#$%&'*+.^_`|~0-9A-Za-z-]{1,64}$",
            description="Header that carries the secret, for example `Authorization` with the value `Bearer …`.",
        ),
    ] = "Authorization"
    webhook_severity: Annotated[Literal["critical", "warning", "info"], REMOVED] = "warning"
    """The least severe alerts that are sent. An `info` asks nobody to act."""


def alert_problems(alerts: Alerts) -> Iterator[str]:
    if alerts.webhook_header.lower() in SET_BY_THE_ROUTER:
        yield f"alerts.webhook_header: the router sets {alerts.webhook_header!r} itself"
    url = alerts.webhook_url
    if not url:
        if alerts.webhook_secret_env:
            yield "alerts.webhook_secret_env: needs alerts.webhook_url"
        return
    try:
        parts = urlsplit(url)
        valid = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        has_user = "@" in parts.netloc
    except ValueError:
        valid = has_user = False
    if not valid or len(url) > MAX_URL or not url.isascii() or not url.isprintable() or " " in url:
        yield "alerts.webhook_url: does not look like https://host/path"  # it may contain a secret
    elif has_user:
        yield "alerts.webhook_url: put the secret into the variable that alerts.webhook_secret_env names, not before @"

"""A dry run: what the router would decide for a request now. Nothing is sent, and no state changes."""

from __future__ import annotations

import asyncio

from warmroute.edge.admission_errors import to_error
from warmroute.edge.api_keys import Rights
from warmroute.edge.http1 import RequestHead
from warmroute.edge.paths import WITH_OUTPUT_TOKENS
from warmroute.edge.prompt_reader import PendingPrompt
from warmroute.edge.proxy import Proxy
from warmroute.prompt.prompt import Prompt
from warmroute.routing.decision import Decision
from warmroute.routing.routing_errors import RoutingError


async def dry_run(proxy: Proxy, head: RequestHead, body: bytes, rights: Rights) -> tuple[Decision, bool]:
    """Return the decision, and whether the request would wait in the queue first. Raises HttpError if rejected."""
    path = head.target.partition(b"?")[0]
    scanned = await proxy.body_scanner.scan(path, head.content_type, body)
    request = proxy.requests.build(head, path, scanned, rights)
    future: asyncio.Future[Prompt | None] = asyncio.get_running_loop().create_future()
    prompt = proxy.read_prompt(request, path, body, scanned.outline, future.set_result)
    if isinstance(prompt, PendingPrompt):
        pending = prompt
        try:
            prompt = await future
        finally:
            pending.cancel()
    lookup = proxy.lookup(request, prompt)
    try:
        limits = rights.limits
        if limits is not None:
            tokens = prompt.total_tokens if prompt is not None else None
            output = proxy.router.output_lengths.expected(request.model, request.tenant, request.max_output_tokens)
            limits.check(tokens, output, proxy.now(), len(body), path in WITH_OUTPUT_TOKENS)
        return proxy.admission.dry_run(request, lookup, proxy.now())
    except RoutingError as why:
        raise to_error(why, request) from None

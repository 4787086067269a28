"""A rehearsal: what would be decided of a request now. Nothing is sent, and no books are touched: it never arrived."""

from __future__ import annotations

import asyncio

from warmroute.edge.admission_errors import in_words
from warmroute.edge.head import RequestHead
from warmroute.edge.proxy import ANSWERED, Proxy
from warmroute.edge.reading import PendingPrompt
from warmroute.prompt.prompt import Prompt
from warmroute.routing.decision import Decision
from warmroute.routing.refusals import Undecided


async def rehearse(proxy: Proxy, head: RequestHead, body: bytes, tenant: str) -> tuple[Decision, bool]:
    """The decision, and whether the request would wait here first. Raises Refusal where it would be refused."""
    request = proxy.request(head, body, tenant)
    reading: asyncio.Future[Prompt | None] = asyncio.get_running_loop().create_future()
    read = proxy.read_prompt(request, head, body, reading.set_result)
    if isinstance(read, PendingPrompt):
        try:
            prompt = await reading
        finally:
            read.cancel()
    else:
        prompt = read
    lookup = proxy.lookup(request, prompt)
    try:
        limits = proxy.rate_limits.of(request.tenant)
        if limits is not None:
            tokens = prompt.token_count if prompt is not None else None
            output = proxy.router.outputs.expected(request.model, request.tenant, request.max_output_tokens)
            answers = head.target.partition(b"?")[0] in ANSWERED
            limits.check(tokens, output, proxy.now(), len(body), answers)
        return proxy.admission.rehearse(request, lookup, proxy.now())
    except Undecided as undecided:
        raise in_words(undecided, request) from None

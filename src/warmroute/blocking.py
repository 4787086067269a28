"""Calls that block, each in a thread of its own. One that hangs takes no other's place, and keeps no process from
ending: threads of a pool would do both.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


async def aside(call: Callable[[], T], who: str, places: asyncio.Semaphore | None = None) -> T:
    """What it returns, or raises. Where it is given up, its thread goes on until the call comes back, and nobody
    listens; only then is its place free again, so that there are never more threads than places."""
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[T] = loop.create_future()

    def settle(result: T | None, error: BaseException | None) -> None:
        if places is not None:
            places.release()
        if ended.done():
            return
        if error is not None:
            ended.set_exception(error)
        else:
            ended.set_result(result)  # type: ignore[arg-type]

    def work() -> None:
        result: T | None = None
        error: BaseException | None = None
        try:
            result = call()
        except Exception as raised:
            error = raised
        try:
            loop.call_soon_threadsafe(settle, result, error)
        except RuntimeError:
            pass  # the loop is closed: nobody listens any more

    if places is not None:
        await places.acquire()
    try:
        threading.Thread(target=work, name=f"warmroute-{who}", daemon=True).start()
    except RuntimeError:  # the system has no more of them
        if places is not None:
            places.release()
        raise
    return await ended

"""Runs blocking calls in threads of their own.

A call that hangs does not block other calls, and does not keep the process from ending. The threads of a pool would do
both.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


async def run_in_thread(call: Callable[[], T], name: str, slots: asyncio.Semaphore | None = None) -> T:
    """Return what the call returns, or raise what it raises.

    If the caller is cancelled, the thread continues until the call returns, and the result is dropped. Only then its
    slot is free again: there are never more threads than slots.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def finish(result: T | None, error: BaseException | None) -> None:
        if slots is not None:
            slots.release()
        if done.done():
            return
        if error is not None:
            done.set_exception(error)
        else:
            done.set_result(result)  # type: ignore[arg-type]

    def work() -> None:
        result: T | None = None
        error: BaseException | None = None
        try:
            result = call()
        except Exception as raised:
            error = raised
        try:
            loop.call_soon_threadsafe(finish, result, error)
        except RuntimeError:
            pass  # the loop is closed

    if slots is not None:
        await slots.acquire()
    try:
        threading.Thread(target=work, name=f"warmroute-{name}", daemon=True).start()
    except RuntimeError:  # the system cannot start another thread
        if slots is not None:
            slots.release()
        raise
    return await done

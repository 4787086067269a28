"""The queue of waiting requests: first come first served, or by priority with ties broken by arrival.

A request that leaves from the middle is only marked. The queue drops it when it reaches the front.
"""

import heapq
from collections import deque
from collections.abc import Iterator
from typing import Protocol

from warmroute.fake_engine.core.sequence import Sequence, State


class WaitingQueue(Protocol):
    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Sequence]: ...

    def push(self, sequence: Sequence) -> None: ...

    def push_front(self, sequence: Sequence) -> None: ...

    def peek(self) -> Sequence: ...

    def pop(self) -> Sequence: ...

    def count_removed(self) -> None:
        """Count one request less. The caller then changes the state of that request."""


class ArrivalQueue:
    __slots__ = ("_length", "_queue")

    def __init__(self) -> None:
        self._queue: deque[Sequence] = deque()
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Sequence]:
        return (sequence for sequence in self._queue if sequence.state is State.WAITING)

    def push(self, sequence: Sequence) -> None:
        self._queue.append(sequence)
        self._length += 1

    def push_front(self, sequence: Sequence) -> None:
        self._queue.appendleft(sequence)
        self._length += 1

    def peek(self) -> Sequence:
        while self._queue[0].state is not State.WAITING:
            self._queue.popleft()
        return self._queue[0]

    def pop(self) -> Sequence:
        self.peek()
        self._length -= 1
        return self._queue.popleft()

    def count_removed(self) -> None:
        self._length -= 1


class PriorityQueue:
    __slots__ = ("_heap", "_length")

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, Sequence]] = []
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Sequence]:
        return (entry[2] for entry in sorted(self._heap) if entry[2].state is State.WAITING)

    def push(self, sequence: Sequence) -> None:
        heapq.heappush(self._heap, (sequence.request.priority, sequence.arrival, sequence))
        self._length += 1

    def push_front(self, sequence: Sequence) -> None:
        self.push(sequence)

    def peek(self) -> Sequence:
        while self._heap[0][2].state is not State.WAITING:
            heapq.heappop(self._heap)
        return self._heap[0][2]

    def pop(self) -> Sequence:
        self.peek()
        self._length -= 1
        return heapq.heappop(self._heap)[2]

    def count_removed(self) -> None:
        self._length -= 1

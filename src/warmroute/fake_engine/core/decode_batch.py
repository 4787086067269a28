"""The decoding part of a batch: who decodes, when each one's blocks change, when it ends, how long steps take.

Every decoding sequence gains one token in every step, so its length follows from the step number. What is left to
look at is a calendar: the steps in which a sequence needs a block or fills one, and the steps at whose end it is done.

A *stretch* is a run of consecutive steps that only decode, all with the same sequences. The k-th of its steps takes
floor + g·(context + k·batch) ms, so the end of each is known in closed form. The ends of steps are computed from the
start of their stretch whether steps are taken one by one or many at once: that makes both exactly equal.
"""

import heapq

from warmroute.fake_engine.core.sequence import Sequence, State
from warmroute.fake_engine.core.step_timing import Timing


class DecodeBatch:
    __slots__ = ("_block_size", "_due", "_finish", "_in_stretch", "_offsets", "_stretch", "_timing", "batch")

    def __init__(self, timing: Timing, block_size: int) -> None:
        self._timing = timing
        self._block_size = block_size
        self.batch = 0
        self._offsets = 0  # Σ token_offset of the batch
        self._finish: list[tuple[int, int, Sequence]] = []  # (finish_step, admission, sequence): a heap, left ones too
        self._due: dict[int, list[Sequence]] = {}  # step → sequences whose blocks may change in it
        self._in_stretch = False
        self._stretch = (0.0, 0, 0.0, 0.0, 0.0)  # start ms, its first step, floor ms, g·context, g·batch/2

    def context_tokens(self, step: int) -> int:
        """KV that the decodes of this step read."""
        return self._offsets + self.batch * (step - 1)

    def join(self, sequence: Sequence, step: int) -> None:
        """It decodes from this step on. `tokens` counts the one just emitted, whose KV this step computes."""
        sequence.state = State.DECODING
        sequence.token_offset = sequence.tokens - step
        sequence.finish_step = step + sequence.request.output_tokens - sequence.emitted - 1
        heapq.heappush(self._finish, (sequence.finish_step, sequence.admission, sequence))
        self.batch += 1
        self._offsets += sequence.token_offset
        self._in_stretch = False
        last_of_block = sequence.tokens % self._block_size
        self.expect(sequence, step if last_of_block <= 1 else step + self._block_size - last_of_block)

    def leave(self, sequence: Sequence, step: int, emitted_in_step: int) -> None:
        """It decodes no more. `emitted_in_step` is 1 if the token of this step counts, else 0."""
        grown = sequence.token_offset + step + emitted_in_step - sequence.tokens
        sequence.tokens += grown
        sequence.emitted += grown
        self.batch -= 1
        self._offsets -= sequence.token_offset
        self._in_stretch = False

    def expect(self, sequence: Sequence, step: int) -> None:
        """Its blocks change next in this step."""
        sequence.due_step = step
        if step <= sequence.finish_step:
            due = self._due.get(step)
            if due is None:
                self._due[step] = [sequence]
            else:
                due.append(sequence)

    def due(self, step: int) -> list[Sequence]:
        """Takes the sequences whose blocks change in this step, in batch order."""
        due = self._due.pop(step, None)
        if due is None:
            return []
        if len(due) > 1:
            due.sort(key=_admission)
        return due

    def has_due(self, step: int) -> bool:
        return step in self._due

    def next_finish_step(self) -> int:
        """The step at whose end the first of the batch is done; the batch is not empty."""
        heap = self._finish
        while True:
            step, admission, sequence = heap[0]
            if _still_ends(sequence, step, admission):
                return step
            heapq.heappop(heap)

    def finished(self, step: int) -> list[Sequence]:
        """Takes the sequences that are done at the end of this step, in batch order."""
        done: list[Sequence] = []
        heap = self._finish
        while heap and heap[0][0] <= step:
            finish_step, admission, sequence = heapq.heappop(heap)
            if _still_ends(sequence, finish_step, admission):
                done.append(sequence)
        return done

    def interrupt(self) -> None:
        """The next decode-only step starts a stretch of its own."""
        self._in_stretch = False

    def change_timing(self, timing: Timing) -> None:
        """From the next step on."""
        self._timing = timing
        self._in_stretch = False

    def step_end_ms(self, step: int, started_ms: float) -> float:
        """The end of a decode-only step that starts now, as part of the present stretch or as the start of one."""
        if not self._in_stretch:
            timing = self._timing
            self._in_stretch = True
            self._stretch = (
                started_ms,
                step,
                timing.decode_floor_ms(self.batch) + timing.overhead_ms,
                timing.g * self.context_tokens(step),
                timing.g * self.batch / 2,
            )
        return self.end_ms(step)

    def end_ms(self, step: int) -> float:
        """The end of a step of the present stretch."""
        start_ms, first, floor_ms, context_ms, half_growth_ms = self._stretch
        k = step - first + 1
        return start_ms + k * (floor_ms + context_ms + half_growth_ms * (k - 1))

    def last_started(self, step: int, limit: int, now_ms: float, before: bool) -> int:
        """The step in progress at `now_ms` (`before`: just before it), from `step` (which has ended) up to `limit`."""
        ended = self.end_ms(limit - 1)
        if ended < now_ms or (ended == now_ms and not before):
            return limit
        low, high = step + 1, limit - 1  # the first step that has not ended lies in here
        while low < high:
            middle = (low + high) // 2
            end = self.end_ms(middle)
            if end < now_ms or (end == now_ms and not before):
                low = middle + 1
            else:
                high = middle
        return low


def _admission(sequence: Sequence) -> int:
    return sequence.admission


def _still_ends(sequence: Sequence, step: int, admission: int) -> bool:
    """Since it was noted that it ends in this step it has neither left nor sat out a step."""
    return sequence.state is State.DECODING and sequence.admission == admission and sequence.finish_step == step

"""The decoding sequences of a batch: when the blocks of each change, when each finishes, and how long steps take.

A decoding sequence gains one token in each step, so its length follows from the step number. The batch keeps only two
schedules: the steps in which a sequence needs or fills a block, and the steps in which it finishes.

A *decode run* is a series of consecutive steps that only decode, all with the same sequences. Its k-th step takes
floor + g·(context + k·size) ms, so the end of each step has a closed form. The engine computes it from the start of the
run, whether it takes steps one by one or many at once. So both ways give exactly the same times.
"""

import heapq

from warmroute.fake_engine.core.sequence import Sequence, State
from warmroute.fake_engine.core.step_timing import Timing


class DecodeBatch:
    __slots__ = ("_block_size", "_due", "_finish", "_in_run", "_offsets", "_run", "_timing", "size")

    def __init__(self, timing: Timing, block_size: int) -> None:
        self._timing = timing
        self._block_size = block_size
        self.size = 0
        self._offsets = 0  # Σ token_offset of the batch
        self._finish: list[tuple[int, int, Sequence]] = []
        """A heap of (finish_step, admission, sequence). It can contain outdated entries."""
        self._due: dict[int, list[Sequence]] = {}  # step → sequences whose blocks may change in it
        self._in_run = False
        self._run = (0.0, 0, 0.0, 0.0, 0.0)  # start ms, first step, floor ms, g·context, g·size/2

    def context_tokens(self, step: int) -> int:
        """The KV tokens that the decodes of this step read."""
        return self._offsets + self.size * (step - 1)

    def add(self, sequence: Sequence, step: int) -> None:
        """Add a sequence that decodes from this step on. Its `tokens` include the one just emitted."""
        sequence.state = State.DECODING
        sequence.token_offset = sequence.tokens - step
        sequence.finish_step = step + sequence.request.output_tokens - sequence.emitted - 1
        heapq.heappush(self._finish, (sequence.finish_step, sequence.admission, sequence))
        self.size += 1
        self._offsets += sequence.token_offset
        self._in_run = False
        last_of_block = sequence.tokens % self._block_size
        self.set_due_step(sequence, step if last_of_block <= 1 else step + self._block_size - last_of_block)

    def remove(self, sequence: Sequence, step: int, emitted_in_step: int) -> None:
        """Remove a sequence. `emitted_in_step` is 1 if its token of this step counts, else 0."""
        grown = sequence.token_offset + step + emitted_in_step - sequence.tokens
        sequence.tokens += grown
        sequence.emitted += grown
        self.size -= 1
        self._offsets -= sequence.token_offset
        self._in_run = False

    def set_due_step(self, sequence: Sequence, step: int) -> None:
        """Set the next step in which the sequence needs or fills a block."""
        sequence.due_step = step
        if step <= sequence.finish_step:
            due = self._due.get(step)
            if due is None:
                self._due[step] = [sequence]
            else:
                due.append(sequence)

    def pop_due(self, step: int) -> list[Sequence]:
        """Remove and return the sequences whose blocks change in this step, in batch order."""
        due = self._due.pop(step, None)
        if due is None:
            return []
        if len(due) > 1:
            due.sort(key=_admission)
        return due

    def has_due(self, step: int) -> bool:
        return step in self._due

    def next_finish_step(self) -> int:
        """Return the first step in which a sequence finishes. The batch must not be empty."""
        heap = self._finish
        while True:
            step, admission, sequence = heap[0]
            if _still_finishes(sequence, step, admission):
                return step
            heapq.heappop(heap)

    def pop_finished(self, step: int) -> list[Sequence]:
        """Remove and return the sequences that finish in this step, in batch order."""
        done: list[Sequence] = []
        heap = self._finish
        while heap and heap[0][0] <= step:
            finish_step, admission, sequence = heapq.heappop(heap)
            if _still_finishes(sequence, finish_step, admission):
                done.append(sequence)
        return done

    def end_run(self) -> None:
        """Make the next decode-only step start a new run."""
        self._in_run = False

    def change_timing(self, timing: Timing) -> None:
        """Use another timing from the next step on."""
        self._timing = timing
        self._in_run = False

    def step_end_ms(self, step: int, started_ms: float) -> float:
        """Return the end of a decode-only step that starts now. It continues the current run or starts one."""
        if not self._in_run:
            timing = self._timing
            self._in_run = True
            self._run = (
                started_ms,
                step,
                timing.decode_floor_ms(self.size) + timing.overhead_ms,
                timing.g * self.context_tokens(step),
                timing.g * self.size / 2,
            )
        return self.end_ms(step)

    def end_ms(self, step: int) -> float:
        """Return the end of a step of the current run."""
        start_ms, first, floor_ms, context_ms, half_growth_ms = self._run
        k = step - first + 1
        return start_ms + k * (floor_ms + context_ms + half_growth_ms * (k - 1))

    def step_in_progress(self, step: int, limit: int, now_ms: float, strictly_before: bool) -> int:
        """Return the step in progress at `now_ms` (or just before it), at most `limit`. `step` has ended."""
        ended = self.end_ms(limit - 1)
        if ended < now_ms or (ended == now_ms and not strictly_before):
            return limit
        low, high = step + 1, limit - 1  # bounds of the first step that has not ended
        while low < high:
            middle = (low + high) // 2
            end = self.end_ms(middle)
            if end < now_ms or (end == now_ms and not strictly_before):
                low = middle + 1
            else:
                high = middle
        return low


def _admission(sequence: Sequence) -> int:
    return sequence.admission


def _still_finishes(sequence: Sequence, step: int, admission: int) -> bool:
    """Return whether a heap entry is valid: the sequence has neither left the batch nor skipped a step since."""
    return sequence.state is State.DECODING and sequence.admission == admission and sequence.finish_step == step

"""What the router writes down of a request that has ended: a line of its log, a line of a capture, a sample for the
prompt doctor, a trace.

`keep` says what they want of a request that has just arrived. The edge fills that in, the core hands it back with the
call when it has ended, and `write` does the rest, apart from requests.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from warmroute.app.capture import TrafficCapture
from warmroute.app.prompt_doctor import PromptComparison
from warmroute.app.tracing import TraceExporter, trace_of_call, trace_of_request
from warmroute.config import Config
from warmroute.core.calls import Call
from warmroute.core.messages import MEANINGS, Left, Outcome, RoutingRequest
from warmroute.core.output_length import OutputLengthEstimate
from warmroute.edge.arrival import FORWARDED, Kept
from warmroute.edge.trace_context import EndedEarly
from warmroute.event_log import EventLog, where_it_failed
from warmroute.prompt.request_body import has_prompt

log = EventLog("warmroute.requests")


class EndedCalls:
    def __init__(
        self,
        config: Config,
        capture: TrafficCapture,
        prompt_doctor: PromptComparison,
        exporter: TraceExporter | None,
        output_lengths: OutputLengthEstimate,
        is_served: Callable[[str], bool],
    ) -> None:
        """`exporter`: None if tracing is off. `is_served`: whether a node serves a model."""
        self._capture = capture
        self._prompt_doctor = prompt_doctor
        self._exporter = exporter
        self._output_lengths = output_lengths
        self._is_served = is_served
        self.reconfigure(config)

    def reconfigure(self, config: Config) -> None:
        self._logs_requests = config.log.requests
        self._samples_prompts = config.prompt_doctor.enabled
        if not self._samples_prompts:
            self._prompt_doctor.forget()

    def keep(self, request: RoutingRequest, path: bytes, body: bytes) -> Kept | None:
        """Return what is wanted of a request that has just arrived; None if nothing is."""
        captures = self._capture.on and has_prompt(path)
        sample = None
        if self._samples_prompts and path in FORWARDED:
            sample = self._prompt_doctor.samples.offer(request, path, body)
        if not captures and sample is None and not self._logs_requests:
            return None
        return Kept(body_bytes=len(body) if captures else -1, sample=sample)

    def write(self, calls: Sequence[Call], early: Sequence[EndedEarly], now_s: float) -> None:
        """Write down calls that have ended, and requests that ended before they asked for a node."""
        wall_offset_s = time.time() - now_s
        for call in calls:
            try:
                self._write(call, wall_offset_s)
            except Exception as error:  # a bug must not cost the other calls
                _log_failure(error)
            call.forget()
        for ended in early:
            try:
                self._write_early(ended, wall_offset_s)
            except Exception as error:
                _log_failure(error)

    def _write(self, call: Call, wall_offset_s: float) -> None:
        kept, request = call.kept, call.request
        if self._logs_requests:
            _log_request(call)
        if kept.body_bytes >= 0:
            self._capture.call_ended(call, self._expected_output(request))
        if kept.sample is not None:
            _complete_sample(call, kept)
        if kept.trace is not None and self._exporter is not None:
            self._exporter.add(trace_of_call(kept.trace, call, self._is_served(request.model), wall_offset_s))

    def _write_early(self, ended: EndedEarly, wall_offset_s: float) -> None:
        kept, trace, request = ended.kept, ended.trace, ended.request
        if kept is not None and request is not None:
            if ended.client_left and kept.body_bytes >= 0:
                self._capture.client_left(request, kept, self._expected_output(request), ended.ended_s)
            if kept.sample is not None:
                kept.sample.drop()
        if trace is not None and self._exporter is not None:
            is_served = request is not None and self._is_served(request.model)
            self._exporter.add(trace_of_request(ended, trace, is_served, wall_offset_s))

    def _expected_output(self, request: RoutingRequest) -> float:
        return self._output_lengths.expected(request.model, request.tenant, request.max_output_tokens)


def _complete_sample(call: Call, kept: Kept) -> None:
    """Tell the prompt doctor what a sampled prompt took."""
    history = call.history
    if call.outcome is not Outcome.OK or history is None:
        kept.sample.drop()
        return
    prompt, cached, _output = call.usage or (None, None, None)
    tokens = prompt if prompt is not None else history.prompt_tokens
    known = cached if cached is not None else history.predicted
    kept.sample.completed(
        (history.model, call.request.route), kept.tokens, tokens,
        None if known is None else min(max(0, known), tokens), history.ms_per_token, history.step_ms,
    )  # fmt: skip


def _log_request(call: Call) -> None:
    """Log a request whose client got a response, or left. The edge has logged those that got an error of the router."""
    history, request = call.history, call.request
    ended = _ending(call)
    if not ended or call.end is None or history is None:
        return
    _, node, tried, status, first_token_s, ended_s = call.end
    opened_s = history.opened_s
    log.info(
        "request",
        request_id=call.request_id.decode("ascii", "replace"),
        node=node.name,
        tenant=request.tenant,
        model=request.model,
        status=status,
        outcome=ended,
        ttft_ms=round((first_token_s - opened_s) * 1000.0, 1) if first_token_s else None,
        duration_ms=round((ended_s - opened_s) * 1000.0, 1),
        attempts=tried,
    )


def _ending(call: Call) -> str:
    if call.left is Left.LEFT:
        return "client_left"
    if call.left is Left.CUT:
        return "late"
    if call.left is not None or call.code or call.outcome is None:
        return ""
    return MEANINGS[call.outcome].logged


def _log_failure(error: Exception) -> None:
    log.error("request_not_recorded", "Log, capture or trace lack a request.", reason=where_it_failed(error))

"""OpenTelemetry traces of requests.

    trace_context.py     W3C trace context: reads and writes `traceparent`
    tracing.py           decides which requests are recorded
    request_trace.py     what a recorded request keeps, and what remains of it at its end
    spans.py             the spans of a recorded request, without OpenTelemetry
    trace_exporter.py    a thread sends finished traces in batches; bounded, and counts what it drops
    create.py            puts these parts together
    otlp.py              the only file that imports OpenTelemetry (extra `otel`)

While a request runs, the router only keeps times. Spans are built after its end, in the exporter's thread.
"""

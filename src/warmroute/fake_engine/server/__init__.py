"""The simulated engine as a server: vLLM's HTTP API, metrics and KV events around the engine core.

engine_server.py         the HTTP endpoints; starts and stops the server
generation.py            one chat or completion request, from its body to the end of its response
rank.py                  an engine core in real time
kv_event_publisher.py    KV events over ZMQ
metrics_page.py          GET /metrics
faults.py                failures on command
"""

"""The core decides: it takes events and a clock, and returns which node serves a request. Edge and replay run the
same code.

    admission    a request is admitted, waits or is rejected (admission.py, queue.py, queue_order.py,
    rate_limits.py)
    decision     candidates, their cached prefixes and prices, one node (router.py, decision.py, policies/,
    pairs.py)
    tries        the node's accounting, the next node after a failure, hedges (tickets.py, calls.py, brain.py)
    fleet        nodes, their health and speeds (fleet.py, node.py, health.py, speeds.py)
    cache        which node holds which KV block (cache_view.py, node_cache.py, prediction.py, reuse.py)

Prompts become chains of block hashes in a namespace (`hash_blocks`, `namespace_seed`). `BlockIndex` maps each
block to the holders that hold it. A holder is a number for one cache, for example one data-parallel rank of a
node; `CacheView` knows which node each holder belongs to. The index itself is compiled (`_kernel/index.h`).
"""

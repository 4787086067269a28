"""The edge: sockets of clients and nodes. It carries bytes, tells the core what happens, and obeys. It decides nothing.

    sockets.py             listening sockets, TLS, and plain sockets that the kernel reads and writes
    client_connection.py   a client's connection: requests in, responses out
    proxy.py               the handler of the listeners; `tell` is the only way to the core
    arrival.py             from head and body to `Arrive`: path, key, route, fields, block hashes
    exchange.py            one call: carries out Send, Withdraw, Reject and Cut; reports Started, FirstToken, Ended …
    tries.py               one try: a request to one node, in its role
    node_connection.py     a connection to a node; connection_pool.py keeps the idle ones
    response.py            what the edge reads in an answer: first token, usage, last event
    errors.py              errors in OpenAI's and Anthropic's form
    envoy/                 the same for requests whose connections Envoy holds

Of the core it imports core/messages.py and nothing else. What it knows of the fleet is in `Tables`.

The edge owns the first byte: of several tries, the first one that answers goes to the client, and the edge closes the
others before it tells the core.
"""

"""What tests share: a scripted engine, a raw HTTP client, a running router, the `serve` command as a process.

Everything is real: sockets on loopback, the whole `Service`, uvloop. Tests do not sleep for long: they poll for what
must happen, with a generous deadline.
"""

def scan(body: bytes, /) -> tuple[str, bytes | None, bytes | None, bytes] | None:
    """What routing needs of a JSON body: model, beginnings of the system prompt and of the first user message, session.

    None where the body is malformed, or where the real parser has to judge.
    """

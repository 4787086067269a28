"""Changes a request's JSON body by splicing the values of some fields into its bytes. All other bytes stay."""

from __future__ import annotations

from collections.abc import Mapping

from warmroute._kernel import Outline


def splice(body: bytes, outline: Outline, values: Mapping[str, bytes]) -> bytes:
    """Return the body with these fields. `outline`: that of the body.

    A field that the body has gets its new value in its place; the others are appended. A parser that finds a field
    twice takes the last one, and so does the outline.
    """
    fields = outline.fields
    pieces: list[bytes | memoryview] = []
    view, at = memoryview(body), 0
    known = sorted((fields[name], value) for name, value in values.items() if name in fields)
    for (start, end), value in known:
        pieces += (view[at:start], value)
        at = end
    close = body.rindex(b"}")
    pieces.append(view[at:close])
    separator = b"" if _is_empty(body, close) else b","
    for name, value in values.items():
        if name not in fields:
            pieces.append(b'%b"%b":%b' % (separator, name.encode("ascii"), value))
            separator = b","
    pieces.append(view[close:])
    return b"".join(pieces)


def _is_empty(body: bytes, close: int) -> bool:
    """Return whether nothing but space is between the braces. The outline does not list every field."""
    while body[close - 1] in b" \t\r\n":
        close -= 1
    return body[close - 1] == ord("{")

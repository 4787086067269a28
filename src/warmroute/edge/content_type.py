"""What a request's Content-Type says about its body: JSON, or a form with a boundary.

The router accepts a type only if every server reads it in the same way, since a body that the engine reads as something
else names another model there. Servers differ in the charset of JSON, in parameters given twice, and in the extended
parameters of RFC 2231 (`boundary*`).
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Final

from warmroute.edge import errors

_TOKEN: Final = rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]+"
_TYPE: Final = re.compile(_TOKEN + rb"/" + _TOKEN)
_PARAMETER: Final = re.compile(rb"[ \t]*;[ \t]*(?:(" + _TOKEN + rb")=(?:(" + _TOKEN + rb')|"([\t\x20-!#-\[\]-~]*)"))?')
"""One parameter, or an empty one. Parameters are matched one by one: a pattern of all of them would try every way to
share out the blanks between two empty ones."""
_MAX_BYTES: Final = 256
"""A media type with a boundary of 70 bytes is far shorter."""
_BOUNDARY: Final = re.compile(rb"[0-9A-Za-z'()+_,\-./:=? ]{0,69}[0-9A-Za-z'()+_,\-./:=?]")
_CHARSETS: Final = (b"utf-8", b"utf8", b"us-ascii")
_FORM: Final = b"multipart/form-data"


@lru_cache(maxsize=128)
def form_boundary(content_type: bytes) -> bytes | None:
    """Return the boundary of a form, None for JSON. Raises HttpError for anything else.

    A body without a type, or of a type that is no form, is JSON: the engine refuses it if it disagrees.
    """
    if not content_type:
        return None
    found = _TYPE.match(content_type)
    if found is None or len(content_type) > _MAX_BYTES:
        raise _malformed()
    media_type = found[0].lower()
    if media_type == b"application/x-www-form-urlencoded" or (
        media_type.startswith(b"multipart/") and media_type != _FORM
    ):
        raise errors.unsupported_media_type("The body must be JSON, or a form of type `multipart/form-data`.")
    parameters = _read_parameters(content_type, found.end())
    if parameters.get(b"charset", b"utf-8").lower() not in _CHARSETS:
        raise errors.unsupported_media_type("The body must be UTF-8.")
    if media_type != _FORM:
        return None
    boundary = parameters.get(b"boundary", b"")
    if _BOUNDARY.fullmatch(boundary) is None:
        raise errors.unsupported_media_type("The `Content-Type` header has no valid `boundary`.")
    return boundary


def _read_parameters(content_type: bytes, at: int) -> dict[bytes, bytes]:
    parameters: dict[bytes, bytes] = {}
    while (found := _PARAMETER.match(content_type, at)) is not None:
        at = found.end()
        name, plain, quoted = found.groups()
        if name is None:
            continue
        name = name.lower()
        if name in parameters or b"*" in name:
            raise errors.unsupported_media_type("A parameter of the `Content-Type` header is given twice or extended.")
        parameters[name] = plain or quoted
    if content_type[at:].strip(b" \t"):
        raise _malformed()
    return parameters


def _malformed() -> errors.HttpError:
    return errors.unsupported_media_type("The `Content-Type` header is malformed.")

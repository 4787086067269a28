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
_PARAMETER: Final = re.compile(rb"[ \t]*;[ \t]*(?:(" + _TOKEN + rb")=(?:(" + _TOKEN + rb')|"([\t\x20-!#-\[\]-~]*)"))?')
_TYPE: Final = re.compile(rb"(" + _TOKEN + rb"/" + _TOKEN + rb")((?:" + _PARAMETER.pattern + rb")*)[ \t]*")
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
    found = _TYPE.fullmatch(content_type)
    if found is None:
        raise errors.unsupported_media_type("The `Content-Type` header is malformed.")
    media_type = found[1].lower()
    if media_type == b"application/x-www-form-urlencoded" or (
        media_type.startswith(b"multipart/") and media_type != _FORM
    ):
        raise errors.unsupported_media_type("The body must be JSON, or a form of type `multipart/form-data`.")
    parameters: dict[bytes, bytes] = {}
    for name, plain, quoted in _PARAMETER.findall(found[2]):
        if not name:
            continue
        name = name.lower()
        if name in parameters or b"*" in name:
            raise errors.unsupported_media_type("A parameter of the `Content-Type` header is given twice or extended.")
        parameters[name] = plain or quoted
    if parameters.get(b"charset", b"utf-8").lower() not in _CHARSETS:
        raise errors.unsupported_media_type("The body must be UTF-8.")
    if media_type != _FORM:
        return None
    boundary = parameters.get(b"boundary", b"")
    if _BOUNDARY.fullmatch(boundary) is None:
        raise errors.unsupported_media_type("The `Content-Type` header has no valid `boundary`.")
    return boundary

"""HTTP requests of LLM clients, changed by the grammar of HTTP, JSON and forms and then by bytes.

Each case is the bytes that one client sends on one connection: a few requests, of which most are changed a little. A
case follows from its number and the seed alone.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from random import Random
from typing import Any

KEYS = ("key-high", "key-normal", "key-low")
"""API keys of the router, by the highest priority that they allow."""
MODELS = ("m", "n")
LAST = b"GET /health HTTP/1.1\r\nHost: router\r\nConnection: close\r\n\r\n"
"""Ends each connection, if its bytes are still read as requests by then."""

PATHS = (
    b"/v1/chat/completions", b"/v1/completions", b"/v1/embeddings", b"/v1/responses", b"/v1/messages", b"/v1/rerank",
    b"/tokenize", b"/v1/audio/transcriptions", b"/v1/audio/translations", b"/v1/load_lora_adapter", b"/v1/models",
    b"/v1/unload_lora_adapter", b"/metrics", b"/v1/custom",
)  # fmt: skip
TARGET_PIECES = (
    b"#", b"#x", b"?", b"?a=b", b"%", b"%2f", b"%23", b"%3f", b"%2e%2e", b"/", b"//", b"/.", b"/..", b"/../", b";",
    b";x", b"\\", b"*", b"&", b":", b"@", b"http://router", b"//router", b"\t", b"\x7f", b"\xc3\xa9", b"|", b"{", b"+",
    b"\0", b" ",
)  # fmt: skip
NAMES = (
    b"Content-Type", b"Content-Length", b"Transfer-Encoding", b"Content-Encoding", b"Connection", b"Host", b"Expect",
    b"Authorization", b"X-Api-Key", b"X-Request-Id", b"X-Forwarded-For", b"X-Priority", b"X-Queue", b"X-Vllm-Priority",
    b"X-Data-Parallel-Rank", b"TE", b"Upgrade", b"Trailer", b"Keep-Alive", b"X-Session-Id", b"Accept", b"X-Own",
    b"Proxy-Authorization", b"X-Deadline-Ms", b"Content-Transfer-Encoding", b"X-HTTP-Method-Override",
)  # fmt: skip
VALUES = (
    b"", b"application/json", b"application/json; charset=utf-16", b"text/plain", b"multipart/form-data; boundary=x",
    b"multipart/form-data", b"application/x-www-form-urlencoded", b"0", b"5", b"-5", b"+5", b"5, 5", b"0x5", b"1e3",
    b"chunked", b"gzip, chunked", b"chunked, identity", b"identity", b"gzip", b"close", b"keep-alive", b"content-type",
    b"close, authorization", b"host", b"x-request-id, content-length", b"upgrade", b"100-continue", b"router", b"high",
    b"low", b"no", b"Bearer key-high", b"Bearer key-low", b"key-high", b"id-1", b"h2c", b"trailers", b"\xe9", b"a\tb",
    b"application/json;charset=utf-8", b'multipart/form-data; boundary="x"', b"application/json, text/plain", b"GET",
)  # fmt: skip
JSON_NAMES = (
    "model",
    "stream",
    "max_tokens",
    "max_completion_tokens",
    "priority",
    "messages",
    "cache_salt",
    "user",
    "x",
)
JSON_VALUES = (
    '"m"', '"n"', '"none"', "null", "true", "false", "0", "1", "-1", "-7", "5", "5.0", "5.5", '"5"', '"-5"', '"true"',
    "NaN", "-Infinity", "[]", "{}", '["m"]', '"\\u006d"', '"\\ud800"', "1e2", "9" * 30, '"m\\u0000"', "01", "tru",
    "'m'", '"m',
)  # fmt: skip
UNKNOWN_NAMES = (
    "Model",
    "model ",
    "models",
    "mode",
    "MODEL",
    "x",
    "gr\u00f6\u00dfe",
    "stream_options",
    "priority\u0000",
    "",
)
BYTES = (
    b"\r",
    b"\n",
    b"\r\n",
    b"\0",
    b" ",
    b"\t",
    b":",
    b",",
    b'"',
    b"\\",
    b"{",
    b"}",
    b"\x7f",
    b"\xff",
    b"\x80",
    b"0",
)
FORM = (
    b'--x\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\nRIFF\r\n',
    b'--x\r\nContent-Disposition: form-data; name="model"\r\n\r\nm\r\n',
    b'--x\r\nContent-Disposition: form-data; name="language"\r\n\r\nde\r\n',
)
FORM_PIECES = (
    b"--x\r\n", b"--x--\r\n", b"\r\n--x", b"\r\n", b"\n", b'; name="model"', b'; filename="f"', b"name*=utf-8''model; ",
    b'--x\r\nContent-Disposition: form-data; name="model"\r\n\r\nn\r\n', b"Content-Transfer-Encoding: base64\r\n", b" ",
    b'Content-Disposition: form-data; name="model"\r\n', b"preamble\r\n", b"\\",
)  # fmt: skip

Header = tuple[bytes, bytes]


class Request:
    """A request in parts, before it becomes bytes."""

    def __init__(self, random: Random) -> None:
        self.random = random
        self.method = b"POST"
        self.target = PATHS[0] if random.random() < 0.5 else random.choice(PATHS)
        self.version = b"HTTP/1.1"
        self.headers: list[Header] = [
            (b"Host", b"router"),
            (b"Authorization", b"Bearer " + random.choice(KEYS).encode()),
        ]
        self.chunked = random.random() < 0.2
        if b"/audio/" in self.target or random.random() < 0.05:
            self.headers.append((b"Content-Type", b"multipart/form-data; boundary=x"))
            self.body = b"".join(random.sample(FORM, len(FORM))) + b"--x--\r\n"
        else:
            self.headers.append((b"Content-Type", b"application/json"))
            self.body = json_body(random)
        if self.target in (b"/v1/models", b"/metrics"):
            self.method = b"GET"

    def to_bytes(self) -> bytes:
        """Return the request, with a framing that fits its body unless a mutation set another one."""
        headers, body = self.headers, self.body
        if self.chunked:
            if not has(headers, b"transfer-encoding"):
                headers = [*headers, (b"Transfer-Encoding", b"chunked")]
            cut = self.random.randrange(len(body) + 1)
            body = b"".join(b"%x\r\n%b\r\n" % (len(one), one) for one in (body[:cut], body[cut:]) if one) + b"0\r\n\r\n"
        elif not has(headers, b"content-length"):
            headers = [*headers, (b"Content-Length", b"%d" % len(body))]
        lines = b"".join(b"%b: %b\r\n" % header for header in headers)
        return b"%b %b %b\r\n%b\r\n%b" % (self.method, self.target, self.version, lines, body)


def has(headers: list[Header], name: bytes) -> bool:
    return any(key.lower() == name for key, _ in headers)


def json_body(random: Random) -> bytes:
    fields: dict[str, Any] = {"model": random.choice(MODELS), "messages": [{"role": "user", "content": "hi"}]}
    for name, values in (("stream", (True, False)), ("max_tokens", (5, 100)), ("priority", (0, 1, 7, -1))):
        if random.random() < 0.3:
            fields[name] = random.choice(values)
    names = list(fields)
    random.shuffle(names)
    return json.dumps({name: fields[name] for name in names}, separators=(",", ":")).encode()


# Mutations of one request.


def change_target(request: Request) -> None:
    at = request.random.randrange(len(request.target) + 1)
    request.target = request.target[:at] + request.random.choice(TARGET_PIECES) + request.target[at:]


def append_to_target(request: Request) -> None:
    request.target += request.random.choice(TARGET_PIECES)


def change_line(request: Request) -> None:
    random = request.random
    request.method = random.choice((b"POST", b"post", b"GET", b"HEAD", b"PUT", b"OPTIONS", b"POST ", b"P\tST", b""))
    request.version = random.choice(
        (b"HTTP/1.1", b"HTTP/1.0", b"HTTP/1.2", b"HTTP/2.0", b"http/1.1", b"HTTP/1.1 ", b"")
    )


def add_header(request: Request) -> None:
    random = request.random
    header = (random.choice(NAMES), random.choice(VALUES))
    request.headers.insert(random.randrange(len(request.headers) + 1), header)


def repeat_header(request: Request) -> None:
    random = request.random
    name, value = random.choice(request.headers)
    header = (random.choice((name, name.lower(), name.upper())), random.choice((value, random.choice(VALUES))))
    request.headers.insert(random.randrange(len(request.headers) + 1), header)


def change_header(request: Request) -> None:
    random = request.random
    at = random.randrange(len(request.headers))
    name, value = request.headers[at]
    request.headers[at] = random.choice(
        [
            (name.replace(b"-", b"_"), value), (name + b" ", value), (b" " + name, value),
            (name, random.choice(VALUES)),
            (name, value + b"\r\n " + random.choice(VALUES)), (name, value + b", " + random.choice(VALUES)),
            (name.swapcase(), value), (name, value + random.choice(BYTES)), (name + random.choice(BYTES), value),
        ]
    )  # fmt: skip


def remove_header(request: Request) -> None:
    del request.headers[request.random.randrange(len(request.headers))]
    if not request.headers:
        request.headers.append((b"Host", b"router"))


def name_in_connection(request: Request) -> None:
    name = request.random.choice((*NAMES, *(name for name, _ in request.headers)))
    request.headers.append((b"Connection", request.random.choice((name, b"close, " + name, name.lower() + b",x"))))


def change_framing(request: Request) -> None:
    random = request.random
    length = len(request.body)
    request.headers.append(
        random.choice(
            [
                (b"Content-Length", b"%d" % (length + random.choice((-2, -1, 0, 1, 40)))),
                (b"Content-Length", random.choice((b"", b"0", b"+5", b"-1", b"5,5", b"0x9", b"1" * 30))),
                (b"Transfer-Encoding", random.choice((b"chunked", b"Chunked", b"xchunked", b"gzip", b"chunked, x"))),
                (b"Content-Length ", b"%d" % length), (b"Transfer-Encoding", b"\x0bchunked"),
            ]
        )
    )  # fmt: skip
    request.chunked = random.random() < 0.5


def change_json(request: Request) -> None:
    """Change one member of the body: another value, a second one of its name, or its name with an escape."""
    random = request.random
    name, value = random.choice(JSON_NAMES), random.choice(JSON_VALUES)
    if random.random() < 0.3:
        at = random.randrange(len(name))
        name = name[:at] + f"\\u{ord(name[at]):04x}" + name[at + 1 :]
    member = f'"{name}":{value}'.encode()
    inner = request.body[1:-1]
    request.body = b"{" + random.choice((member + b"," + inner, inner + b"," + member)) + b"}"


def rewrite_json(request: Request) -> None:
    """Write the same body in another way, with members that mean nothing to the router."""
    random = request.random
    try:
        fields = json.loads(request.body)
    except ValueError:
        return
    if not isinstance(fields, dict):
        return
    fields |= {
        random.choice(UNKNOWN_NAMES): random.choice(({"model": "n", "priority": -9}, [1, "é"], "\u2028", 1e-9, None))
    }
    names = random.sample(list(fields), len(fields))
    indent, ascii_only = random.choice((None, 0, 1)), random.random() < 0.5
    request.body = json.dumps({name: fields[name] for name in names}, indent=indent, ensure_ascii=ascii_only).encode(
        "utf-8", "surrogatepass"
    )


def rewrite_headers(request: Request) -> None:
    """Write the same headers in another way."""
    random = request.random
    cases: tuple[Callable[[bytes], bytes], ...] = (bytes.lower, bytes.upper, bytes.swapcase, bytes.title)
    request.headers = [
        (random.choice(cases)(name), random.choice((b"", b" ", b"\t ")) + value + random.choice((b"", b" ")))
        for name, value in random.sample(request.headers, len(request.headers))
    ]


def encode_body(request: Request) -> None:
    random = request.random
    text = request.body.decode("latin-1")
    request.body = random.choice(
        [
            b"\xef\xbb\xbf" + request.body, text.encode("utf-16"), text.encode("utf-16-le"), text.encode("utf-32-be"),
            request.body + b"\0", request.body + b" \r\n", b"[" + request.body + b"]", request.body + request.body,
            b"[" * 300 + b"]" * 300, request.body[:-1], b" " + request.body, b"",
        ]
    )  # fmt: skip


def change_form(request: Request) -> None:
    at = request.random.randrange(len(request.body) + 1)
    request.body = request.body[:at] + request.random.choice(FORM_PIECES) + request.body[at:]


MUTATIONS: tuple[Callable[[Request], None], ...] = (
    change_target, append_to_target, change_line, add_header, add_header, repeat_header, repeat_header, change_header,
    change_header, remove_header, name_in_connection, change_framing, change_json, change_json, change_json,
    encode_body, change_form, rewrite_json, rewrite_json, rewrite_headers, rewrite_headers,
)  # fmt: skip


def damage(random: Random, data: bytes) -> bytes:
    """Change, insert, remove or repeat a few bytes."""
    at = random.randrange(len(data) + 1)
    kind = random.random()
    if kind < 0.3:
        return data[:at] + random.choice(BYTES) + data[at:]
    if kind < 0.5:
        return data[:at] + random.choice(BYTES) + data[at + 1 :]
    if kind < 0.7:
        return data[:at] + data[at + random.randrange(1, 4) :]
    if kind < 0.8:
        return data.replace(b"\r\n", b"\n", random.randrange(1, 4))
    end = min(len(data), at + random.randrange(1, 60))
    return data[:end] + data[at:end] + data[end:]


def request_bytes(random: Random) -> bytes:
    request = Request(random)
    changes = random.choice((0, 0, 1, 1, 1, 2, 3))
    for _ in range(changes):
        random.choice(MUTATIONS)(request)
    data = request.to_bytes()
    if random.random() < 0.1:
        data = damage(random, data)
    return data


def case(seed: int, number: int) -> bytes:
    """Return what one client sends."""
    random = Random(seed << 40 | number)
    return b"".join([request_bytes(random) for _ in range(random.choice((1, 1, 2, 3)))]) + LAST

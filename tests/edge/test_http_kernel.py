"""The compiled HTTP parsers agree with the Python references, in any pieces. Where h11 differs, they are stricter."""

from __future__ import annotations

import functools
import re
import subprocess
import sys

import h11
import pytest
import reference_http
import reference_usage
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from warmroute import _kernel

REQUEST_VALUES = (
    "method", "target", "minor_version", "length", "chunked", "keep_alive", "expects_continue", "authorization",
    "api_key", "request_id", "forwarded_for", "content_type", "has_routing_headers", "forwarded_fields",
)  # fmt: skip
RESPONSE_VALUES = (
    "status",
    "status_line",
    "length",
    "keep_alive",
    "content_type",
    "retry_after",
    "encoded",
    "forwarded_fields",
)


@functools.cache
def joins_forwarded_for() -> bool:
    """Whether a head with two X-Forwarded-For can be read at all: it has been seen to crash."""
    head = b"GET / HTTP/1.1\\r\\nHost: a\\r\\nX-Forwarded-For: 1\\r\\nX-Forwarded-For: 2\\r\\n\\r\\n"
    code = f"""if 1:
        from warmroute._kernel import read_request_head
        data = b"{head.decode()}"
        assert read_request_head(data, len(data) - 4, 9).forwarded_for == b"1, 2"
    """
    return subprocess.run([sys.executable, "-c", code], capture_output=True, check=False).returncode == 0


def readable(head: bytes) -> bool:
    return joins_forwarded_for() or len(re.findall(rb"(?i)x-forwarded-for", head)) < 2


# Heads: mostly well-formed, from the words that matter, then damaged.

NAMES = st.sampled_from(
    [
        b"Host", b"Content-Length", b"Transfer-Encoding", b"Connection", b"Expect", b"Authorization", b"X-Request-Id",
        b"X-Forwarded-For", b"Content-Type", b"Keep-Alive", b"Proxy-Connection", b"Proxy-Authorization",
        b"TE", b"Trailer", b"Content-Encoding",
        b"Upgrade", b"Retry-After", b"X-A", b"x-a", b"Accept", b"Proxy-Authenticate", b"cOnTeNt-LeNgTh",
        b"!#$%&'*+-.^_`|~",
        b"Content_Length", b"Content-Lengt", b"Hos", b"Hostt", b"X-Priority", b"x-queue", b"X-Queues", b"X-Deadline-Ms",
        b"X-Data-Parallel-Rank", b"x_data-parallel_RANK", b"X-Vllm-Priority", b"Content-Encoding", b"X_Custom_Name",
        b"X-Api-Key", b"x_api_key",
    ]
)  # fmt: skip
VALUES = st.one_of(
    st.sampled_from(
        [
            b"", b"a", b"0", b"5", b"5, 5", b"05", b"+5", b"-1", b"0x5", b"123456789012345678", b"1234567890123456789",
            b"chunked", b"Chunked", b"gzip, chunked", b"chunked, chunked", b"identity", b"close", b"keep-alive",
            b"Keep-Alive, close", b"X-A", b"x-a , accept,, Content-Type", b"close\t,\tx-a",
            b"100-continue", b"100-Continue",
            b"other", b"Bearer k", b"id-1", b"id 1", b"x" * 200, b"x" * 201, b"1.2.3.4", b"application/json; a=b",
            b"a  b\t", b"\xc3\xa9", b"timeout=5", b",".join(b"n%d" % n for n in range(17)),
            b"gzip", b"Identity", b"close, HOST", b"x-request-id", b"X-Data-Parallel-Rank", b"upgrade, HTTP2-Settings",
        ]
    ),
    st.binary(max_size=12),
)  # fmt: skip
SPACES = st.sampled_from([b" ", b" ", b" ", b"", b"\t", b"  \t"])
FIELD = st.builds(
    lambda n, s, v, t: n + b":" + s + v + t + b"\r\n", NAMES, SPACES, VALUES, st.sampled_from([b"", b"", b" ", b"\t "])
)
FIELDS = st.lists(FIELD, max_size=8).map(b"".join)
REQUEST_LINE = st.one_of(
    st.sampled_from(
        [
            b"GET / HTTP/1.1\r\n", b"POST /v1/chat/completions?a=b HTTP/1.1\r\n", b"POST /x HTTP/1.0\r\n",
            b"OPTIONS * HTTP/1.1\r\n", b"M-SEARCH /\xff HTTP/1.1\r\n", b"GET http://a/ HTTP/1.1\r\n",
            b"GET / HTTP/2.0\r\n",
            b"CONNECT a:1 HTTP/1.1\r\n", b"GET / HTTP/1.2\r\n", b"GET /\r\n", b"GET  / HTTP/1.1\r\n",
            b"get /~|^ HTTP/1.1\r\n", b"GET /# HTTP/1.1\r\n", b"GET /a?b#c HTTP/1.1\r\n", b"GET # HTTP/1.1\r\n",
            b"GET **  HTTP/1.1\r\n", b"GET ** HTTP/1.1\r\n", b"GET / HTTP/1.10\r\n", b"GET / http/1.1\r\n",
            b"/ HTTP/1.1\r\n",
        ]
    ),
    st.builds(lambda t: b"GET /" + t + b" HTTP/1.1\r\n", st.binary(max_size=6)),
)  # fmt: skip
STATUS_LINE = st.one_of(
    st.sampled_from(
        [
            b"HTTP/1.1 200 OK\r\n", b"HTTP/1.0 200 OK\r\n", b"HTTP/1.1 200\r\n", b"HTTP/1.1 200 \r\n",
            b"HTTP/1.1 204 N\r\n",
            b"HTTP/1.1 304 N\r\n", b"HTTP/1.1 100 C\r\n", b"HTTP/1.1 600 X\r\n", b"HTTP/1.1 099 X\r\n",
            b"HTTP/2 200 OK\r\n",
            b"HTTP/1.1 20 OK\r\n", b"HTTP/1.1 2000\r\n", b"HTTP/1.1  200 OK\r\n",
            b"HTTP/1.1 200 \xc3\xa9\r\n", b"HTTP/1.1 200OK\r\n",
            b"HTTP/1.1 599 a\tb\r\n", b"http/1.1 200 OK\r\n", b"\r\n",
        ]
    ),
    st.builds(lambda t: b"HTTP/1.1 200 " + t + b"\r\n", st.binary(max_size=6)),
)  # fmt: skip


GOOD_VALUES: dict[bytes, list[bytes]] = {
    b"Content-Length": [b"0", b"5", b"005", b"123456789012345678"],
    b"Transfer-Encoding": [b"chunked", b"CHUNKED"],
    b"Connection": [b"close", b"keep-alive", b"X-A, close", b"x-a,,accept , Upgrade", b"keep-alive, Close", b""],
    b"Expect": [b"100-continue", b"100-Continue"],
    b"X-Request-Id": [b"id", b"i d", b"", b"x" * 200, b"x" * 201],
    b"Content-Encoding": [b"identity", b"IDENTITY"],
}
GOOD_FIELD = st.sampled_from(
    [b"Content-Length", b"Transfer-Encoding", b"Connection", b"Expect", b"X-Request-Id", b"Authorization",
    b"Content-Type",
     b"X-Forwarded-For", b"X-A", b"accept", b"TE", b"Upgrade", b"Keep-Alive", b"Retry-After", b"Proxy-Authenticate",
     b"X-PRIORITY", b"x-queue", b"X-Deadline-Ttft-Ms", b"x-deadline-ms", b"X-Deadline-Tt", b"X-VLLM-priority",
     b"X-Data-Parallel-Rank", b"Content-Encoding", b"x_unknown"]
).flatmap(lambda name: st.sampled_from(GOOD_VALUES.get(name, [b"a", b"", b"b c\t d", b"\xe9"])).map(
    lambda value: name + b": " + value + b"\r\n"
))  # fmt: skip
GOOD_FIELDS = st.lists(GOOD_FIELD, max_size=6, unique_by=lambda line: line[:14].lower()).map(b"".join)


@st.composite
def damaged(draw: st.DrawFn, whole: st.SearchStrategy[bytes]) -> bytes:
    """Bytes with a few of them changed, removed, doubled or added."""
    data = bytearray(draw(whole))
    for _ in range(draw(st.sampled_from([0, 0, 0, 1, 1, 2, 3]))):
        if not data:
            break
        at = draw(st.integers(0, len(data) - 1))
        what = draw(st.integers(0, 3))
        odd = draw(st.sampled_from(b"\0\t\n\r \x0b:;,/0aZ\x7f\x80\xff"))
        if what == 0:
            data[at] = odd
        elif what == 1:
            del data[at]
        elif what == 2:
            data.insert(at, odd)
        else:
            data.insert(at, data[at])
    return bytes(data)


def a_head(
    good: list[bytes], line: st.SearchStrategy[bytes], host: st.SearchStrategy[bytes]
) -> st.SearchStrategy[bytes]:
    """Heads. About half of them are well-formed before they are damaged."""
    well_formed = st.builds(lambda a, b, c: a + b + c, st.sampled_from(good), host, GOOD_FIELDS)
    wild = st.builds(lambda a, b, c: a + b + c, st.one_of(line, st.sampled_from(good)), host, FIELDS)
    whole = st.one_of(well_formed, damaged(well_formed), well_formed, damaged(wild))
    return whole.map(lambda data: data + b"\r\n")


REQUESTS = a_head(
    [b"GET / HTTP/1.1\r\n", b"POST /v1/x?a=%20 HTTP/1.1\r\n", b"PUT * HTTP/1.0\r\n"],
    REQUEST_LINE,
    st.sampled_from([b"Host: a\r\n"] * 6 + [b""]),
)
RESPONSES = a_head([b"HTTP/1.1 200 OK\r\n", b"HTTP/1.0 404\r\n", b"HTTP/1.1 204 \r\n"], STATUS_LINE, st.just(b""))


def first_blank_line(data: bytes) -> int:
    return data.find(b"\r\n\r\n")


@settings(max_examples=1500)
@given(REQUESTS, st.sampled_from([0, 1, 3, 100]), st.binary(max_size=5))
@example(b"GET / HTTP/1.1\r\n\r\n", 100, b"")
@example(b"GET / HTTP/1.0\r\n\r\n", 0, b"")
@example(b"\r\n\r\n", 0, b"")
def test_request_heads_are_read_as_the_reference_reads_them(head: bytes, max_fields: int, after: bytes) -> None:
    data = head + after
    end = first_blank_line(data)
    assume(end >= 0 and readable(head))
    kernel = _kernel.read_request_head(data, end, max_fields)
    reference = reference_http.read_request_head(data, end, max_fields)
    if isinstance(kernel, int) or isinstance(reference, int):
        assert kernel == reference
        return
    for name in REQUEST_VALUES:
        assert getattr(kernel, name) == getattr(reference, name), name
    for field, _ in [*reference.fields, (b"x-none", b""), (b"HOST", b"")]:
        assert kernel.get(field) == reference.get(field)


@settings(max_examples=1000)
@given(RESPONSES, st.binary(max_size=5))
@example(b"HTTP/1.1 200\r\n\r\n", b"")
@example(b"HTTP/1.1 200 OK\r\nConnection: keep-alive, close\r\nContent-Length: 1\r\n\r\n", b"")
def test_response_heads_are_read_as_the_reference_reads_them(head: bytes, after: bytes) -> None:
    data = head + after
    end = first_blank_line(data)
    assume(end >= 0)
    kernel = _kernel.read_response_head(data, end)
    reference = reference_http.read_response_head(data, end)
    if isinstance(kernel, int) or isinstance(reference, int):
        assert kernel == reference
        return
    for name in RESPONSE_VALUES:
        assert getattr(kernel, name) == getattr(reference, name), name


@given(st.binary(max_size=60))
@example(b"HTTP/1.0 100\r\n\r\n")
def test_arbitrary_bytes_are_read_as_the_reference_reads_them(noise: bytes) -> None:
    data = noise + b"\r\n\r\n"
    end = first_blank_line(data)
    for kernel, reference in (
        (_kernel.read_request_head(data, end, 10), reference_http.read_request_head(data, end, 10)),
        (_kernel.read_response_head(data, end), reference_http.read_response_head(data, end)),
    ):
        if isinstance(kernel, int) or isinstance(reference, int):
            assert kernel == reference
        else:  # random bytes that happen to be a head
            assert kernel.forwarded_fields == reference.forwarded_fields


def test_an_end_outside_of_the_data_is_an_error_not_a_crash() -> None:
    for end in (-1, 1, 10**9, -(10**9)):
        with pytest.raises(ValueError):
            _kernel.read_request_head(b"GET ", end, 1)
        with pytest.raises(ValueError):
            _kernel.read_response_head(b"HTTP", end)
    with pytest.raises(TypeError):
        _kernel.read_request_head("GET / HTTP/1.1\r\n\r\n", 14, 1)  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        _kernel.ChunkReader().feed(b"0\r\n\r\n", ())  # type: ignore[arg-type]


# h11.


def read_with_h11(data: bytes) -> h11.Request | None:
    connection = h11.Connection(h11.SERVER, max_incomplete_event_size=1 << 20)
    connection.receive_data(data)
    try:
        found = connection.next_event()
    except h11.RemoteProtocolError:
        return None
    return found if isinstance(found, h11.Request) else None


STRICTER: dict[int, bytes] = {
    _kernel.MALFORMED_START_LINE: rb"^[^\r]*\n|^[^\r]*\r[^\n]|^[^\r\n]*[^ !-~\r\n]",  # line ends, bytes beyond ASCII
    _kernel.BAD_TARGET: rb"^\S+ ([^/]|\S*#)",  # a path, and nothing else
    _kernel.UNSUPPORTED_VERSION: rb"HTTP/(?!1\.[01]\r\n)",
    _kernel.MALFORMED_FIELD: rb"(?<!\r)\n|\r(?!\n)|\r\n[ \t]|[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]",  # folds, controls
    _kernel.TOO_MANY_FIELDS: rb"",
    _kernel.BAD_CONTENT_LENGTH: rb"(?i)content-length",  # equal lengths, in one field or two; 19 and 20 digits
    _kernel.REPEATED_TRANSFER_ENCODING: rb"(?i)transfer-encoding",
    _kernel.UNSUPPORTED_TRANSFER_ENCODING: rb"(?i)transfer-encoding",
    _kernel.UNSUPPORTED_EXPECTATION: rb"(?i)expect",
    _kernel.BAD_HOST: rb"",
    _kernel.LENGTH_AND_TRANSFER_ENCODING: rb"(?i)content-length",
    _kernel.TRANSFER_ENCODING_IN_HTTP_1_0: rb"HTTP/1\.0",
    _kernel.TOO_MANY_CONNECTION_OPTIONS: rb"(?i)connection",
    _kernel.REPEATED_FIELD: rb"(?is)\n(content-type|authorization|x-api-key|x-vllm-priority):.*\n\1:",
    _kernel.FIELD_NAMED_IN_CONNECTION: rb"(?i)connection:",
    _kernel.AMBIGUOUS_FIELD_NAME: rb"_",
    _kernel.UNSUPPORTED_CONTENT_ENCODING: rb"(?i)content-encoding",
}
"""Every reason to reject what h11 accepts, with a pattern that the head must then match."""


@settings(max_examples=1500)
@given(REQUESTS)
def test_what_the_kernel_accepts_h11_accepts_and_reads_the_same(head: bytes) -> None:
    end = first_blank_line(head)
    assume(end >= 0 and readable(head))
    head = head[: end + 4]
    kernel = _kernel.read_request_head(head, end, 100)
    by_h11 = read_with_h11(head)
    if isinstance(kernel, int):
        if by_h11 is not None:
            assert re.search(STRICTER[kernel], head), (kernel, head)
        return
    assert by_h11 is not None, head
    assert (kernel.method, kernel.target) == (by_h11.method, by_h11.target)
    assert kernel.minor_version == int(by_h11.http_version[-1:])
    fields = [(name, value) for name, value in by_h11.headers]
    lengths = [value for name, value in fields if name == b"content-length"]
    codings = [value for name, value in fields if name == b"transfer-encoding"]
    assert kernel.chunked == bool(codings)
    assert kernel.length == (-1 if codings else int(lengths[0]) if lengths else 0)
    for name, value in fields:
        if name not in (b"transfer-encoding",):
            assert kernel.get(name) == next(v for n, v in fields if n == name), (name, value)


# Chunk frames.

SIZE_LINE = st.one_of(
    st.integers(0, 40).map(lambda n: b"%x\r\n" % n),
    st.sampled_from(
        [b"5;a=b\r\n", b"005\r\n", b"A \t;x\r\n", b"0\r\n", b"000000000000005\r\n", b"0000000000000005\r\n", b"5 \r\n"]
    ),
)


@st.composite
def frames(draw: st.DrawFn) -> bytes:
    data = b""
    for _ in range(draw(st.integers(0, 5))):
        payload = draw(st.binary(max_size=40))
        extension = draw(st.sampled_from([b"", b"", b"", b";a", b' ; b="c"', b";" + b"e" * 4090, b";" + b"e" * 4100]))
        if payload:
            data += b"%x%b\r\n%b\r\n" % (len(payload), extension, payload)
    trailers = draw(
        st.sampled_from(
            [
                b"",
                b"",
                b"A: b\r\n",
                b"A:\r\nB: c\r\n",
                b"A: b\r\n" * 64,
                b"A: b\r\n" * 65,
                b"A: " + b"v" * 4100 + b"\r\n",
            ]
        )
    )
    data += draw(st.sampled_from([b"0\r\n", b"000\r\n", b"0;x\r\n", b""])) + trailers + b"\r\n"
    return data + draw(st.binary(max_size=4))


@settings(max_examples=1500)
@given(st.one_of(damaged(frames()), st.lists(SIZE_LINE).map(b"".join)), st.lists(st.integers(0, 60), max_size=30))
def test_chunks_are_read_as_the_reference_reads_them_in_any_pieces(data: bytes, cuts: list[int]) -> None:
    kernel, reference = _kernel.ChunkReader(), reference_http.ChunkReader()
    kernel_pieces: list[bytes] = []
    reference_pieces: list[bytes] = []
    at = 0
    for cut in [*cuts, len(data)]:
        piece = data[at : at + cut]
        at += len(piece)
        result = feed_result(kernel, piece, kernel_pieces)
        assert result == feed_result(reference, piece, reference_pieces)
        assert b"".join(kernel_pieces) == b"".join(reference_pieces)
        assert kernel.padding_to_chunk_end() == reference.padding_to_chunk_end()
        if result != -1:
            return


def feed_result(
    frames: _kernel.ChunkReader | reference_http.ChunkReader, data: bytes, pieces: list[bytes]
) -> int | str:
    try:
        return frames.feed(data, pieces)
    except (_kernel.BadChunk, reference_http.BadChunk):
        return "bad"


@given(
    st.lists(st.binary(min_size=1, max_size=50), max_size=6),
    st.lists(st.integers(1, 30), max_size=20),
    st.binary(max_size=9),
)
def test_the_payload_and_the_end_are_found_however_the_bytes_are_cut(
    chunks: list[bytes], cuts: list[int], after: bytes
) -> None:
    message = b"".join(b"%X\r\n%b\r\n" % (len(each), each) for each in chunks) + b"0\r\n\r\n"
    data = message + after
    reader = _kernel.ChunkReader()
    pieces: list[bytes] = []
    at = 0
    for cut in [*cuts, len(data)]:
        end = reader.feed(data[at : at + cut], pieces)
        if end >= 0:
            assert at + end == len(message)
            break
        at += cut
    assert b"".join(pieces) == b"".join(chunks)


def test_an_enormous_chunk_is_not_completed() -> None:
    reader = _kernel.ChunkReader()
    assert reader.feed(b"7fffffffffffff\r\nabc") == -1
    assert reader.padding_to_chunk_end() is None


@pytest.mark.parametrize("so_far", [b"0\r", b"0\r\n", b"0;a", b"0 ", b"0\r\nA: b", b"0\r\n\r\n"])
def test_no_chunk_can_follow_once_the_last_chunk_has_started(so_far: bytes) -> None:
    reader = _kernel.ChunkReader()
    reader.feed(so_far)
    assert reader.padding_to_chunk_end() is None


@given(st.binary(min_size=1, max_size=50), st.sampled_from([b"", b";a=b", b" ; x", b"\t;"]), st.booleans(), st.data())
def test_the_rest_of_a_chunk_completes_it_wherever_it_was_cut(
    payload: bytes, extension: bytes, zeros: bool, data: st.DataObject
) -> None:
    frame = b"%b%x%b\r\n%b\r\n" % (b"00" if zeros else b"", len(payload), extension, payload)
    cut = data.draw(st.integers(0, len(frame)))
    reader = _kernel.ChunkReader()
    assert reader.feed(frame[:cut]) == -1
    rest = reader.padding_to_chunk_end()
    assert rest is not None
    pieces: list[bytes] = []
    assert reader.feed(rest + b"2\r\nok\r\n0\r\n\r\n", pieces) >= 0
    assert pieces[-1] == b"ok"


@pytest.mark.parametrize("zeros", range(1, 16))
@pytest.mark.parametrize("digits", [b"", b"1", b"0000", b"f"])
@pytest.mark.parametrize("blanks", [0, 1, 2, 4079, 4080, 4081, 4090, 4094, 4095, 4096])
def test_the_rest_of_a_chunk_is_well_formed_after_long_sizes(zeros: int, digits: bytes, blanks: int) -> None:
    """A size has at most 15 digits, and a size line at most 4,096 bytes before its end."""
    line = b"0" * zeros + digits + b" " * blanks
    reader, reference = _kernel.ChunkReader(), reference_http.ChunkReader()
    if feed_result(reader, line, []) == "bad":
        return
    assert feed_result(reference, line, []) == -1
    rest = reader.padding_to_chunk_end()
    assert rest == reference.padding_to_chunk_end()
    if rest is not None:
        pieces: list[bytes] = []
        assert reader.feed(rest + b"2\r\nok\r\n0\r\n\r\n", pieces) >= 0
        assert pieces[-1] == b"ok"
    elif not blanks:
        assert zeros + len(digits) == 15 and not int(line, 16), (
            "no digit may follow, and the chunk would be the last one"
        )


# Usage.

USAGE_PIECES = st.one_of(
    st.sampled_from(
        [b'"usage"', b'"usage', b'usage"', b"\r\n", b"\r\n1a\r\n", b"\r\n123456789\r\n", b"\r", b"\n", b'\\"', b'"',
         b":", b" ", b"\t\x0b\x0c", b"{", b",", b"}", b"_", b"x", b"-", b"\xe9", b"0", b"7", b"123456789",
         b"1234567890"]
    ),
    st.sampled_from(
        [b"prompt_tokens", b"input_tokens", b"cached_tokens", b"cache_read_input_tokens",
         b"cache_creation_input_tokens", b"completion_tokens", b"output_tokens", b"total_tokens"]
    ).flatmap(lambda name: st.sampled_from([b'"%b"' % name, b'"%b": 12' % name, b'"%b":0,' % name, b'"%b' % name])),
)  # fmt: skip


@given(st.lists(USAGE_PIECES, max_size=30).map(b"".join), st.sampled_from([b"", b'{"usage":']))
@example(b'"prompt_tokens":123456789', b'{"usage":')
@example(b'"prompt_\r\n5\r\ntokens":1\r\n5\r\n5\r\n', b'{"usage":')
def test_usage_is_read_as_the_reference_reads_it(data: bytes, before: bytes) -> None:
    assert _kernel.read_usage(before + data) == reference_usage.read_usage(before + data)


@pytest.mark.parametrize("after", range(16_330, 16_390))
def test_usage_far_from_the_end_is_not_found(after: int) -> None:
    data = b'{"usage": {"prompt_tokens": 12, "completion_tokens": 34}' + b"\r\n" * (after % 2) + b"x" * after
    assert _kernel.read_usage(data) == reference_usage.read_usage(data)


def test_usage_is_read_from_bytes_only() -> None:
    with pytest.raises(TypeError):
        _kernel.read_usage("usage")  # type: ignore[arg-type]

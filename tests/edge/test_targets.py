"""The path that the router judges is the path that the engine's server sees."""

from __future__ import annotations

import httptools
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.raw_client import CHAT, post
from support.running_router import router
from support.scripted_engine import engines
from uvicorn_scopes import scopes

from warmroute._kernel import BAD_TARGET, read_request_head
from warmroute.edge.arrival import FORWARDED, NEVER_FORWARDED, check_path, hash_key
from warmroute.edge.errors import HttpError

HEAD = b"POST %b HTTP/1.1\r\nHost: a\r\nContent-Length: 0\r\n\r\n"
PIECES = st.one_of(
    st.sampled_from(sorted(FORWARDED | NEVER_FORWARDED)),
    st.sampled_from(
        [
            b"/", b"//", b"v1", b"/v1/", b"chat", b"completions", b".", b"..", b"/./", b"/../", b"?", b"#", b";", b"&",
            b"=", b"%", b"%2f", b"%2F", b"%2e", b"%23", b"%3f", b"%00", b"%", b"\\", b":", b"@", b"*", b"http://a",
            b"a:80", b"~", b"|", b"^", b'"', b"<", b"{", b"`", b"'", b"\x7f", b"\x80", b"\xff", b"\xc3\xa9",
            b"\t", b"\0", b"V1", b"/v1/load_lora_adapter", b"/v1/models", b"+", b",", b"!", b"$",
        ]
    ),
    st.binary(max_size=3),
)  # fmt: skip
TARGETS = st.one_of(
    st.lists(PIECES, min_size=1, max_size=6).map(b"".join),
    st.builds(
        lambda path, at, piece: path[:at] + piece + path[at:],
        st.sampled_from(sorted(FORWARDED | NEVER_FORWARDED)),
        st.integers(0, 25),
        PIECES,
    ),
)


def judged_path(request: bytes) -> bytes | None:
    """Return the path of a request that the router would forward; None if it answers the request itself."""
    end = request.find(b"\r\n\r\n")
    head = read_request_head(request, end, 100)
    if isinstance(head, int):
        return None
    path = head.target.partition(b"?")[0]
    try:
        check_path(head.method, path)
    except HttpError:
        return None
    return path


@settings(max_examples=3000)
@given(TARGETS)
@example(b"/v1/load_lora_adapter#x")
@example(b"/v1/chat/completions#")
@example(b"/v1/chat/completions?a#b")
@example(b"/v1/x;y")
@example(b"/v1/%6coad_lora_adapter")
@example(b"//v1/load_lora_adapter")
@example(b"http://a/v1/load_lora_adapter")
def test_uvicorn_sees_the_path_that_the_router_judged(target: bytes) -> None:
    request = HEAD % target
    path = judged_path(request)
    if path is None:
        return
    assert path not in NEVER_FORWARDED
    for name, scope in scopes(request).items():
        assert scope is not None, (name, target)
        assert (scope["path"].encode(), scope["raw_path"]) == (path, path), name
        assert scope["query_string"] == target.partition(b"?")[2]
        assert scope["method"] == "POST"
    assert httptools.parse_url(target).path == path


@given(TARGETS)
def test_a_target_with_a_fragment_is_rejected(target: bytes) -> None:
    for one in (b"/" + target + b"#", b"/v1/models#" + target, b"#", b"*#"):
        request = HEAD % one
        result = read_request_head(request, request.find(b"\r\n\r\n"), 100)
        assert isinstance(result, int)
    request = HEAD % b"/#"
    assert read_request_head(request, len(request) - 4, 100) == BAD_TARGET


def test_the_paths_of_known_apis_are_forwarded() -> None:
    for path in (*FORWARDED, b"/v1/audio/translations", b"/v1/images/generations", b"/v1/responses/resp_1/cancel",
                 b"/v1/chat/completions/render", b"/v1/x.y", b"/v1/...", b"/v1/@a:b"):  # fmt: skip
        assert judged_path(HEAD % path) == path


@pytest.mark.parametrize(
    "target",
    [
        b"/v1/load_lora_adapter#x", b"/v1/load_lora_adapter#", b"/v1/load_lora_adapter?#",
        b"/v1/models/../load_lora_adapter",
        b"/v1/./load_lora_adapter", b"/v1//load_lora_adapter", b"//v1/load_lora_adapter", b"/v1/load_lora_adapter/",
        b"/v1/load_lora_adapter;x", b"/v1/load%5flora_adapter", b"/v1\\load_lora_adapter", b"/v1/load_lora_adapter%23",
        b"http://a/v1/load_lora_adapter", b"*", b"/v1/load_lora_adapter\xe9", b"/v1/load_lora_adapter\x7f",
    ],
)  # fmt: skip
async def test_no_spelling_of_an_administrative_path_reaches_an_engine(target: bytes) -> None:
    async with engines() as [engine], router(engine) as r:
        request = post().replace(b"/v1/chat/completions", target, 1)
        assert (await r.request(request)).status in (400, 404, 405)
        assert engine.seen == []


@pytest.mark.parametrize("target", ["/v1/chat/completions#", "/v1/chat/completions?#", "/v1/chat/completions#?a"])
async def test_a_fragment_does_not_evade_a_token_limit(target: str) -> None:
    keys = [{"sha256": hash_key("k"), "tenant": "t", "tokens_per_min": 1}]
    async with engines() as [engine], router(engine, keys=keys) as r:
        headers = ["Authorization: Bearer k"]
        response = await r.request(post(CHAT, target, headers))
        assert response.status == 400 and response.error["code"] == "bad_request"
        assert engine.seen == []

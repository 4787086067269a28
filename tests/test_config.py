"""The configuration: every error names the key, and the nearest known key if it is unknown."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from warmroute import config as configuration
from warmroute.config import Config, ConfigError, NodeConfig, describe_changes, from_table, load, node_name
from warmroute.config.file import MAX_CHANGES, MAX_CHARACTERS
from warmroute.config.routing import RouteConfig, Routes, route_problems
from warmroute.config.section import Section, keys_of, section_of

HASH = hashlib.sha256(b"k").hexdigest()


def error_of(table: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as error:
        from_table(table)
    return str(error.value)


def test_an_empty_table_is_the_default_configuration() -> None:
    assert from_table({}) == Config()


def test_every_table_and_key_has_a_description() -> None:
    for name, section, _repeatable in configuration.tables():
        assert section.__doc__, name
        for key in configuration.describe_keys(section):
            assert key.description.endswith("."), f"{name}.{key.name}"
            assert key.type_name and "<" not in key.type_name


def test_every_default_is_valid() -> None:
    assert from_table(_keys_only(msgspec.to_builtins(Config()), Config)) == Config()


def _keys_only(table: dict[str, Any], section: type[Section]) -> dict[str, Any]:
    """The values that the file can set."""
    return {
        key: _keys_only(table[key], inner)
        if (inner := section_of(kind)) and isinstance(table[key], dict)
        else table[key]
        for key, kind in keys_of(section).items()
    }


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"lisen": {}}, "unknown key lisen; did you mean listen?"),
        ({"listen": {"prt": 1}}, "unknown key listen.prt; did you mean listen.port?"),
        ({"limits": {"body_byte": 1}}, "unknown key limits.body_byte; did you mean limits.body_bytes?"),
        ({"nodes": [{"url": "http://a", "modls": []}]}, "unknown key nodes.modls; did you mean nodes.models?"),
        ({"keys": [{"sha25": HASH, "tenant": "t"}]}, "unknown key keys.sha25; did you mean keys.sha256?"),
        ({"port": 1}, "unknown key port; did you mean listen.port or picker.port or admin.port?"),
        ({"max_wait_s": 0.5}, "unknown key max_wait_s; did you mean admission.max_wait_s?"),
        ({"url": "http://a"}, "unknown key url; did you mean cluster.url?"),
        ({"tenant": "t"}, "unknown key tenant; did you mean keys.tenant or routes.tenant?"),
        ({"zzz": 1}, f"unknown key zzz; known keys: {', '.join(sorted(keys_of(Config)))}"),
        ({"log": {"qqqq": 1}}, "unknown key log.qqqq; known keys: format, level, requests"),
    ],
)
def test_an_unknown_key_is_rejected_with_the_nearest_known_key(table: dict[str, Any], message: str) -> None:
    assert error_of(table) == message


def test_only_an_experiment_sets_values_that_are_not_in_the_file() -> None:
    table = {"price": {"room": False}, "routing": {"load_factor": 2.0}}
    assert error_of(table).startswith("unknown key price.room; ")
    config = from_table(table, experiment=True)
    assert not config.price.room and config.routing.load_factor == 2.0
    with pytest.raises(ConfigError, match=r"routing\.load_factor: expected a number >= 1"):
        from_table({"routing": {"load_factor": 0.5}}, experiment=True)


@pytest.mark.parametrize(
    ("table", "key", "words"),
    [
        ({"listen": {"port": "80"}}, "listen.port: ", "expected a whole number, got text"),
        ({"listen": {"port": 70000}}, "listen.port: ", "65535"),
        ({"listen": {"port": -1}}, "listen.port: ", ">= 0"),
        ({"listen": 5}, "listen: ", "expected a table, got a whole number"),
        ({"upstream": {"first_byte_timeout_s": 0}}, "upstream.first_byte_timeout_s: ", "> 0"),
        ({"limits": {"body_bytes": 0}}, "limits.body_bytes: ", ">= 1"),
        ({"limits": {"body_bytes": 1.5}}, "limits.body_bytes: ", "expected a whole number, got a number"),
        ({"keys": [{"sha256": HASH, "tenant": "t", "requests_per_min": -1}]}, "keys[0].requests_per_min: ", ">= 0"),
        ({"shutdown": {"delay_s": -1}}, "shutdown.delay_s: ", ">= 0"),
        (
            {"routing": {"policy": "best"}},
            "routing.policy: ",
            "unknown value 'best'; possible values: round_robin, random",
        ),
        ({"log": {"level": "loud"}}, "log.level: ", "unknown value 'loud'"),
        (
            {"admin": {"token_sha256": "secret"}},
            "admin.token_sha256: ",
            "expected a SHA-256 hash in hex; `warmroute hash-key`",
        ),
        (
            {"keys": [{"sha256": "secret", "tenant": "t"}]},
            "keys[0].sha256: ",
            "expected a SHA-256 hash in hex; `warmroute hash-key`",
        ),
        ({"keys": [{"sha256": HASH, "tenant": ""}]}, "keys[0].tenant: ", "length >= 1"),
        ({"keys": [{"sha256": HASH}]}, "keys[0]: ", "missing required field `tenant`"),
        ({"nodes": [{}]}, "nodes[0]: ", "missing required field `url`"),
        ({"nodes": {"url": "http://a"}}, "nodes: ", "write [[nodes]]: this table is repeatable"),
        (
            {"nodes": [{"url": "http://a", "role": "cook"}]},
            "nodes[0].role: ",
            "unknown value 'cook'; possible values: mixed",
        ),
        (
            {"routing": {"policy": "pricee"}},
            "routing.policy: ",
            "did you mean price? Possible values: round_robin, ",
        ),
        ({"routes": [{"name": "r", "policy": "pricee"}]}, "routes[0].policy: ", "did you mean price?"),
        ({"provisioners": [{"kind": "k8s"}]}, "provisioners[0].kind: ", "possible values: process, kubernetes, ec2, "),
        ({"provisioners": [{"kind": "Kubernets"}]}, "provisioners[0].kind: ", "did you mean kubernetes?"),
        ({"scaling": {"hours": [{"days": ["tues"]}]}}, "scaling.hours[0].days[0]: ", "did you mean tue?"),
        (
            {"routes": [{"name": "r", "allow_engine_fields": 1}]},
            "routes[0].allow_engine_fields: ",
            "expected true or false, got a whole number",
        ),
        ({"nodes": [[]]}, "nodes[0]: ", "expected a table, got a list"),
        ({"listen": [{"port": 1}]}, "listen: ", "write [listen]: this table is not repeatable"),
        ({"scaling": {"islands": {"island": "x"}}}, "scaling.islands: ", "write [[scaling.islands]]: "),
        ({"scaling": {"hours": [{"start": "24:30"}]}}, "scaling.hours[0].start: ", "invalid format. Start, `HH:MM`"),
    ],
)
def test_the_error_for_an_invalid_value_names_its_key(table: dict[str, Any], key: str, words: str) -> None:
    message = error_of(table)
    assert message.startswith(key) and words in message and "regex" not in message


def test_an_error_does_not_contain_an_api_key() -> None:
    assert "hunter2" not in error_of({"keys": [{"sha256": "hunter2", "tenant": "t"}]})


def test_a_day_ends_at_24_00() -> None:
    from_table({"scaling": {"hours": [{"start": "22:00", "end": "24:00", "min_nodes": 2}]}})


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ({"listen": {"tls_cert": "x"}}, "listen.tls_cert and listen.tls_key must be set together"),
        ({"listen": {"tls_key": "x"}}, "listen.tls_cert and listen.tls_key must be set together"),
        ({"admin": {"host": "0.0.0.0"}}, "set admin.token_sha256"),
        ({"nodes": [{"url": "http://a:1"}, {"url": "http://a:1/"}]}, "two nodes have the name 'a:1'"),
        ({"nodes": [{"url": "http://a", "name": "x"}, {"url": "http://b", "name": "x"}]}, "(http://a and http://b)"),
        ({"keys": [{"sha256": HASH, "tenant": "a"}, {"sha256": HASH, "tenant": "b"}]}, "tenant 'b' is defined twice"),
        ({"models": [{"name": "m"}, {"name": "m"}]}, "model 'm' is defined twice"),
        ({"routes": [{"name": "r"}, {"name": "r"}]}, "route 'r' is defined twice"),
        ({"islands": [{"name": "i"}, {"name": "i"}]}, "islands: 'i' is defined twice"),
        ({"listen": {"port": 9000}, "admin": {"port": 9000}}, "listen.port and admin.port are both 9000"),
        (
            {"listen": {"host": "::", "port": 9000}, "admin": {"port": 9000}},
            "listen.port and admin.port are both 9000: give each listener its own port",
        ),
        (
            {"scaling": {"enabled": True, "keda_port": 8081}},
            "admin.port and scaling.keda_port are both 8081",
        ),
        (
            {"nodes": [{"url": "http://a:80", "name": "x"}, {"url": "http://A", "name": "y"}]},
            "nodes: 'x' and 'y' are the same engine (http://A)",
        ),
        (
            {"nodes": [{"url": "http://localhost:1", "name": "x"}, {"url": "http://127.0.0.1:1/", "name": "y"}]},
            "nodes: 'x' and 'y' are the same engine",
        ),
        (
            {"nodes": [{"url": "http://[::1]:1", "name": "x"}, {"url": "http://[0:0::1]:1", "name": "y"}]},
            "nodes: 'x' and 'y' are the same engine",
        ),
    ],
)
def test_values_that_contradict_each_other_are_rejected(table: dict[str, Any], words: str) -> None:
    assert words in error_of(table)


def test_a_reachable_admin_listener_needs_a_token() -> None:
    from_table({"admin": {"host": "0.0.0.0", "token_sha256": HASH}})
    from_table({"admin": {"host": "0.0.0.0", "enabled": False}}, experiment=True)
    for host in ("127.0.0.1", "127.1.2.3", "::1", "localhost"):
        from_table({"admin": {"host": host}})


@pytest.mark.parametrize(
    "url",
    [
        "", "a:1", "ftp://a", "http://", "http:///", "http://a/v1", "http://u:p@a", "http://a?x", "//a",
        "http://a:99999", "http://a:port", "http://[::1", "http://a:-1", "http://:80",
    ],
)  # fmt: skip
def test_an_invalid_node_url_is_rejected(url: str) -> None:
    assert error_of({"nodes": [{"url": url}]}).startswith("nodes.url: ")


def test_a_node_without_a_name_is_named_by_its_address() -> None:
    assert node_name(NodeConfig(url="http://a:1/")) == "a:1"
    assert node_name(NodeConfig(url="https://[::1]:8")) == "[::1]:8"
    assert node_name(NodeConfig(url="http://a:1", name="gpu-1")) == "gpu-1"


def test_errors_name_the_file(tmp_path: Path) -> None:
    path = tmp_path / "w.toml"
    for content, words in (
        (b"", "the file is empty"),
        (b"[listen\n", "invalid TOML"),
        (b"\xff\xfe", "not UTF-8 text"),
        (b"[listen]\nprt = 1\n", "unknown key listen.prt; did you mean listen.port?"),
    ):
        path.write_bytes(content)
        with pytest.raises(ConfigError) as error:
            load(path)
        assert str(error.value).startswith(f"{path}: ") and words in str(error.value)
    for missing in (tmp_path / "none.toml", tmp_path):
        with pytest.raises(ConfigError, match="cannot read the file"):
            load(missing)


def test_load_reads_a_file(tmp_path: Path) -> None:
    path = tmp_path / "w.toml"
    path.write_text(
        f"""
        [listen]
        port = 9000
        [upstream]
        first_byte_timeout_s = 5  # whole numbers are numbers
        [[nodes]]
        url = "http://10.0.0.1:8000"
        models = ["a", "b"]
        role = "decode"
        [[keys]]
        sha256 = "{HASH}"
        tenant = "acme"
        """
    )
    config = load(path)
    assert config.listen.port == 9000 and config.upstream.first_byte_timeout_s == 5.0
    assert config.nodes[0].models == ("a", "b") and config.nodes[0].role == "decode"
    assert config.keys[0].tenant == "acme"


@pytest.mark.parametrize(
    "tables",
    [
        {"listen": {"port": 0}, "admin": {"port": 0}},
        {"listen": {"port": 9000, "unix_socket": "/tmp/s"}, "admin": {"port": 9000}},
        {"listen": {"port": 9000}, "admin": {"port": 9000, "enabled": False}},
        {"listen": {"host": "127.0.0.2", "port": 9000}, "admin": {"host": "127.0.0.1", "port": 9000}},
        {"nodes": [{"url": "http://a:1"}, {"url": "http://a:2"}, {"url": "http://b:1"}]},
    ],
)
def test_listeners_and_nodes_with_their_own_addresses_are_accepted(tables: dict[str, Any]) -> None:
    from_table(tables, experiment=True)


def problems_of(table: dict[str, Any]) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as error:
        from_table(table)
    return error.value.problems


def test_all_problems_are_reported_at_once() -> None:
    table = {
        "lisen": {},
        "listen": {"port": "80", "prt": 1},
        "limits": {"body_bytes": 1.5},
        "upstream": {"max_attempts": -1, "first_byte_timeout_s": float("inf")},
        "log": {"level": "loud"},
        "nodes": [{"url": "http://a"}, {}, {"url": "ftp://x"}, {"url": "http://a", "rol": "mixed"}],
        "keys": [{"sha256": "x"}, 5],
        "scaling": {"min_nodes": 9, "max_nodes": 2, "hours": [{"start": "24:30", "end": "01:00", "min_nodes": 3}]},
        "models": [{"name": "m"}, {"name": "m"}],
    }
    assert problems_of(table) == (
        "unknown key lisen; did you mean listen?",
        "listen.port: expected a whole number, got text",
        "unknown key listen.prt; did you mean listen.port?",
        "limits.body_bytes: expected a whole number, got a number",
        "upstream.max_attempts: expected a whole number >= 0",
        "upstream.first_byte_timeout_s: expected a finite number",
        "log.level: unknown value 'loud'; possible values: debug, info, warning, error",
        "nodes[1]: missing required field `url`",
        "unknown key nodes.rol; did you mean nodes.role?",
        "keys[0].sha256: expected a SHA-256 hash in hex; `warmroute hash-key` prints it",
        "keys[0]: missing required field `tenant`",
        "keys[1]: expected a table, got a whole number",
        "scaling.hours[0].start: invalid format. Start, `HH:MM` in UTC.",
        "scaling.min_nodes (9) is above scaling.max_nodes (2)",
        "nodes.url: 'ftp://x' does not look like http://host:port",
        "models: model 'm' is defined twice",
    )


def test_a_value_that_is_left_out_causes_no_further_problem() -> None:
    table = {"listen": {"tls_cert": 5, "tls_key": "k.pem"}}
    assert problems_of(table) == ("listen.tls_cert: expected text, got a whole number",)


def test_every_problem_names_the_file(tmp_path: Path) -> None:
    path = tmp_path / "w.toml"
    path.write_text("[listen]\nport = -1\nprt = 2\n")
    with pytest.raises(ConfigError) as error:
        load(path)
    assert len(error.value.problems) == 2 and all(one.startswith(f"{path}: ") for one in error.value.problems)


ROUTES: tuple[tuple[dict[str, str], dict[str, str], bool], ...] = (
    ({"model": "qwen*"}, {"model": "qwen3-*"}, True),
    ({"model": "qwen*"}, {"model": "qwen3"}, True),
    ({}, {"model": "m", "tenant": "t", "path": "/v1/*", "header": "x-a=b"}, True),
    ({"model": "*"}, {}, True),
    ({"header": "X-A"}, {"header": "x-a=1"}, True),
    ({"header": "x-a=*"}, {"header": "x-a"}, True),
    ({"header": "x-a=b*"}, {"header": "x-a=bc"}, True),
    ({"tenant": "a*c"}, {"tenant": "a*b*c"}, True),
    ({"model": "qwen3-*"}, {"model": "qwen*"}, False),
    ({"model": "m"}, {}, False),
    ({"model": "m", "tenant": "t"}, {"model": "m"}, False),
    ({"header": "x-a=1"}, {"header": "x-a"}, False),
    ({"header": "x-a"}, {}, False),
    ({"header": "x-a"}, {"header": "x-b"}, False),
    ({"tenant": "a*b"}, {"tenant": "a*"}, False),
    ({"path": "/v1/chat/*"}, {"path": "/v1/completions"}, False),
)


@pytest.mark.parametrize(("first", "second", "hides"), ROUTES)
def test_a_route_that_no_request_reaches_is_rejected(
    first: dict[str, str], second: dict[str, str], hides: bool
) -> None:
    table = {"routes": [{"name": "first", **first}, {"name": "second", **second}]}
    if hides:
        assert problems_of(table) == (
            "routes: no request reaches route 'second', because route 'first' before it matches all of its requests: "
            "put 'second' first, or remove it",
        )
    else:
        from_table(table)


@given(st.text("ab*", max_size=4), st.text("ab*", max_size=4), st.text("ab", max_size=6))
def test_a_rejected_route_never_matches_first(first: str, second: str, model: str) -> None:
    routes = [RouteConfig(name="first", model=first), RouteConfig(name="second", model=second)]
    if list(route_problems(routes)):
        picked = Routes(routes).pick(model, "/v1/x", "", lambda _name: b"")
        assert picked is None or picked.name == "first"


# What a reload changes.


def key(secret: str, tenant: str, **more: Any) -> dict[str, Any]:
    return {"sha256": hashlib.sha256(secret.encode()).hexdigest(), "tenant": tenant, **more}


A, B = "http://a:1", "http://b:1"
CHANGES: list[tuple[dict[str, Any], dict[str, Any], list[str]]] = [
    ({"keys": [key("old", "red")]}, {"keys": [key("new", "red")]}, ["keys red: rotated"]),
    (
        {"keys": [key("old", "red", requests_per_min=5)]},
        {"keys": [key("new", "red", max_priority="low", cache_group="g")]},
        [
            "keys red: rotated", "keys red: max_priority normal -> low", "keys red: requests_per_min 5 -> 0",
            "keys red: cache_group changed",
        ],
    ),
    (
        {"keys": [key("a", "red"), key("b", "red"), key("c", "blue")]},
        {"keys": [key("d", "red"), key("e", "red"), key("c", "green"), key("f", "blue")]},
        ["keys blue: rotated", "keys +green", "keys red: rotated (2 keys)"],
    ),
    (
        {"keys": [key("a", "red"), key("b", "blue")]},
        {"keys": [key("a", "red", tokens_per_min=9), key("c", "red")]},
        ["keys -blue", "keys red: 1 added, 0 removed", "keys red: tokens_per_min 0 -> 9"],
    ),
    (
        {"nodes": [{"url": A}, {"url": B, "name": "b"}]},
        {"nodes": [{"url": "http://b:2", "name": "b", "role": "decode"}, {"url": "http://c:1"}]},
        ["nodes +c:1", "nodes -a:1", "nodes b: url changed", "nodes b: role mixed -> decode"],
    ),
    (
        {"routes": [{"name": "chat", "path": "/v1/chat/completions"}, {"name": "rest", "policy": "random"}]},
        {"routes": [{"name": "rest", "policy": "price", "model": "m"}, {"name": "chat", "path": "/v1/completions"}]},
        [
            "routes rest: model changed", "routes rest: policy random -> price", "routes chat: path changed",
            "routes in another order",
        ],
    ),
    (
        {"models": [{"name": "m"}], "routing": {"policy": "random"}},
        {
            "models": [{"name": "m", "tokenizer": "/srv/t"}, {"name": "n"}],
            "routing": {"policy": "price"}, "limits": {"body_bytes": 100}, "prompt_doctor": {"enabled": False},
        },
        [
            "limits.body_bytes 33554432 -> 100", "prompt_doctor.enabled true -> false",
            "routing.policy random -> price",
            "models +n", "models m: tokenizer changed",
        ],
    ),
    (
        {"cluster": {"url": "redis://u:hunter2@h/0"}},
        {"cluster": {"url": "redis://u:hunter3@h/0"}, "admin": {"token_sha256": "0" * 64}},
        ["admin.token_sha256 changed", "cluster.url changed"],
    ),
    (
        {"scaling": {"islands": [{"island": "aws/a"}], "dry_run": True}},
        {"scaling": {"islands": [{"island": "aws/a", "max_nodes": 3}]}},
        ["scaling.dry_run true -> false", "scaling.islands aws/a: max_nodes 64 -> 3"],
    ),
    ({}, {}, []),
]  # fmt: skip


@pytest.mark.parametrize(("before", "after", "expected"), CHANGES)
def test_what_a_reload_changes_is_said_without_secrets(
    before: dict[str, Any], after: dict[str, Any], expected: list[str]
) -> None:
    assert sorted(describe_changes(from_table(before), from_table(after))) == sorted(expected)


def test_many_and_long_changes_stay_short() -> None:
    nodes = [{"url": f"http://n:{number + 1}", "name": f"{'x' * 150}{number}"} for number in range(100)]
    found = describe_changes(Config(), from_table({"nodes": nodes}))
    assert len(found) == MAX_CHANGES + 1 and found[-1] == "80 more"
    assert all(len(one) <= MAX_CHARACTERS for one in found)


def test_no_text_of_any_table_is_shown() -> None:
    secret = "s3cret"
    for name in keys_of(Config):
        table = getattr(Config(), name)
        if not isinstance(table, Section):
            continue
        for text in (one for one in keys_of(type(table)) if getattr(table, one) == ""):
            after = msgspec.structs.replace(Config(), **{name: msgspec.structs.replace(table, **{text: secret})})
            assert describe_changes(Config(), after) == [f"{name}.{text} changed"]
            assert describe_changes(after, Config()) == [f"{name}.{text} changed"]

"""The configuration: every error is a sentence that names the key, and the nearest one where it is unknown."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import msgspec
import pytest

from warmroute import config as configuration
from warmroute.config import Config, ConfigError, NodeConfig, from_table, load, node_name

HASH = hashlib.sha256(b"k").hexdigest()


def refused(table: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as error:
        from_table(table)
    return str(error.value)


def test_nothing_is_a_configuration() -> None:
    assert from_table({}) == Config()


def test_every_value_has_a_sentence() -> None:
    for name, section, _many in configuration.tables():
        assert section.__doc__, name
        for key, kind, _default, sentence in configuration.described(section):
            assert sentence.endswith("."), f"{name}.{key}"
            assert kind and "<" not in kind


def test_every_default_is_valid_by_its_own_rules() -> None:
    table = msgspec.to_builtins(Config())
    assert from_table(table) == Config()


@pytest.mark.parametrize(
    ("table", "sentence"),
    [
        ({"lisen": {}}, "unknown key lisen; did you mean listen?"),
        ({"listen": {"prt": 1}}, "unknown key listen.prt; did you mean listen.port?"),
        ({"limits": {"body_byte": 1}}, "unknown key limits.body_byte; did you mean limits.body_bytes?"),
        ({"nodes": [{"url": "http://a", "modls": []}]}, "unknown key nodes.modls; did you mean nodes.models?"),
        ({"keys": [{"sha25": HASH, "tenant": "t"}]}, "unknown key keys.sha25; did you mean keys.sha256?"),
        ({"port": 1}, "unknown key port; did you mean listen.port or admin.port?"),
        ({"locality": 0.5}, "unknown key locality; did you mean price.locality?"),
        ({"url": "http://a"}, "unknown key url; did you mean nodes.url or provisioners.url?"),
        (
            {"zzz": 1},
            "unknown key zzz; known here: admin, admission, crossing, health, index, islands, journal, keys, limits, "
            "listen, log, metrics, models, nodes, price, prompts, provisioners, routes, routing, scaling, shutdown, "
            "upstream",
        ),
        ({"log": {"qqqq": 1}}, "unknown key log.qqqq; known here: format, level, requests"),
    ],
)
def test_an_unknown_key_is_refused_with_the_nearest_name(table: dict[str, Any], sentence: str) -> None:
    assert refused(table) == sentence


@pytest.mark.parametrize(
    ("table", "key", "words"),
    [
        ({"listen": {"port": "80"}}, "listen.port: ", "expected a whole number, got text"),
        ({"listen": {"port": 70000}}, "listen.port: ", "65535"),
        ({"listen": {"port": -1}}, "listen.port: ", ">= 0"),
        ({"listen": 5}, "listen: ", "expected a table, got a whole number"),
        ({"limits": {"header_timeout_s": 0}}, "limits.header_timeout_s: ", "> 0"),
        ({"limits": {"connections": 0}}, "limits.connections: ", ">= 1"),
        ({"limits": {"body_bytes": 1.5}}, "limits.body_bytes: ", "expected a whole number, got a number"),
        ({"upstream": {"attempts": 0}}, "upstream.attempts: ", ">= 1"),
        ({"health": {"path": "health"}}, "health.path: ", "does not look right: Path of the active check."),
        ({"health": {"slow_start_s": -1}}, "health.slow_start_s: ", ">= 0"),
        (
            {"routing": {"policy": "best"}},
            "routing.policy: ",
            "'best' is none of its values; there are round_robin, random",
        ),
        ({"routing": {"load_factor": 0.5}}, "routing.load_factor: ", ">= 1"),
        ({"log": {"level": "loud"}}, "log.level: ", "'loud' is none of its values"),
        (
            {"admin": {"token_sha256": "secret"}},
            "admin.token_sha256: ",
            "is not a SHA-256 in hex: `warmroute hash-key`",
        ),
        (
            {"keys": [{"sha256": "secret", "tenant": "t"}]},
            "keys[0].sha256: ",
            "is not a SHA-256 in hex: `warmroute hash-key`",
        ),
        ({"keys": [{"sha256": HASH, "tenant": ""}]}, "keys[0].tenant: ", "length >= 1"),
        ({"keys": [{"sha256": HASH}]}, "keys[0]: ", "missing required field `tenant`"),
        ({"nodes": [{}]}, "nodes[0]: ", "missing required field `url`"),
        ({"nodes": {"url": "http://a"}}, "nodes: ", "write [[nodes]]: it may stand there many times"),
        (
            {"nodes": [{"url": "http://a", "role": "cook"}]},
            "nodes[0].role: ",
            "'cook' is none of its values; there are mixed",
        ),
        ({"routing": {"policy": "pricee"}}, "routing.policy: ", "did you mean price? There are round_robin, "),
        ({"routes": [{"name": "r", "policy": "pricee"}]}, "routes[0].policy: ", "did you mean price?"),
        ({"provisioners": [{"kind": "k8s"}]}, "provisioners[0].kind: ", "there are process, kubernetes, ec2, "),
        ({"provisioners": [{"kind": "Kubernets"}]}, "provisioners[0].kind: ", "did you mean kubernetes?"),
        ({"scaling": {"hours": [{"days": ["tues"]}]}}, "scaling.hours[0].days[0]: ", "did you mean tue?"),
        ({"routes": [{"name": "r", "hold": 1}]}, "routes[0].hold: ", "expected true or false, got a whole number"),
        ({"nodes": [[]]}, "nodes[0]: ", "expected a table, got a list"),
        ({"listen": [{"port": 1}]}, "listen: ", "write [listen]: it stands there once"),
        ({"scaling": {"islands": {"island": "x"}}}, "scaling.islands: ", "write [[scaling.islands]]: "),
        ({"scaling": {"hours": [{"start": "24:30"}]}}, "scaling.hours[0].start: ", "look right: When it begins, `HH:"),
    ],
)
def test_a_wrong_value_is_refused_by_its_key(table: dict[str, Any], key: str, words: str) -> None:
    said = refused(table)
    assert said.startswith(key) and words in said and "regex" not in said


def test_a_key_that_stands_where_its_hash_belongs_is_not_said() -> None:
    assert "hunter2" not in refused({"keys": [{"sha256": "hunter2", "tenant": "t"}]})


def test_a_day_ends_at_24_00() -> None:
    from_table({"scaling": {"hours": [{"start": "22:00", "end": "24:00", "min_nodes": 2}]}})


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ({"listen": {"tls_cert": "x"}}, "listen.tls_cert and listen.tls_key go together"),
        ({"listen": {"tls_key": "x"}}, "listen.tls_cert and listen.tls_key go together"),
        ({"admin": {"host": "0.0.0.0"}}, "set admin.token_sha256"),
        ({"nodes": [{"url": "http://a:1"}, {"url": "http://a:1/"}]}, "two nodes are named 'a:1'"),
        ({"nodes": [{"url": "http://a", "name": "x"}, {"url": "http://b", "name": "x"}]}, "(http://a and http://b)"),
        ({"keys": [{"sha256": HASH, "tenant": "a"}, {"sha256": HASH, "tenant": "b"}]}, "tenant 'b' stands there twice"),
    ],
)
def test_values_that_do_not_fit_together_are_refused(table: dict[str, Any], words: str) -> None:
    assert words in refused(table)


def test_an_open_admin_listener_is_taken_with_a_token_or_switched_off() -> None:
    from_table({"admin": {"host": "0.0.0.0", "token_sha256": HASH}})
    from_table({"admin": {"host": "0.0.0.0", "enabled": False}})
    for host in ("127.0.0.1", "127.1.2.3", "::1", "localhost"):
        from_table({"admin": {"host": host}})


@pytest.mark.parametrize(
    "url", ["", "a:1", "ftp://a", "http://", "http:///", "http://a/v1", "http://u:p@a", "http://a?x", "//a"]
)
def test_a_url_that_is_none_is_refused(url: str) -> None:
    assert refused({"nodes": [{"url": url}]}).startswith("nodes.url: ")


@pytest.mark.parametrize("url", ["http://a:99999", "http://a:port", "http://[::1", "http://a:-1", "http://:80"])
def test_a_url_with_an_impossible_port_or_host_is_refused(url: str) -> None:
    assert refused({"nodes": [{"url": url}]}).startswith("nodes.url: ")


def test_a_node_is_named_by_its_address_where_it_has_no_name() -> None:
    assert node_name(NodeConfig(url="http://a:1/")) == "a:1"
    assert node_name(NodeConfig(url="https://[::1]:8")) == "[::1]:8"
    assert node_name(NodeConfig(url="http://a:1", name="gpu-1")) == "gpu-1"


def test_a_file_is_named_in_its_errors(tmp_path: Path) -> None:
    path = tmp_path / "w.toml"
    for content, words in (
        (b"[listen\n", "is not valid TOML"),
        (b"\xff\xfe", "is not UTF-8 text"),
        (b"[listen]\nprt = 1\n", "unknown key listen.prt; did you mean listen.port?"),
    ):
        path.write_bytes(content)
        with pytest.raises(ConfigError) as error:
            load(path)
        assert str(error.value).startswith(f"{path}: ") and words in str(error.value)
    for missing in (tmp_path / "none.toml", tmp_path):
        with pytest.raises(ConfigError, match="cannot be read"):
            load(missing)


def test_a_whole_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "w.toml"
    path.write_text(
        f"""
        [listen]
        port = 9000
        [limits]
        idle_timeout_s = 5        # whole numbers are numbers
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
    assert config.listen.port == 9000 and config.limits.idle_timeout_s == 5.0
    assert config.nodes[0].models == ("a", "b") and config.nodes[0].role == "decode"
    assert config.keys[0].tenant == "acme"

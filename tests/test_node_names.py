"""A node's name has no control characters: it is printed in logs and sent in headers."""

from __future__ import annotations

import json

import pytest
from support.running_router import quick_table, router
from support.scripted_engine import engines

from warmroute.config import ConfigError, NodeConfig, from_table
from warmroute.config.nodes import MAX_NAME_LENGTH, node_name

BAD_NAMES = ["a\nb", "a\r\nX: 1", "\x1b[31mred", "tab\there", "nul\0", "\x7f", "\x85", "a\u2028b", "\ud800", "\u202e"]
URL = "http://127.0.0.1:8000"


@pytest.mark.parametrize("name", [*BAD_NAMES, "x" * (MAX_NAME_LENGTH + 1)])
def test_a_name_with_control_characters_is_rejected(name: str) -> None:
    with pytest.raises(ConfigError, match=r"nodes\.name"):
        node_name(NodeConfig(url=URL, name=name))
    with pytest.raises(ConfigError, match=r"nodes\.name"):
        from_table(quick_table([{"url": URL, "name": name}]))


@pytest.mark.parametrize("name", ["gpu a", "Größe-1", "節点", "a/b:c#d", "x" * MAX_NAME_LENGTH])
def test_other_names_are_accepted(name: str) -> None:
    assert node_name(NodeConfig(url=URL, name=name)) == name


@pytest.mark.parametrize("url", ["http://a\nb:80", "http://a b:80", "http://a:80\r\n", "http://a\t:80", "http://\x00a"])
def test_an_address_with_control_characters_is_rejected(url: str) -> None:
    """It would be the node's name, and a line of the request's head."""
    with pytest.raises(ConfigError, match=r"nodes\.url"):
        node_name(NodeConfig(url=url))
    with pytest.raises(ConfigError, match=r"nodes\.url"):
        node_name(NodeConfig(url=url, name="a"))


def test_a_provisioner_whose_nodes_would_have_such_names_is_rejected() -> None:
    provisioner = {"kind": "process", "name": "p\n", "gpu": "L4", "command": ["engine", "{port}"]}
    with pytest.raises(ConfigError, match=r"provisioners\.name"):
        from_table({**quick_table(), "provisioners": [provisioner]})


async def test_the_admin_api_rejects_such_names() -> None:
    async with engines(2) as [engine, other], router(engine) as r:
        for name in BAD_NAMES[:-2]:
            body = json.dumps({"url": other.url, "name": name}).encode()
            response = await r.admin("POST", "/admin/nodes", body, "Content-Type: application/json")
            assert response.status == 400 and response.json["error"]["code"] == "bad_node"
        assert [node.name for node in r.service.fleet] == ["node0"]

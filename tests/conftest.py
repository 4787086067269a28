"""Runs each `async def` test on its own uvloop loop, lets tests import shared modules, and adds the option `--data`."""

from __future__ import annotations

import asyncio
import inspect
import os
import ssl
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import uvloop
from hypothesis import HealthCheck, settings

from warmroute import is_compiled
from warmroute.config.file import EXPERIMENT

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE / "edge"), str(HERE / "routing")]

settings.register_profile("quick", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("quick")

TEST_LIMIT_S = 60


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--data", type=Path, metavar="DIR", help="for tests marked `data`: public data that is not in the repository"
    )


@pytest.fixture(scope="session")
def data_dir(request: pytest.FixtureRequest) -> Path:
    """The directory that `--data DIR` names."""
    found: Path | None = request.config.getoption("--data")
    if found is None or not found.is_dir():
        pytest.fail("tests marked `data` need --data DIR, a directory with public data (tests/README.md)")
    return found


@pytest.fixture
def experiment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Configuration files of the test, and of processes that it starts, may also set what is not a key."""
    monkeypatch.setenv(EXPERIMENT, "1")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if is_compiled():
        reason = "compiled code does not call the method that the test replaces"
        for item in items:
            if item.get_closest_marker("interpreted") is not None:
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    arguments = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}

    async def within_limit() -> None:
        async with asyncio.timeout(TEST_LIMIT_S):
            await pyfuncitem.obj(**arguments)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(within_limit())
    return True


@pytest.fixture(autouse=True)
def _no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove the machine's proxy settings: tests use loopback addresses."""
    for name in list(os.environ):
        if name.lower().endswith("_proxy"):
            monkeypatch.delenv(name)


@pytest.fixture(scope="session")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """`listen`: a table that turns TLS on. `trusting`: what clients need to trust the router."""
    import trustme  # only here: the sanitizers' run would report what its libraries leak

    folder = tmp_path_factory.mktemp("tls")
    authority = trustme.CA()
    issued = authority.issue_cert("127.0.0.1", "localhost")
    issued.private_key_pem.write_to_path(folder / "key.pem")
    for pem in issued.cert_chain_pems:
        pem.write_to_path(folder / "cert.pem", append=True)
    trusting = ssl.create_default_context()
    authority.configure_trust(trusting)
    return {"listen": {"tls_cert": str(folder / "cert.pem"), "tls_key": str(folder / "key.pem")}, "trusting": trusting}


@pytest.fixture(params=["plain", "tls"])
def encryption(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Both kinds of client connections. `listen`: the router's table. `connect`: what clients connect with."""
    if request.param == "plain":
        return {"listen": {}, "connect": {}}
    certificate = request.getfixturevalue("certificate")
    return {"listen": certificate["listen"], "connect": {"ssl": certificate["trusting"]}}


warnings.filterwarnings("error", message="coroutine .* was never awaited")

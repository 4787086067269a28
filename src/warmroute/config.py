"""The whole configuration: every value typed, with one default and a sentence that says what it does.

One TOML file holds it. Unknown keys are refused with the nearest known name, so that a typing error never turns into a
silent default. docs/configuration.md is made from this file (`warmroute config-reference`).
"""

from __future__ import annotations

import difflib
import ipaddress
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints
from urllib.parse import urlsplit

import msgspec
from msgspec import Meta

Seconds = Annotated[float, Meta(gt=0)]
Count = Annotated[int, Meta(ge=1)]
Bytes = Annotated[int, Meta(ge=1)]
Port = Annotated[int, Meta(ge=0, le=65535)]

PriorityName = Literal["high", "normal", "low"]
PolicyName = Literal[
    "round_robin",
    "random",
    "least_loaded",
    "power_of_two",
    "latency",
    "session",
    "prefix_hash",
    "approximate",
    "overlap",
    "price",
]


class ConfigError(Exception):
    """What is wrong with a configuration, as a sentence for the person who wrote it."""


class Section(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A table of the file."""


class Listen(Section, frozen=True):
    """Where clients reach the router."""

    host: Annotated[str, Meta(description="Address to listen on; `::` listens on IPv6 and IPv4.")] = "127.0.0.1"
    port: Annotated[Port, Meta(description="TCP port; 0 takes a free one and prints it.")] = 8080
    unix: Annotated[str, Meta(description="Path of a unix socket to listen on instead of TCP.")] = ""
    tls_cert: Annotated[str, Meta(description="PEM file with the certificate chain; with `tls_key`, serves HTTPS.")] = (
        ""
    )
    tls_key: Annotated[str, Meta(description="PEM file with the certificate's private key.")] = ""
    backlog: Annotated[Count, Meta(description="Connections the kernel may hold before they are accepted.")] = 4096


class Admin(Section, frozen=True):
    """The separate listener for metrics and the admin API."""

    host: Annotated[str, Meta(description="Address of the admin listener; anything but loopback needs a token.")] = (
        "127.0.0.1"
    )
    port: Annotated[Port, Meta(description="TCP port of the admin listener; 0 takes a free one.")] = 8081
    enabled: Annotated[bool, Meta(description="Whether the admin listener runs at all.")] = True
    token_sha256: Annotated[
        str,
        Meta(
            pattern="^([0-9a-f]{64})?$",
            description="SHA-256 of the token that every admin call but /health and /ready must carry "
            "(`warmroute hash-key` makes it).",
        ),
    ] = ""


class Limits(Section, frozen=True):
    """What a client may ask of the router, each with its own error."""

    header_bytes: Annotated[Bytes, Meta(description="Largest request head; above it 431.")] = 32_768
    header_count: Annotated[Count, Meta(description="Most header fields in a request; above it 431.")] = 100
    body_bytes: Annotated[Bytes, Meta(description="Largest request body; above it 413.")] = 33_554_432
    buffered_bytes: Annotated[
        Bytes, Meta(description="Request bodies held in memory in all; above it 503 for those that would add more.")
    ] = 2_147_483_648
    connections: Annotated[
        Count, Meta(description="Client connections in all; further ones are told 503 and closed.")
    ] = 20_000
    header_timeout_s: Annotated[
        Seconds, Meta(description="Time for a request's head to arrive, from its first byte; above it 408.")
    ] = 10.0
    body_timeout_s: Annotated[
        Seconds, Meta(description="Time for a request's body to arrive after its head; above it 408.")
    ] = 60.0
    idle_timeout_s: Annotated[
        Seconds, Meta(description="How long a kept-alive connection may stay silent between requests.")
    ] = 75.0
    stall_timeout_s: Annotated[
        Seconds, Meta(description="How long a client may stop reading its response before it counts as gone.")
    ] = 120.0


class Upstream(Section, frozen=True):
    """How the router speaks to its nodes."""

    connect_timeout_s: Annotated[Seconds, Meta(description="Time to connect to a node (TLS included).")] = 2.0
    first_byte_timeout_s: Annotated[
        Seconds,
        Meta(description="Time for a node to begin its answer; a non-streamed answer begins when it is complete."),
    ] = 600.0
    between_chunks_timeout_s: Annotated[
        Seconds, Meta(description="Longest silence of a node within an answer that it has begun.")
    ] = 120.0
    idle_timeout_s: Annotated[
        Seconds,
        Meta(description="How long an unused connection to a node is kept; below the 5 s after which vLLM closes it."),
    ] = 4.0
    idle_connections: Annotated[Count, Meta(description="Unused connections kept for each node.")] = 256
    attempts: Annotated[Count, Meta(description="Nodes tried for one request before it fails with 502.")] = 3
    response_header_bytes: Annotated[Bytes, Meta(description="Largest response head taken from a node.")] = 65_536
    ca_file: Annotated[
        str, Meta(description="PEM file of the authorities that https nodes are verified with; empty: the system's.")
    ] = ""


class Health(Section, frozen=True):
    """How the router learns which nodes can serve."""

    interval_s: Annotated[Seconds, Meta(description="Time between two active checks of a node (with jitter).")] = 1.0
    timeout_s: Annotated[Seconds, Meta(description="Time for a node to answer a check.")] = 2.0
    path: Annotated[str, Meta(description="Path of the active check.", pattern="^/")] = "/health"
    slow_checks: Annotated[
        Count,
        Meta(
            description="Checks in a row that time out, with no traffic answered meanwhile, before a node is avoided."
        ),
    ] = 3
    failures: Annotated[
        Count, Meta(description="Requests in a row that fail on a node before its circuit breaker opens.")
    ] = 5
    open_s: Annotated[Seconds, Meta(description="How long the breaker stays open at first; doubles each time.")] = 0.5
    open_limit_s: Annotated[Seconds, Meta(description="Longest time the breaker stays open.")] = 15.0
    slow_start_s: Annotated[
        float, Meta(ge=0, description="Time over which a node that came back grows to its full share; 0 for at once.")
    ] = 10.0


class Metrics(Section, frozen=True):
    """How the router reads its nodes' load."""

    interval_s: Annotated[Seconds, Meta(description="Time between two reads of a node's metrics (with jitter).")] = 1.0
    timeout_s: Annotated[Seconds, Meta(description="Time for a node to answer with its metrics.")] = 2.0
    stale_s: Annotated[Seconds, Meta(description="Age after which what a node said of its load no longer counts.")] = (
        5.0
    )
    models_interval_s: Annotated[Seconds, Meta(description="Time between two reads of a node's /v1/models.")] = 30.0


class Index(Section, frozen=True):
    """What the router keeps of its nodes' caches, and how much that counts."""

    memory_bytes: Annotated[
        int, Meta(ge=1 << 20, description="Memory for all blocks of all nodes; about 48 bytes a block of a node.")
    ] = 268_435_456
    min_tokens: Annotated[
        int, Meta(ge=0, description="Prompts shorter than this are routed by load: there is nothing to win.")
    ] = 200
    assumed_cache_tokens: Annotated[
        Count, Meta(description="What a node's cache is believed to hold where it does not say.")
    ] = 131_072
    expected_s: Annotated[
        Seconds,
        Meta(description="How long after a first token its blocks are expected to be told of by the node's events."),
    ] = 1.0
    stale_s: Annotated[
        Seconds, Meta(description="Silence of a node after which what it told counts less and less.")
    ] = 5.0
    gone_s: Annotated[Seconds, Meta(description="Silence of a node after which what it told counts nothing.")] = 30.0


class Routing(Section, frozen=True):
    """Which node a request goes to."""

    policy: Annotated[PolicyName, Meta(description="The policy that ranks the nodes of a model.")] = "price"
    load_factor: Annotated[
        float,
        Meta(
            ge=1, description="`prefix_hash` and `session` pass over a node with more than this × the mean in flight."
        ),
    ] = 1.25
    session_headers: Annotated[
        tuple[str, ...], Meta(description="Request headers that name a session, in the order they are looked for.")
    ] = ("x-session-id", "x-conversation-id")
    seed: Annotated[int, Meta(description="Seed of the random choices; 0 takes one from the system.")] = 0

    @property
    def uses_events(self) -> bool:
        """Whether the policy wants to know what nodes tell of their caches."""
        return self.policy in ("overlap", "price")


class Prompts(Section, frozen=True):
    """How prompts are turned into tokens."""

    cache_bytes: Annotated[
        Bytes, Meta(description="Memory for conversations whose tokens are known, for each model.")
    ] = 134_217_728
    discover: Annotated[
        bool,
        Meta(description="Whether a tokenizer is loaded from a local path that a node names in its /v1/models."),
    ] = True
    remote: Annotated[
        bool,
        Meta(description="Whether a node's /tokenize is asked where no tokenizer is at hand; costs a round trip."),
    ] = False
    loop_ms: Annotated[
        float, Meta(ge=0, description="Prompts that take longer than this to read are read in a thread.")
    ] = 1.0
    threads: Annotated[Count, Meta(description="Threads that read prompts.")] = 1
    max_waiting: Annotated[
        Count,
        Meta(description="Prompts that wait for a thread; above it a prompt is not read and is routed by load."),
    ] = 64


class Admission(Section, frozen=True):
    """Who is let through to a node, who waits for one, and who is refused."""

    hold: Annotated[
        bool,
        Meta(
            description="Whether requests wait here until the node they are meant for has room, and not in its queue; "
            "for the policy `price`."
        ),
    ] = True
    ahead_ms: Annotated[
        float, Meta(gt=0, description="Prefill work that may be queued on a node before others wait here.")
    ] = 250.0
    max_waiting: Annotated[
        Count, Meta(description="Requests that wait here; above it 429, from half of it for low priority; high passes.")
    ] = 4096
    max_wait_s: Annotated[
        float, Meta(ge=0, description="How long a request may wait here; above it 503. 0 for as long as it takes.")
    ] = 0.0


class Pricing(Section, frozen=True):
    """What counts in the price of a node, for the policy `price`."""

    room: Annotated[bool, Meta(description="Whether finding KV memory on a full node counts.")] = True
    memory: Annotated[bool, Meta(description="Whether it counts what a request pushes out of a node's cache.")] = True
    congestion: Annotated[bool, Meta(description="Whether it counts what a request costs those behind it.")] = True
    second_home_ms: Annotated[
        float,
        Meta(ge=0, description="What a request may pay to give a beginning that crowds a node another home."),
    ] = 250.0
    max_saving_ms: Annotated[
        float, Meta(gt=0, description="The most that a cached prefix may save, so that no prefix owns a node for ever.")
    ] = 60_000.0


class Log(Section, frozen=True):
    """What is said on standard error."""

    level: Annotated[
        Literal["debug", "info", "warning", "error"], Meta(description="Least severity that is logged.")
    ] = "info"
    format: Annotated[
        Literal["text", "json"], Meta(description="`text` for people, `json` for collectors: one object a line.")
    ] = "text"
    requests: Annotated[
        bool, Meta(description="Logs a line for each request (never its content): for hunting, not for production.")
    ] = False


class Shutdown(Section, frozen=True):
    """How the router ends on SIGTERM."""

    delay_s: Annotated[
        float,
        Meta(
            ge=0, description="Time in which /ready says 503 while requests are still accepted, for balancers in front."
        ),
    ] = 0.0
    deadline_s: Annotated[
        float, Meta(ge=0, description="Time that running requests have to finish before they are cut.")
    ] = 30.0


class NodeConfig(Section, frozen=True):
    """One engine endpoint."""

    url: Annotated[str, Meta(description="Base URL, `http://host:port` or `https://host:port`.")]
    name: Annotated[str, Meta(description="Name in metrics, logs and the admin API; empty: host:port.")] = ""
    models: Annotated[tuple[str, ...], Meta(description="Models it serves; empty: asked from its /v1/models.")] = ()
    engine: Annotated[
        Literal["auto", "vllm", "sglang", "trtllm"], Meta(description="The engine; `auto` tells it by its metrics.")
    ] = "auto"
    role: Annotated[
        Literal["mixed", "prefill", "decode"],
        Meta(description="What it does; requests are sent to `mixed` nodes, and to `decode` where there are none."),
    ] = "mixed"
    island: Annotated[str, Meta(description="The island it stands on: provider and region, say `aws/us-east-1`.")] = (
        "local"
    )
    api_key_env: Annotated[
        str, Meta(description="Environment variable with the key that the node itself asks for.")
    ] = ""
    kv_events: Annotated[
        str,
        Meta(
            pattern="^(auto|off|tcp://.+:[0-9]+)$",
            description="Where its KV events are: `auto` asks the engine, `off` does without, or `tcp://host:port` "
            "(`*` for its own host).",
        ),
    ] = "auto"
    kv_replay: Annotated[
        str,
        Meta(
            pattern="^(tcp://.+:[0-9]+)?$",
            description="Where its KV events are replayed, `tcp://host:port`; empty: as the engine says.",
        ),
    ] = ""


class ModelConfig(Section, frozen=True):
    """How the prompts of one model are read."""

    name: Annotated[str, Meta(min_length=1, description="The model's name, as requests say it.")]
    tokenizer: Annotated[
        str,
        Meta(description="Directory with the model's tokenizer files, or its tokenizer.json; empty: discovered."),
    ] = ""
    chat_template: Annotated[
        str, Meta(description="File with the chat template that the engines were given; empty: the model's own.")
    ] = ""
    chat_template_content_format: Annotated[
        Literal["auto", "string", "openai"],
        Meta(description="How message contents reach the template; `auto` tells it by the template, as vLLM does."),
    ] = "auto"
    default_chat_template_kwargs: Annotated[
        dict[str, bool | int | float | str],
        Meta(description="Template variables that the engines set where a request does not."),
    ] = {}
    trust_request_chat_template: Annotated[
        bool, Meta(description="Whether the engines take a chat template from a request.")
    ] = False
    exclude_tools_when_tool_choice_none: Annotated[
        bool, Meta(description='Whether the engines leave tools out of the prompt where `tool_choice` is "none".')
    ] = False
    max_model_len: Annotated[
        int,
        Meta(
            ge=0,
            description="Tokens that prompt and answer may have together; 0: unknown, or as a discovered node says.",
        ),
    ] = 0


class KeyConfig(Section, frozen=True):
    """One API key that clients may use."""

    sha256: Annotated[
        str, Meta(pattern="^[0-9a-f]{64}$", description="SHA-256 of the key (`warmroute hash-key` makes it).")
    ]
    tenant: Annotated[str, Meta(min_length=1, description="Whose key it is.")]
    priority: Annotated[PriorityName, Meta(description="The highest priority that its requests may ask for.")] = "high"
    shares: Annotated[
        str,
        Meta(
            description="Tenants with the same word here may know of each other's cached prompts; empty: nobody else's."
        ),
    ] = ""


class Config(Section, frozen=True):
    """The file."""

    listen: Listen = Listen()
    admin: Admin = Admin()
    limits: Limits = Limits()
    upstream: Upstream = Upstream()
    health: Health = Health()
    metrics: Metrics = Metrics()
    index: Index = Index()
    routing: Routing = Routing()
    admission: Admission = Admission()
    price: Pricing = Pricing()
    prompts: Prompts = Prompts()
    log: Log = Log()
    shutdown: Shutdown = Shutdown()
    nodes: tuple[NodeConfig, ...] = ()
    models: tuple[ModelConfig, ...] = ()
    keys: tuple[KeyConfig, ...] = ()

    def sharing(self) -> dict[str, str]:
        """For each tenant, whom it shares knowledge of caches with; nothing where all share with all."""
        groups = {key.tenant: f"shared {key.shares}" if key.shares else f"only {key.tenant}" for key in self.keys}
        return groups if len(set(groups.values())) > 1 else {}


def load(path: Path) -> Config:
    """Reads a file; raises ConfigError with a sentence that names the file and the key."""
    try:
        text = path.read_bytes().decode("utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: is not UTF-8 text") from None
    if not text.strip():
        raise ConfigError(f"{path}: is empty")
    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: is not valid TOML: {error}") from None
    try:
        return from_table(table)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None


def from_table(table: Mapping[str, Any]) -> Config:
    """Makes a Config of a parsed table, checked as a whole."""
    _refuse_unknown_keys(table, Config, "")
    try:
        config = msgspec.convert(table, Config, strict=True)
    except msgspec.ValidationError as error:
        raise ConfigError(_in_words(str(error))) from None
    check(config)
    return config


def check(config: Config) -> None:
    """Raises ConfigError where values do not fit together."""
    listen = config.listen
    if bool(listen.tls_cert) != bool(listen.tls_key):
        raise ConfigError("listen.tls_cert and listen.tls_key go together: give both or neither")
    for what, port in (("listen.port", listen.port), ("admin.port", config.admin.port)):
        if not 0 <= port <= 65535:
            raise ConfigError(f"{what}: {port} is no port; it must be 0 to 65535")
    if config.admin.enabled and not config.admin.token_sha256 and not is_loopback(config.admin.host):
        raise ConfigError(
            f"admin.host is {config.admin.host!r}, which others can reach: set admin.token_sha256 "
            "(`warmroute hash-key` makes it), or keep the admin listener on 127.0.0.1"
        )
    names: dict[str, str] = {}
    for node in config.nodes:
        name = node_name(node)
        if name in names:
            raise ConfigError(f"two nodes are named {name!r} ({names[name]} and {node.url}): give each its own name")
        names[name] = node.url
    models: set[str] = set()
    for model in config.models:
        if model.name in models:
            raise ConfigError(f"models: the model {model.name!r} stands there twice")
        models.add(model.name)
    hashes: set[str] = set()
    for key in config.keys:
        if key.sha256 in hashes:
            raise ConfigError(f"keys: the key of tenant {key.tenant!r} stands there twice")
        hashes.add(key.sha256)


def node_name(node: NodeConfig) -> str:
    """The node's name; also checks its URL."""
    scheme, separator, rest = node.url.partition("://")
    host_port = rest.rstrip("/")
    if not separator or scheme not in ("http", "https") or not host_port:
        raise ConfigError(f"nodes.url: {node.url!r} is not like http://host:port")
    if "/" in host_port or "?" in host_port or "@" in host_port:
        raise ConfigError(f"nodes.url: {node.url!r} has more than scheme, host and port")
    try:
        parts = urlsplit(node.url)
        good = bool(parts.hostname) and parts.port != 0
    except ValueError:
        good = False
    if not good:
        raise ConfigError(f"nodes.url: {node.url!r} has no host, or a port that is none")
    return node.name or host_port


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _refuse_unknown_keys(table: Mapping[str, Any], section: type[Section], prefix: str) -> None:
    fields = {field.name: field.type for field in msgspec.structs.fields(section)}
    for key, value in table.items():
        if key not in fields:
            near = difflib.get_close_matches(key, fields, n=1, cutoff=0.5)
            hint = f"; did you mean {prefix}{near[0]}?" if near else f"; known here: {', '.join(sorted(fields))}"
            raise ConfigError(f"unknown key {prefix}{key}{hint}")
        inner = section_of(fields[key])
        if inner is None:
            continue
        tables = value if isinstance(value, list) else [value]
        for inner_table in tables:
            if isinstance(inner_table, dict):
                _refuse_unknown_keys(inner_table, inner, f"{prefix}{key}.")


def section_of(kind: Any) -> type[Section] | None:
    """The table that a field of this type holds (once or many times), if it holds one."""
    if get_origin(kind) is tuple:
        return section_of(get_args(kind)[0])
    return kind if isinstance(kind, type) and issubclass(kind, Section) else None


def _in_words(message: str) -> str:
    """`Expected `int`, got `str` - at `$.listen.port`` → `listen.port: expected `int`, got `str``."""
    what, separator, where = message.rpartition(" - at `$")
    if not separator:
        return message
    path = where.rstrip("`").lstrip(".").replace("[...]", "")
    return f"{path}: {what[0].lower()}{what[1:]}"


def tables() -> Iterator[tuple[str, type[Section], bool]]:
    """Each table of the file: name, section, whether it may stand there many times."""
    for field in msgspec.structs.fields(Config):
        section = section_of(field.type)
        assert section is not None
        yield field.name, section, get_origin(field.type) is tuple


def described(section: type[Section]) -> Iterator[tuple[str, str, Any, str]]:
    """Each value of a table: name, type in words, default (or msgspec.NODEFAULT), sentence."""
    hints = get_type_hints(section, include_extras=True)
    for field in msgspec.structs.fields(section):
        hint = hints[field.name]
        sentence = ""
        while get_origin(hint) is Annotated:
            hint, *metas = get_args(hint)
            for meta in metas:
                sentence = getattr(meta, "description", None) or sentence
        default = field.default
        if default is msgspec.NODEFAULT and field.default_factory is not msgspec.NODEFAULT:
            default = field.default_factory()
        yield field.name, _type_in_words(hint), default, sentence


def _type_in_words(hint: Any) -> str:
    while get_origin(hint) is Annotated:
        hint = get_args(hint)[0]
    if get_origin(hint) is Literal:
        return " / ".join(f'"{value}"' for value in get_args(hint))
    if get_origin(hint) is tuple:
        return f"list of {_type_in_words(get_args(hint)[0])}"
    if get_origin(hint) is dict:
        return f"table of {_type_in_words(get_args(hint)[1])}"
    if get_origin(hint) is UnionType:
        return ", ".join(_type_in_words(kind) for kind in get_args(hint))
    return {str: "text", int: "whole number", float: "number", bool: "true / false"}.get(hint, str(hint))

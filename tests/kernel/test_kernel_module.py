"""The compiled module as a whole: its stubs, its constants, and that it can be imported again."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

import warmroute._kernel as kernel
from warmroute._kernel import ChunkReader, Recency, digest, read_request_head

KERNEL = Path(str(kernel.__file__)).parent


def names_in(stub: Path) -> set[str]:
    names = set()
    for node in ast.parse(stub.read_text()).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.AnnAssign) and ast.unparse(node.annotation) != "TypeAlias":
            names.add(ast.unparse(node.target))
    return names


def test_the_stubs_name_what_the_module_has() -> None:
    stubs = {name for stub in KERNEL.glob("*.pyi") for name in names_in(stub)}
    assert stubs == {name for name in dir(kernel) if not name.startswith("_")}


@pytest.mark.parametrize("stub", sorted(KERNEL.glob("*.pyi")), ids=lambda stub: stub.stem)
def test_a_stub_names_what_its_classes_have(stub: Path) -> None:
    for node in ast.parse(stub.read_text()).body:
        if not isinstance(node, ast.ClassDef):
            continue
        members = {ast.unparse(item.target) for item in node.body if isinstance(item, ast.AnnAssign)}
        members |= {item.name for item in node.body if isinstance(item, ast.FunctionDef)}
        found = set(vars(getattr(kernel, node.name)))
        assert members <= found, members - found
        assert {name for name in found if not name.startswith("_")} <= members


def test_every_constant_has_a_value_of_its_type() -> None:
    for stub in KERNEL.glob("*.pyi"):
        for node in ast.parse(stub.read_text()).body:
            if isinstance(node, ast.AnnAssign) and ast.unparse(node.annotation) in ("Final[int]", "Final[float]"):
                kind = int if "int" in ast.unparse(node.annotation) else float
                assert type(getattr(kernel, ast.unparse(node.target))) is kind


def test_a_second_import_shares_types_and_random_keys() -> None:
    recency = Recency(4)
    recency.touch(b"abcdefgh", 1.0)
    before = digest(b"text", 0, 4)
    saved = sys.modules.pop("warmroute._kernel._native")
    try:
        import warmroute._kernel._native as again  # type: ignore[import-not-found]

        assert again is not saved and again.Recency is Recency
        assert recency.match(b"abcdefgh") == 1 and again.digest(b"text", 0, 4) == before
    finally:
        sys.modules["warmroute._kernel._native"] = saved


TURKISH = """if 1:
    import locale, sys
    from warmroute._kernel import read_request_head
    try:
        locale.setlocale(locale.LC_CTYPE, "tr_TR.UTF-8")
    except locale.Error:
        sys.exit(77)
    data = b"POST / HTTP/1.1\\r\\nHOST: a\\r\\nTRANSFER-ENCODING: CHUNKED\\r\\n\\r\\n"
    head = read_request_head(data, len(data) - 4, 9)
    sys.exit(0 if head.chunked and not head.forwarded_fields else 1)
"""


def test_header_names_do_not_depend_on_the_locale(tmp_path: Path) -> None:
    """Where LC_CTYPE is Turkish, strncasecmp finds TRANSFER-ENCODING and transfer-encoding different."""
    localedef = ["localedef", "-i", "tr_TR", "-f", "UTF-8", str(tmp_path / "tr_TR.UTF-8")]
    made = subprocess.run(localedef, capture_output=True)
    environment = {**os.environ, "LOCPATH": str(tmp_path), "PYTHONPATH": str(KERNEL.parents[1])}
    done = subprocess.run([sys.executable, "-c", TURKISH], env=environment)
    if made.returncode and done.returncode == 77:
        pytest.skip("this machine has no sources for a Turkish locale (package `locales`)")
    assert done.returncode == 0


def test_a_head_whose_end_is_beyond_all_bounds_is_an_error() -> None:
    for end in (sys.maxsize, sys.maxsize - 3, -sys.maxsize - 1, 2**70):
        with pytest.raises((ValueError, OverflowError)):
            read_request_head(b"GET / HTTP/1.1\r\n\r\n", end, 9)


def test_nothing_is_read_after_the_end_of_a_message() -> None:
    reader = ChunkReader()
    assert reader.feed(b"0\r\n\r\nmore") == 5 and reader.feed(b"") == -1

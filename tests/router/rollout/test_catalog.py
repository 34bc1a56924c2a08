"""Strategies loaded by name, from files and from uploads; errors name the line."""

from __future__ import annotations

import sys

import pytest

from engine.protocol import BadRequest
from router.base.errors import Conflict, NotFound
from router.rollout.catalog import Catalog

HEAD = "from router import strategy\n\n"
ONE = "@strategy\nasync def {}(request, cluster):\n    yield\n\n"


def test_a_files_strategy_is_its_only_one_or_the_one_named_like_it(catalog, tmp_path):
    only = HEAD + ONE.format("mine")
    assert catalog.load(only, file="/any/where.py").name == "mine"
    both = HEAD + ONE.format("first") + ONE.format("second")
    assert catalog.load(both, file="second.py").name == "second"
    assert catalog.load(both, name="first").name == "first"
    for options in ({"file": "third.py"}, {"name": "third"}):
        with pytest.raises(BadRequest, match="first, second"):
            catalog.load(both, **options)
    with pytest.raises(BadRequest, match="no strategy 'yours' in it; it has: mine"):
        catalog.load(only, name="yours")
    file = tmp_path / "second.py"
    file.write_text(both)
    assert catalog.find(str(file)).name == "second"
    with pytest.raises(NotFound):
        catalog.find("nothing")


@pytest.mark.parametrize(
    ("source", "line", "says"),
    [
        ("1/\n", 1, "SyntaxError"),
        ("import os\nos.nothing\n", 2, "AttributeError"),
        ("def f():\n    raise KeyError('k')\n\nf()\n", 2, "KeyError: 'k'"),
        ("import sys\n\nsys.exit(3)\n", 3, "SystemExit"),
        (HEAD + "@strategy\nasync def s(request):\n    yield\n", 3, "takes (request, cluster)"),
    ],
)
def test_load_errors_name_the_line(source, line, says):
    catalog = Catalog()
    before = catalog.describe()
    with pytest.raises(BadRequest) as wrong:
        catalog.load(source, file="dir/bad.py")
    assert wrong.value.message.startswith(f"dir/bad.py:{line}: ")
    assert says in wrong.value.message
    assert "\n" not in wrong.value.message
    assert catalog.describe() == before


def test_installed_names_are_reserved_and_files_must_be_readable(catalog, tmp_path):
    with pytest.raises(Conflict, match="balanced"):
        catalog.load(HEAD + ONE.format("balanced"), file="x.py")
    with pytest.raises(BadRequest, match="No such file"):
        catalog.find(str(tmp_path / "absent.py"))
    (tmp_path / "binary.py").write_bytes(b"\xff\xfe")
    with pytest.raises(BadRequest, match="UTF-8"):
        catalog.find(str(tmp_path / "binary.py"))


def test_a_bad_package_leaves_the_others_usable(tmp_path, monkeypatch, caplog):
    """Strategies are found by entry point; one that cannot be imported is logged and left out."""
    (tmp_path / "third_party.py").write_text(HEAD + ONE.format("theirs"))
    (tmp_path / "broken_party.py").write_text("1/0\n")
    metadata = tmp_path / "third_party-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: third-party\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(
        "[microserve.strategies]\n"
        "theirs = third_party:theirs\nbad = broken_party:x\nodd = third_party:strategy\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    catalog = Catalog()
    assert catalog["theirs"].name == "theirs"
    assert catalog["balanced"].name == "balanced"
    for name in ("bad", "odd"):
        with pytest.raises(NotFound):
            catalog[name]
    assert "broken_party:x cannot be imported: division by zero" in caplog.text
    assert "third_party:strategy is no strategy" in caplog.text


def test_replaced_versions_are_not_kept(catalog):
    def modules() -> int:
        return sum(name.startswith("microserve_strategy_") for name in sys.modules)

    first = catalog.load(HEAD + ONE.format("mine"), file="mine.py")
    before = modules()
    for version in range(5):
        last = catalog.load(HEAD + f"# {version}\n" + ONE.format("mine"), file="mine.py")
    assert modules() == before
    assert catalog["mine"] is last
    assert first.source_sha256 != last.source_sha256

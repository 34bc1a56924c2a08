"""Strategies loaded by name, from files and from uploads; errors name the line."""

from __future__ import annotations

import asyncio
import sys
import threading

import pytest

from engine.protocol import BadRequest, Timeout
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


def modules() -> set[str]:
    return {name for name in sys.modules if name.startswith("microserve_strategy_")}


def test_a_module_stays_while_one_of_its_strategies_is_listed(catalog):
    before = modules()
    catalog.load(HEAD + ONE.format("first") + ONE.format("second"), name="first")
    (both,) = modules() - before
    catalog.load(HEAD + ONE.format("first"), name="first")
    assert both in modules() and len(modules() - before) == 2
    catalog.load(HEAD + ONE.format("second"), name="second")
    assert both not in modules() and len(modules() - before) == 2
    assert catalog["first"].function.__module__ != catalog["second"].function.__module__


@pytest.mark.parametrize(
    ("source", "says"),
    [
        (HEAD + ONE.format("mine") + ONE.format("balanced"), "balanced is the name of an inst"),
        (HEAD + ONE.format("first") + ONE.format("second"), "no strategy 'mine'"),
        (HEAD, "no strategy 'mine' in it; it has: none"),
        ("from strategies.balanced import balanced", "it has: none"),
        (HEAD + ONE.format("mine") + "1/0\n", "mine.py:7: ZeroDivisionError: division by zero"),
        (HEAD + ONE.format("mine") + "raise SystemExit\n", "mine.py:7: SystemExit"),
    ],
)
def test_a_source_that_is_refused_leaves_nothing_behind(catalog, source, says):
    before, listed = modules(), catalog.describe()
    with pytest.raises((BadRequest, Conflict), match=says):
        catalog.load(source, file="mine.py")
    assert modules() == before
    assert catalog.describe() == listed


def test_an_interruption_is_no_error_of_the_source(catalog):
    before = modules()
    with pytest.raises(KeyboardInterrupt):
        catalog.load("raise KeyboardInterrupt", file="mine.py")
    assert modules() == before


def test_strategies_that_a_source_imports_are_not_its_own(catalog):
    source = HEAD + "from strategies.balanced import balanced\n\n" + ONE.format("mine")
    assert catalog.load(source, file="whatever.py").name == "mine"
    assert catalog["balanced"].function.__module__ == "strategies.balanced"


def test_a_file_may_import_what_lies_beside_it(catalog, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "beside_the_strategy.py").write_text("NAME = 'imported'\n")
    file = tmp_path / "mine.py"
    file.write_text(HEAD + "from beside_the_strategy import NAME\n\n" + ONE.format("mine"))
    monkeypatch.chdir(tmp_path)
    assert catalog.find("mine.py").name == "mine"
    assert sys.modules.pop("beside_the_strategy").NAME == "imported"
    assert catalog.find("mine") is catalog["mine"]


def test_the_list_says_which_strategies_are_installed(catalog):
    catalog.load(HEAD + ONE.format("a_first_one"), file="mine.py")
    listed = catalog.describe()
    names = [one["name"] for one in listed]
    assert names == sorted(names) and names[0] == "a_first_one" and "balanced" in names
    assert [one["name"] for one in listed if not one["installed"]] == ["a_first_one"]
    with pytest.raises(
        NotFound, match="no strategy 'x'; there are: a_first_one, adaptive, balanced, "
    ):
        catalog["x"]


def test_an_upload_without_a_file_is_named_by_its_strategy(catalog):
    with pytest.raises(BadRequest, match=r"^<strategy mine>:2: NameError"):
        catalog.load("\nnothing\n", name="mine")
    assert catalog.load(HEAD + ONE.format("mine"), name="mine").name == "mine"


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("\0", "mine.py:1: "),  # the error has no line
        ("raise ValueError('two\\n  lines')", "mine.py:1: ValueError: two lines"),
        ("raise ValueError('x' * 3000)", "mine.py:1: ValueError: " + "x" * 2000),
        (
            "def f():\n  g()\ndef g():\n  import json\n  json.loads('{')\nf()",
            "mine.py:5: JSONDecode",
        ),
        (
            "raise ExceptionGroup('both', [ValueError('first'), KeyError('second')])",
            "mine.py:1: ValueError: first",
        ),
    ],
)
def test_errors_are_one_line_with_a_place(catalog, source, says):
    with pytest.raises(BadRequest) as wrong:
        catalog.load(source, file="mine.py")
    assert wrong.value.param == "source"
    message = wrong.value.message
    assert message.startswith(says) and "\n" not in message and len(message) < 2050


async def test_the_module_of_an_upload_can_be_found(catalog):
    """Dataclasses look up their module there."""
    before = modules()
    loaded = await catalog.load_in_thread(HEAD + ONE.format("mine"), file="mine.py", limit_s=20)
    assert modules() - before == {loaded.function.__module__}
    with pytest.raises(BadRequest, match="no strategy 'yours'"):
        await catalog.load_in_thread(HEAD + ONE.format("mine"), name="yours", limit_s=20)
    assert modules() - before == {loaded.function.__module__}


async def test_an_upload_that_ends_too_late_leaves_no_module(catalog, monkeypatch):
    """It swallows its interruption, and defines its strategy after the router has given up."""
    gate, before = threading.Event(), modules()
    monkeypatch.setattr(sys, "gate", gate, raising=False)
    late = "import sys\ntry:\n    sys.gate.wait()\nexcept BaseException:\n    pass\n"
    with pytest.raises(Timeout):
        await catalog.load_in_thread(late + HEAD + ONE.format("mine"), file="m.py", limit_s=0.05)
    assert modules() > before
    with pytest.raises(Conflict, match="an earlier upload still runs"):
        await catalog.load_in_thread(HEAD + ONE.format("yours"), file="y.py", limit_s=20)
    gate.set()
    async with asyncio.timeout(20):
        while catalog._threads.late or modules() != before:  # noqa: ASYNC110  a thread ends
            await asyncio.sleep(0.005)
    assert "mine" not in [one["name"] for one in catalog.describe()]

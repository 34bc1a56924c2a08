"""The lines of keys in TOML files, and files that cannot be read at all."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from router.cli.config.problems import Invalid
from router.cli.config.toml_file import MOST, _Lines, read_toml

ALL_FORMS = '''# a comment with a = 1
a = 1
"b.c" = """x = 1
[no.table]
y"""""

'lit' = \'\'\'
[[none]]\'\'\'
[t.u]   # k
v = [1,
  2, # three = 3
  {q = 3, r.s = "]}"}]
w.x.y = 0x_f
[[p]]
x = 1
[p.e]
tp = 2
[[p]]
e.tp = 3
d = 1979-05-27 07:32:00
[[p.q]]
k = "\\"\\\\" # k = 1
[[p.q]]
k = '#'
'''.replace("0x_f", "0xf")
LINES = {
    ("a",): 2,
    ("b.c",): 3,
    ("lit",): 7,
    ("t", "u"): 9,
    ("t", "u", "v"): 10,
    ("t", "u", "v", 1): 11,
    ("t", "u", "v", 2, "r", "s"): 12,
    ("t", "u", "w", "x", "y"): 13,
    ("p", 0): 14,
    ("p", 0, "e", "tp"): 17,
    ("p", 1): 18,
    ("p", 1, "e", "tp"): 19,
    ("p", 1, "d"): 20,
    ("p", 1, "q", 0, "k"): 22,
    ("p", 1, "q", 1, "k"): 24,
}


def paths(value, path=()):
    if path:
        yield path
    pairs = value.items() if isinstance(value, dict) else []
    for key, inner in enumerate(value) if isinstance(value, list) else pairs:
        yield from paths(inner, (*path, key))


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_every_key_has_its_line(tmp_path: Path, end: str):
    (tmp_path / "f.toml").write_bytes(ALL_FORMS.replace("\n", end).encode())
    file = read_toml(tmp_path / "f.toml")
    assert file.data == tomllib.loads(ALL_FORMS)
    assert {path: file.lines.get(path) for path in LINES} == LINES
    assert set(file.lines) == set(paths(file.data))  # no key is missed, and none invented
    assert file.line(("p", 1, "nothing", "here")) == 18 and file.line(("none",)) == 1


FILES = {
    "a missing file": (None, "f.toml: No such file or directory (name a TOML file"),
    "not UTF-8": (b"a = 1\nb = '\xff'\n", "f.toml:2: is not UTF-8 (save it as UTF-8)"),
    "a large file": (b"#" * (MOST + 1), f"f.toml: has more than {MOST} bytes ("),
    "deep nesting": (b"a = " + b"[" * 5000 + b"]" * 5000, "f.toml:1: is nested too deeply ("),
    "no value": (b"a = 1\nport =\n", "f.toml:2: port: no TOML: Invalid value (correct the TOML"),
    "a key twice": (b"a = 1\n\na = 2\n", "f.toml:3: a: no TOML: Cannot overwrite a value ("),
    "a huge number": (b"a = " + b"9" * 5000, "f.toml:1: Exceeds the limit (4300 digits)"),
    "an open text": (b'a = 1\nb = """\n', "f.toml:2: b: no TOML: "),
}


@pytest.mark.parametrize("content, said", FILES.values(), ids=FILES)
def test_a_file_that_cannot_be_read(tmp_path: Path, monkeypatch, content: bytes | None, said: str):
    monkeypatch.chdir(tmp_path)
    if content is not None:
        Path("f.toml").write_bytes(content)
    with pytest.raises(Invalid) as caught:
        read_toml(Path("f.toml"))
    (problem,) = caught.value.problems
    assert str(problem).startswith(said)


def test_a_folder_instead_of_a_file(tmp_path: Path):
    with pytest.raises(Invalid, match=r": Is a directory \(name a TOML file"):
        read_toml(tmp_path)


def test_a_file_of_the_largest_size_is_read(tmp_path: Path):
    (tmp_path / "f.toml").write_text("a = 1\n" + "#" * (MOST - 6))
    assert read_toml(tmp_path / "f.toml").data == {"a": 1}


KEYS = st.sampled_from(["a", "b", "a.b", '"a"', "'b'.c", '"a.b"', '"\\""', "a . b"])
VALUES = st.recursive(
    st.sampled_from(
        ["1", "true", '"]"', "'#'", '"""\n"a""\n"""', "'''\n[x]'''", "0.5", '"\\""', "1979-05-27"]
    ),
    lambda inner: (
        st.lists(inner, max_size=3).map(lambda found: f"[ # ,]\n{', '.join(found)}]")
        | st.tuples(KEYS, inner).map(lambda pair: f"{{ {pair[0]} = {pair[1]} }}")
    ),
    max_leaves=5,
)
ROWS = st.lists(
    st.tuples(KEYS, VALUES).map(" = ".join)
    | KEYS.map("[{}]".format)
    | KEYS.map(" [[ {} ]] # [a]".format)
    | st.just("# a = 1"),
    max_size=8,
)


@given(ROWS)
def test_the_keys_with_lines_are_those_that_tomllib_finds(rows: list[str]):
    text = "\n".join(rows)
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        assume(False)
    lines = _Lines(text).read()
    assert set(lines) == set(paths(data))
    written = text.split("\n")
    for path, line in lines.items():
        if isinstance(path[-1], str):
            shown = path[-1].replace('"', '\\"')
            assert shown in written[line - 1]

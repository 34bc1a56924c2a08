"""`config check` names the file, the line, the key and the remedy of each mistake."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner

from router.cli import cli

# A file's text, and what is said of it: the beginning and the end of each line.
WRONG: dict[str, tuple[str, list[tuple[str, str]]]] = {
    "syntax": ('[router]\nstrategy = "a\n', [(":2: strategy: no TOML: ", "each key once)")]),
    "unknown table": ("[ruoter]\nport = 1\n", [(":1: ruoter: unknown key", "'router'?)")]),
    "unknown key": (
        "[engine]\nmax_batsh = 3\n",
        [(":2: engine.max_batsh: unknown key", "(did you mean 'max_batch'?)")],
    ),
    "a key like no other": ("x = 1\n", [(":1: x: unknown key (one of: model, ", ")")]),
    "a key of another table": (
        'port = 1\n[engine]\nstrategy = "balanced"\n[router]\nadmin_key = "k"\n',
        [
            (":1: port: unknown key here", "(it belongs in [router])"),
            (":3: engine.strategy: unknown key here", "(it belongs in [router])"),
            (":5: router.admin_key: unknown key here", "(it belongs in [keys])"),
        ],
    ),
    "a key of pools": (
        '[engine]\nrole = "decode"\n',
        [(":2: engine.role: unknown key here", "(it belongs in [[pool]])")],
    ),
    "a number as a pool": (
        "pool = [1]\n",
        [(":1: pool[0]: must be a table", "(write [[pool]], and its keys below)")],
    ),
    "a unit in a number": (
        '[router]\nshutdown_s = "2s"\n',
        [(":2: router.shutdown_s: must be a number, not a text (from 0 to ", "quotes)")],
    ),
    "another unit": (
        "[router]\nshutdown_ms = 200\n",
        [(":2: router.shutdown_ms: unknown key", "(did you mean 'shutdown_s'?)")],
    ),
    "a key twice": ("[router]\nport = 1\nport = 2\n", [(":3: port: no TOML: ", "each key once)")]),
    "a table twice": (
        "[router]\nport = 1\n[router]\nworkers = 2\n",
        [(":3: router: no TOML: ", "each key once)")],
    ),
    "a file that includes another": (
        'include = "fleet.toml"\n',
        [(":1: include: unknown key (one of: model, ", ")")],
    ),
    "lists in lists without end": (
        f"x = {'[' * 5000}{']' * 5000}\n",
        [(":1: is nested too deeply (", ")")],
    ),
    "a table as a value": ("router = 3\n", [(":1: router: must be a table", "keys below)")]),
    "a text as a number": (
        '[router]\nport = "8000"\n',
        [(":2: router.port: must be an integer, not a text (from 0 to 65535", "quotes)")],
    ),
    "a boolean as a number": (
        "[engine]\ntp = true\n",
        [(":2: engine.tp: must be an integer, not true or false (", ")")],
    ),
    "a fraction as a count": ("[engine]\ntp = 1.5\n", [(":2: engine.tp: must be an integer", ")")]),
    "a text as a switch": (
        'no-respawn = "yes"\n',
        [(":1: no-respawn: must be true or false, not a text (write true or", "quotes)")],
    ),
    "a number as a text": ("model = 7\n", [(":1: model: must be a text, not an integer", ")")]),
    "a date": ("model = 1979-05-27\n", [(":1: model: must be a text, not a date or time", ")")]),
    "two lines in a text": (
        'model = "a\\nb"\n',
        [(":1: model: has characters that cannot be printed (", "line)")],
    ),
    "too small": (
        '[[pool]]\n[[pool]]\nrole = "decode"\n[pool.engine]\ntp = 0\n',
        [(":5: pool[1].engine.tp: must be at least 1, not 0", "(choose a number from 1 to 64)")],
    ),
    "too large": ("[router]\nport = 65536\n", [(":2: router.port: must be at most 65535,", ")")]),
    "a huge number": (
        f"[engine]\ntp = 0x{'f' * 5000}\n[router.params]\nratio = 0x{'f' * 5000}\n",
        [
            (":2: engine.tp: must be at most 64, not a huge number (", ")"),
            (":4: router.params.ratio: is too large for a number (", ")"),
        ],
    ),
    "a null character": (
        '[engine]\nbackend = "vllm"\nvllm_flags = ["a\\u0000b"]\n',
        [(":3: engine.vllm_flags: has a null character (", ")")],
    ),
    "no number": ("[router]\nretry-share = nan\n", [(":2: router.retry-share: must be at", ")")]),
    "unknown choice": (
        '[engine]\ndtype = "float23"\n',
        [(":2: engine.dtype: 'float23' is unknown (did you mean 'float32'?", ")")],
    ),
    "a key in two spellings": (
        "[router]\nmax_queue = 1\nmax-queue = 2\n",
        [(":3: router.max-queue: is also set at fleet.toml:2 (", "of the two)")],
    ),
    "pools and a number of engines": (
        "engines = 2\n[[pool]]\n",
        [(":1: engines: does not go with [[pool]] (", ")")],
    ),
    "engines and roles": (
        "engines = 2\nprefill = 1\ndecode = 1\n",
        [(":1: engines: does not go with prefill and decode (", "[[pool]])")],
    ),
    "flags without engines": (
        'prefill_flags = "--tp 2"\n',
        [(":1: prefill_flags: there are no engines that prefill (set prefill = 1", ")")],
    ),
    "one bracket": ("[pool]\ncount = 2\n", [(":1: pool: must be a list of tables (", "brackets)")]),
    "unknown role": (
        '[[pool]]\nrole = "prefil"\n',
        [(":2: pool[0].role: 'prefil' is unknown (did you mean 'prefill'?", ")")],
    ),
    "no engines": (
        "[[pool]]\ncount = 0\n",
        [(":2: pool[0].count: must be a number of engines, at least 1 (", "drop the pool)")],
    ),
    "too many engines": (
        "[[pool]]\ncount = 1000\n[[pool]]\ncount = 25\n",
        [(":4: pool[1].count: 1025 engines in all pools (", ")")],
    ),
    "unknown key of a pool": (
        "[[pool]]\ncuont = 1\n",
        [(":2: pool[0].cuont: unknown key (did you mean 'count'?", ")")],
    ),
    "two pools of one name": (
        '[[pool]]\nname = "a"\n[[pool]]\nname = "a"\n',
        [(":4: pool[1].name: 'a' is also the name at fleet.toml:2 (", ")")],
    ),
    "a reserved name": ('[[pool]]\nname = "engine"\n', [(":2: pool[0].name: is no name", ")")]),
    "a label with a space": (
        '[[pool]]\nlabels = {zone = "a b", role = "any", n = 1, ok = "x"}\n',
        [(f":2: pool[0].labels.{name}: is no label (", ")") for name in ("n", "role", "zone")],
    ),
    "no such strategy": (
        '[router]\nstrategy = "balancd"\n',
        [(":2: router.strategy: there is no strategy 'balancd' (did you mean 'balanced'?", ")")],
    ),
    "no such strategy file": (
        '[router]\nstrategy = "mine.py"\n',
        [(":2: router.strategy: there is no ", "(paths are relative to the file)")],
    ),
    "unknown parameter": (
        '[router]\nstrategy = "balanced"\n[router.params]\nraito = 0.1\n',
        [(":4: router.params.raito: balanced has no such parameter (did you mean 'ratio'?", ")")],
    ),
    "parameter of a wrong type": (
        '[router]\nstrategy = "balanced"\n[router.params]\nratio = "x"\n',
        [(":4: router.params.ratio: ratio='x': ", "tells its type and bounds)")],
    ),
    "parameter out of bounds": (
        '[router]\nstrategy = "balanced"\nparams.ratio = 1.5\n',
        [(":3: router.params.ratio: ratio=1.5: ", ")")],
    ),
    "a parameter that is a date": (
        "[router.params]\nratio = 1979-05-27\n",
        [(":2: router.params.ratio: a date or time is no parameter (", ")")],
    ),
    "missing keys file": (
        '[keys]\nfile = "keys.txt"\n',
        [(":2: keys.file: ", "keys.txt: No such file or directory (create it; paths are relative")],
    ),
    "a keys file without keys": (
        '[keys]\nfile = "empty.txt"\n',
        [(":2: keys.file: ", "empty.txt: there is no key in it (correct it)")],
    ),
    "unknown key in keys": (
        '[keys]\nadmin = "x"\n',
        [(":2: keys.admin: unknown key (did you mean 'admin_key'?", ")")],
    ),
    "a variable that is not set": (
        '[keys]\nadmin_key = {env = "NOT_SET_ANYWHERE"}\n',
        [(":2: keys.admin_key: the variable 'NOT_SET_ANYWHERE' is not set (", ")")],
    ),
    "a missing file with a key": (
        '[keys]\nadmin_key = {file = "none"}\n',
        [(":2: keys.admin_key: none: No such file or directory (", ")")],
    ),
    "an empty file with a key": (
        '[keys]\nadmin_key = {file = "empty.txt"}\n',
        [(":2: keys.admin_key: empty.txt: is no key (", ")")],
    ),
    "a key from nowhere": (
        '[keys]\nadmin_key = {vault = "x"}\n',
        [(":2: keys.admin_key: 'vault' is no source of a key (", ")")],
    ),
    "certificate without key": (
        '[router]\ntls-cert = "cert.pem"\n',
        [(":2: router.tls-cert: needs tls_key (set router.tls_key too", ")")],
    ),
    "key without certificate": (
        '[router]\ntls-key = "key.pem"\n',
        [(":2: router.tls-key: needs tls_cert (", ")")],
    ),
    "files that are no certificate": (
        '[router]\ntls-cert = "empty.txt"\ntls-key = "empty.txt"\n',
        [(":2: router.tls-cert: tls-cert ", ")")],
    ),
    "no folder for a file": (
        'state_file = "none/state.json"\n',
        [(":1: state_file: ", "(name a folder that exists; paths are relative to this file)")],
    ),
    "a model that is not there": (
        'model = "./none.gguf"\n',
        [(":1: model: there is no ", ")")],
    ),
    "flags of vLLM for another engine": (
        '[[pool]]\n[[pool]]\n[pool.engine]\nvllm_flags = ["--max-num-seqs", "8"]\n',
        [(":4: pool[1].engine.vllm_flags: needs backend vllm (", "same table)")],
    ),
    "flags of vLLM as a text": (
        '[engine]\nbackend = "vllm"\nvllm_flags = "--max-num-seqs 8"\n',
        [(":3: engine.vllm_flags: must be a list, not a text (write a list of texts, ", ")")],
    ),
    "a store that is no URL": (
        '[keys]\nstore = "h:6379"\n',
        [(":2: keys.store: not the URL of a store; it begins with", "(redis://HOST:PORT/DB#NAME)")],
    ),
    "a store of several servers": (
        '[keys]\nstore = "redis://:hidden@h1:1,h2:2/0"\n',
        [(":2: keys.store: its port is no number", "names several hosts")],
    ),
    "a store in the wrong table": (
        '[router]\nstore = "redis://h"\nworkers = 0\n',
        [
            (":2: router.store: unknown key here", "(it belongs in [keys])"),
            (":3: router.workers: must be at least 1, not 0", "(choose a number from 1 to 64)"),
        ],
    ),
    "a store without its password": (
        '[router]\nstore_password_file = "none"\n[keys]\nstore = "redis://h"\n',
        [(":2: router.store_password_file: ", "none: No such file or directory (paths are")],
    ),
    "a password without a store": (
        '[router]\nstore_password_file = "empty.txt"\n',
        [(":2: router.store_password_file: needs --store (", ")")],
    ),
    "several mistakes": (
        '[engine]\ntp = 0\ndtype = 3\n[router]\nprot = 1\n',
        [
            (":2: engine.tp: ", ")"),
            (":3: engine.dtype: must be a text, not an integer (write one of: auto, ", ")"),
            (":5: router.prot: unknown key (did you mean 'port'?", ")"),
        ],
    ),
}  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty.txt").touch()
    return tmp_path


@pytest.mark.parametrize(("text", "said"), WRONG.values(), ids=WRONG)
def test_a_mistake_is_named_with_line_key_and_remedy(folder: Path, text: str, said: list):
    (folder / "fleet.toml").write_text(text)
    for command in (["config", "check"], ["up", "--config"]):
        done = CliRunner().invoke(cli, [*command, "fleet.toml"])
        assert done.exit_code == 2, done.output
        lines = done.output.splitlines()
        assert len(lines) == len(said), done.output
        for line, (start, end) in zip(lines, said, strict=True):
            assert line.startswith(f"fleet.toml{start}"), line
            assert end in line and line.endswith(")"), line


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"\xef\xbb\xbf[router]\r\nprot = 1\r\n", ":2: router.prot: unknown key"),  # of an editor
        ("[router]\nport = 1\n".encode("utf-16"), ":1: is not UTF-8 (save it as UTF-8)"),
        (b"[router]\n# caf\xe9\n", ":2: is not UTF-8 (save it as UTF-8)"),
        (b"[router]\nport = 1\0\n", ":2: port: no TOML: "),
    ],
)
def test_files_of_other_encodings(folder: Path, content: bytes, said: str):
    (folder / "fleet.toml").write_bytes(content)
    done = CliRunner().invoke(cli, ["config", "check", "fleet.toml"])
    assert done.exit_code == 2
    assert done.output.startswith(f"fleet.toml{said}") and done.output.endswith(")\n")


def test_of_very_many_mistakes_the_first_are_told(folder: Path):
    (folder / "fleet.toml").write_text("".join(f"x{n} = 1\n" for n in range(2000)))
    done = CliRunner().invoke(cli, ["config", "check", "fleet.toml"])
    lines = done.output.splitlines()
    assert len(lines) == 101 and any(line.endswith("(correct these first)") for line in lines)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda file: None, "No such file or directory (name a TOML file that can be read)"),
        (lambda file: file.mkdir(), "Is a directory (name a TOML file that can be read)"),
        (lambda file: file.symlink_to(file), "Too many levels of symbolic links ("),
        (lambda file: file.symlink_to("/dev/zero"), "has more than 1048576 bytes ("),
        (lambda file: (file.touch(), os.truncate(file, 1 << 30)), "has more than 1048576 bytes ("),
    ],
)
def test_what_is_no_file_with_a_configuration(folder: Path, make: Callable, said: str):
    make(folder / "fleet.toml")
    done = CliRunner().invoke(cli, ["config", "check", "fleet.toml"])
    assert done.exit_code == 2
    assert done.output.startswith(f"fleet.toml: {said}"), done.output


def test_a_good_file_is_counted(folder: Path):
    (folder / "fleet.toml").write_text("[[pool]]\ncount = 2\n[[pool]]\n")
    done = CliRunner().invoke(cli, ["config", "check", "fleet.toml"])
    assert (done.exit_code, done.output) == (0, "fleet.toml: ok, 3 engines in 2 pools\n")
    (folder / "empty.toml").touch()
    done = CliRunner().invoke(cli, ["config", "check", "empty.toml"])
    assert (done.exit_code, done.output) == (0, "empty.toml: ok, 2 engines in 1 pool\n")


def test_paths_are_relative_to_the_file(folder: Path, monkeypatch: pytest.MonkeyPatch):
    (folder / "keys.txt").write_text("secret-of-a-client\n")
    (folder / "fleet.toml").write_text('[keys]\nfile = "keys.txt"\n[engine]\ndisk_dir = "tier"\n')
    (folder / "elsewhere").mkdir()
    monkeypatch.chdir("elsewhere")
    done = CliRunner().invoke(cli, ["config", "check", "../fleet.toml"])
    assert done.exit_code == 0, done.output
    done = CliRunner().invoke(cli, ["config", "show", "--changed", "--config", "../fleet.toml"])
    # Written as an absolute path, for processes in any folder.
    assert f'keys.file = "{folder / "keys.txt"}"' in done.output
    assert f'engine.disk_dir = "{folder / "tier"}"' in done.output


def test_a_strategy_file_is_tried_in_another_process(folder: Path):
    (folder / "broken.py").write_text("raise SystemExit('broken')\n")
    (folder / "fleet.toml").write_text('[router]\nstrategy = "broken.py"\n')
    done = CliRunner().invoke(cli, ["config", "check", "fleet.toml"])
    assert done.exit_code == 2
    assert done.output.startswith("fleet.toml:2: router.strategy: ")
    assert "broken.py:1: SystemExit: broken" in done.output

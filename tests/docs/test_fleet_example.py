"""The fleet's files that the pages and the examples show are good."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from click.testing import CliRunner
from test_links import ROOT

from router.cli import cli

PAGE = (ROOT / "docs" / "operations.md").read_text()
SHOWN = re.findall(r"^```toml\n(.*?)^```$", PAGE, re.S | re.M)
EXAMPLE = (ROOT / "examples" / "fleet.toml").read_text()


def test_the_page_shows_one_file():
    assert len(SHOWN) == 1


@pytest.mark.parametrize("text", [*SHOWN, EXAMPLE], ids=["the page", "the example"])
def test_a_file_that_is_shown_is_good(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str):
    monkeypatch.chdir(tmp_path)
    Path("fleet.toml").write_text(text)
    done = CliRunner().invoke(cli, ["config", "check", "fleet.toml"])
    assert (done.exit_code, done.output) == (0, "fleet.toml: ok, 3 engines in 2 pools\n")


def test_the_mistake_that_the_page_shows_is_told_so(tmp_path: Path, monkeypatch):
    (shown,) = re.findall(r"`(fleet\.toml:12: .*?)`", PAGE, re.S)
    monkeypatch.chdir(tmp_path)
    Path("fleet.toml").write_text("[[pool]]\n[[pool]]\n" + "\n" * 8 + "[pool.engine]\ntp = 0\n")
    done = CliRunner().invoke(cli, ["config", "check", "fleet.toml"])
    assert done.output == f"{' '.join(shown.split())}\n"

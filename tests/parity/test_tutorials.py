"""The numbered tutorials run in time and print what their docstrings show."""

from __future__ import annotations

import ast
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPTS = sorted((ROOT / "tutorials").glob("[0-9]*.py"))


def shown_output(script: Path) -> list[str]:
    """The last indented blocks of the docstring, after the command, without the lines that stand for more."""
    docstring = ast.get_docstring(ast.parse(script.read_text())) or ""
    _, _, rest = docstring.partition(f"    python tutorials/{script.name}\n")
    indented = "\n".join(line for line in rest.splitlines() if line.startswith("    "))
    return [line for line in textwrap.dedent(indented).splitlines() if line != "..."]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_a_tutorial_prints_what_its_docstring_shows(script: Path) -> None:
    command = [sys.executable, "-W", "error", script]
    run = subprocess.run(command, capture_output=True, text=True, timeout=100, cwd=ROOT)
    assert run.returncode == 0, run.stderr
    printed = iter(run.stdout.splitlines())
    for line in shown_output(script):
        assert line in printed, f"not printed, or not in this order: {line!r}\n{run.stdout}"
    assert len(script.read_text().splitlines()) < 120


def test_there_are_tutorials_and_each_shows_its_output() -> None:
    assert len(SCRIPTS) >= 4
    assert all(len(shown_output(script)) >= 3 for script in SCRIPTS)

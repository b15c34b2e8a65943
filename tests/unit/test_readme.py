"""Everything in README.md that can be run is run, and what it lists is there.

A code block says by its language what it is, and there is no language that nothing checks:

    python    runs on 2 gloo ranks, or as rank 0 of a fake group: ```python fake_ranks=16 node_size=8
    output    is what the python block before it prints on rank 0
    bash      make targets and torchrun lines, each with a script that exists and options that it has
    files     the package, in data-flow order
"""

from __future__ import annotations

import builtins
import contextlib
import io
import itertools
import os
import re
import shlex
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

import shardkit.errors
from shardkit import FSDPModule
from tests.support.ranks import run_ranks
from tests.unit.test_architecture import DATA_FLOW, ROOT, SIBLINGS, SOURCE_FOLDER

REPOSITORY = SOURCE_FOLDER.parent
README = REPOSITORY / "README.md"
LANGUAGES = {"python", "output", "bash", "files"}
LAUNCHER_OPTIONS = {"--nnodes", "--nproc-per-node", "--rdzv-backend", "--rdzv-endpoint", "--standalone"}


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced block: its language, the options behind it, its first line's number, its text."""

    language: str
    options: dict[str, int]
    line: int
    text: str


def blocks_of(readme: str) -> list[Block]:
    """The fenced blocks, in order."""
    blocks = []
    for match in re.finditer(r"^```(.*)\n((?s:.*?))^```$", readme, re.MULTILINE):
        language, *options = match[1].split() or [""]
        sizes = {name: int(value) for name, value in (option.split("=") for option in options)}
        blocks.append(Block(language, sizes, readme[: match.start(2)].count("\n") + 1, match[2]))
    return blocks


BLOCKS = blocks_of(README.read_text())
SNIPPETS = [index for index, block in enumerate(BLOCKS) if block.language == "python"]


def run(block: Block) -> str:
    """What the block prints on rank 0."""
    code = compile("\n" * (block.line - 1) + block.text, str(README), "exec")

    def execute(rank: int, world_size: int) -> str:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # the ranks are gloo's
        if block.options:
            dist.destroy_process_group()
            fake_ranks = block.options["fake_ranks"]
            dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=fake_ranks)
            os.environ["LOCAL_WORLD_SIZE"] = str(block.options.get("node_size", fake_ranks))
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            exec(code, {"__name__": "__main__"})
        return printed.getvalue()

    return run_ranks(execute, 1 if block.options else 2)[0]


def test_every_block_is_of_a_kind_that_is_checked() -> None:
    assert [block for block in BLOCKS if block.language not in LANGUAGES] == []
    num_fences = len(re.findall("^ *(```|~~~)", README.read_text(), re.MULTILINE))
    assert num_fences == 2 * len(BLOCKS), "a fence is indented, does not close, or is made of ~~~"
    assert {block.language for block in BLOCKS} == LANGUAGES
    follows = [before.language for before, block in itertools.pairwise(BLOCKS) if is_output(block)]
    assert BLOCKS[0].language != "output" and set(follows) == {"python"}, "output belongs behind python"


def is_output(block: Block) -> bool:
    return block.language == "output"


@pytest.mark.parametrize("index", SNIPPETS, ids=lambda index: f"line-{BLOCKS[index].line}")
def test_snippet_runs_and_prints_what_is_shown(index: int) -> None:
    following = BLOCKS[index + 1] if index + 1 < len(BLOCKS) else None
    expected = following.text if following is not None and is_output(following) else ""
    assert run(BLOCKS[index]) == expected


def commands() -> list[list[str]]:
    lines = [line for block in BLOCKS if block.language == "bash" for line in block.text.splitlines()]
    spoken = re.findall(r"`(make [^`]*)`", README.read_text())
    return [shlex.split(line, comments=True) for line in (*lines, *spoken)]


@pytest.mark.parametrize("command", commands(), ids=" ".join)
def test_command_names_what_exists(command: list[str]) -> None:
    if command[0] == "make":
        targets = re.findall(r"^([a-z]+):", (REPOSITORY / "Makefile").read_text(), re.MULTILINE)
        assert command[1] in targets
        return
    assert command[0] == "torchrun"
    script = next(word for word in command if word.endswith(".py"))
    place = command.index(script)
    known = re.findall(r'add_argument\("(--[a-z-]+)"', (REPOSITORY / script).read_text())
    assert {word for word in command[:place] if word.startswith("--")} <= LAUNCHER_OPTIONS
    assert {word for word in command[place:] if word.startswith("--")} <= set(known)


def test_the_files_are_listed_in_the_order_of_the_data_flow() -> None:
    listed = [
        line.split()[0] for block in BLOCKS if block.language == "files" for line in block.text.splitlines()
    ]
    there = {entry.name for entry in SOURCE_FOLDER.iterdir() if entry.suffix == ".py" or is_package(entry)}
    order = [*DATA_FLOW.split(), *SIBLINGS, "__init__"]
    expected = sorted(there, key=lambda name: order.index(name.removesuffix(".py")))
    assert listed == [f"{ROOT}/{name}" for name in expected]


def is_package(entry: Path) -> bool:
    return (entry / "__init__.py").exists()


def test_paths_in_the_text_exist() -> None:
    paths = re.findall(r"`((?:tests|tutorials)/[\w/.]*|\w+\.toml)`", README.read_text())
    assert paths and [path for path in paths if not (REPOSITORY / path).exists()] == []


def test_exceptions_and_methods_in_the_text_exist() -> None:
    text = README.read_text()
    for name in re.findall(r"`(\w+Error)`", text):
        assert hasattr(shardkit.errors, name) or hasattr(builtins, name), name
    for name in re.findall(r"`((?:set_|reset_|reshard|unshard)\w*)\(", text):
        assert hasattr(FSDPModule, name), name

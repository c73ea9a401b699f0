"""Every command that a page shows is run, and prints what the page shows; a comment above a block says why one is not.

A comment stands in the line before its block:

``<!-- commands: NAME -->``
    ``.ci/run`` runs the block, a whole set-up.
``<!-- run in: tests/folder/test_file.py -->``
    That file runs it: it names the page, or quotes the block.
``<!-- not run: reason -->``
    Nothing runs it.

Without one the block is run here, in a folder with a script to train, a repository and the examples; what trains is a
slow test. Python code is no command: ``.ci/docs`` runs ``{testcode}`` blocks with their ``{testoutput}``.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from ampcompat import amp

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
COMMANDS_AND_OUTPUTS = ("bash", "console", "text")
OTHER_LANGUAGES = ("python", "diff", "yaml", "mermaid")
BLOCK = re.compile(
    r"^(?:<!-- (?P<mark>[a-z ]+): (?P<value>[^\n]+) -->\n)?```(?P<language>\S*)\n(?P<text>.*?)^```$", re.M | re.S
)

#: ``train.py``: a script of apex, whatever it is called with; it overflows once, as trainings begin.
SCRIPT = """
import argparse
import torch
try:
    from apex import amp
except ImportError:
    from ampcompat import amp


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.wo = torch.nn.Linear(8, 8)

    def forward(self, x):
        return self.wo(x)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--opt-level", default="O1")
    args, _ = parser.parse_known_args()
    torch.manual_seed(0)
    model = torch.nn.Sequential()
    model.decoder = torch.nn.Sequential(Block(), Block())
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    model, optimizer = amp.initialize(model, optimizer, opt_level=args.opt_level)
    for _ in range(8):
        loss = model(torch.randn(4, 8)).float().square().sum()
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    main()
"""
PROGRAMS = {
    "ampcompat": "-m ampcompat",
    "python": "",
    "torchrun": "-m torch.distributed.run",
    "jq": '-c "import json, sys; [json.loads(line) for line in sys.stdin]"',
}


class Block(NamedTuple):
    page: str
    line: int
    mark: str
    value: str
    language: str
    text: str


def blocks_of(page):
    text = page.read_text(encoding="utf-8")
    for found in BLOCK.finditer(text):
        line = text.count("\n", 0, found.start("language")) + 1
        mark, value = found["mark"] or "", found["value"] or ""
        yield Block(page.name, line, mark, value, found["language"], found["text"])


BLOCKS = [block for page in PAGES for block in blocks_of(page)]


def shown_here(block):
    """Whether the block is a command or an output, which the generated picture and code are not."""
    return block.language in COMMANDS_AND_OUTPUTS


def problem_of(block):
    """What is wrong with the comment above a block; "" if nothing is."""
    if not shown_here(block):
        known = block.language in OTHER_LANGUAGES or block.language.startswith("{")
        return "" if known else f"a language that this test does not know: {block.language!r}"
    if block.mark == "commands":
        return "" if f".ci/readme-block {block.value}" in (ROOT / ".ci" / "run").read_text() else ".ci/run lacks it"
    if block.mark == "not run":
        return "" if len(block.value.split()) > 2 else "no reason"
    if block.mark == "run in":
        return problem_of_test(block, ROOT / block.value)
    if block.mark:
        return f"no such comment: {block.mark}"
    return "" if commands_of(block) else "an output without its command: say which test has it"


def problem_of_test(block, path):
    if not path.is_file():
        return f"{block.value} is not there"
    test = path.read_text(encoding="utf-8")
    quoted = any(line[:40] in test for line in block.text.splitlines() if len(line) >= 40)
    return "" if block.page in test or quoted else f"{block.value} neither names the page nor quotes the block"


def commands_of(block):
    """The commands of a block with what is shown below each: a list of pairs."""
    if block.language == "console":
        parts = re.split(r"^\$ ", block.text, flags=re.M)[1:]
        return [tuple(part.split("\n", 1)) for part in parts]
    starts = tuple(f"{name} " for name in PROGRAMS)
    if block.language == "text" and not block.text.startswith(starts):
        return []
    # Usage: what stands for options and arguments of the reader's own is left out.
    return [(block.text.replace("[options] ", "").replace(" ...", ""), "")]


def test_every_block_is_run_or_says_why_not():
    assert [(block.page, block.line, problem) for block in BLOCKS if (problem := problem_of(block))] == []


def test_every_comment_is_of_a_block():
    marks = re.compile(r"^<!-- (?:run in|not run|commands): ", re.M)
    for page in PAGES:
        assert len(marks.findall(page.read_text(encoding="utf-8"))) == sum(
            block.mark != "" for block in BLOCKS if block.page == page.name
        ), page.name


def takes_long(command):
    """Whether the command trains, for which torch is imported in new processes."""
    return re.search(r"\b(run|parity|multiproc)\b", command) is not None


def runs():
    """Each command once, by the first page that has it."""
    seen = set()
    for block in BLOCKS:
        if block.mark or not shown_here(block):
            continue
        for command, shown in commands_of(block):
            if (command, shown) not in seen:
                seen.add((command, shown))
                marks = [pytest.mark.slow] if takes_long(command) else []
                yield pytest.param(command, shown, id=f"{block.page}:{block.line}", marks=marks)


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "bin").mkdir()
    for name, arguments in PROGRAMS.items():
        program = tmp_path / "bin" / name
        program.write_text(f'#!/bin/sh\nexec "{sys.executable}" {arguments} "$@"\n')
        program.chmod(0o755)
    for package in ("repo", "package"):
        (tmp_path / package).mkdir()
        (tmp_path / package / "train.py").write_text(SCRIPT)
    (tmp_path / "package" / "__init__.py").touch()
    (tmp_path / "train.py").write_text(SCRIPT)
    shutil.copytree(ROOT / "docs" / "examples", tmp_path / "docs" / "examples")
    return tmp_path


@pytest.mark.parametrize(("command", "shown"), [*runs()])
def test_the_command_runs(folder, command, shown):
    path = os.pathsep.join([str(folder / "bin"), os.environ["PATH"]])
    environment = {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", command],
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    if shown:
        printed = comparable(f"{done.stdout}\n{done.stderr}")
        for part in re.split(r"^ *…$", comparable(shown), flags=re.M):
            wanted = part.strip("\n")
            assert wanted in printed
            printed = printed[printed.index(wanted) + len(wanted) :]
    else:
        assert done.returncode == 0, done.stdout + done.stderr


def comparable(text):
    """The text without figures, which differ between machines, and without the columns that they make wide."""
    without_figures = re.sub(r"\d+(?:[.,]\d+)*(?:e[+-]\d+)?", "N", text)
    return re.sub(r"[ -]{2,}", " ", without_figures).replace("\n\n", "\n").strip("\n")


def test_the_records_of_the_page_are_what_is_printed(capsys):
    """The page docs/debugging.md shows the records of ``amp.on_step``."""
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = amp.initialize(model, optimizer, opt_level="O1", verbosity=0)
    with amp.on_step(print):
        for factor in (float("inf"), 1.0):
            with amp.scale_loss(model(torch.ones(1, 2)).sum() * factor, optimizer) as scaled_loss:
                scaled_loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    (shown,) = [block.text for block in BLOCKS if block.text.startswith("StepRecord")]
    assert capsys.readouterr().out == shown

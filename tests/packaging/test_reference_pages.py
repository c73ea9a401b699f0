"""The reference pages name everything that there is: public names, commands with their options, variables."""

import argparse
import importlib
import pkgutil
import re
from pathlib import Path

import pytest

from ampcompat import cli

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
#: torch's own, and names that are no functions.
NOT_ON_THE_PAGE = {"ReduceOp", "__version__", "_amp_state"}


def read(page: str) -> str:
    return (DOCS / page).read_text(encoding="utf-8")


@pytest.mark.parametrize("module", ["amp", "tools.explain", "tools.report", "optimizers", "parallel", "testing"])
def test_the_api_page_has_every_public_name(module):
    names = importlib.import_module(f"ampcompat.{module}").__all__
    directives = r"auto(?:function|class):: (?:[\w.]+\.)?(\w+)|function:: (\w+)"
    documented = {name for found in re.findall(directives, read("api.md")) for name in found}
    wanted = {name for name in names if not {name, f"ampcompat.{module}.{name}"} & NOT_ON_THE_PAGE}
    # Called by the package itself, where a variable asks for it.
    assert wanted - documented - {"explain_as_asked", "explain_as", "report_as_asked"} == set()


def commands() -> dict[str, argparse.ArgumentParser]:
    names = [name for _, name, _ in pkgutil.iter_modules(cli.__path__) if not name.startswith("_")]
    parser = cli._parser(names, "")
    (subparsers,) = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    return dict(subparsers.choices)


def test_the_command_line_page_has_every_command():
    names = {name for _, name, _ in pkgutil.iter_modules(cli.__path__) if not name.startswith("_")}
    assert set(re.findall(r"^\| `ampcompat (\w+)", read("cli.md"), re.MULTILINE)) == names


@pytest.mark.parametrize(
    ("command", "page"),
    [
        ("run", "cli.md"),
        ("parity", "parity_tool.md"),
        ("check", "check_and_migrate.md"),
        ("migrate", "check_and_migrate.md"),
    ],
)
def test_the_page_of_a_command_has_its_options(command, page):
    shown = [action for action in commands()[command]._actions if action.help != argparse.SUPPRESS]
    options = {option for action in shown for option in action.option_strings if option[:2] == "--"}
    assert len(options) > 1
    assert {option for option in options - {"--help"} if option not in read(page)} == set()


def test_the_page_of_variables_has_every_variable():
    used = {
        name
        for path in (ROOT / "ampcompat").rglob("*.py")
        for name in re.findall(r"AMPCOMPAT_[A-Z0-9_]*[A-Z0-9]", path.read_text(encoding="utf-8"))
    }
    assert "AMPCOMPAT_DTYPE" in used
    assert set(re.findall(r"^\| `(AMPCOMPAT_\w+)", read("cli.md"), re.MULTILINE)) == used

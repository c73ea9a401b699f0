"""Where a file says that apex is to be installed: requirements, project files, environments, Dockerfiles, scripts."""

from __future__ import annotations

import fnmatch
import os
import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from ampcompat.tools.check.split_lines import lines_of

REQUIREMENTS = ("*requirements*.txt", "*requirements*.in", "*constraints*.txt")
COMMANDS = ("Dockerfile*", "*.dockerfile", "*.sh", "*.bash")
TABLES = ("setup.cfg", "pyproject.toml", "Pipfile")
ENVIRONMENTS = ("environment*.yml", "environment*.yaml")
SETUP = "setup.py"

DOWNLOAD = re.compile(r"github\.com[/:]nvidia/apex|nvidia[-_]apex", re.IGNORECASE)
APEX = re.compile(r"\bapex\b", re.IGNORECASE)
#: A requirement on apex and on nothing else, as pip and conda read one.
REQUIREMENT = re.compile(r"(?:nvidia[-_])?apex(?:\[[^\]]*\])? *(?:[=<>!~@;].*| --.*)?$", re.IGNORECASE)
#: What installs by name, up to the end of that command.
INSTALL_COMMAND = re.compile(
    r"\b(?:(?:pip3?|pipenv|conda|mamba)[ \t]+install|(?:poetry|pdm|uv)[ \t]+add)\b([^&|;]*)", re.IGNORECASE
)
HEADER = re.compile(r"\[+([^\[\]]+)\]")
#: A key before its value, as in TOML, in an INI file, and as a name or an argument in Python.
KEY = re.compile(r"(?<![\w.\"'-])([\w.\"'-]+) *=(?!=)")
QUOTED = re.compile(r"\"([^\"]*)\"|'([^']*)'")
DEPENDENCIES = re.compile(r"depend|require", re.IGNORECASE)
PACKAGE_TABLES = ("packages", "dev-packages")


class Place(NamedTuple):
    """A line, from 1, that installs apex, and the line above which a comment about it can stand."""

    line: int
    start: int


def is_manifest(path: str) -> bool:
    """Whether a file of that path may say what is to be installed."""
    name = os.path.basename(path)
    return name == SETUP or _is_requirements(path) or _is_one_of(name, (*COMMANDS, *TABLES, *ENVIRONMENTS))


def _is_requirements(path: str) -> bool:
    folder, name = os.path.split(path)
    in_folder = os.path.basename(folder) == "requirements" and name.endswith((".txt", ".in"))
    return in_folder or _is_one_of(name, REQUIREMENTS)


def _is_one_of(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def places(path: str, text: str) -> Iterator[Place]:
    """The places in a manifest where apex is installed."""
    name = os.path.basename(path)
    lines = lines_of(text)
    if _is_one_of(name, COMMANDS):
        yield from in_commands(lines)
        return
    is_table = name == SETUP or _is_one_of(name, TABLES)
    numbers = _in_tables(lines) if is_table else _in_requirements(lines)
    yield from (Place(number, number) for number in numbers)


def _installs_apex(command: str) -> bool:
    """Whether a command downloads or installs apex."""
    command = command.partition("#")[0]
    if DOWNLOAD.search(command):
        return True
    return any(APEX.search(names) for names in INSTALL_COMMAND.findall(command))


def _in_requirements(lines: Sequence[str]) -> Iterator[int]:
    for number, line in enumerate(lines, 1):
        if is_requirement(line):
            yield number


def is_requirement(line: str) -> bool:
    """Whether a line of a requirements file, or an item of an environment's list, asks for apex."""
    asked = line.strip()
    if asked.startswith("#"):
        return False
    asked = asked.partition(" #")[0].removeprefix("-e ").removeprefix("- ").strip(" \"'").rpartition("::")[2]
    return REQUIREMENT.match(asked) is not None or DOWNLOAD.search(asked) is not None


def in_commands(lines: Sequence[str]) -> Iterator[Place]:
    """Each command that installs apex, by the first of its lines that names apex."""
    for start, parts in _commands(lines):
        if _installs_apex(" ".join(parts)):
            first = next(number for number, part in enumerate(parts, start) if APEX.search(part))
            yield Place(first, start)


def _commands(lines: Sequence[str]) -> Iterator[tuple[int, list[str]]]:
    """The lines of each command, with the number of its first; a backslash goes on, and comments count as empty."""
    start = 1
    parts: list[str] = []
    for number, line in enumerate(lines, 1):
        is_comment = line.lstrip().startswith("#")
        parts.append("" if is_comment else line.rstrip().removesuffix("\\"))
        is_inside = is_comment and len(parts) > 1
        if not is_inside and (is_comment or not line.rstrip().endswith("\\")):
            yield start, parts
            start, parts = number + 1, []
    yield start, parts


def _in_tables(lines: Sequence[str]) -> Iterator[int]:
    """Lines of TOML, of an INI file or of a ``setup.py`` that have apex where dependencies are listed."""
    table = key = ""
    for number, line in enumerate(lines, 1):
        text = line.strip()
        if text.startswith(("#", ";")):
            continue
        header = HEADER.match(text) if line.startswith("[") else None
        if header is not None:
            table, key = header[1].strip(), ""
            continue
        first, *rest = KEY.split(text)
        pairs = [(key, first), *zip(rest[::2], rest[1::2], strict=True)]
        key = pairs[-1][0]
        if any(_asks(table, *pair) for pair in pairs):
            yield number


def _asks(table: str, key: str, value: str) -> bool:
    """Whether a value, or its key where keys are packages, asks for apex."""
    if not _lists_packages(table):
        return DEPENDENCIES.search(key) is not None and _has_requirement(value)
    return REQUIREMENT.match(key.strip("\"'")) is not None or _has_requirement(value)


def _lists_packages(table: str) -> bool:
    """Whether the keys of a table are packages, or names of groups of packages."""
    return table in PACKAGE_TABLES or DEPENDENCIES.search(table) is not None


def _has_requirement(value: str) -> bool:
    quoted = [first or second for first, second in QUOTED.findall(value)]
    return any(REQUIREMENT.match(text) or DOWNLOAD.search(text) for text in quoted or [value.strip()])

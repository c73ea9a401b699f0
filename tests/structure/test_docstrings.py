"""Docstrings begin with what the thing does, not with a question word."""

import ast
from pathlib import Path

import pytest

import ampcompat

PACKAGE = Path(ampcompat.__file__).parent
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


@pytest.fixture(scope="module")
def docstrings():
    """Every docstring of the package, with its file."""
    return [
        (path.relative_to(PACKAGE), ast.get_docstring(node) or "")
        for path in sorted(PACKAGE.rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, DOCUMENTED)
    ]


@pytest.mark.parametrize("word", ["What", "Who", "Where"])
def test_no_docstring_begins_with_a_question_word(docstrings, word):
    assert [f"{path}: {text.splitlines()[0]}" for path, text in docstrings if text.startswith(f"{word} ")] == []

"""Scripts and trees in the style of public repositories, which other tests train: nothing in them is a mistake."""

import sys
from pathlib import Path

TESTS = Path(__file__).parents[2]
FOLDERS = ("legacy/scripts", "tools/migrate/scripts", "integrations/scripts")


def scripts():
    """The text of each script, by its name."""
    paths = [path for folder in FOLDERS for path in sorted((TESTS / folder).glob("*.py"))]
    return {path.name: path.read_text("utf-8") for path in paths}


def trees():
    """The files of each tree, by name; a shape of a script is a tree of one file."""
    sys.path.insert(0, str(TESTS / "tools" / "migrate"))
    try:
        import shapes
    finally:
        sys.path.pop(0)
    scripts = {name: {"train.py": shapes.HEAD + code} for name, code in shapes.SHAPES.items()}
    return {**scripts, **{name: files for name, (_, files) in shapes.TREES.items()}}

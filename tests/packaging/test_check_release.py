"""What keeps a tree from being released: ``.ci/check_release.py``."""

import runpy
from pathlib import Path

import pytest

FILE = Path(__file__).parents[2] / ".ci" / "check_release.py"
CHANGES = "# Changelog\n\n## [1.2.3] - 2026-11-22\n\n### Added\n\n- A thing.\n"


@pytest.fixture(scope="module")
def problems():
    return runpy.run_path(str(FILE))["problems"]


def test_a_tree_that_agrees_with_itself(problems):
    assert problems("1.2.3", CHANGES, "v1.2.3", "") == []


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"version": "1.2.3.dev1", "tag": "v1.2.3.dev1"}, "a release is three numbers"),
        ({"tag": ""}, "the tag is '' and __version__ is '1.2.3': the tag of this tree is v1.2.3"),
        ({"tag": "v1.2.4"}, "the tag is 'v1.2.4'"),
        ({"changelog": CHANGES.replace("1.2.3", "Unreleased")}, "CHANGELOG.md begins with Unreleased"),
        ({"changelog": ""}, "CHANGELOG.md begins with no version"),
        ({"changelog": CHANGES.replace(" - 2026-11-22", "")}, "CHANGELOG.md has no date for 1.2.3"),
        ({"changed": " M README.md\n?? new.py"}, "files differ from the commit: README.md, new.py"),
    ],
)
def test_what_does_not_agree_is_said(problems, given, said):
    found = problems(**{"version": "1.2.3", "changelog": CHANGES, "tag": "v1.2.3", "changed": ""} | given)
    assert any(said in one for one in found)

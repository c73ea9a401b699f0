"""What ``pip wheel`` builds: the package, and metadata that an index can show."""

import email
import re
import zipfile
from pathlib import Path

import pytest
from python_process import run_python

import ampcompat

ROOT = Path(__file__).parents[2]
# An inline link or image, or the definition of a reference: its target.
LINK = re.compile(r"\]\(\s*<?([^)\s>]+)|^\s*\[[^\]]+\]:\s*(\S+)|(?:href|src)=[\"']([^\"']+)", re.MULTILINE)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> zipfile.ZipFile:
    folder = tmp_path_factory.mktemp("wheel")
    # Without isolation pip asks no index for hatchling.
    done = run_python(
        ["-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", folder, ROOT],
        fresh=True,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    (file,) = folder.glob("*.whl")
    with zipfile.ZipFile(file) as opened:
        yield opened


@pytest.fixture(scope="module")
def metadata(wheel) -> email.message.Message:
    return email.message_from_bytes(wheel.read(f"ampcompat-{ampcompat.__version__}.dist-info/METADATA"))


def test_the_license_is_an_expression_and_a_file(metadata, wheel):
    assert metadata["License-Expression"] == "BSD-3-Clause"
    assert metadata["License"] is None
    assert metadata.get_all("License-File") == ["LICENSE"]
    assert not [name for name in metadata.get_all("Classifier") if name.startswith("License")]
    text = wheel.read(f"ampcompat-{ampcompat.__version__}.dist-info/licenses/LICENSE").decode()
    assert text == (ROOT / "LICENSE").read_text()


def test_every_link_works_on_an_index(metadata):
    assert metadata["Description-Content-Type"] == "text/markdown"
    text = metadata.get_payload()
    assert text.startswith("# ampcompat\n")
    targets = ["".join(found) for found in LINK.findall(text)]
    assert [target for target in targets if not target.startswith(("https://", "#"))] == []
    assert LINK.findall("[page](docs/index.md)"), "the pattern finds a link"


def test_no_address_is_named_that_does_not_exist(metadata):
    """No public one is known yet; give this test those that are."""
    assert metadata.get_all("Project-URL", []) == []
    assert metadata["Home-page"] is None


def test_it_holds_the_package_alone(wheel):
    in_tree = {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "ampcompat").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    packed = {name for name in wheel.namelist() if ".dist-info/" not in name or name.startswith("ampcompat/")}
    assert packed == in_tree

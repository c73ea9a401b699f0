"""What the project says of itself in several places says the same in all of them."""

import ast
import json
import re
import runpy
import subprocess
from pathlib import Path

import pytest
from packaging.version import Version

import ampcompat

ROOT = Path(__file__).parents[2]
CHANGES = {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}  # Keep a Changelog's
PYPROJECT = (ROOT / "pyproject.toml").read_text()


def pinned(constraints, name="torch"):
    return re.search(rf"^{name}==([\d.]+)", (ROOT / ".ci" / constraints).read_text(), re.MULTILINE)[1]


def test_the_torch_floor_is_the_oldest_torch_that_is_tested():
    floor = re.search(r'"torch>=([\d.]+)"', PYPROJECT)[1]
    assert pinned("constraints-oldest.txt").rpartition(".")[0] == floor
    assert f"({floor} or newer" in (ROOT / "README.md").read_text()


def test_torch_has_no_upper_bound():
    assert re.search(r'dependencies = \["torch>=[\d.]+", "packaging>=[\d.]+"\]', PYPROJECT)


def test_the_pinned_torch_is_the_tested_one():
    assert pinned("constraints.txt") == "2.13.0"


def test_the_oldest_torch_is_tested_by_the_checks_before_a_merge():
    assert ".ci/old-torch" in (ROOT / ".ci" / "run").read_text()
    assert "constraints-oldest.txt" in (ROOT / ".ci" / "old-torch").read_text()


def test_the_wheel_holds_the_package_only():
    assert 'packages = ["ampcompat"]' in PYPROJECT
    assert (Path(ampcompat.__file__).parent / "py.typed").is_file()


def test_the_version_comes_from_one_place():
    assert 'path = "ampcompat/__init__.py"' in PYPROJECT
    assert re.fullmatch(r"\d+\.\d+\.\d+(\.?(dev|a|b|rc)\d+)?", ampcompat.__version__)


def test_every_release_and_the_version_itself_are_in_the_changelog():
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    heads = re.findall(r"^## \[(.+?)\](?: - (\d{4}-\d\d-\d\d))?$", text, re.MULTILINE)
    assert len(heads) == len(re.findall("^## ", text, re.MULTILINE))
    versions = [version for version, _ in heads]
    # The version in the tree is the next release until it is dated.
    assert versions[0] == "Unreleased" or ampcompat.__version__ == versions[0]
    assert all(date for version, date in heads if version != "Unreleased")
    released = [Version(version) for version in versions if version != "Unreleased"]
    assert released == sorted(released, reverse=True)
    assert all(version <= Version(ampcompat.__version__) for version in released)
    assert set(re.findall(r"^### (.+)$", text, re.MULTILINE)) <= CHANGES


def test_the_architecture_page_names_every_file_and_no_other():
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    named, folders, folder = [], [], ""
    for line in page[page.index("## The rooms") : page.index("Three rules hold")].splitlines():
        if line.startswith("### "):
            heading = re.search("`ampcompat/(.*?)`", line)
            folder = heading[1] if heading else ""
        first = line.split("|")[1] if line.startswith("|") else ""
        named += [folder + name for name in re.findall(r"`([\w/]+\.py)`", first)]
        folders += re.findall(r"`([\w/]+)/`", first)
    package = Path(ampcompat.__file__).parent
    files = {path.relative_to(package).as_posix() for path in package.rglob("*.py")}
    inits = {name for name in files if name.endswith("__init__.py") and name != "_shim/apex/__init__.py"}
    assert sorted(named) == sorted(files - inits)
    # A package that is nothing but its names, and packages of such.
    alone = {name.split("/")[0] for name in inits} - {name.split("/")[0] for name in named} - {"__init__.py"}
    assert sorted(folders) == sorted(alone)


@pytest.mark.parametrize("name", ["main-job", "tests"])
def test_readme_commands_can_be_taken_out_of_it(name):
    block = subprocess.run([ROOT / ".ci" / "readme-block", name], capture_output=True, text=True, check=True).stdout
    lines = block.splitlines()
    assert lines[0] == "python3 -m venv .venv"
    assert lines[1] == '.venv/bin/pip install -c .ci/constraints.txt -e ".[test]"'
    assert len(lines) == 3


def test_a_block_that_readme_lacks_is_an_error():
    assert subprocess.run([ROOT / ".ci" / "readme-block", "no-such-block"], capture_output=True).returncode != 0


def slugs(page):
    """The anchors of a page's headings, as the site makes them."""
    heads = re.findall(r"^#{1,3} (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", head.lower()).strip().replace(" ", "-") for head in heads}


def test_links_of_the_readme_are_absolute_and_lead_to_a_file():
    links = re.findall(r"\]\(([^)]+)\)", (ROOT / "README.md").read_text())
    assert len(links) > 10
    for link in links:
        page, _, anchor = link.partition("#")
        site, file = re.fullmatch(r"https://ampcompat\.readthedocs\.io/en/latest/([\w/]*)(\.html)?", page), None
        if site:
            file = ROOT / "docs" / f"{site[1] or 'index'}.md"
        assert file is None or file.is_file(), link
        assert file or link.startswith("https://creativecommons.org/"), link
        assert not anchor or anchor in slugs(file), link


def test_the_divergences_page_is_what_the_file_says():
    generator = runpy.run_path(str(ROOT / "docs" / "divergences.py"))
    assert (ROOT / "docs" / "divergences.md").read_text() == generator["page"]()


def test_every_divergence_has_its_own_name():
    entries = json.loads((ROOT / "docs" / "divergences.json").read_text())
    assert len({entry["id"] for entry in entries}) == len(entries)
    assert all(entry[field] for entry in entries for field in ("id", "area", "apex", "ampcompat", "why"))


#: Types that torch has under no public name, for annotations and isinstance.
TYPES = (
    "torch._ops.OpOverload",
    "torch.nn.modules.batchnorm._BatchNorm",
    "torch.utils._python_dispatch.TorchDispatchMode",
)


def names_in(node):
    if isinstance(node, ast.ImportFrom):
        return [f"{node.module}.{alias.name}" for alias in node.names]
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    parts = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return [".".join([node.id, *reversed(parts)])] if parts and isinstance(node, ast.Name) else []


def test_private_names_of_torch_are_used_in_one_package_only():
    found = []
    for path in sorted((ROOT / "ampcompat").rglob("*.py")):
        if "_torch" not in path.parts:
            for node in ast.walk(ast.parse(path.read_text())):
                found += [(path.name, name) for name in names_in(node) if re.match(r"torch\.(.*\.)?_[a-z]", name)]
    private = {(path, name) for path, name in found if not any(known.startswith(name) for known in TYPES)}
    assert private == set()

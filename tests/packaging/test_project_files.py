"""What the project says of itself in several places says the same in all of them."""

import ast
import json
import re
import runpy
import subprocess
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

import ampcompat

ROOT = Path(__file__).parents[2]
CHANGES = {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}  # Keep a Changelog's


def pinned(constraints: str) -> str:
    return re.search(r"^torch==([\d.]+)", (ROOT / ".ci" / constraints).read_text(), re.MULTILINE)[1]


@pytest.fixture(scope="module")
def project() -> dict:
    return pytest.importorskip("tomllib").loads((ROOT / "pyproject.toml").read_text())["project"]


@pytest.fixture(scope="module")
def matrix() -> dict[str, list[str]]:
    """The lists of versions in the workflow that runs the tests."""
    text = (ROOT / ".github" / "workflows" / "tests.yml").read_text()
    return {
        name: json.loads(values) for name, values in re.findall(r"^ +(python|torch): (\[.*\])$", text, re.MULTILINE)
    }


def test_the_torch_floor_is_the_oldest_tested(project):
    """There is no upper limit."""
    (torch,) = [need.specifier for need in map(Requirement, project["dependencies"]) if need.name == "torch"]
    oldest = Version(pinned("constraints-oldest.txt"))
    assert [(one.operator, Version(one.version).release) for one in torch] == [(">=", oldest.release[:2])]
    assert torch.contains("99.0")
    assert f"torch (2.{oldest.minor} or newer" in (ROOT / "README.md").read_text()


def test_the_matrix_has_every_torch_that_is_pinned(matrix):
    assert matrix["torch"] == [pinned("constraints-oldest.txt"), pinned("constraints.txt"), "newest"]


def test_each_python_has_one_pin_of_what_the_tests_need(project, matrix):
    lines = (ROOT / ".ci" / "constraints.txt").read_text().splitlines()
    pins = [Requirement(line) for line in lines if line and not line.startswith("#")]
    needed = {Requirement(one).name for one in [*project["dependencies"], *project["optional-dependencies"]["test"]]}
    for python in matrix["python"]:
        names = [pin.name for pin in pins if not pin.marker or pin.marker.evaluate({"python_version": python})]
        assert needed <= set(names), python
        assert len(names) == len(set(names)), python


def test_the_classifiers_name_the_pythons_of_the_matrix(project, matrix):
    named = [c.rpartition(" ")[2] for c in project["classifiers"] if re.fullmatch(r".* :: Python :: 3\.\d+", c)]
    assert named == matrix["python"]
    assert project["requires-python"] == f">={named[0]}"


def test_the_matrix_and_nox_run_the_same_cells(matrix):
    """nox is not installed here: the table is read from its file."""
    tree = ast.parse((ROOT / ".ci" / "noxfile.py").read_text())
    (table,) = [n.value for n in tree.body if isinstance(n, ast.Assign) and ast.unparse(n.targets[0]) == "PYTHONS"]
    by_torch = dict(zip(matrix["torch"], map(ast.literal_eval, table.values), strict=True))
    text = (ROOT / ".github" / "workflows" / "tests.yml").read_text()
    excluded = set(re.findall(r'- \{python: "(.*)", torch: "(.*)"\}', text))
    assert {(p, t) for t, pythons in by_torch.items() for p in [*pythons, matrix["python"][0]]} == {
        (p, t) for p in matrix["python"] for t in matrix["torch"] if (p, t) not in excluded
    }


def test_steps_of_the_workflows_are_scripts_that_exist():
    for workflow in sorted((ROOT / ".github" / "workflows").glob("*.yml")):
        for script in re.findall(r"\.ci/[\w-]+(?:\.\w+)?", workflow.read_text()):
            assert (ROOT / script).is_file(), (workflow.name, script)


def test_pre_commit_runs_the_pinned_tools():
    pins = dict(re.findall(r"^(\S+)==(\S+)$", (ROOT / ".ci" / "constraints.txt").read_text(), re.MULTILINE))
    hooks = re.findall(r'\["([\w-]+)==(.*)"\]', (ROOT / ".pre-commit-config.yaml").read_text())
    assert ("ruff", pins["ruff"]) in hooks
    assert [(name, version) for name, version in hooks if pins.get(name, version) != version] == []


def test_the_version_is_one_that_can_be_released():
    assert str(Version(ampcompat.__version__)) == ampcompat.__version__


def test_the_changelog_has_every_release():
    """The newest section is [Unreleased], or the section of the version in the tree."""
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


def before_colons(items: str) -> str:
    """What stands before the first colon of each item of a list."""
    return " ".join(item.partition("`: ")[0] + "`" for item in re.split("^- ", items, flags=re.MULTILINE)[1:])


def test_the_architecture_page_names_every_package_and_no_other():
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    section = page[page.index("### Around the core") : page.index("Three rules hold")]
    named = re.findall(r"`([\w/]+(?:/|\.py))`", before_colons(section))
    package = Path(ampcompat.__file__).parent
    there = [f"{folder.relative_to(package)}/" for folder in package.iterdir() if (folder / "__init__.py").exists()]
    there += [f"tools/{folder.name}/" for folder in (package / "tools").iterdir() if (folder / "__init__.py").exists()]
    there += [path.relative_to(package).as_posix() for path in [*package.glob("*.py"), *package.glob("tools/*.py")]]
    without_a_line = {"__init__.py", "tools/__init__.py", "amp/", "tools/"}
    assert sorted(named) == sorted({*there, "_shim/"} - without_a_line)


def test_the_architecture_page_names_every_module_of_the_core():
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    section = page[page.index("### `ampcompat/amp/`") : page.index("### Around the core")]
    named = re.findall(r"`([\w/]+\.py)`", before_colons(section))
    core = Path(ampcompat.__file__).parent / "amp"
    there = {path.relative_to(core).as_posix() for path in core.rglob("*.py")}
    assert sorted(named) == sorted(path for path in there if not path.endswith("__init__.py"))


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


def test_links_of_the_readme_lead_to_files_of_the_repository():
    links = re.findall(r"\]\(([^)]+)\)", (ROOT / "README.md").read_text())
    assert links
    for link in links:
        page, _, anchor = link.partition("#")
        if page.startswith("https://creativecommons.org/"):
            continue
        assert (ROOT / page).is_file(), link
        assert not anchor or anchor in slugs(ROOT / page), link


def test_pages_that_moved_lead_to_pages():
    """Sphinx does not look at the targets of additional pages."""
    moved = runpy.run_path(str(ROOT / "docs" / "conf.py"))["MOVED"]
    assert moved
    for old, new in moved.items():
        page, _, anchor = new.partition("#")
        assert not (ROOT / "docs" / f"{old}.md").exists(), old
        assert not anchor or anchor in slugs(ROOT / "docs" / f"{page}.md"), (old, new)


#: Names of pages, in messages and docstrings.
PAGE = re.compile(r"docs/([\w/-]+\.md)")


def test_pages_that_the_package_names_are_there():
    files = sorted((ROOT / "ampcompat").rglob("*.py"))
    named = [(path.name, page) for path in files for page in PAGE.findall(path.read_text(encoding="utf-8"))]
    assert named
    assert [(file, page) for file, page in named if not (ROOT / "docs" / page).is_file()] == []


def test_the_divergences_page_is_what_the_file_says():
    generator = runpy.run_path(str(ROOT / "docs" / "divergences.py"))
    assert (ROOT / "docs" / "divergences.md").read_text() == generator["page"]()


def test_every_divergence_has_its_own_name():
    entries = json.loads((ROOT / "docs" / "divergences.json").read_text())
    assert len({entry["id"] for entry in entries}) == len(entries)
    numbers = [entry["number"] for entry in entries]  # numbers that were taken back stay free: messages cite them
    assert numbers == sorted(set(numbers))
    assert all(re.fullmatch(r"D\d\d", number) for number in numbers)
    assert all(entry[field] for entry in entries for field in ("id", "area", "apex", "ampcompat", "why"))


def texts_of_the_package():
    """Every string in the sources; what f-strings format is {}."""
    for path in (ROOT / "ampcompat").rglob("*.py"):
        parts = set()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):  # parents first
            if isinstance(node, ast.JoinedStr):
                parts.update(node.values)
                yield "".join(part.value if isinstance(part, ast.Constant) else "{}" for part in node.values)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in parts:
                yield node.value


def test_messages_cite_the_divergences_that_they_concern():
    entries = {entry["number"]: entry for entry in json.loads((ROOT / "docs" / "divergences.json").read_text())}
    texts = list(texts_of_the_package())
    cited = {number for text in texts for number in re.findall(r"\bD\d\d\b", text)}
    assert cited == {number for number, entry in entries.items() if entry.get("messages")}
    for number, entry in entries.items():
        for words in entry.get("messages", ()):
            found = [text for text in texts if words in text]
            assert found, (number, words)
            assert all(re.search(rf"[( ]{number}\)", text) for text in found), found


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
        # native_amp.py is copied into repositories that do not have the package.
        if "_torch" not in path.parts and path.name != "native_amp.py":
            for node in ast.walk(ast.parse(path.read_text())):
                found += [(path.name, name) for name in names_in(node) if re.match(r"torch\.(.*\.)?_[a-z]", name)]
    private = {(path, name) for path, name in found if not any(known.startswith(name) for known in TYPES)}
    assert private == set()

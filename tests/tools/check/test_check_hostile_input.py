"""The check reads repositories that are not trusted: any bytes, any file, any link; it never runs what it reads."""

import json
import os

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ampcompat.cli import main
from ampcompat.tools.check import files, scan, scan_source

TRAIN = b"from apex import amp\nm, o = amp.initialize(m, o)\nwith amp.scale_loss(l, o) as s:\n    s.backward()\n"
BYTES = st.one_of(
    st.binary(max_size=300),
    st.integers(0, len(TRAIN)).map(lambda n: TRAIN[:n]),
    st.tuples(st.integers(0, len(TRAIN)), st.binary(max_size=4)).map(lambda t: TRAIN[: t[0]] + t[1] + TRAIN[t[0] :]),
    st.text(max_size=200).map(lambda t: t.encode("utf-8", "surrogatepass")),
)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=BYTES)
def test_arbitrary_bytes_give_a_report(tmp_path, data):
    (tmp_path / "a.py").write_bytes(data)
    report = scan(tmp_path)
    assert report.files == 1
    json.dumps(report.as_dict())


DEEP = {
    "parentheses": "(" * 50_000,
    "closed parentheses": "(" * 150 + "1" + ")" * 150,
    "unary minus": "x = " + "-" * 100_000 + "1",
    "attributes": "x = a" + ".b" * 50_000,
    "sums": "x = 1" + "+1" * 50_000,
    "calls": "x = f" + "()" * 20_000,
    "blocks": "".join(" " * i + "if x:\n" for i in range(150)),
    "elif": "if x:\n    pass\n" + "elif x:\n    pass\n" * 5_000,
    "huge number": "x = " + "9" * 100_000,
    "null": "from apex import amp\n\0",
    "python 2": "from apex import amp\nprint 'loss', loss\n",
    "form feeds": "\f\f\ffrom apex import amp\f",
    "lone surrogate": "x = '\\ud800'\nfrom apex import amp\n",
}


@pytest.mark.parametrize("name", sorted(DEEP))
def test_deep_and_odd_sources_give_findings(name):
    assert {finding.kind for finding in scan_source(DEEP[name])} <= {"file", "symbol"}


@pytest.mark.parametrize(
    "code",
    [
        "a.level = a.level\namp.initialize(m, o, opt_level=a.level)\n",
        "m = n\nn = m\namp.initialize(m, o)\n",
        "    f()\ndef f():\n" + "    f()\n" * 5_000,
        "torch.nn.utils.clip_grad_norm_(p, 1)\np = q\nq = p\n",
    ],
)
def test_names_and_functions_in_circles(code):
    assert [finding for finding in scan_source(TRAIN.decode() + code) if finding.kind != "symbol"] == []


@pytest.mark.parametrize("rest", ["print 'loss'\n", "x = (", "  x = 1", "<<<<<<< HEAD\nlr = 1\n>>>>>>> theirs\n"])
def test_a_file_that_python_3_cannot_parse(rest):
    """It is an error if it uses apex, and the line is named."""
    (finding,) = scan_source(f"from apex import amp\n{rest}")
    assert (finding.name, finding.level, finding.line) == ("unparsable", "error", 2)
    assert finding.note.startswith("Python 3 cannot parse the file (")
    assert finding.note.endswith("; it imports apex - correct it first, or port it (2to3) if it is Python 2")
    (finding,) = scan_source(rest)
    assert (finding.level, finding.line) == ("error", 1)
    assert "apex" not in finding.note


@pytest.mark.parametrize("charset", ["latin-1", "cp1252", "gbk", "euc-jp"])
def test_declared_charsets_are_read(tmp_path, charset):
    text = f"# -*- coding: {charset} -*-\nfrom apex import amp  # " + ("中" if charset[0] in "ge" else "é") + "\n"
    (tmp_path / "a.py").write_bytes(text.encode(charset))
    assert [f.name for f in scan(tmp_path).findings] == ["apex.amp"]


@pytest.mark.parametrize("charset", ["rot13", "zlib", "no such", "../../x", "\xff"])
def test_odd_charsets_are_findings_not_codecs(tmp_path, charset):
    (tmp_path / "a.py").write_bytes(f"# coding: {charset}\n".encode("latin-1") + b"\xff\n")
    assert [f.name for f in scan(tmp_path).findings] == ["unreadable"]


def test_links_pipes_and_huge_files_are_not_read(tmp_path, monkeypatch):
    outside = tmp_path / "outside"
    inside = tmp_path / "inside"
    outside.mkdir()
    inside.mkdir()
    (outside / "secret.py").write_text("from apex import amp\n")
    (inside / "link.py").symlink_to(outside / "secret.py")
    (inside / "folder").symlink_to(outside)
    (inside / "loop").symlink_to(inside)
    (inside / "self.py").symlink_to(inside / "self.py")
    (inside / "dangling.py").symlink_to("nowhere")
    os.mkfifo(inside / "pipe.py")
    (inside / "folder.py").mkdir()
    monkeypatch.setattr(files, "LARGEST", 1000)
    (inside / "huge.py").write_text("from apex import amp\n" * 100)
    assert [(f.path, f.name) for f in scan(inside).findings] == [("huge.py", "unreadable"), ("pipe.py", "unreadable")]


def test_a_file_that_cannot_be_opened_is_a_finding(tmp_path, monkeypatch):
    (tmp_path / "a.py").write_text("from apex import amp\n")

    def refuse(*args, **kwargs):
        raise PermissionError(13, "Permission denied")

    # Permission bits do not stop root, which may run the tests.
    monkeypatch.setattr(files.os, "open", refuse)
    (finding,) = scan(tmp_path).findings
    assert finding.name == "unreadable"
    assert "Permission denied" in finding.note


def test_nothing_that_is_read_is_run(tmp_path):
    mark = tmp_path / "ran"
    evil = f"import os\nopen({str(mark)!r}, 'w').write('x')\nfrom apex import amp\n"
    for name in ("apex.py", "torch.py", "setup.py", "conftest.py", "sitecustomize.py", "ampcompat.py"):
        (tmp_path / name).write_text(evil)
    scan(tmp_path)
    assert not mark.exists()


def run(capsys, *words):
    """The exit status of ``ampcompat check *words``, and what it printed."""
    status = main(["check", *map(str, words)])
    return status, capsys.readouterr()


def test_exit_status_and_output(tmp_path, capsys):
    file = tmp_path / "a.py"
    file.write_text("from apex import amp\n")
    status, shown = run(capsys, str(tmp_path))
    assert status == 0
    assert shown.out == "1 file: 1 works\n"
    file.write_text("import apex.RNN\n")
    status, shown = run(capsys, str(file), "--format", "json")
    assert status == 1
    assert json.loads(shown.out)["findings"][0]["name"] == "apex.RNN"


@pytest.mark.parametrize("path", ["missing", "null\0byte", "x" * 5000])
def test_a_path_that_is_none_is_bad_usage(tmp_path, capsys, path):
    status, shown = run(capsys, str(tmp_path / path))
    assert status == 2
    assert shown.err.startswith("ampcompat check: ")
    assert shown.out == ""


def test_terminal_escapes_in_names_are_shown_not_obeyed(tmp_path, capsys):
    (tmp_path / "\x1b[31mred\n.py").write_text("from apex import amp\n")
    (tmp_path / os.fsdecode(b"\xff.py")).write_text("from apex import amp\n")
    status, shown = run(capsys, str(tmp_path), "--all")
    assert status == 0
    assert "\x1b" not in shown.out
    assert "\\x1b[31mred\\n.py:1:1: " in shown.out


@pytest.mark.parametrize(
    "text", ["pip install ", "[", "a\\\n", "=", " " * 20, "- ", "apex[", "#", "'", "\n", "from import\n", "except a, "]
)
def test_texts_that_regular_expressions_might_stumble_over(text, tmp_path):
    """A quarter of a megabyte in one line, or of nothing: minutes where an expression goes back and forth."""
    manifests = ("requirements.txt", "setup.cfg", "build.sh", "environment.yml")
    for name in manifests:
        (tmp_path / name).write_text(text * (2**18 // len(text)))
    (tmp_path / "a.py").write_text("from apex import amp\n" + text * (2**16 // len(text)) + "(")
    assert scan(tmp_path).files == len(manifests) + 1

"""A large tree costs what its apex files cost: the others are parsed only where a trap could be in them."""

import ast
import weakref

from ampcompat.check import scan, source

TRAP = "import torch\ns = s.masked_fill(mask, -1e9)\n"


def test_files_without_apex_are_not_parsed_unless_amp_is_used_somewhere(tmp_path, monkeypatch):
    for i in range(5):
        (tmp_path / f"m{i}.py").write_text(TRAP)
    parsed = []
    real = ast.parse
    monkeypatch.setattr(ast, "parse", lambda code, *args, **kwargs: parsed.append(code) or real(code, *args, **kwargs))
    report = scan(tmp_path)
    assert (report.files, report.findings, parsed) == (5, [], [])
    (tmp_path / "train.py").write_text("from apex import amp\nm, o = amp.initialize(m, o)\n")
    assert [f.path for f in scan(tmp_path).findings if f.kind == "trap"] == [f"m{i}.py" for i in range(5)]


def test_trees_do_not_pile_up(tmp_path, monkeypatch):
    """All of them alive at once take the garbage collector longer than the parser takes."""
    alive, most, real = weakref.WeakSet(), [0], source.Source.__init__

    def counted(self, path, code):
        real(self, path, code)
        alive.add(self)
        most[0] = max(most[0], len(alive))

    monkeypatch.setattr(source.Source, "__init__", counted)
    for i in range(20):
        (tmp_path / f"m{i}.py").write_text(TRAP)
    (tmp_path / "train.py").write_text("from apex import amp\nm, o = amp.initialize(m, o)\n")
    scan(tmp_path)
    assert most[0] < 10

"""``apex`` as another name of ampcompat: the same objects, honest probes, and no trace after the undo."""

import importlib
import importlib.metadata
import importlib.util
import pickle
import re
import subprocess
import sys
import textwrap
import types
from pathlib import Path

import pytest
import torch

import ampcompat
from ampcompat._state import state
from ampcompat.alias import ROOTS, install_as_apex, uninstall_as_apex

ROOT = Path(__file__).parents[2]


def aliased_names():
    return {name for name in sys.modules if name.partition(".")[0] in ROOTS}


@pytest.fixture
def alias():
    assert install_as_apex()
    yield
    uninstall_as_apex()


def run(source):
    """Run ``source`` with the alias in force and return its names."""
    names = {}
    exec(textwrap.dedent(source), names)
    return types.SimpleNamespace(**{k: v for k, v in names.items() if not k.startswith("__")})


def test_every_form_of_import_gives_the_same_objects(alias):
    seen = run(
        """
        import apex
        import apex.amp as amp1
        from apex import amp
        from apex import amp as apex_amp
        from apex.amp import initialize, scale_loss, half_function
        from apex.amp.frontend import Properties
        """
    )
    import ampcompat.amp.frontend

    assert seen.apex is ampcompat
    assert seen.amp is seen.amp1 is seen.apex_amp is ampcompat.amp
    assert seen.initialize is ampcompat.amp.initialize
    assert seen.Properties is ampcompat.amp.frontend.Properties
    assert "state_dict" in seen.amp.__dict__
    assert {re.sub(r"^apex\b", "ampcompat", name) for name in aliased_names()} <= set(sys.modules)


@pytest.mark.parametrize(
    "first",
    [
        "import apex.amp._amp_state",
        "from apex.amp import _amp_state",
        "from apex.amp._amp_state import _amp_state",
        "import ampcompat.amp, apex, apex.amp._amp_state",
        "import apex.amp._amp_state as module",
    ],
)
def test_the_state_object_is_never_hidden_by_the_module_of_its_name(alias, first):
    run(first)
    seen = run(
        """
        import apex, apex.amp._amp_state
        from apex import amp
        from apex.amp import _amp_state as one
        from apex.amp._amp_state import _amp_state as two, master_params
        """
    )
    assert seen.one is seen.two is seen.amp._amp_state is ampcompat.amp._amp_state
    assert not isinstance(seen.one, types.ModuleType)
    assert isinstance(sys.modules["apex.amp._amp_state"], types.ModuleType)


def test_modules_keep_their_own_identity(alias):
    before = ampcompat.__spec__
    importlib.import_module("apex.amp.frontend")
    assert ampcompat.__spec__ is before
    assert ampcompat.amp.__spec__.name == ampcompat.amp.__name__ == "ampcompat.amp"
    assert pickle.loads(pickle.dumps(ampcompat.amp.frontend.Properties)) is ampcompat.amp.frontend.Properties
    assert pickle.loads(b"capex.amp.frontend\nProperties\n.") is ampcompat.amp.frontend.Properties


def test_probes(alias):
    assert importlib.util.find_spec("apex") is not None
    assert importlib.util.find_spec("apex.amp") is not None
    assert importlib.util.find_spec("apex.amp.scaler") is not None
    assert importlib.util.find_spec("apex.absent") is None
    assert importlib.util.find_spec("apex.amp.absent") is None
    assert importlib.metadata.version("apex") == importlib.import_module("apex").__version__ == ampcompat.__version__
    assert "apex" in {found.name for found in importlib.metadata.distributions()}
    assert importlib.metadata.version("torch").split("+")[0] == torch.__version__.split("+")[0]


@pytest.mark.parametrize(
    ("statement", "name", "words"),
    [
        ("import apex.absent", "apex.absent", "it has "),
        ("from apex.absent import x", "apex.absent", "docs/run.md"),
        ("import apex.amp.absent", "apex.amp.absent", "ampcompat, which stands in for apex"),
    ],
)
def test_what_is_missing_is_said_in_one_line(alias, statement, name, words):
    with pytest.raises(ModuleNotFoundError) as caught:
        run(statement)
    assert caught.value.name == name
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_attributes_that_are_missing_are_plain_misses(alias):
    apex = importlib.import_module("apex")
    assert not hasattr(apex, "absent")
    with pytest.raises(ImportError, match="absent"):
        run("from apex import absent")


def test_the_flatten_extension(alias):
    apex_C = importlib.import_module("apex_C")
    tensors = [torch.randn(2, 3), torch.randn(()), torch.randn(4)]
    flat = apex_C.flatten(tensors)
    assert flat.shape == (11,)
    for back, tensor in zip(apex_C.unflatten(flat, tensors), tensors):
        assert torch.equal(back, tensor)
        assert back.data_ptr() >= flat.data_ptr()


def test_installing_twice_and_undoing():
    before = list(sys.meta_path), aliased_names()
    assert install_as_apex()
    assert install_as_apex()
    assert len(sys.meta_path) == len(before[0]) + 1
    importlib.import_module("apex.amp")
    state.reset()
    assert (list(sys.meta_path), aliased_names()) == before
    uninstall_as_apex()
    with pytest.raises(importlib.metadata.PackageNotFoundError):
        importlib.metadata.version("apex")
    with pytest.raises(ModuleNotFoundError, match="^No module named 'apex'$"):
        importlib.import_module("apex")


@pytest.fixture
def installed_apex(tmp_path, monkeypatch):
    """An apex on ``sys.path`` that is not ours; with its amp, unless that directory is removed."""
    package = tmp_path / "apex"
    (package / "amp").mkdir(parents=True)
    (package / "__init__.py").write_text("WHOSE = 'real'\n")
    (package / "amp" / "__init__.py").write_text("WHOSE = 'real'\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield package
    for name in aliased_names():
        del sys.modules[name]


@pytest.mark.parametrize("imported", [False, True])
def test_a_real_apex_with_amp_is_left_alone_unless_forced(installed_apex, imported, capsys):
    if imported:
        importlib.import_module("apex")
    assert not install_as_apex()
    said = capsys.readouterr().out
    assert said.count("\n") == 1
    assert str(installed_apex) in said
    assert "force=True" in said
    assert importlib.import_module("apex.amp").WHOSE == "real"
    assert install_as_apex(force=True)
    assert (
        capsys.readouterr().out == f"ampcompat: takes the place of the apex at {installed_apex}, which has amp too.\n"
    )
    assert importlib.import_module("apex.amp") is ampcompat.amp
    uninstall_as_apex()
    assert importlib.import_module("apex.amp").WHOSE == "real"


def test_a_real_apex_without_amp_gives_way(installed_apex, capsys):
    (installed_apex / "amp" / "__init__.py").unlink()
    assert install_as_apex()
    assert capsys.readouterr().out == ""
    assert importlib.import_module("apex.amp") is ampcompat.amp


def test_a_stand_in_without_a_spec_gives_way(monkeypatch):
    monkeypatch.setitem(sys.modules, "apex", types.ModuleType("apex"))
    assert install_as_apex()
    assert importlib.import_module("apex") is ampcompat


def test_importing_ampcompat_imports_no_torch():
    source = "import sys, ampcompat; ampcompat.install_as_apex(); import apex; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", source], cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert (done.stdout, done.stderr) == ("False\n", "")


def test_lazy_names():
    assert {"amp", "install_as_apex"} <= set(dir(ampcompat))
    assert ampcompat.install_as_apex is install_as_apex
    with pytest.raises(AttributeError, match="no attribute 'absent'"):
        ampcompat.absent

"""``apex`` as another name of ampcompat: the same objects, honest probes, and no trace after the undo."""

import importlib
import importlib.metadata
import importlib.util
import math
import pickle
import re
import sys
import textwrap
import types
from pathlib import Path

import pytest
import torch
from internals import reset
from python_process import run_python

import ampcompat
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
def test_no_import_order_hides_the_state_object(alias, first):
    """``apex.amp._amp_state`` is the name of a module and of an object in it: the package shows the object."""
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


@pytest.mark.parametrize(
    ("statement", "names"),
    [
        ("from apex import amp", ["apex", "apex.amp", "apex.amp.frontend"]),
        ("import apex; apex.amp", ["apex", "apex.amp", "apex.amp.handle"]),
        ("import apex; apex.parallel", ["apex.parallel", "apex.parallel.LARC", "apex.amp"]),
        ("from apex import testing", ["apex.testing"]),
    ],
)
def test_what_is_imported_is_in_sys_modules_by_apex_s_name(statement, names):
    program = f"""
import sys, ampcompat
ampcompat.install_as_apex()
{statement}
print([name for name in {names!r} if sys.modules.get(name) is not sys.modules[name.replace("apex", "ampcompat", 1)]])
ampcompat.uninstall_as_apex()
import ampcompat.mlp
ampcompat.mlp, ampcompat.parallel
print([name for name in sys.modules if name.partition(".")[0] == "apex"])
"""
    done = run_python(["-c", program])
    assert (done.stdout, done.stderr) == ("[]\n[]\n", "")


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
    assert importlib.metadata.version("Apex") == ampcompat.__version__
    assert "apex" in {found.name for found in importlib.metadata.distributions()}
    assert importlib.metadata.version("torch").split("+")[0] == torch.__version__.split("+")[0]


@pytest.mark.parametrize(
    ("statement", "name", "words"),
    [
        ("import apex.absent", "apex.absent", "it has "),
        ("from apex.absent import x", "apex.absent", "docs/namespace.md"),
        ("import apex.amp.absent", "apex.amp.absent", "ampcompat, which replaces apex"),
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


def test_the_layer_norm_extension(alias):
    extension = importlib.import_module("fused_layer_norm_cuda")
    torch.manual_seed(0)
    shape = (3, 4)
    x = torch.randn(2, 5, *shape, requires_grad=True)
    weight, bias = torch.randn(shape, requires_grad=True), torch.randn(shape, requires_grad=True)
    grad = torch.randn_like(x)
    wanted = torch.nn.functional.layer_norm(x, shape, weight, bias, 1e-3)
    wanted.backward(grad)
    out, mean, invvar = extension.forward_affine(x, shape, weight, bias, 1e-3)
    assert torch.equal(out, wanted)
    assert (mean.shape, invvar.shape, out.requires_grad) == ((10,), (10,), False)
    got = extension.backward_affine(grad, mean, invvar, x, shape, weight, bias, 1e-3)
    assert all(torch.equal(g, t.grad) for g, t in zip(got, (x, weight, bias), strict=True))
    plain = x.detach().clone().requires_grad_()
    wanted = torch.nn.functional.layer_norm(plain, shape, eps=1e-3)
    wanted.backward(grad)
    out, mean, invvar = extension.forward(plain, torch.Size(shape), 1e-3)
    assert torch.equal(out, wanted)
    assert torch.equal(extension.backward(grad, mean, invvar, plain, shape, 1e-3), plain.grad)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_layer_norm_extension_in_half(alias, dtype):
    extension = importlib.import_module("fused_layer_norm_cuda")
    x, weight, bias = torch.randn(4, 8).to(dtype), torch.ones(8).to(dtype), torch.zeros(8).to(dtype)
    out, mean, invvar = extension.forward_affine(x, (8,), weight, bias, 1e-5)
    with torch.autocast("cpu"):
        again = extension.forward_affine(x, (8,), weight, bias, 1e-5)
    assert all(torch.equal(a, b) for a, b in zip((out, mean, invvar), again, strict=True))
    assert out.dtype == dtype
    found = extension.backward_affine(torch.ones_like(out), mean, invvar, x, (8,), weight, bias, 1e-5)
    assert [t.dtype for t in found] == [dtype] * 3


def scalar_adam(p, m, v, g, lr, beta1, beta2, eps, scale, step, inside, corrected, decay):
    """One element, in Python's floats."""
    g /= scale
    m, v = beta1 * m + (1 - beta1) * g, beta2 * v + (1 - beta2) * g * g
    denominator = math.sqrt(v + eps) if inside else math.sqrt(v) + eps
    if corrected:
        lr *= math.sqrt(1 - beta2**step) / (1 - beta1**step)
    return p - lr * (m / denominator + decay * p), m, v


@pytest.mark.parametrize("corrected", [True, False])
@pytest.mark.parametrize("mode", [0, 1])
@pytest.mark.parametrize("copied", [True, False])
def test_the_adam_extension(alias, mode, corrected, copied):
    """In the order of its callers: the param, its copy, the moments, the gradient."""
    extension = importlib.import_module("fused_adam_cuda")
    torch.manual_seed(0)
    p, m, v = torch.randn(3, 2), torch.randn(3, 2), torch.rand(3, 2)
    copy = torch.empty(3, 2, dtype=torch.float16) if copied else torch.tensor([])
    for step in (1, 2):
        g = torch.randn(3, 2)
        options = (0.01, 0.9, 0.99, 1e-4, 8.0, step)
        elements = zip(*(t.flatten().tolist() for t in (p, m, v, g)), strict=True)
        wanted = [scalar_adam(*one, *options, mode == 0, corrected, 0.1) for one in elements]
        extension.adam(p, copy, m, v, g, *options, mode, corrected, 0.1)
        for tensor, numbers in zip((p, m, v), zip(*wanted, strict=True), strict=True):
            # float32 against Python's double arithmetic
            torch.testing.assert_close(tensor.flatten(), torch.tensor(numbers), rtol=1e-6, atol=1e-7)
    if copied:
        assert torch.equal(copy, p.half())


@pytest.mark.parametrize(
    ("extension", "name"),
    [("fused_adam_cuda", "reversible_adam"), ("fused_layer_norm_cuda", "group_forward")],
)
def test_functions_that_an_extension_lacks(alias, extension, name):
    module = importlib.import_module(extension)
    assert not hasattr(module, name)
    with pytest.raises(AttributeError, match=f"{extension}.{name} - ampcompat does not supply it - use "):
        getattr(module, name)
    with pytest.raises(ImportError, match=f"cannot import name '{name}' from 'ampcompat.{extension}'"):
        run(f"from {extension} import {name}")


def test_installing_twice_and_undoing():
    before = list(sys.meta_path), aliased_names()
    assert install_as_apex()
    assert install_as_apex()
    assert len(sys.meta_path) == len(before[0]) + 1
    importlib.import_module("apex.amp")
    reset()
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
    done = run_python(["-c", source], cwd=ROOT, fresh=True)
    assert (done.stdout, done.stderr) == ("False\n", "")


def test_lazy_names():
    assert {"amp", "install_as_apex"} <= set(dir(ampcompat))
    assert ampcompat.install_as_apex is install_as_apex
    with pytest.raises(AttributeError, match="no attribute 'absent'"):
        ampcompat.absent


PKG_RESOURCES = """
import sys, warnings
warnings.simplefilter("ignore")
try:
    import pkg_resources
except ImportError:  # setuptools dropped it; pip still has a copy
    import pip._vendor.pkg_resources as pkg_resources
    sys.modules["pkg_resources"] = pkg_resources
"""


def test_pkg_resources_finds_the_alias_under_run(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(f"{PKG_RESOURCES}print(pkg_resources.require('apex>=0.1')[0].version)\n")
    done = run_python(["-m", "ampcompat", "run", str(script)], cwd=tmp_path)
    assert done.stdout.strip() == ampcompat.__version__, done.stderr[-2000:]

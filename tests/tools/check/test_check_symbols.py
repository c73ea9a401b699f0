"""Which symbols the check reports, under every way of importing them, and with which verdict."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from ampcompat._extensions import NOT_FOUND
from ampcompat.tools.check import package_names, scan, scan_source
from ampcompat.tools.check.symbols import MODULES, SYMBOLS, canonical, verdict


def symbols(code: str) -> dict[str, str]:
    return {f.name: f.level for f in scan_source(code) if f.kind == "symbol"}


@pytest.mark.parametrize(
    "code",
    [
        "from apex import amp\namp.initialize(m, o)",
        "from apex import amp as apex_amp\napex_amp.initialize(m, o)",
        "import apex\napex.amp.initialize(m, o)",
        "import apex.amp as amp\namp.initialize(m, o)",
        "import apex.amp\napex.amp.initialize(m, o)",
        "from apex.amp import initialize\ninitialize(m, o)",
        "from apex.amp import *\ninitialize(m, o)",
        "try:\n    from apex import amp\nexcept ImportError:\n    amp = None\namp.initialize(m, o)",
        "try:\n    from apex import amp\nexcept:\n    from torch.cuda import amp\namp.initialize(m, o)",
        "def main():\n    from apex import amp\n    amp.initialize(m, o)",
        "import apex\namp = apex.amp\namp.initialize(m, o)",
    ],
)
def test_every_way_of_importing_is_resolved(code):
    assert symbols(code)["apex.amp.initialize"] == "works"


@pytest.mark.parametrize(
    "code",
    [
        "from torch.cuda import amp\namp.initialize(m)",
        "from .apex import amp\namp.initialize(m)",
        "from myapex import amp\namp.initialize(m)",
        "from apexlib.amp import initialize\ninitialize(m)",
        "amp = object()\namp.initialize(m)",
        "text = 'from apex import amp'  # import apex",
    ],
)
def test_other_packages_are_left_alone(code):
    assert symbols(code) == {}


@pytest.mark.parametrize(
    ("code", "name", "level"),
    [
        ("import fused_adam_cuda\nfused_adam_cuda.adam(p)", "fused_adam_cuda.adam", "works"),
        ("import fused_adam_cuda as f\nf.maybe_adam(p)", "fused_adam_cuda.maybe_adam", "unsupported"),
        ("import importlib as i\nf = i.import_module('fused_adam_cuda')\nf.adam(p)", "fused_adam_cuda.adam", "works"),
        ("from fused_layer_norm_cuda import forward_affine", "fused_layer_norm_cuda.forward_affine", "works"),
        ("import amp_C\namp_C.multi_tensor_scale(1)", "amp_C.multi_tensor_scale", "works"),
        ("import apex_C\napex_C.flatten(x)", "apex_C.flatten", "works"),
        (
            "from apex.amp import _process_optimizer as p\np.AmpOptimizerState",
            "apex.amp._process_optimizer.AmpOptimizerState",
            "works",
        ),
        ("from apex.amp.utils import cached_cast", "apex.amp.utils.cached_cast", "works"),
        ("from apex.amp.utils import casted_args", "apex.amp.utils.casted_args", "unsupported"),
        ("from apex.amp.utils import is_fp_tensor", "apex.amp.utils.is_fp_tensor", "works"),
    ],
)
def test_extensions_and_private_modules(code, name, level):
    assert symbols(code)[name] == level


@pytest.mark.parametrize(
    "assigned",
    [
        "self.amp = amp",
        "self.amp = amp if fp16 else None",
        "self.amp: object = amp",
        "self.amp = module = amp",
        "self.fp16 = self.amp = amp",
    ],
)
def test_a_module_that_an_attribute_holds(assigned):
    code = (
        "from apex import amp\nclass Trainer:\n    def __init__(self, fp16):\n"
        f"        {assigned}\n"
        "    def step(self, loss):\n        with self.amp.scale_loss(loss, self.opt) as scaled:\n"
        "            scaled.backward()\n"
        "            clip_grad_norm_(self.model.parameters(), 1)\n"
    )
    assert symbols(code)["apex.amp.scale_loss"] == "works"
    assert "clip_of_scaled_gradients" in {f.name for f in scan_source(code)}


@pytest.mark.parametrize("method", ["def f(self, amp)", "def f(amp)"])
def test_a_parameter_named_amp_shadows_the_import(method):
    """It does so where the module assigns ``self.amp = amp``, too."""
    code = f"from apex import amp\nself.amp = amp\nclass A:\n    {method}:\n        amp.nonsense()\n"
    assert "apex.amp.nonsense" not in symbols(code)


def test_a_parameter_shadows_the_import():
    assert "apex.amp.nonsense" not in symbols("from apex import amp\ndef f(amp):\n    amp.nonsense()")
    assert "apex.amp.nonsense" in symbols("from apex import amp\ndef f(x):\n    amp.nonsense()")


@pytest.mark.parametrize("call", ["train(model, amp)", "train(model, amp=amp)", "main.train(model, amp)"])
def test_a_parameter_that_is_given_the_module(call):
    code = (
        "def main():\n    from apex import amp\n    amp.initialize(model, opt, opt_level='O2')\n"
        f"    {call}\n"
        "def train(model, amp):\n    with amp.scale_loss(loss, opt) as scaled:\n        scaled.backward()\n"
        "    clip_grad_norm_(model.module.parameters(), 1)\n"
    )
    assert symbols(code)["apex.amp.scale_loss"] == "works"
    assert "clip_of_model_params" in {f.name for f in scan_source(code)}


def test_a_name_imported_from_apex_or_torch():
    """An attribute of it is reported only if apex has it."""
    code = "try:\n    from apex import amp\nexcept ImportError:\n    from torch.cuda import amp\namp.autocast()\n"
    assert "apex.amp.autocast" not in symbols(code)


def test_private_state_is_one_symbol_however_deep_the_chain():
    found = symbols("from apex import amp\namp._amp_state.loss_scalers[0]._loss_scale = 1\nx = amp._amp_state.handle.y")
    assert found["apex.amp._amp_state.loss_scalers"] == "works"
    assert found["apex.amp._amp_state.handle"] == "works"


def test_unsupported_symbols_name_their_replacement():
    (finding,) = [f for f in scan_source("from apex.RNN import LSTM\n") if f.kind == "symbol"]
    assert (finding.level, finding.line, finding.column) == ("unsupported", 1, 1)
    assert "torch.nn.LSTM" in finding.note


def test_a_guarded_import_of_an_unsupported_module():
    """It fails, so that the script does without: neither it nor the use of its name is an error."""
    code = "try:\n    from apex.contrib.fmha import FMHA as X\nexcept ImportError:\n    X = None\n"
    assert symbols(code) == {"apex.contrib.fmha": "differs"}
    assert [f.level for f in scan_source(code + "X()\n")] == ["differs", "differs"]
    assert "the import fails here" in scan_source(code)[0].note


@pytest.mark.parametrize(
    "code",
    [
        "try:\n    from apex import RNN\nexcept ImportError:\n    pass\nRNN.LSTM()",
        "try:\n    from apex.contrib.fmha import X\nexcept:\n    pass\nfrom apex.contrib.fmha import X\nX",
    ],
)
def test_a_use_that_is_reached_although_the_import_is_guarded(code):
    assert [f.level for f in scan_source(code)][-1] == "unsupported"


@pytest.mark.parametrize("name", ["contrib.fmha.FMHA", "contrib.layer_norm.layer_norm.F", "RNN.LSTM", "amp.autocast"])
def test_what_is_said_to_fail_does(name):
    module, _, attribute = name.rpartition(".")
    with pytest.raises(ImportError):
        exec(f"from ampcompat.{module} import {attribute}", {})


@pytest.mark.parametrize("code", ["import {} as x", "import torch, {}", "x = import_module('{}')", "__import__('{}')"])
@pytest.mark.parametrize("name", NOT_FOUND)
def test_an_extension_that_is_not_found(name, code):
    code = code.format(name)
    assert symbols(f"import apex_C\n{code}") == {"apex_C": "works", name: "unsupported"}
    assert symbols(f"import apex_C\ntry:\n    {code}\nexcept ImportError:\n    x = None\n")[name] == "differs"


def test_an_extension_that_is_not_found_in_a_file_without_other_names_of_apex():
    assert symbols("import xentropy_cuda") == {"xentropy_cuda": "unsupported"}
    assert symbols("import syncbn") == {}  # of apex, or a module beside the script
    assert symbols("import apex_C\nfrom .xentropy_cuda import f\nimport my.mlp_cuda") == {"apex_C": "works"}


def test_the_page_lists_the_extensions_that_are_not_found():
    page = Path(__file__).parents[3] / "docs" / "namespace.md"
    rows = re.findall(r"\| `(\w+)` \|  \| the module is not found \|", page.read_text("utf-8"))
    assert sorted(rows) == sorted(NOT_FOUND)


def test_unknown_symbols_of_a_known_module():
    assert symbols("from apex import amp\namp.autocast()")["apex.amp.autocast"] == "unsupported"


def test_probes_by_name_are_reported():
    assert symbols("import importlib.util\nimportlib.util.find_spec('apex')") == {"apex": "note"}
    assert symbols("from importlib.metadata import version\nversion('apex')") == {"apex": "note"}
    assert symbols("import importlib\nimportlib.import_module('fused_adam_cuda')") == {"fused_adam_cuda": "note"}
    assert symbols("version('torch')") == {}


@pytest.mark.parametrize(
    ("code", "name"),
    [
        ("from timm.utils import ApexScaler\ns = ApexScaler()", "timm.ApexScaler"),
        ("from timm.utils import *\nloss_scaler = ApexScaler()", "timm.ApexScaler"),
        ("import timm\ns = timm.utils.ApexScaler()", "timm.ApexScaler"),
        ("from mmengine.optim import ApexOptimWrapper", "mmengine.ApexOptimWrapper"),
        ("import pytorch_lightning as pl\nt = pl.Trainer(amp_backend='apex')", "amp_backend"),
        ("a = TrainingArguments(half_precision_backend='apex')", "half_precision_backend"),
        ("t = create_supervised_trainer(model, amp_mode='apex')", "amp_mode"),
    ],
)
@pytest.mark.parametrize("start", ["", "from apex import amp\n", "from ampcompat import amp\n"])
def test_a_library_that_imports_apex_itself(code, name, start):
    found = {f.name: f for f in scan_source(start + code) if f.kind == "symbol"}
    assert found[name].level == "differs"
    assert "install_as_apex()" in found[name].note


@pytest.mark.parametrize(
    "code",
    [
        "from apex import amp\nclass ApexScaler: pass\ns = ApexScaler()",
        "from apex import amp\nTrainer(amp_backend='native')",
    ],
)
def test_what_is_no_library(code):
    assert set(symbols(code)) == {"apex.amp"}


def test_line_and_column_are_those_of_the_use():
    found = [f for f in scan_source("from apex import amp\n\nif x:\n    amp.state_dict()\n") if "state_dict" in f.name]
    assert [(f.line, f.column) for f in found] == [(4, 5)]


@pytest.mark.parametrize("name", sorted(SYMBOLS))
def test_the_table_is_well_formed(name):
    assert SYMBOLS[name].verdict in ("works", "differs", "unsupported")
    assert SYMBOLS[name].verdict == "works" or SYMBOLS[name].note, "a difference or replacement must be named"
    assert verdict(name) == SYMBOLS[name]
    assert name in MODULES or canonical(name) == name


def test_the_check_needs_no_torch(tmp_path):
    (tmp_path / "a.py").write_text("from apex import amp\n")
    code = (
        "import sys; from ampcompat.tools.check import scan; from ampcompat.tools.check.formats import lines\n"
        f"lines(scan({str(tmp_path)!r}), True); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=240).returncode == 0


def test_the_report_of_a_directory(tmp_path):
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "train.py").write_text("from apex import amp\n")
    (tmp_path / "a.py").write_text("import apex.RNN\n")
    report = scan(tmp_path)
    assert [(f.path, f.name) for f in report.findings] == [("a.py", "apex.RNN"), ("b/train.py", "apex.amp")]
    assert report.exit_status == 1
    assert json.loads(json.dumps(report.as_dict()))["summary"]["unsupported"] == 1


def test_what_every_module_has_is_there():
    code = "from apex import amp\nif 'state_dict' in amp.__dict__: pass\n"
    assert set(symbols(code).values()) == {"works"}


def test_a_folder_that_an_older_version_left_hides_no_module(monkeypatch, tmp_path):
    """git and pip leave the folder of a package that became a module, with Python's caches in it."""
    (tmp_path / "amp" / "misuse" / "__pycache__").mkdir(parents=True)
    (tmp_path / "amp" / "__init__.py").touch()
    (tmp_path / "amp" / "misuse.py").write_text("watch = 1")
    monkeypatch.setattr(package_names, "PACKAGE", tmp_path)
    assert package_names.provides("ampcompat.amp.misuse.watch")

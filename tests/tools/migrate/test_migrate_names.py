"""Every name of apex that ``check`` knows: ``native_amp.py`` has it, or ``migrate`` marks it."""

import re
import sys

import pytest
import torch
from running import migrate_tree, write

from ampcompat.amp.scaler import LossScaler
from ampcompat.cli.migrate import _list_left
from ampcompat.tools.check.symbols import MODULES, ON_OPTIMIZERS, SYMBOLS, names_in
from ampcompat.tools.migrate import migrate_source, native_amp

PROPERTIES = ("enabled", "opt_level", "patch_torch_functions", "keep_batchnorm_fp32", "cast_model_outputs", "options")
STASH = ("all_fp16_params", "all_fp32_from_fp16_params", "lazy_init_called", "fp16_groups", "loss_scalers")


def assert_there_or_marked(code, monkeypatch):
    """Run what has no mark, with an optimizer that the file knows."""
    result = migrate_source(code, "native")
    if result.todos:
        return
    monkeypatch.setitem(sys.modules, "native_amp", native_amp)
    model = torch.nn.Linear(2, 2)
    _, optimizer = native_amp.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), verbosity=0)
    exec(result.code, {"optimizer": optimizer})


KNOWN = {*SYMBOLS, *(f"{module}.{name}" for module in MODULES for name in names_in(module))}


@pytest.mark.parametrize("symbol", sorted(symbol for symbol in KNOWN if symbol.startswith("apex.")))
@pytest.mark.parametrize("form", ["import apex\nx = {0}\n", "from {1} import {2}\nx = {2}\n"])
def test_every_symbol(symbol, form, monkeypatch):
    parent, _, name = symbol.rpartition(".")
    assert_there_or_marked(form.format(symbol, parent, name), monkeypatch)


@pytest.mark.parametrize(
    "use",
    [
        *(f"optimizer.{name}" for name in ON_OPTIMIZERS),
        *(f"optimizer._amp_stash.{name}" for name in STASH),
        *(f"apex.amp._amp_state.opt_properties.{name}" for name in PROPERTIES),
        *(f"apex.amp._amp_state.loss_scalers[0].{name}" for name in dir(LossScaler) if not name.startswith("__")),
        "apex.amp._amp_state.opt_properties.options['opt_level']",
        "apex.amp._amp_state.handle.is_active()",
        "apex.amp.initialize(optimizers=[], models=[], verbosity=0, patch_torch_functions_type=None)",
    ],
)
def test_every_attribute(use, monkeypatch):
    assert_there_or_marked(f"import apex\nx = {use}\n", monkeypatch)


@pytest.mark.parametrize(
    "line",
    [
        "handle = amp.init()",
        "amp._amp_state.handle.is_active()",
        "amp._amp_state.maybe_print('x')",
        "amp._amp_state.opt_properties.keep_batchnorm_fp32",
        "amp._amp_state.loss_scalers[0].clear_overflow_state()",
        "for s in amp._amp_state.loss_scalers: s.clear_overflow_state()",
        "s = amp._amp_state.loss_scalers[0]; s.clear_overflow_state()",
        "optimizer._lazy_init_maybe_master_weights()",
        "optimizer._amp_stash.all_fp32_from_fp16_params",
        "setattr(optimizer, '_post_amp_backward', f)",
        "optimizer._prepare_amp_backward = f",
        "amp.register_promote_function(torch, 'add')",
        "amp.initialize(model, optimizer, patch_type=None)",
        "class O:\n    def _post_amp_backward(self, scaler): pass",
    ],
)
def test_what_the_file_does_not_have_is_marked_once_and_counts(line, tmp_path, capsys):
    write(tmp_path, {"train.py": f"import torch\nfrom apex import amp\n{line}\n"})
    changes = list(migrate_tree(tmp_path, "native"))
    assert _list_left(changes) == 1
    assert re.search(r"native_amp (does not|makes no|has no)", capsys.readouterr().err)
    for change in changes:
        change.write()
    assert [change.name for change in migrate_tree(tmp_path, "native") if change.changed] == []


def test_files_that_never_name_apex_are_read_too(tmp_path):
    write(tmp_path, {"hooks.py": "def after(optimizer):\n    optimizer._master_params_to_model_params()\n"})
    (change,) = migrate_tree(tmp_path, "native")
    assert len(change.todos) == 1


def test_what_the_file_has_is_not_marked():
    code = (
        "from apex import amp\nif hasattr(optimizer, '_amp_stash'): pass\n"
        "amp._amp_state.loss_scalers[0]._loss_scale = 2.0**10\namp._amp_state.opt_properties.opt_level\n"
        "optimizer._amp_stash.loss_scalers\namp._amp_state.verbosity = 0\n"
        "for s in amp._amp_state.loss_scalers: s._unskipped\ndef f(s): s.clear_overflow_state()\n"
    )
    assert migrate_source(code, "native").todos == []

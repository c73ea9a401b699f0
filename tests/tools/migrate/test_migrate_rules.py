"""Single translations, and what is marked instead of translated."""

import pytest

from ampcompat.tools.migrate import migrate_source


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("from apex import amp\n", "from ampcompat import amp\n"),
        ("from apex import amp as apex_amp  # why\n", "from ampcompat import amp as apex_amp  # why\n"),
        ("import apex\n", "import ampcompat as apex\n"),
        ("import apex.amp as amp\n", "import ampcompat.amp as amp\n"),
        ("import apex.amp\n", "import ampcompat.amp, ampcompat as apex\n"),
        ("import os, apex\n", "import os, ampcompat as apex\n"),
        ("import amp_C\n", "import ampcompat.amp_C as amp_C\n"),
        ("import fused_adam_cuda\n", "import ampcompat.fused_adam_cuda as fused_adam_cuda\n"),
        (
            "from fused_layer_norm_cuda import forward\n",
            "from ampcompat.fused_layer_norm_cuda import forward\n",
        ),
        ("from apex.parallel import (\n    LARC,  # x\n)\n", "from ampcompat.parallel import (\n    LARC,  # x\n)\n"),
        ("from apex.amp import *\n", "from ampcompat.amp import *\n"),
        ("from .apex import amp\n", "from .apex import amp\n"),
        ("x = 'from apex import amp'\n", "x = 'from apex import amp'\n"),
        ('find_spec("apex")\n', 'find_spec("ampcompat")\n'),
        ("import_module('apex.amp')\n", "import_module('ampcompat.amp')\n"),
    ],
)
def test_imports(before, after):
    result = migrate_source(before)
    assert (result.code, result.todos) == (after, [])
    assert migrate_source(after).code == after


def test_imports_without_a_counterpart_stay_and_are_marked():
    result = migrate_source("from apex import amp, RNN\n")
    first, mark, second = result.code.splitlines()
    assert (first, second) == ("from ampcompat import amp", "from apex import RNN")
    assert mark.startswith("# TODO(ampcompat): apex.RNN is not provided: use torch.nn.LSTM")
    assert [line for line, _ in result.todos] == [2]
    assert migrate_source(result.code).code == result.code


@pytest.mark.parametrize("code", ["import apex.RNN\n", "from apex.contrib.fmha import X\n", "import apex; x = 1\n"])
def test_marks_are_put_once(code):
    once = migrate_source(code)
    assert once.code.endswith(code)
    assert len(once.todos) == 1
    assert migrate_source(once.code).code == once.code


LOOP = """\
import torch
from apex import amp

model, optimizer = amp.initialize(model, optimizer{arguments})
for x in data:
    loss = model(x)
    optimizer.zero_grad()
    with amp.scale_loss(loss, optimizer{more}) as scaled_loss:
        scaled_loss.backward({backward})
    optimizer.step({step})
"""


def native(arguments="", more="", backward="", step=""):
    result = migrate_source(LOOP.format(arguments=arguments, more=more, backward=backward, step=step), "native")
    assert migrate_source(result.code, "native").code == result.code
    return result


@pytest.mark.parametrize(
    ("arguments", "scaler"),
    [
        ("", "torch.amp.GradScaler(amp_device)"),
        (", loss_scale='dynamic'", "torch.amp.GradScaler(amp_device)"),
        (", loss_scale=1.0", "torch.amp.GradScaler(amp_device, enabled=False)"),
        (", loss_scale='1.0'", "torch.amp.GradScaler(amp_device, enabled=False)"),
        (", opt_level='O4'", "torch.amp.GradScaler(amp_device, enabled=False)"),
        (", max_loss_scale=512.0", "torch.amp.GradScaler(amp_device, init_scale=512.0)"),
        (", enabled=args.fp16", "torch.amp.GradScaler(amp_device, enabled=amp_enabled)"),
        (", True", "torch.amp.GradScaler(amp_device)"),
        (", 'O1'", "torch.amp.GradScaler(amp_device)"),
    ],
)
def test_scalers(arguments, scaler):
    assert f"scaler = {scaler}\n" in native(arguments).code


def test_O4_is_autocast_in_bfloat16():
    assert "dtype=torch.bfloat16" in native(", opt_level='O4'").code


def test_arguments_of_backward_are_kept():
    assert "scaler.scale(loss).backward(retain_graph=True)" in native(backward="retain_graph=True").code


def test_delayed_unscaling_is_what_the_scaler_does_anyway():
    assert "scaler.scale(loss).backward()\n" in native(more=", delay_unscale=not last").code


def test_a_closure_is_marked():
    result = native(step="closure")
    assert "optimizer.step(closure)" in result.code
    assert any("closure" in message for _, message in result.todos)


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        (LOOP.format(arguments=", opt_level='O3'", more="", backward="", step=""), "no float32 weights"),
        (LOOP.format(arguments=", **options", more="", backward="", step=""), "from a dict"),
        (
            "from apex import amp\nwith amp.scale_loss(loss, opt) as s:\n    s.backward()\n",
            "no calls of amp.initialize",
        ),
        ("from apex import amp\ndef f():\n    return amp.initialize(m, o)\n", "not a statement of its own"),
        ("from apex import amp\nfor m in ms:\n    m, o = amp.initialize(m, o)\n", "in a loop"),
    ],
)
def test_files_that_cannot_be_translated_are_marked_and_otherwise_unchanged(code, reason):
    result = migrate_source(code, "native")
    lines = [line for line in result.code.splitlines(keepends=True) if "# TODO(ampcompat)" not in line]
    assert "".join(lines) == code
    assert result.todos
    assert all(reason in message for _, message in result.todos)
    assert migrate_source(result.code, "native").code == result.code


def test_a_forward_out_of_sight_is_marked():
    code = (
        "import torch\nfrom apex import amp\n\nmodel, opt = amp.initialize(model, opt)\n\n\n"
        "def backward(loss):\n    with amp.scale_loss(loss, opt) as scaled:\n        scaled.backward()\n"
        "    opt.step()\n"
    )
    result = migrate_source(code, "native")
    assert ["run it under torch.autocast" in message for _, message in result.todos] == [True]
    assert "scaler.scale(loss).backward()" in result.code


def test_a_test_for_the_module_is_marked():
    code = "try:\n    from apex import amp\nexcept ImportError:\n    amp = None\nok = amp is not None\n"
    result = migrate_source(code, "native")
    assert [line for line, _ in result.todos] == [5]


def test_an_unknown_target_is_refused():
    with pytest.raises(ValueError, match="ampcompat, native"):
        migrate_source("", "jax")


def test_a_look_into_the_state_is_marked_since_scalers_keep_other_keys():
    code = (
        LOOP.format(arguments="", more="", backward="", step="")
        + "print(amp.state_dict()['loss_scaler0']['loss_scale'])\ntorch.save(amp.state_dict(), 'x')\n"
    )
    result = migrate_source(code, "native")
    assert "amp.state_dict()['loss_scaler0']" in result.code
    assert "torch.save(scaler.state_dict(), 'x')" in result.code
    assert [note for _, note in result.todos] == ["apex.amp.state_dict: GradScaler's has other keys; use get_scale()"]


def test_a_model_that_is_a_default_argument_is_one_that_runs():
    code = f"{LOOP.format(arguments='', more='', backward='', step='')}def show(net=model, *, other=model):\n"
    for name in ("net", "other"):
        result = migrate_source(code + f"    return {name}(x)\n", "native")
        assert "dtype=torch.float16):\n        return " in result.code


def test_a_model_that_is_walked_over_may_begin_with_a_layer_without_parameters():
    code = LOOP.format(arguments="", more="", backward="", step="") + "for layer in model:\n    print(layer)\n"
    result = migrate_source(code, "native")
    assert "amp_device = next(p for model in model for p in model.parameters()).device.type" in result.code

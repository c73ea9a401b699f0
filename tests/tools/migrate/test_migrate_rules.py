"""Single translations, and what is marked instead of translated."""

import os
import subprocess
import sys
from pathlib import Path

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
        (
            "try: from apex import amp\nexcept ImportError: amp = None\n",
            "try: from ampcompat import amp\nexcept ImportError: amp = None\n",
        ),
        ("if x: import apex.amp as a\n", "if x: import ampcompat.amp as a\n"),
        ("import apex; x = 1\n", "import ampcompat as apex; x = 1\n"),
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


@pytest.mark.parametrize("code", ["import apex.RNN\n", "from apex.contrib.fmha import X\n", "import apex.RNN; x = 1\n"])
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
    ("arguments", "call"),
    [
        ("", "mixed_precision(model)"),
        (", opt_level='O1'", "mixed_precision(model)"),
        (", opt_level='O2'", "mixed_precision(model)"),
        (", opt_level='O0'", "mixed_precision(model, enabled=False)"),
        (", opt_level='O3'", "mixed_precision(model, loss_scale=1.0)"),
        (", opt_level='O4'", "mixed_precision(model, dtype=torch.bfloat16)"),
        (", opt_level='O5', loss_scale=128", "mixed_precision(model, dtype=torch.bfloat16)"),
        (", opt_level=args.level", 'mixed_precision(model, enabled=args.level != "O0")'),
        (", loss_scale='dynamic'", "mixed_precision(model)"),
        (", loss_scale='128.0'", "mixed_precision(model, loss_scale=128.0)"),
        (", loss_scale=2**7", "mixed_precision(model, loss_scale=128.0)"),
        (", loss_scale=args.scale", "mixed_precision(model, loss_scale=args.scale)"),
        (", enabled=args.fp16", "mixed_precision(model, enabled=args.fp16)"),
        (", enabled=a or b, opt_level=c", 'mixed_precision(model, enabled=(a or b) and c != "O0")'),
        (", True", "mixed_precision(model)"),
        (", 'O1'", "mixed_precision(model)"),
        (
            ", **options",
            'mixed_precision(model, enabled=options.get("enabled", True) and options.get("opt_level", "O1") != "O0", '
            'loss_scale=options.get("loss_scale"))',
        ),
    ],
)
def test_what_initialize_becomes(arguments, call):
    assert f"scaler = {call}\n" in native(arguments).code


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("from apex import amp\nwith amp.scale_loss(loss, opt) as s:\n    s.backward()\n", "not called in this file"),
        ("from apex import amp\ndef f():\n    g(amp.initialize(m, o))\n", "no statement of its own"),
        ("from apex import amp\nm, o = amp.initialize(m, o, opt_level='01')\n", "no opt_level"),
    ],
)
def test_what_cannot_be_translated_is_marked_and_stays(code, reason):
    result = migrate_source(code, "native")
    lines = [line for line in result.code.splitlines() if "# TODO(ampcompat)" not in line]
    assert set(code.splitlines()) <= set(lines)
    assert any(reason in message for _, message in result.todos)
    assert migrate_source(result.code, "native").code == result.code


def test_a_text_that_says_install_apex_gets_a_note():
    result = migrate_source(
        "try:\n    from apex import amp\nexcept ImportError:\n    raise ImportError('Please install apex')\n"
    )
    assert result.todos == []
    assert len(result.notes) == 1
    assert "install apex" in result.notes[0]


def test_the_note_about_apex_comes_to_native_too():
    code = LOOP.format(arguments="", more="", backward="", step="") + "print('Please install apex first')\n"
    result = migrate_source(code, "native")
    assert [note for note in result.notes if "install apex" in note]
    assert result.todos == []


@pytest.mark.parametrize(
    "imports",
    [
        "try: from apex import amp\nexcept ImportError: amp = None\n",
        "try: from apex import amp\nexcept ImportError: raise ImportError('Please install apex')\n",
        "import sys\nif sys.argv: import apex.amp as amp\n",
        "import torch; from apex import amp\n",
    ],
)
def test_imports_on_one_line_go(imports):
    code = LOOP.format(arguments="", more="", backward="", step="").replace("from apex import amp\n", imports)
    result = migrate_source(code, "native")
    assert "apex" not in result.code
    assert result.todos == []
    assert migrate_source(result.code, "native").code == result.code


def test_an_unknown_target_is_refused():
    with pytest.raises(ValueError, match="ampcompat, native"):
        migrate_source("", "jax")


def test_the_scale_in_the_state_is_read_from_the_scaler():
    """A GradScaler's state has other keys, so other looks into it are marked; saving the whole state is rewritten."""
    code = (
        LOOP.format(arguments="", more="", backward="", step="")
        + "print(amp.state_dict()['loss_scaler0']['loss_scale'])\ntorch.save(amp.state_dict(), 'x')\n"
        + "print(amp.state_dict()['loss_scaler0']['unskipped'])\n"
    )
    result = migrate_source(code, "native")
    assert "print(scaler.get_scale())" in result.code
    assert "amp.state_dict()['loss_scaler0']['unskipped']" in result.code
    assert "torch.save(scaler.state_dict(), 'x')" in result.code
    assert [note for _, note in result.todos] == [
        "apex.amp.state_dict: a GradScaler's state has other keys; use scaler.get_scale()"
    ]


@pytest.mark.parametrize(
    ("block", "line"),
    [
        (
            "with amp.scale_loss(loss, optimizer) if fp16 else nullcontext(loss) as s:\n        s.backward()\n",
            "scaler.scale(loss).backward()",
        ),
        (
            "with amp.scale_loss(loss, optimizer) as s:\n        s.backward()\n    torch.autograd.backward(other)\n",
            "torch.autograd.backward(scaler.scale(other))",
        ),
    ],
)
def test_other_forms_of_backward(block, line):
    code = LOOP.format(arguments="", more="", backward="", step="")
    start, _, rest = code.partition("with amp.scale_loss")
    rest = rest[rest.index("    optimizer.step") :]
    result = migrate_source(start + block + rest, "native")
    assert result.todos == []
    assert f"    {line}\n" in result.code


def test_a_loss_whose_optimizer_is_not_seen_is_marked():
    code = LOOP.format(arguments="", more="", backward="", step="").replace("(loss, optimizer)", "(loss, get())")
    result = migrate_source(code.replace("    optimizer.step()", "    get().step()"), "native")
    assert any("which optimizer steps with this loss" in message for _, message in result.todos)


OWN_OPTIMIZER = """\
class Own(torch.optim.SGD):
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p.grad.clamp_(-1, 1)
        return super().step(closure)


"""


def test_an_optimizer_of_the_file_is_stepped_by_the_scaler():
    """Its own step reads gradients that the scaler has unscaled by then."""
    code = LOOP.format(arguments="", more="", backward="", step="")
    code = code.replace("model, optimizer =", OWN_OPTIMIZER + "optimizer = Own(parameters)\nmodel, optimizer =", 1)
    result = migrate_source(code, "native")
    assert result.todos == []
    assert OWN_OPTIMIZER in result.code
    assert "    scaler.step(optimizer)\n    scaler.update()\n" in result.code


@pytest.mark.parametrize("name", ["env_opt", "warmup_optimizer", "ema_opt"])
def test_an_optimizer_may_have_any_name(name):
    code = LOOP.format(arguments="", more="", backward="", step="").replace("optimizer", name)
    result = migrate_source(code, "native")
    assert result.todos == []
    assert f"    scaler.step({name})\n    scaler.update()\n" in result.code


@pytest.mark.parametrize(
    ("definition", "call"),
    [
        ("from torch.nn.utils import clip_grad_norm_ as limit\n", "limit(model.parameters(), 1.0)"),
        ("limit = functools.partial(clip_grad_norm_, max_norm=1.0)\n", "limit(model.parameters())"),
        ("limit = lambda: clip_grad_norm_(model.parameters(), 1.0)\n", "limit()"),
        ("limit = torch.nn.utils.clip_grad_norm_\n", "limit(model.parameters(), 1.0)"),
        ("def limit(f=clip_grad_norm_):\n    f(model.parameters(), 1.0)\n", "limit()"),
    ],
)
def test_clipping_by_another_name_reads_gradients(definition, call):
    code = LOOP.format(arguments="", more="", backward="", step="")
    code = code.replace("model, optimizer = amp", definition + "model, optimizer = amp")
    result = migrate_source(code.replace("    optimizer.step()", f"    {call}\n    optimizer.step()"), "native")
    assert result.todos == []
    assert result.code.count("scaler.unscale_(optimizer)\n") == 1


def test_a_mark_on_a_one_line_suite_stands_above_it():
    code = "from apex import amp\nif fp16: model, optimizer = amp.initialize(model, optimizer, opt_level='01')\n"
    result = migrate_source(code, "native")
    lines = result.code.splitlines()
    assert any("no opt_level" in message and message in lines[line - 1] for line, message in result.todos)
    assert any(lines[line].startswith("if fp16: ") for line, _ in result.todos)
    assert migrate_source(result.code, "native").code == result.code


def test_a_step_in_a_context_manager_is_marked():
    """It is made after the block, where the walk over the calls does not go."""
    code = LOOP.format(arguments="", more="", backward="", step="")
    manager = "@contextmanager\ndef updating():\n    yield\n    optimizer.step()\n\n\n"
    code = code.replace("model, optimizer = amp", manager + "model, optimizer = amp")
    block = code[code.index("    with amp.scale_loss") :]
    scaled = "        with amp.scale_loss(loss, optimizer) as scaled_loss:\n            scaled_loss.backward()\n"
    result = migrate_source(code.replace(block, "    with updating():\n" + scaled), "native")
    assert any("no step of this optimizer is seen" in message for _, message in result.todos)


def test_parameters_by_another_name_are_unscaled():
    code = "def train(net, opt):\n    opt.zero_grad()\n    loss = net(x)\n"
    code += "    with amp.scale_loss(loss, opt) as s:\n        s.backward()\n"
    code += "    clip_grad_norm_(net.parameters(), 1.0)\n    opt.step()\n\n\n"
    head = "from apex import amp\nnet = Net()\nopt = SGD(net.parameters())\n"
    result = migrate_source(head + code + "pair = amp.initialize(net, opt)\ntrain(*pair)\n", "native")
    assert "    scaler.unscale_(opt)\n    clip_grad_norm_" in result.code


@pytest.mark.parametrize("runs", [2, pytest.param(8, marks=pytest.mark.slow)])
def test_marks_come_in_the_same_order_in_each_run(runs):
    """Sets of states have another order in each process; marks above one line had, too."""
    script = Path(__file__).parents[2] / "legacy" / "scripts" / "bert_pretraining.py"
    code = (
        "import sys; from ampcompat.tools.migrate import migrate_source as m\nprint(m(sys.stdin.read(), 'native').code)"
    )
    seen = {
        subprocess.run(
            [sys.executable, "-c", code],
            input=script.read_bytes(),
            env={**os.environ, "PYTHONHASHSEED": str(seed)},
            capture_output=True,
            check=True,
        ).stdout
        for seed in range(runs)
    }
    assert len(seen) == 1

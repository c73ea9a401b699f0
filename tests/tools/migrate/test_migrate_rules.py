"""Single imports and uses, and what is marked instead of rewritten."""

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


@pytest.mark.parametrize("start", ["", "from apex import amp\n"])
def test_a_library_that_imports_apex_itself_gets_a_note(start):
    code = start + "from timm.utils import *\nloss_scaler = ApexScaler()\n"
    result = migrate_source(code)
    assert result.todos == []
    ((line, note),) = result.notes
    assert line == len(code.splitlines())
    assert note.startswith("timm.ApexScaler: ")
    assert "ampcompat.install_as_apex()" in note


@pytest.mark.parametrize("start", ["", "from apex import amp\n"])
@pytest.mark.parametrize(
    ("line", "name", "instead"),
    [
        ("loss_scaler = ApexScaler()", "timm.ApexScaler", "in its place, write with amp.scale_loss(loss, optimizer)"),
        ("trainer = Trainer(amp_backend='apex')", "amp_backend", "have it use torch's autocast"),
    ],
)
def test_a_library_that_imports_apex_itself_is_marked_in_native(start, line, name, instead):
    """Without apex, it fails in its first step."""
    code = f"{start}from timm.utils import *\n{line}\n"
    result = migrate_source(code, "native")
    ((number, message),) = result.todos
    assert number == len(code.splitlines())
    assert message.startswith(f"{name}: the library calls apex itself; {instead}")
    assert result.notes == []
    assert migrate_source(result.code, "native").code == result.code


def test_an_unknown_target_is_refused():
    with pytest.raises(ValueError, match="ampcompat, native"):
        migrate_source("", "jax")


NATIVE = [
    ("from apex import amp\n", "import native_amp as amp\n"),
    ("from apex import amp as apex_amp  # why\n", "import native_amp as apex_amp  # why\n"),
    ("import apex.amp as amp\n", "import native_amp as amp\n"),
    ("import apex\napex.amp.state_dict()\n", "import native_amp\nnative_amp.state_dict()\n"),
    ("import apex.amp\napex.amp.state_dict()\n", "import native_amp\nnative_amp.state_dict()\n"),
    ("import apex\napex.amp._amp_state.verbosity = 0\n", "import native_amp\nnative_amp._amp_state.verbosity = 0\n"),
    ("import os, apex\napex.amp.state_dict()\n", "import native_amp\nimport os\nnative_amp.state_dict()\n"),
    (
        "try: import apex\nexcept ImportError: apex = None\nif apex is not None: apex.amp.state_dict()\n",
        "try: import native_amp\nexcept ImportError: native_amp = None\n"
        "if native_amp is not None: native_amp.state_dict()\n",
    ),
    (
        "def f():\n    from apex.amp import initialize as init, scale_loss\n",
        "def f():\n    from native_amp import initialize as init, scale_loss\n",
    ),
    ("from apex.amp import *\ninitialize(m)\n", "from native_amp import *\ninitialize(m)\n"),
    ("from apex.amp._amp_state import _amp_state\n", "from native_amp import _amp_state\n"),
    ("from apex.amp.handle import scale_loss\n", "from native_amp import scale_loss\n"),
    (
        "from apex import amp\namp._amp_state.loss_scalers[0].loss_scale()\n",
        "import native_amp as amp\namp._amp_state.loss_scalers[0].loss_scale()\n",
    ),
    (
        "from apex import amp\n'state_dict' in amp.__dict__\n",
        "import native_amp as amp\n'state_dict' in amp.__dict__\n",
    ),
    ("amp = import_module('apex.amp')\n", "amp = import_module('native_amp')\n"),
    ('find_spec("apex") is None\n', 'find_spec("native_amp") is None\n'),
    ("from .apex import amp\n", "from .apex import amp\n"),
    ("x = 'from apex import amp'\n", "x = 'from apex import amp'\n"),
    ("import apex; x = 1\n", "pass; x = 1\n"),
    (
        "import apex\ndef f(x, apex=False):\n    return x if apex else None\nf(apex.amp, apex=True)\n",
        "import native_amp\ndef f(x, apex=False):\n    return x if apex else None\nf(native_amp, apex=True)\n",
    ),
    ("x = 1\nfrom apex import optimizers  # unused\n", "x = 1\n"),
    (
        "try:\n    from apex.fp16_utils import *\nexcept ImportError:\n    pass\n",
        "try:\n    pass\nexcept ImportError:\n    pass\n",
    ),
    # Classes that torch has too.
    (
        "from apex.parallel import DistributedDataParallel as DDP\n"
        "m = DDP(m, delay_allreduce=True)\nisinstance(m, DDP)\n",
        "from torch.nn.parallel import DistributedDataParallel as DDP\nm = DDP(m)\nisinstance(m, DDP)\n",
    ),
    (
        "import apex\nm = apex.parallel.convert_syncbn_model(m)\n",
        "import torch\nm = torch.nn.SyncBatchNorm.convert_sync_batchnorm(m)\n",
    ),
    (
        "from apex.parallel import convert_syncbn_model as convert\nm = convert(m)\n",
        "from torch.nn import SyncBatchNorm\nm = SyncBatchNorm.convert_sync_batchnorm(m)\n",
    ),
    (
        "from apex.normalization import FusedLayerNorm as LayerNorm\nclass A(LayerNorm): pass\n",
        "from torch.nn import LayerNorm\nclass A(LayerNorm): pass\n",
    ),
    (
        "from apex.normalization import FusedRMSNorm\nFusedRMSNorm(\n    4,\n)\n",
        "from torch.nn import RMSNorm as FusedRMSNorm\nFusedRMSNorm(\n    4, eps=1e-5,\n)\n",
    ),
    (
        "from apex.optimizers import FusedAdam\nFusedAdam(p, lr, set_grad_none=True)\n",
        "from torch.optim import AdamW as FusedAdam\nFusedAdam(p, lr, weight_decay=0.0)\n",
    ),
    (
        "from apex.optimizers import FusedAdam\nFusedAdam(p, adam_w_mode=False, lr=1)\n",
        "from torch.optim import Adam as FusedAdam\nFusedAdam(p, lr=1)\n",
    ),
    (
        "from apex.optimizers import FusedSGD\nFusedSGD(p, 0.1)\n",
        "from torch.optim import SGD as FusedSGD\nFusedSGD(p, 0.1)\n",
    ),
    ("import apex.fp16_utils as f\nx = 1\ny = f.to_python_float(x)\n", "x = 1\ny = x.item()\n"),
    (
        "from apex.fp16_utils import to_python_float\nx = 1\ny = to_python_float(x + 1), to_python_float(x.data)\n",
        "x = 1\ny = (x + 1).item(), x.data.item()\n",
    ),
]


@pytest.mark.parametrize(("before", "after"), NATIVE)
def test_native(before, after):
    result = migrate_source(before, "native")
    assert (result.code, result.todos) == (after, [])
    assert migrate_source(after, "native").code == after


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("from apex import amp\n", "from pkg import native_amp as amp\n"),
        ("import apex\napex.amp.state_dict()\n", "from pkg import native_amp\nnative_amp.state_dict()\n"),
        ("from apex.amp import scale_loss\n", "from pkg.native_amp import scale_loss\n"),
        ("import_module('apex.amp')\n", "import_module('pkg.native_amp')\n"),
    ],
)
def test_native_in_a_package(before, after):
    assert migrate_source(before, "native", package="pkg").code == after


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("from apex.optimizers import FusedLAMB\nFusedLAMB(p)\n", "torch has no LAMB"),
        ("from apex.optimizers import FusedAdam\nFusedAdam(p, bias_correction=False)\n", "use torch.optim.AdamW"),
        ("from apex.optimizers import FusedAdam\nmake(FusedAdam)\n", "use torch.optim.AdamW"),
        ("from apex.optimizers import FusedAdam\nFusedAdam(p)\nFusedAdam(p, adam_w_mode=False)\n", "use torch.optim"),
        ("from apex.optimizers import FusedAdam\nFusedAdam(**options)\n", "use torch.optim.AdamW"),
        ("from apex.parallel import DistributedDataParallel as D\nD(m, gradient_average=False)\n", "gradient_average"),
        ("from apex.parallel import LARC\nLARC(o)\n", "torch has no LARC"),
        ("from apex import fp16_utils\nfp16_utils.network_to_half(m)\n", "nothing of the same meaning"),
        ("from apex.amp import lists\nlists.torch_overrides\n", "native_amp does not have it"),
        ("import apex.contrib.fmha\napex.contrib.fmha.f()\n", "scaled_dot_product_attention"),
        ("import amp_C\namp_C.multi_tensor_scale(x)\n", "nothing of the same meaning"),
        ("apex = import_module('apex')\n", "looked for by its name"),
        ("try: import apex.contrib.x as y\nexcept ImportError: y = None\nif y: y.f()\n", "operation of the same"),
        ("try: from apex.contrib import y\nexcept ImportError: y = None\nif y: y.f()\n", "operation of the same"),
        ("importlib.metadata.version('apex')\n", "looked for among what is installed"),
    ],
)
def test_what_torch_has_nothing_for_stays_and_is_marked(code, reason):
    result = migrate_source(code, "native")
    lines = [line for line in result.code.splitlines() if "# TODO(ampcompat)" not in line]
    assert lines == code.splitlines()
    assert any(reason in message for _, message in result.todos)
    assert migrate_source(result.code, "native").code == result.code


@pytest.mark.parametrize("target", ["ampcompat", "native"])
@pytest.mark.parametrize(
    "line",
    [
        "HAS = _module_available('apex.amp')",
        "amp, HAS = optional_import('apex.amp')",
        "HAS = all(find_spec(name) for name in ('apex', 'torch'))",
        "HAS = 'apex' in sys.modules",
        "HAS = is_package_available('apex')",
        "for name in ['apex', 'torch']:\n    found = importlib.import_module(name)",
    ],
)
def test_what_looks_for_apex_is_marked(line, target):
    """After the rewriting it finds none, and a script that asks so trains in float32 in silence."""
    ((_, message),) = migrate_source(f"import torch\n{line}\n", target).todos
    assert "is looked for by its name; look for" in message


@pytest.mark.parametrize(
    "line", ["HAS = hasattr(apex, 'amp')", "HAS = 'amp' in dir(apex)", "use(backend=apex)", "self.apex = apex"]
)
def test_the_package_is_marked_where_it_is_handed_on(line):
    todos = migrate_source(f"import apex\n{line}\napex.amp.initialize(m)\n", "native").todos
    assert any("is handed on or tested here" in message for _, message in todos)
    assert migrate_source(f"import apex\n{line}\napex.amp.initialize(m)\n").todos == []


@pytest.mark.parametrize("target", ["ampcompat", "native"])
@pytest.mark.parametrize(
    "line",
    [
        "parser.add_argument('--backend', choices=['apex', 'native'])",
        "module = import_module(name)\nbackend = 'apex'",
        "if 'apex' in args.backend: pass",
        "if args.backend == 'apex':\n    module = import_module(name)",
        "def load(name, backend='apex'):\n    return import_module(name)",
        "logging.getLogger('apex.amp')",
        "log('apex')",
    ],
)
def test_the_word_apex_is_not_marked(line, target):
    assert migrate_source(f"{line}\n", target).todos == []


@pytest.mark.parametrize(
    ("code", "line"),
    [
        ("from apex.optimizers import FusedAdam\nFusedAdam(p, lr=1.0, bias_correction=False)\n", 2),
        ("import apex\napex.optimizers.FusedAdam(p, bias_correction=False)\n", 3),
    ],
)
def test_an_argument_that_torch_does_not_have_is_named_once(code, line):
    message = (
        "apex.optimizers.FusedAdam: torch has no bias_correction=False; import it from ampcompat, or use"
        " torch.optim.AdamW, or Adam for adam_w_mode=False; apex's weight_decay is 0"
    )
    todos = migrate_source(code, "native").todos
    assert [todo for todo in todos if "FusedAdam" in todo[1]] == [(line, message)]


def test_what_delay_allreduce_did_besides_is_noted():
    """Torch warns of find_unused_parameters=True where all parameters are used; where not, its error names it."""
    code = "from apex.parallel import DistributedDataParallel as DDP\nm = DDP(m, delay_allreduce=True)\n"
    ((line, note),) = migrate_source(code, "native").notes
    assert line == 2
    assert note.startswith("delay_allreduce=True is dropped")
    assert "find_unused_parameters=True" in note
    assert migrate_source(code.replace("=True", "=False"), "native").notes == []


@pytest.mark.parametrize("name", ["FusedAdam", "FusedAdagrad"])
def test_where_checkpoints_of_fused_optimizers_load_is_noted(name):
    code = f"from apex.optimizers import {name}\no = {name}(p, 0.1)\n"
    ((line, note),) = migrate_source(code, "native").notes
    assert line == 2
    assert note.startswith(f"load checkpoints of {name} after amp.initialize")


def test_a_note_has_the_line_of_the_new_text_as_a_todo_has():
    """Also at the beginning of a line under a mark."""
    code = (
        "from apex.amp import amp as inner\nfrom apex.parallel import DistributedDataParallel as DDP\n"
        "import apex.RNN\nm = DDP(m, delay_allreduce=True); n = apex.RNN.LSTM(4)\n"
    )
    result = migrate_source(code, "native")
    lines = result.code.splitlines()
    ((line, note),) = result.notes
    assert note.startswith("delay_allreduce=True")
    assert lines[line - 1].startswith("m = DDP(m")
    assert all(lines[number - 1].startswith("# TODO(ampcompat)") for number, _ in result.todos)
    assert lines[line - 2].startswith("# TODO(ampcompat)")


def test_what_changes_in_an_argument_that_is_dropped_is_dropped_with_it():
    code = (
        "from apex.parallel import DistributedDataParallel as DDP\nfrom apex.optimizers import FusedAdam\n"
        "net = DDP(net, message_size=10, shared_param=wrap(FusedAdam(q)))\n"
    )
    assert migrate_source(code, "native").code.splitlines()[-1] == "net = DDP(net)"


def test_a_mark_stands_below_the_import_that_its_statement_needs():
    code = "x = [apex.parallel.DistributedDataParallel(m), apex.RNN.LSTM(2)]\nimport apex\n"
    first, second, third, *_ = migrate_source(code, "native").code.splitlines()
    assert first == "import torch"
    assert second.startswith("# TODO(ampcompat): apex.RNN: ")
    assert third.startswith("x = [torch.nn.parallel.DistributedDataParallel(m)")


def test_a_function_of_a_module_of_amp_is_marked_with_its_name():
    result = migrate_source("from apex import amp\namp.handle.scale_loss(l, o)\n", "native")
    assert result.todos == [(2, "apex.amp.handle.scale_loss: it is native_amp.scale_loss")]


def test_what_is_left_stands_beside_what_is_not():
    code = "try:\n    from apex import amp, RNN\nexcept ImportError:\n    raise\nRNN.LSTM(4)\n"
    result = migrate_source(code, "native")
    first, second, mark, left, *_ = result.code.splitlines()
    assert (first, second, left) == ("try:", "    import native_amp as amp", "    from apex import RNN")
    assert mark.startswith("    # TODO(ampcompat): apex.RNN: use torch.nn.LSTM")


def test_edits_inside_of_edited_calls():
    call = "apex.optimizers.FusedAdam(apex.amp.master_params(x), lr=f(apex.amp), capturable=True)"
    code = f"import torch\nimport apex\no = {call}\n"
    assert migrate_source(code, "native").code.splitlines()[2] == (
        "o = torch.optim.AdamW(native_amp.master_params(x), lr=f(native_amp), weight_decay=0.0)"
    )


def test_columns_are_counted_in_characters():
    code = "from apex.optimizers import FusedSGD\nx = 'é\u2028'; y = FusedSGD(p, 0.1, wd_after_momentum=False)\n"
    assert migrate_source(code, "native").code.splitlines(keepends=False)[-1].endswith("y = FusedSGD(p, 0.1)")

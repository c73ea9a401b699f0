"""What ROCm's fork of apex has beyond NVIDIA's: bfloat16 by its own names."""

import inspect
import unittest

import pytest
import torch
import torch.nn.functional as F
from amp_training import net, sgd, start, train
from internals import is_anything_initialized, reset
from python_process import run_python

from ampcompat import amp
from ampcompat.amp import utils
from ampcompat.testing import common_utils

HALF, BF16, FLOAT = torch.float16, torch.bfloat16, torch.float32


def mm():
    return torch.mm(torch.ones(2, 2), torch.ones(2, 2)).dtype


# -- amp.init(patch_type=) ---------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("args", "kwargs", "dtype"),
    [
        ((), {"patch_type": BF16}, BF16),
        ((), {"patch_type": HALF}, HALF),
        ((), {"patch_type": None}, HALF),
        ((True, "dynamic", BF16), {}, BF16),  # ROCm's order
        ((True, "dynamic", HALF, True, False), {}, HALF),
        ((True, "dynamic", True), {}, HALF),  # NVIDIA's
        ((True, "dynamic", True, False), {"patch_type": BF16}, BF16),
        ((True, 128.0, BF16), {"verbose": False, "allow_banned": True}, BF16),
    ],
)
@pytest.mark.usefixtures("tensors_on_the_accelerator")
def test_init_casts_to_patch_type(args, kwargs, dtype):
    handle = amp.init(*args, **kwargs)
    assert mm() == dtype
    assert F.linear(torch.ones(2, 2), torch.ones(2, 2)).dtype == dtype
    (scaler,) = amp._amp_state.loss_scalers
    assert scaler.loss_scale() == (128.0 if 128.0 in args else 2.0**16)
    handle._deactivate()
    assert mm() == FLOAT


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [
        ((True, "dynamic", HALF, True, False, True), {}),
        ((True, "dynamic", HALF), {"allow_banned": True}),
        ((True, "dynamic", True, False, True), {}),
    ],
)
@pytest.mark.usefixtures("tensors_on_the_accelerator")
def test_init_reads_either_order_of_arguments(args, kwargs):
    """ROCm's fork and apex order the positional arguments differently."""
    amp.init(*args, **kwargs)
    half, target = torch.full((2,), 0.5, dtype=HALF), torch.ones(2)
    assert F.binary_cross_entropy(half, target).dtype == FLOAT


@pytest.mark.parametrize("wrong", [torch.float32, torch.int8, "float16", True])
def test_another_patch_type_is_refused(wrong):
    rule = "amp.init got patch_type=.* - functions are cast to torch.float16 or torch.bfloat16 - pass one of these"
    with pytest.raises(RuntimeError, match=rule):
        amp.init(patch_type=wrong)
    if isinstance(wrong, torch.dtype):
        with pytest.raises(RuntimeError, match=rule):
            amp.init(True, "dynamic", wrong)
    assert not is_anything_initialized()
    assert mm() == FLOAT


def test_patch_type_twice_is_refused():
    with pytest.raises(TypeError, match="patch_type"):
        amp.init(True, "dynamic", BF16, patch_type=BF16)


def test_patch_type_of_init_leaves_models_alone():
    """After ``initialize``, ``amp.init(patch_type=...)`` decides for code outside the models alone."""
    model, optimizer = start("O1")
    handle = amp.init(patch_type=BF16)
    assert mm() == BF16
    assert model(torch.ones(4, 6)).dtype == HALF
    train(model, optimizer, 1)
    handle._deactivate()
    start("O4", model=net(1))
    amp.init()
    assert mm() == BF16


@pytest.mark.usefixtures("tensors_on_the_accelerator")
def test_the_dtype_from_outside_beats_patch_type(monkeypatch):
    with monkeypatch.context() as patch:
        patch.setenv("AMPCOMPAT_DTYPE", "float16")
        amp.init(patch_type=BF16)
    assert mm() == HALF


def test_signature_of_init_shows_nvidia_s_order():
    assert list(inspect.signature(amp.init).parameters)[2:] == [
        "enable_caching",
        "verbose",
        "allow_banned",
        "patch_type",
    ]


# -- initialize(patch_torch_functions_type=) ---------------------------------------------------------------------------
@pytest.mark.parametrize(("level", "dtype"), [("O0", None), ("O1", HALF), ("O2", None), ("O4", BF16), ("O5", None)])
def test_the_type_of_patches_is_an_option(level, dtype, capsys):
    model = net()
    amp.initialize(model, sgd(model), opt_level=level, patch_torch_functions_type=dtype)
    properties = amp._amp_state.opt_properties
    assert properties.patch_torch_functions_type is properties.options["patch_torch_functions_type"] is dtype
    assert capsys.readouterr().out.count(f"patch_torch_functions_type : {dtype}\n") == 2


@pytest.mark.parametrize(
    ("level", "dtype", "fix"),
    [
        ("O1", BF16, "at O1 - .* torch.float16 - select opt_level='O4'"),
        ("O4", HALF, "at O4 - .* torch.bfloat16 - select opt_level='O1'"),
        ("O2", HALF, "at O2 - this level casts no functions - leave it out"),
        ("O0", BF16, "at O0 - this level casts no functions"),
    ],
)
def test_another_type_of_patches_is_refused(level, dtype, fix):
    model = net()
    with pytest.raises(RuntimeError, match=f"patch_torch_functions_type={dtype} {fix}"):
        amp.initialize(model, sgd(model), opt_level=level, patch_torch_functions_type=dtype, verbosity=0)
    assert not is_anything_initialized()


@pytest.mark.parametrize("wrong", ["float16", True, torch.float32])
def test_what_is_no_type_of_patches(wrong):
    model = net()
    with pytest.raises(TypeError, match=r"patch_torch_functions_type=.* - it must be torch.float16, torch.bfloat16 or"):
        amp.initialize(model, sgd(model), opt_level="O1", patch_torch_functions_type=wrong)


def test_the_option_shows_what_is_in_force(monkeypatch, capsys):
    """Environment variables override ``patch_torch_functions_type``, and the properties show the result."""
    with monkeypatch.context() as patch:
        patch.setenv("AMPCOMPAT_DTYPE", "bf16")
        model = net()
        amp.initialize(model, sgd(model), opt_level="O1", patch_torch_functions_type=HALF, verbosity=0)
        assert amp._amp_state.opt_properties.patch_torch_functions_type is BF16
        assert mm() == BF16
        patch.setenv("AMPCOMPAT_OPT_LEVEL", "O5")
        model = net(1)
        amp.initialize(model, sgd(model), opt_level="O4", patch_torch_functions_type=BF16, verbosity=0)
        assert amp._amp_state.opt_properties.patch_torch_functions_type is None
    assert "patch_torch_functions_type=torch.bfloat16 is not for this level and is dropped" in capsys.readouterr().out


# -- bfloat16 functions ------------------------------------------------------------------------------------------------
@amp.bfloat16_function
def in_bfloat16(x, *rest, **kwargs):
    return x.dtype


@pytest.mark.parametrize(("level", "dtype"), [("O0", FLOAT), ("O1", BF16), ("O2", FLOAT), ("O4", BF16)])
def test_bfloat16_function_casts_while_casts_are_on(level, dtype):
    x = torch.ones(2)
    assert in_bfloat16(x) == FLOAT
    _held = start(level)
    assert (in_bfloat16(x), in_bfloat16(x.half())) == (dtype, dtype if dtype == BF16 else HALF)
    assert in_bfloat16(x.double()) == torch.float64
    with amp.disable_casts():
        assert in_bfloat16(x) == FLOAT


@pytest.mark.parametrize("level", ["O1", "O4"])
def test_register_bfloat16_function_beats_the_lists(level):
    amp.register_bfloat16_function(torch, "softmax")
    amp.register_bfloat16_function(torch, "mm")
    _held = start(level)
    assert torch.softmax(torch.ones(2), 0).dtype == BF16
    assert mm() == BF16
    reset()
    assert torch.softmax(torch.ones(2), 0).dtype == FLOAT


def test_bfloat16_functions_refuse_what_their_namesakes_refuse():
    with pytest.raises(ValueError, match="No function named 'softmacks' in module torch"):
        amp.register_bfloat16_function(torch, "softmacks")
    with pytest.raises(TypeError, match="bfloat16_function got an object of type NoneType"):
        amp.bfloat16_function(None)


def test_maybe_bfloat16():
    cast = utils.maybe_bfloat16({"a": [torch.ones(2), torch.ones(2).half()], "b": torch.ones(2).long()}, "name", False)
    assert [t.dtype for t in cast["a"]] == [BF16, BF16]
    assert cast["b"].dtype == torch.int64


# -- apex.testing.common_utils -----------------------------------------------------------------------------------------
def test_decorators_run_the_test_where_nothing_is_set():
    assert not common_utils.TEST_WITH_ROCM
    assert not common_utils.SKIP_FLAKY_TEST
    for decorate in (common_utils.skipIfRocm, common_utils.skipFlakyTest):
        named = decorate(sum)
        assert (named([1, 2]), named.__name__) == (3, "sum")


@pytest.mark.parametrize(
    ("flag", "decorator"), [("TEST_WITH_ROCM", "skipIfRocm"), ("SKIP_FLAKY_TEST", "skipFlakyTest")]
)
def test_decorators_skip_where_their_variable_is_set(flag, decorator, monkeypatch):
    monkeypatch.setattr(common_utils, flag, True)
    with pytest.raises(unittest.SkipTest):
        getattr(common_utils, decorator)(sum)([1])


def test_flags_are_read_from_the_environment():
    code = "from ampcompat.testing.common_utils import *; print(TEST_WITH_ROCM, SKIP_FLAKY_TEST)"
    for one, other in (("1", "0"), ("0", "1"), ("", "yes")):
        flags = {"APEX_TEST_WITH_ROCM": one, "APEX_SKIP_FLAKY_TEST": other}
        assert run_python(["-c", code], variables=flags).stdout == f"{one == '1'} {other == '1'}\n"


def test_common_utils_by_apex_s_name():
    code = "import ampcompat; ampcompat.install_as_apex(); from apex.testing.common_utils import skipIfRocm;"
    code += "import apex.testing, sys; print(skipIfRocm.__module__, 'torch' in sys.modules)"
    done = run_python(["-c", code])
    assert done.stdout.split()[0] == "ampcompat.testing.common_utils", done.stderr

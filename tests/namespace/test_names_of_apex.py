"""Names of the original's Python modules that public code imports, calls or asks for, and how they must be called.

Editors' auto-imports put some of them at the top of files that never use them; the file must import all the same. Names
of :mod:`ampcompat.amp` that scripts read and write are in ``tests/amp/core/test_core_contract.py``.
"""

import importlib
import inspect

import pytest
import torch
from torch.nn import functional as F

from ampcompat import amp, install_as_apex, uninstall_as_apex

#: By its full name in apex: the parameters, in the original's order, that it takes, by position or by name.
NAMES = {
    # at the top of files
    "apex._autocast_utils._cast_if_autocast_enabled": "*args",
    "apex.amp.compat.filter_attrs": "module attrs",
    "apex.amp.rnn_compat.has_old_rnns": "",
    "apex.amp.utils.type_string": "x",
    "apex.amp._initialize.applier": "value fn",
    "apex.amp._amp_state.maybe_print": "msg rank0",
    "apex.amp._amp_state.warn_or_err": "msg",
    "apex.fp16_utils.loss_scaler.to_python_float": "t",
    "apex.mlp.MlpFunction.backward": "ctx grad_o",
    "apex.mlp.MlpFunction.forward": "ctx bias activation *args",
    "apex.mlp.mlp.mlp_function": "bias activation *args",
    "apex.mlp.mlp_function": "bias activation *args",
    "apex.normalization.fused_layer_norm.FusedLayerNormAffineFunction.forward": (
        "ctx input weight bias normalized_shape eps memory_efficient"
    ),
    "apex.normalization.fused_layer_norm.FusedLayerNormFunction.forward": (
        "ctx input normalized_shape eps memory_efficient"
    ),
    "apex.normalization.fused_layer_norm.FusedRMSNormAffineFunction.forward": (
        "ctx input weight normalized_shape eps memory_efficient"
    ),
    "apex.normalization.fused_layer_norm.FusedRMSNormFunction.forward": (
        "ctx input normalized_shape eps memory_efficient"
    ),
    "apex.parallel.distributed.flatten": "bucket",
    "apex.parallel.distributed.unflatten": "coalesced bucket",
    # methods
    "apex.amp.opt.OptimWrapper.add_param_group": "self param_group",
    "apex.amp.opt.OptimWrapper.load_state_dict": "self state_dict",
    "apex.amp.opt.OptimWrapper.state_dict": "self",
    "apex.amp.opt.OptimWrapper.zero_grad": "self",
    "apex.fp16_utils.FP16_Optimizer._master_params_to_model_params": "self",
    "apex.fp16_utils.FP16_Optimizer._model_grads_to_master_grads": "self",
    "apex.optimizers.FusedSGD.get_momentums": "self params",
    "apex.parallel.DistributedDataParallel.allreduce_fallback": "self",
}


@pytest.fixture
def alias():
    assert install_as_apex()
    yield
    uninstall_as_apex()


def find(name):
    """What ``name`` is: of a module, imported as a script imports it, or an attribute of that."""
    parts = name.split(".")
    for end in range(len(parts), 0, -1):
        path = ".".join(parts[:end])
        try:
            found = importlib.import_module(path)
        except ModuleNotFoundError:
            continue
        for part in parts[end:]:
            found = getattr(found, part)
        return found
    raise AssertionError(name)


@pytest.mark.parametrize("name", NAMES)
def test_it_is_there_and_takes_what_the_original_took(alias, name):
    parameters = inspect.signature(inspect.unwrap(find(name))).parameters.values()
    stars = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
    found = [stars.get(p.kind, "") + p.name for p in parameters]
    wanted = NAMES[name].split()
    assert found[: len(wanted)] == wanted


def test_modules_are_attributes_of_amp_too(alias):
    import apex

    assert not apex.amp.rnn_compat.has_old_rnns()
    assert apex.amp.compat.filter_attrs(torch, ["mm", "absent", "addmm"]) == ["mm", "addmm"]


def test_type_string():
    assert amp.utils.type_string(torch.ones(1).half()) == "HalfTensor"
    assert amp.utils.type_string(torch.ones(1)) == "FloatTensor"


def test_the_handle_is_in_the_module_where_apex_had_it():
    assert amp.amp._DECORATOR_HANDLE is None
    handle = amp.init()
    assert amp.amp._DECORATOR_HANDLE is amp._DECORATOR_HANDLE is handle
    with pytest.raises(AttributeError, match="no attribute 'absent'"):
        amp.amp.absent  # noqa: B018


def test_applier_and_messages_by_their_keywords(capsys):
    from ampcompat.amp._amp_state import maybe_print, warn_or_err
    from ampcompat.amp._initialize import applier

    tensor = torch.ones(2)
    assert applier(value={"a": [tensor, "b"]}, fn=lambda t: t + 1)["a"][0].tolist() == [2.0, 2.0]
    maybe_print(msg="said", rank0=True)
    assert capsys.readouterr().out == "said\n"
    with pytest.raises(RuntimeError, match="^wrong$"):
        warn_or_err(msg="wrong")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_cast_if_autocast_enabled(dtype):
    from ampcompat._autocast_utils import _cast_if_autocast_enabled

    wide = torch.ones(2)
    args = (wide, wide.double(), wide.long(), torch.ones(2, device="meta"), None, "text", [wide])
    assert all(a is b for a, b in zip(_cast_if_autocast_enabled(*args), args, strict=True))
    with torch.autocast(wide.device.type, dtype):
        found = _cast_if_autocast_enabled(*args)
    assert found[0].dtype == found[6][0].dtype == dtype
    assert all(a is b for a, b in zip(found[1:6], args[1:6], strict=True))


def test_norm_functions_by_apply():
    from ampcompat.normalization import fused_layer_norm as norms

    torch.manual_seed(0)
    x, weight, bias = torch.randn(3, 4), torch.randn(4), torch.randn(4)
    pairs = [
        (norms.FusedLayerNormFunction.apply(x, (4,), 1e-3), F.layer_norm(x, (4,), eps=1e-3)),
        (
            norms.FusedLayerNormAffineFunction.apply(x, weight, bias, (4,), 1e-3),
            F.layer_norm(x, (4,), weight, bias, 1e-3),
        ),
        (norms.FusedRMSNormFunction.apply(x, (4,), 1e-3), F.rms_norm(x, (4,), eps=1e-3)),
        (norms.FusedRMSNormAffineFunction.apply(x, weight, (4,), 1e-3, True), F.rms_norm(x, (4,), weight, 1e-3)),
    ]
    assert all(torch.equal(a, b) for a, b in pairs)


def test_flatten_and_unflatten():
    from ampcompat.parallel.distributed import flatten, unflatten

    tensors = [torch.arange(4.0).reshape(2, 2), torch.tensor(7.0)]
    flat = flatten(tensors)
    assert flat.tolist() == [0, 1, 2, 3, 7]
    assert all(torch.equal(a, b) for a, b in zip(unflatten(flat, tensors), tensors, strict=True))


def test_a_subclass_of_the_wrapped_optimizer_extends_its_methods():
    from ampcompat.amp.opt import OptimWrapper

    class Counting(OptimWrapper):
        def state_dict(self):
            return {"counted": 1, **super().state_dict()}

    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    wrapper = Counting(optimizer, amp.init(), 1)
    more = torch.nn.Parameter(torch.ones(2))
    wrapper.add_param_group({"params": [more]})
    assert optimizer.param_groups[1]["params"] == [more]
    more.grad = torch.ones(2)
    wrapper.step()
    wrapper.zero_grad(set_to_none=True)
    assert more.grad is None
    saved = wrapper.state_dict()
    assert saved.pop("counted") == 1
    wrapper.load_state_dict(saved)
    assert optimizer.state[more]["momentum_buffer"].tolist() == [1.0, 1.0]


def test_amp_of_amp_has_what_training_calls():
    """An inpainting script says ``from apex.amp import amp``, and then ``amp.initialize``."""
    assert amp.amp.initialize is amp.initialize
    assert amp.amp.state_dict is amp.state_dict
    assert amp.amp.load_state_dict is amp.load_state_dict


#: A module of apex, a name in it, and the package of ampcompat that has the same object.
PATHS = [
    ("contrib.optimizers.fp16_optimizer", "FP16_Optimizer", "optimizers"),
    ("contrib.optimizers.fused_adam", "FusedAdam", "contrib.optimizers"),
    ("contrib.optimizers.fused_lamb", "FusedLAMB", "contrib.optimizers"),
    ("contrib.optimizers.fused_sgd", "FusedSGD", "contrib.optimizers"),
    ("contrib.xentropy.softmax_xentropy", "SoftmaxCrossEntropyLoss", "contrib.xentropy"),
    ("contrib.clip_grad.clip_grad", "clip_grad_norm_", "contrib.clip_grad"),
    ("mlp.mlp", "MLP", "mlp"),
    ("parallel.optimized_sync_batchnorm", "SyncBatchNorm", "parallel"),
    ("parallel.distributed", "Reducer", "parallel"),
]


@pytest.mark.parametrize(("path", "name", "home"), PATHS)
def test_old_import_paths(path, name, home):
    install_as_apex()
    scope = {}
    exec(f"from apex.{path} import {name}", scope)
    assert scope[name] is getattr(importlib.import_module(f"ampcompat.{home}"), name)

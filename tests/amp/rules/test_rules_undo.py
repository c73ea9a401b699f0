"""Installing is idempotent, all or nothing, and leaves nothing behind."""

import pytest
import torch
import torch.nn.functional as F
from internals import device_types_with_rules, reset

from ampcompat import _torch
from ampcompat.amp.casts import installation, rules

pytestmark = [pytest.mark.device, pytest.mark.torch]


def registrations():
    """What is registered for autocast, and its kernels' sources, by op."""
    names = ["aten::mv", "aten::exp", "aten::binary_cross_entropy", "aten::lstm_cell", "aten::_softmax"]
    keys = [key for d in _torch.autocast_device_types() if (key := _torch.autocast_key(d))]
    every = [sorted(torch._C._dispatch_get_registrations_for_dispatch_key(key)) for key in keys]
    return every, [torch._C._dispatch_dump(name) for name in names]


def functions():
    """The functions that are wrapped, by identity and body, and the globals beside them."""
    found = [(name, vars(F).get(name)) for name in rules.PYTHON]
    bodies = [(name, f.__code__, f.__defaults__) for name, f in found if f is not None]
    methods = dict(torch.Tensor.__dict__)
    return found, bodies, sorted(vars(F)), methods, {name: vars(torch)[name] for name in dir(torch) if name[-1] == "_"}


def settings():
    import torch._functorch.config as functorch

    compiler = getattr(torch.compiler, "config", None)
    return getattr(functorch, "backward_pass_autocast", None), getattr(compiler, "cache_key_tag", None)


def test_release_leaves_nothing_behind():
    """The dispatcher, torch's functions and its settings are as they were before ``acquire``."""
    before = registrations(), settings(), functions()
    for _ in range(3):
        installation.install(_torch.autocast_device_types())
        assert (registrations(), settings()) != before[:2]
        assert functions() != before[2]
        installation.uninstall()
        assert (registrations(), settings(), functions()) == before


def test_reset_releases():
    before = registrations()
    installation.install(["cpu", "cuda"])
    reset()
    assert registrations() == before
    assert not device_types_with_rules()


def test_acquire_is_idempotent_and_grows():
    installation.install(["cpu"])
    once = registrations()
    installation.install(["cpu", "cpu"])
    assert registrations() == once
    installation.install(["cuda", "cpu"])
    assert device_types_with_rules() == {"cpu", "cuda"}
    installation.uninstall()
    installation.uninstall()
    assert not device_types_with_rules()


def test_a_device_type_without_autocast_is_passed_over():
    installation.install(["meta", "no such device"])
    assert not device_types_with_rules()
    assert "cpu" not in torch.Tensor.__dict__


def test_a_failing_registration_leaves_torch_as_it_was(monkeypatch):
    before = registrations(), functions()
    planned, impl = len(rules.plan_for("cpu", "AutocastCPU")), torch.library.Library.impl
    calls = []

    def failing(self, op, kernel, key):
        calls.append(op)
        if len(calls) == planned + 3:  # in the middle of the second device type
            raise RuntimeError("no more")
        impl(self, op, kernel, key)

    monkeypatch.setattr(torch.library.Library, "impl", failing)
    with pytest.raises(RuntimeError, match="no more"):
        installation.install(["cpu", "cuda"])
    assert (registrations(), functions()) == before
    assert not device_types_with_rules()


def test_only_what_native_autocast_lacks_is_registered():
    cpu = {_torch.op_name(op) for op in rules.plan_for("cpu", "AutocastCPU")}
    cuda = {_torch.op_name(op) for op in rules.plan_for("cuda", "AutocastCUDA")}
    assert {"aten::mv", "aten::exp", "aten::lstm.input", "aten::binary_cross_entropy"} <= cpu
    assert not {"aten::mm", "aten::linear", "aten::mse_loss", "aten::add.Tensor"} & (cpu | cuda)
    assert {"aten::gelu", "aten::std.correction", "aten::grid_sampler", "aten::binary_cross_entropy"} <= cuda
    assert not {"aten::mv", "aten::exp", "aten::lstm.input", "aten::softmax.int"} & cuda


@pytest.mark.parametrize("device_type", _torch.autocast_device_types())
def test_no_op_with_a_rule_takes_a_tensor_by_keyword_only(device_type):
    """The kernels cast positional arguments, which is how the dispatcher passes all the others."""
    for op, (_, rule) in rules.plan_for(device_type, _torch.autocast_key(device_type)).items():
        if rule is rules.Rule.UNCAST:  # out=
            continue
        keywords = [a for a in op._schema.arguments if a.kwarg_only]
        assert not [a.name for a in keywords if "Tensor" in str(a.type)], op


def test_a_device_without_autocast_kernels():
    """It gets rules for every op of the lists."""
    hpu = {_torch.op_name(op) for op in rules.plan_for("hpu", "AutocastHPU")}
    assert {"aten::mm", "aten::linear", "aten::softmax.int", "aten::lstm.input", "aten::grid_sampler"} <= hpu

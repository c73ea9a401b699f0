"""What subclasses with a step of their own call: the functions of ``amp_C`` on the optimizer, and a flag for them."""

import copy
import pickle

import pytest
import torch

from ampcompat import amp, amp_C, optimizers
from ampcompat.contrib import optimizers as contributed

pytestmark = pytest.mark.device

CARRIED = {
    optimizers.FusedAdam: {
        "multi_tensor_adam": "multi_tensor_adam",
        "multi_tensor_adam_capturable": "multi_tensor_adam_capturable",
        "multi_tensor_adam_capturable_master": "multi_tensor_adam_capturable_master",
    },
    optimizers.FusedSGD: {"multi_tensor_sgd": "multi_tensor_sgd"},
    optimizers.FusedAdagrad: {"multi_tensor_adagrad": "multi_tensor_adagrad"},
    optimizers.FusedNovoGrad: {"multi_tensor_novograd": "multi_tensor_novograd"},
    optimizers.FusedLAMB: {"multi_tensor_l2norm": "multi_tensor_l2norm", "multi_tensor_lamb": "multi_tensor_lamb"},
    optimizers.FusedMixedPrecisionLamb: {
        "multi_tensor_l2norm": "multi_tensor_l2norm_mp",
        "multi_tensor_lamb": "multi_tensor_lamb_mp",
    },
    contributed.FusedSGD: {"multi_tensor_sgd": "multi_tensor_sgd"},
}
every = pytest.mark.parametrize("cls", CARRIED, ids=lambda cls: cls.__module__.removeprefix("ampcompat."))


def make(cls):
    return cls([torch.nn.Parameter(torch.ones(2))], lr=0.1)


@every
def test_they_are_the_functions_of_amp_C(cls):
    optimizer = make(cls)
    for attribute, function in CARRIED[cls].items():
        assert getattr(optimizer, attribute) is getattr(amp_C, function)


@every
def test_the_flag_is_on_the_device_of_the_params_and_outlives_copies(cls):
    optimizer = make(cls)
    for one in (optimizer, copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        flag = one._dummy_overflow_buf
        assert (flag.tolist(), flag.dtype, flag.device) == ([0], torch.int32, one.param_groups[0]["params"][0].device)
        assert one._dummy_overflow_buf is flag
    assert set(optimizer.state_dict()) == {"state", "param_groups"}


def test_a_subclass_sets_its_own():
    """Copies of apex's constructors assign both."""

    class Copied(optimizers.FusedLAMB):
        def __init__(self, params):
            super().__init__(params)
            self._dummy_overflow_buf = torch.ones(1, dtype=torch.int)
            self.multi_tensor_lamb = amp_C.multi_tensor_lamb_mp

    optimizer = Copied([torch.nn.Parameter(torch.ones(2))])
    assert optimizer._dummy_overflow_buf.item() == 1
    assert optimizer.multi_tensor_lamb is amp_C.multi_tensor_lamb_mp


@every
def test_a_step_of_its_own_takes_no_flags(cls):
    """``GradScaler`` and amp lend ``found_inf`` to an optimizer that says it reads it: a step of its own does not."""

    class Stepping(cls):
        def step(self, closure=None):
            return None

    class Mixin:
        def step(self, closure=None):
            return None

    class Mixed(Mixin, cls):
        pass

    class Named(cls):
        pass

    class NamedAgain(Named):
        pass

    for kind in (cls, Named, NamedAgain):
        assert make(kind)._step_supports_amp_scaling
    for kind in (Stepping, Mixed):
        assert not make(kind)._step_supports_amp_scaling


def test_a_step_of_its_own_that_takes_a_scaler_gets_it_from_torchs_alone():
    """``GradScaler`` passes itself, with scale and flag, to a step that has the parameter; amp passes none."""

    class Scaled(optimizers.FusedAdam):
        def step(self, closure=None, grad_scaler=None):
            self.passed = grad_scaler

    class Derived(Scaled):
        pass

    for cls, level in ((Scaled, "O1"), (Derived, "O2")):
        assert make(cls)._step_supports_amp_scaling
        model = torch.nn.Linear(2, 2)
        model, optimizer = amp.initialize(model, cls(model.parameters()), opt_level=level, verbosity=0)
        assert not optimizer._step_supports_amp_scaling

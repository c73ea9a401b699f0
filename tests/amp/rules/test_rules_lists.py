"""Scripts edit ``amp.lists`` before ``initialize``, as NVIDIA's Tacotron2 does, and the casts follow."""

import copy

import pytest
import torch
import torch.nn.functional as F
from internals import device_types_with_rules
from o1_casts import casts_on
from seeded import seeded
from torch.nn.functional import normalize as early_normalize
from torch.nn.functional import softmax as early_softmax

from ampcompat import amp
from ampcompat.amp.lists import functional_overrides, tensor_overrides, torch_overrides

HALF, FLOAT = torch.float16, torch.float32


@pytest.fixture(autouse=True)
def lists_left_as_found():
    names = ("FP16_FUNCS", "FP32_FUNCS", "CASTS", "SEQUENCE_CASTS", "BANNED_FUNCS")
    modules = (functional_overrides, torch_overrides, tensor_overrides)
    found = [(m, n, copy.copy(getattr(m, n))) for m in modules for n in names if hasattr(m, n)]
    yield
    for module, name, entries in found:
        getattr(module, name)[:] = entries


@pytest.fixture
def h():
    return torch.randn(4, 8, generator=seeded(0)).half()


def initialize():
    net = torch.nn.Linear(2, 2)
    return amp.initialize(net, torch.optim.SGD(net.parameters(), lr=0.1), opt_level="O1", verbosity=0)


def softmaxes(x):
    return {f(x).dtype for f in (lambda t: F.softmax(t, 1), lambda t: early_softmax(t, 1), torch.nn.Softmax(1))} | {
        x.softmax(1).dtype,
        torch.softmax(x, 1).dtype,
    }


def test_the_lists_have_apexs_names_and_homes():
    assert amp.lists.functional_overrides.MODULE is F
    assert amp.lists.torch_overrides.MODULE is torch
    assert amp.lists.tensor_overrides.MODULE is torch.Tensor
    assert "__rpow__" in tensor_overrides.FP32_FUNCS
    assert "cat" in torch_overrides.SEQUENCE_CASTS
    ((name, message),) = functional_overrides.BANNED_FUNCS
    assert (name, "BCEWithLogits" in message) == ("binary_cross_entropy", True)


def test_a_softmax_moved_to_half_as_in_tacotron2(h):
    _held = initialize()
    assert softmaxes(h) == softmaxes(h.float()) - {HALF} == {FLOAT}
    amp.lists.functional_overrides.FP32_FUNCS.remove("softmax")
    amp.lists.functional_overrides.FP16_FUNCS.append("softmax")
    _held = initialize()
    assert softmaxes(h) == softmaxes(h.float()) == {HALF}
    functional_overrides.FP16_FUNCS.remove("softmax")
    functional_overrides.FP32_FUNCS.append("softmax")
    _held = initialize()
    assert softmaxes(h) == {FLOAT}


@pytest.mark.parametrize("device_type", ["cpu", "cuda"])
def test_a_removed_name_runs_as_it_is_given(h, device_type):
    from torch._subclasses.fake_tensor import FakeTensorMode

    torch_overrides.FP32_FUNCS.remove("exp")
    functional_overrides.FP32_FUNCS.remove("softmax")
    torch_overrides.FP16_FUNCS.remove("mm")
    with casts_on(device_type), FakeTensorMode():
        x = torch.ones(4, 4, device=device_type)
        assert {torch.exp(x.half()).dtype, x.half().exp_().dtype} | softmaxes(x.half()) == {HALF}
        assert {torch.exp(x).dtype, torch.mm(x, x).dtype} | softmaxes(x) == {FLOAT}


def test_a_name_added_without_removing_it_elsewhere_moves():
    torch_overrides.FP16_FUNCS.append("exp")
    tensor_overrides.FP32_FUNCS.append("__matmul__")
    with casts_on():
        assert torch.ones(2).exp().dtype is HALF
        assert (torch.ones(2, 2).half() @ torch.ones(2, 2)).dtype is FLOAT


def test_half_wins_where_a_name_was_added_to_two_lists():
    functional_overrides.FP32_FUNCS.append("sigmoid")
    torch_overrides.FP16_FUNCS.append("sigmoid")
    with casts_on():
        assert torch.sigmoid(torch.ones(2)).dtype is HALF


@pytest.mark.parametrize(
    ("module", "entries", "name", "call", "given", "dtype"),
    [
        (torch_overrides, "FP32_FUNCS", "einsum", lambda x: torch.einsum("ij,kj->ik", x, x), HALF, FLOAT),
        (torch_overrides, "FP32_FUNCS", "mean", lambda x: x.mean(), HALF, FLOAT),
        (torch_overrides, "FP16_FUNCS", "add", lambda x: x + x, FLOAT, HALF),
        (tensor_overrides, "FP32_FUNCS", "__add__", lambda x: x + 1, HALF, FLOAT),
        (functional_overrides, "FP32_FUNCS", "gumbel_softmax", lambda x: F.gumbel_softmax(x), HALF, FLOAT),
        (functional_overrides, "FP16_FUNCS", "normalize", lambda x: early_normalize(x) * 1.0, FLOAT, FLOAT),
        (tensor_overrides, "FP16_FUNCS", "tolist", lambda x: torch.tensor(x.tolist()), FLOAT, FLOAT),
        (torch_overrides, "SEQUENCE_CASTS", "hstack", lambda x: torch.hstack([x, x.float()]), HALF, FLOAT),
        (torch_overrides, "FP16_FUNCS", "stack", lambda x: torch.stack([x, x.half()]), FLOAT, HALF),
    ],
)
def test_names_that_apex_did_not_have(module, entries, name, call, given, dtype):
    getattr(module, entries).append(name)
    with casts_on():
        assert call(torch.ones(4, 8).to(given)).dtype is dtype


def test_listed_python_functions_compute_in_half(h):
    """Functions that torch writes in Python: one put on the half list, one taken from the float list."""
    third, large = torch.full((1, 3), 1 / 3), torch.full((1, 4, 8), 300.0).half()
    functional_overrides.FP16_FUNCS.append("gumbel_softmax")
    functional_overrides.FP32_FUNCS.remove("local_response_norm")
    plain = F.local_response_norm(large, 2)
    with casts_on():
        assert torch.equal(F.local_response_norm(large, 2), plain)  # the square overflows in half, as without casts
        torch.manual_seed(0)
        got = F.gumbel_softmax(third)
        torch.manual_seed(0)
        assert torch.equal(got, F.gumbel_softmax(third.half()))


def test_bans_can_be_lifted_and_made(h):
    functional_overrides.BANNED_FUNCS.clear()
    functional_overrides.BANNED_FUNCS.append(("sigmoid", "no sigmoids here"))
    with casts_on():
        assert F.binary_cross_entropy(torch.full((2,), 0.5).half(), torch.ones(2).half()).dtype is HALF
        with pytest.raises(NotImplementedError, match="no sigmoids here"):
            h.sigmoid()
        assert h.float().sigmoid().dtype is FLOAT


def test_an_unknown_name_gets_a_warning():
    functional_overrides.FP32_FUNCS.append("sofmax")
    with pytest.warns(UserWarning, match=r"functional_overrides\.FP32_FUNCS holds 'sofmax'.*spelling"):
        _held = initialize()


@pytest.mark.parametrize(
    ("entries", "entry"), [("FP32_FUNCS", torch.exp), ("FP32_FUNCS", ("exp", "")), ("BANNED_FUNCS", "exp")]
)
def test_an_entry_of_the_wrong_kind_is_refused(entries, entry, torch_state):
    """``initialize`` raises before anything changes."""
    before = torch_state()
    getattr(functional_overrides, entries).append(entry)
    with pytest.raises(TypeError, match=rf"functional_overrides\.{entries} holds .* - its entries are"):
        _held = initialize()
    assert not device_types_with_rules()
    assert torch_state() == before


def test_edits_reach_compiled_code_too(h):
    run = torch.compile(lambda x: torch.exp(x) * 2, backend="aot_eager", fullgraph=True)
    with casts_on():
        assert run(h).dtype is FLOAT
    torch_overrides.FP16_FUNCS.append("exp")
    with casts_on():
        assert run(h.float()).dtype is HALF


def test_a_name_may_move_between_float_lists(h):
    """``softmax`` moved from the list of ``functional`` to that of ``torch`` still computes in float32."""
    functional_overrides.FP32_FUNCS.remove("softmax")
    torch_overrides.FP32_FUNCS.append("softmax")
    with casts_on():
        assert softmaxes(h) == {FLOAT}

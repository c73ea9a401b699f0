"""Classes of apex beside amp: torch's, with the same results, or marked; and uses that ampcompat does not provide."""

import pytest
import torch

import ampcompat
from ampcompat.tools.migrate import migrate_source

SAME = {
    "FusedLayerNorm(6)": "normalization",
    "FusedLayerNorm(6, eps=1e-12)": "normalization",
    "MixedFusedLayerNorm(6, elementwise_affine=True)": "normalization",
    "FusedRMSNorm(6)": "normalization",
    "FusedRMSNorm(6, 1e-3)": "normalization",
    "FusedAdam([w], lr=0.1)": "optimizers",
    "FusedAdam([w], lr=0.1, weight_decay=0.1, bias_correction=True, set_grad_none=False)": "optimizers",
    "FusedAdam([w], 0.1, adam_w_mode=False, weight_decay=0.1)": "optimizers",
    "FusedSGD([w], 0.1, momentum=0.9, weight_decay=0.1)": "optimizers",
    "FusedAdagrad([w], lr=0.1, weight_decay=0.1)": "optimizers",
}


def result_of(code):
    """What a norm makes of a tensor, or where three steps of an optimizer lead."""
    torch.manual_seed(0)
    variables = {"w": torch.nn.Parameter(torch.randn(3, 6))}
    exec(code, variables)
    made, w = variables["made"], variables["w"]
    if not isinstance(made, torch.optim.Optimizer):
        return made(w)
    for _ in range(3):
        made.zero_grad()
        w.square().sum().backward()
        made.step()
    return w


@pytest.mark.parametrize("call", SAME)
def test_torch_does_the_same(call):
    code = f"from apex.{SAME[call]} import {call.partition('(')[0]}\nmade = {call}\n"
    migrated = migrate_source(code, "native")
    assert migrated.todos == []
    assert "apex" not in migrated.code
    before = result_of(code.replace("apex", "ampcompat"))
    torch.testing.assert_close(result_of(migrated.code), before, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "call",
    [
        "FusedAdam([w], 0.1, True)",
        "FusedAdam([w], bias_correction=False)",
        "FusedAdam([w], adam_w_mode=mode)",
        "FusedAdam(*given)",
        "FusedSGD([w], 0.1, wd_after_momentum=True)",
        "FusedAdagrad([w], adagrad_w_mode=True)",
        "FusedLAMB([w])",
        "FusedNovoGrad([w])",
    ],
)
def test_what_torch_does_otherwise_is_marked(call):
    code = f"from apex.optimizers import {call.partition('(')[0]}\nmade = {call}\n"
    migrated = migrate_source(code, "native")
    assert call in migrated.code
    assert len(migrated.todos) == 1
    assert migrate_source(migrated.code, "native").code == migrated.code


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("DDP(m)", "torch.nn.parallel.DistributedDataParallel(m)"),
        (
            "DDP(m, message_size=3, delay_allreduce=True)",
            "torch.nn.parallel.DistributedDataParallel(m, find_unused_parameters=True)",
        ),
        ("convert_syncbn_model(m)", "torch.nn.SyncBatchNorm.convert_sync_batchnorm(m)"),
        ("class_of(LN)", "class_of(torch.nn.LayerNorm)"),
    ],
)
def test_parallel_and_mentions(before, after):
    code = (
        "import torch\nfrom apex.parallel import DistributedDataParallel as DDP, convert_syncbn_model\n"
        f"from apex.normalization import FusedLayerNorm as LN\nm = {before}\n"
    )
    assert migrate_source(code, "native").code == f"import torch\nm = {after}\n"


def test_ddp_that_sums_gradients_is_marked():
    code = "from apex.parallel import DistributedDataParallel as DDP\nm = DDP(m, gradient_average=False)\n"
    assert "DDP(m, gradient_average=False)" in migrate_source(code, "native").code
    assert migrate_source(code, "native").todos


@pytest.mark.parametrize(
    "handler", ['raise ImportError("Please install apex from ...")', "amp = None", "pass", "print('no apex')"]
)
def test_a_try_that_only_imported_apex_goes(handler):
    code = f"import os\ntry:\n    from apex import amp\nexcept ImportError:\n    {handler}\nx = 1\n"
    assert migrate_source(code, "native").code == "import os\nx = 1\n"


def test_a_try_that_does_more_stays():
    code = "try:\n    from apex import amp\n    HAS = True\nexcept ImportError:\n    HAS = False\n"
    assert migrate_source(code, "native").code == "HAS = True\n"
    code = "try:\n    from apex import amp\n    import other\nexcept ImportError:\n    other = None\n"
    assert migrate_source(code, "native").code == code.replace("    from apex import amp\n", "")
    code = "try:\n    from apex import amp\nexcept ImportError:\n    HAS = False\nelse:\n    HAS = True\n"
    assert migrate_source(code, "native").code == "HAS = True\n"


@pytest.mark.parametrize("use", ["amp.lists.nonsense", "amp.nonsense()", "apex.RNN.LSTM(1)", "apex.pyprof.nvtx.init()"])
def test_uses_that_are_not_provided_are_marked(use):
    code = f"import apex\nfrom apex import amp\nx = {use}\n"
    once = migrate_source(code)
    assert [line for line, _ in once.todos] == [3]
    assert "is not provided" in once.todos[0][1]
    assert migrate_source(once.code).code == once.code
    assert ampcompat

"""``torch.distributed.checkpoint`` in one process, imported before ``amp.initialize`` or after it."""

import pytest
import torch
from internals import is_under_amp, reset
from python_process import run_python
from torch.nn.parallel import DistributedDataParallel

from ampcompat import amp

pytestmark = pytest.mark.torch

LATE = """
import sys
import torch
from ampcompat import amp

torch.distributed.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=0, world_size=1)
model = torch.nn.Linear(2, 2)
optimizer = torch.optim.AdamW(model.parameters())
amp.initialize(model, optimizer, opt_level="O2", verbosity=0)
from torch.distributed.checkpoint.state_dict import get_state_dict
print(list(get_state_dict(model, optimizer)[1]["state"]))
torch.distributed.destroy_process_group()
"""


def test_in_a_process_group_the_module_may_be_imported_later(tmp_path):
    script = tmp_path / "late.py"
    script.write_text(LATE)
    run = run_python([script, tmp_path / "meeting_place"])
    assert run.stdout.strip().splitlines()[-1:] == ["['weight', 'bias']"], run.stderr


WITHOUT = """
import sys
import torch
from ampcompat import amp

model = torch.nn.Linear(2, 2)
amp.initialize(model, torch.optim.AdamW(model.parameters()), opt_level="O2", verbosity=0)
assert "torch.distributed.checkpoint" not in sys.modules
"""


def test_scripts_in_one_process_do_not_wait_for_its_import(tmp_path):
    script = tmp_path / "without.py"
    script.write_text(WITHOUT)
    run = run_python([script])
    assert run.returncode == 0, run.stderr


def test_one_process_saves_and_loads_by_name():
    """There is no process group, and the optimizer has not stepped; batch norm and masters have their names."""
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    def made(seed):
        torch.manual_seed(seed)
        model = torch.nn.Sequential(torch.nn.Linear(2, 4), torch.nn.BatchNorm1d(4))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        return amp.initialize(model, optimizer, opt_level="O2", verbosity=0)

    model, optimizer = made(0)
    with amp.scale_loss(model(torch.randn(4, 2)).square().mean() / 64, optimizer) as scaled:
        scaled.backward()
    optimizer.step()
    saved = get_state_dict(model, optimizer)
    assert list(saved[1]["state"]) == ["0.weight", "0.bias", "1.weight", "1.bias"]
    assert "named_parameters" not in vars(model)
    other, its_optimizer = made(1)
    set_state_dict(other, its_optimizer, model_state_dict=saved[0], optim_state_dict=saved[1])
    for got, want in zip(amp.master_params(its_optimizer), amp.master_params(optimizer), strict=True):
        assert torch.equal(got, want)
        assert torch.equal(its_optimizer.state[got]["exp_avg"], optimizer.state[want]["exp_avg"])


def test_an_error_in_between_leaves_model_and_optimizer():
    from torch.distributed.checkpoint.state_dict import set_optimizer_state_dict

    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model, optimizer = amp.initialize(model, optimizer, opt_level="O2", verbosity=0)
    with pytest.raises((KeyError, RuntimeError)):
        set_optimizer_state_dict(model, optimizer, {"state": {"other": {}}, "param_groups": []})
    assert "named_parameters" not in vars(model)
    assert is_under_amp(optimizer)


def test_reset_takes_the_patches_back():
    import torch.distributed.checkpoint.state_dict as home

    patched = [
        *[(home, name) for name in ("_get_optim_state_dict", "_load_optim_state_dict")],
        *[(DistributedDataParallel, name) for name in ("__init__", "_sync_final_model")],
    ]

    def now():
        return [getattr(owner, name) for owner, name in patched]

    before = now()
    model = torch.nn.Linear(2, 2)
    amp.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), opt_level="O2", verbosity=0)
    assert all(new is not old for new, old in zip(now(), before, strict=True))
    reset()
    assert now() == before

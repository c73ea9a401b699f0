"""The scripts of the corpus train like before; the others say what they lack."""

import shutil

import pytest
import torch
from corpus import PATHS, faults, run_script
from running import migrate

#: Scripts that use what torch does not have, and what says so: a mark.
LEFT = {
    "fused_adam_layernorm": "use torch.optim.AdamW",
}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("name", [name for name in PATHS if name not in LEFT])
def test_scripts_train_like_before(name, tmp_path):
    if name == "uniter_train_vqa" and torch.__version__.startswith("2.4."):
        pytest.skip("the fast path of attention raises under autocast on a CPU")
    assert faults(name, tmp_path) == ([], {})


@pytest.mark.slow
@pytest.mark.parametrize("name", LEFT)
def test_what_is_not_there_is_said(name, tmp_path):
    shutil.copy(PATHS[name], tmp_path)
    said = str(migrate(tmp_path))
    with pytest.raises((RuntimeError, ImportError, AttributeError)) as raised:
        run_script(tmp_path, name, [], apex=False)
    assert LEFT[name] in said + str(raised.value)

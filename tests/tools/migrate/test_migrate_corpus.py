"""The scripts of the corpus train like before; the others say what they lack."""

import shutil

import pytest
import torch
from corpus import PATHS, faults, run_script
from running import migrate

#: Scripts that use what neither torch nor ``native_amp`` has, and the mark that says so.
LEFT = {
    "bert_pretraining": "torch has no LAMB",
    "fused_adam_layernorm": "use torch.optim.AdamW",
    "hf_trainer": "apex is looked for among what is installed",
}
#: A script that trains all the same: it asks for what is marked in an assertion, and never needs the answer.
MARKED = "maskrcnn"


def has_half_lstm():
    """Whether the CPU has an LSTM in half precision."""
    try:
        with torch.autocast("cpu", torch.float16):
            torch.nn.LSTM(2, 2)(torch.ones(1, 1, 2))
    except RuntimeError:
        return False
    return True


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("name", [name for name in PATHS if name not in LEFT])
def test_scripts_train_like_before(name, tmp_path):
    if name == "uniter_train_vqa" and torch.__version__.startswith("2.4."):
        pytest.skip("the fast path of attention raises under autocast on a CPU")
    if name == "tacotron2" and not has_half_lstm():
        pytest.skip("the CPU has no LSTM in half precision")
    found, left = faults(name, tmp_path)
    assert found == []
    assert bool(left) == (name == MARKED)


@pytest.mark.slow
@pytest.mark.parametrize("name", LEFT)
def test_what_is_not_there_is_said(name, tmp_path):
    shutil.copy(PATHS[name], tmp_path)
    said = str(migrate(tmp_path))
    with pytest.raises((RuntimeError, ImportError, AttributeError)) as raised:
        run_script(tmp_path, name, [], apex=False)
    assert LEFT[name] in said + str(raised.value)

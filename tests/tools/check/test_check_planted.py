"""Mistakes that people made with amp, planted in scripts that train as they should."""

import pytest
from healthy_scripts import scripts

from ampcompat.tools.check import scan_source

SCRIPTS = scripts()
#: The script, the right code, the mistake that replaces it, and the level of each trap that is found.
PLANTED = {
    "backward below the block": (
        "imagenet.py",
        "            scaled_loss.backward()\n        optimizer.step()",
        "            pass\n        scaled_loss.backward()\n        optimizer.step()",
        {"backward_after_block": "error"},
    ),
    "no block": (
        "resume_checkpoint.py",
        "with amp.scale_loss(loss, optimizer) as scaled_loss:\n            scaled_loss.backward()",
        "loss.backward()",
        {"unscaled_backward": "error"},
    ),
    "no block at O1, in a method": (
        "trainer_class.py",
        "with amp.scale_loss(loss, self.optimizer) as scaled_loss:\n                scaled_loss.backward()\n"
        "        else:\n            loss.backward()",
        "loss.backward()",
        {"unscaled_backward": "warning"},
    ),
    "step in the block": (
        "resume_checkpoint.py",
        "scaled_loss.backward()\n        optimizer.step()",
        "scaled_loss.backward()\n            optimizer.step()",
        {"step_in_block": "error"},
    ),
    "clip in the block by a method": (
        "trainer_class.py",
        "                scaled_loss.backward()\n",
        "                scaled_loss.backward()\n                self._clip()\n",
        {"clip_of_scaled_gradients": "error"},
    ),
    "gradients edited at the level of an option": (
        "imagenet.py",
        "        optimizer.step()\n",
        "        for p in model.parameters():\n            p.grad.data.div_(2)\n        optimizer.step()\n",
        {"edit_of_model_gradients": "warning"},
    ),
    "clip of the model's at O2 by default": (
        "resume_checkpoint.py",
        "        optimizer.step()\n",
        "        nn.utils.clip_grad_norm_(model.parameters(), 1.0)\n        optimizer.step()\n",
        {"clip_of_model_params": "error"},
    ),
    "the loss that was not scaled": (
        "trainer_class.py",
        "scaled_loss.backward()",
        "loss.backward()",
        {"unscaled_backward": "error"},
    ),
}


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_mistake_is_found_and_nothing_else(name):
    script, right, wrong, expected = PLANTED[name]
    assert SCRIPTS[script].count(right) == 1
    found = scan_source(SCRIPTS[script].replace(right, wrong))
    assert {f.name: f.level for f in found if f.kind != "symbol"} == expected


@pytest.mark.parametrize("script", sorted({script for script, *_ in PLANTED.values()}))
def test_before_it_is_planted_nothing_is_found(script):
    assert [f for f in scan_source(SCRIPTS[script]) if f.kind != "symbol"] == []

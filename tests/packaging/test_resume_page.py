"""The code of docs/resume.md: a moving average, and Hugging Face's Trainer, on a stand-in that saves what it saves."""

import copy
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from internals import reset

from ampcompat import amp

PAGE = Path(__file__).parents[2] / "docs" / "resume.md"
STEPS = 12


class TrainerCallback:
    pass


class Trainer:
    """The apex part of transformers 4.40: model, optimizer and scheduler are in its checkpoints, amp's state is not."""

    def __init__(self, folder, callbacks):
        torch.manual_seed(0)
        self.model = torch.nn.Linear(4, 2)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3, momentum=0.9)
        self.args, self.callbacks = SimpleNamespace(output_dir=str(folder)), callbacks

    def train(self, resume_from_checkpoint=None):
        first = 0
        if resume_from_checkpoint is not None:
            first = int(resume_from_checkpoint.rpartition("-")[2])
            saved = torch.load(f"{resume_from_checkpoint}/rest.pt", weights_only=True)
            self.model.load_state_dict(saved["model"])
        model, optimizer = amp.initialize(self.model, self.optimizer, opt_level="O2", verbosity=0)
        if resume_from_checkpoint is not None:
            optimizer.load_state_dict(saved["optimizer"])
        for step in range(first, STEPS):
            torch.manual_seed(step)
            with amp.scale_loss(model(torch.randn(3, 4)).float().pow(2).sum() * 8, optimizer) as scaled:
                scaled.backward()
            optimizer.step()
            optimizer.zero_grad()
            if step + 1 == STEPS // 2:
                self.save(step + 1)
        return {name: value.clone() for name, value in model.state_dict().items()}

    def save(self, step):
        folder = Path(self.args.output_dir, f"checkpoint-{step}")
        folder.mkdir(exist_ok=True)
        torch.save({"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}, folder / "rest.pt")
        for callback in self.callbacks:
            callback.on_save(self.args, SimpleNamespace(global_step=step), None)


@pytest.fixture
def snippets():
    section = PAGE.read_text().partition("### Resume Hugging Face's Trainer\n")[2].partition("\n### ")[0]
    return re.findall(r"```python\n(.*?)```", section, re.DOTALL)


def test_the_trainer_resumes_bitwise_with_the_callback_alone(snippets, tmp_path):
    defines, resumes = snippets
    scope = {"amp": amp, "torch": torch, "TrainerCallback": TrainerCallback}
    exec(defines, scope)
    checkpoint = str(tmp_path / f"checkpoint-{STEPS // 2}")
    whole = Trainer(tmp_path, [scope["SaveAmp"]()]).train()
    reset()
    without = Trainer(tmp_path, []).train(checkpoint)
    reset()
    assert not torch.equal(without["weight"], whole["weight"])
    resumed = []
    trainer = Trainer(tmp_path, [])
    trainer.train, train = lambda **options: resumed.append(train(**options)), trainer.train
    exec(resumes, {**scope, "trainer": trainer, "checkpoint": checkpoint})
    for name, value in whole.items():
        assert torch.equal(resumed[0][name], value), name


@pytest.mark.parametrize("opt_level", ["O0", "O1", "O2", "O3", "O4", "O5"])
def test_the_moving_average_moves(opt_level):
    section = PAGE.read_text().partition("## Keep a moving average\n")[2].partition("\n## ")[0]
    (code,) = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    if opt_level == "O3":
        (begins,) = re.findall(r"begin with `(ema = .*?)`", section)
        code = re.sub(r"^ema = .*", begins, code)
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = amp.initialize(model, optimizer, opt_level=opt_level, verbosity=0)
    scope = {"amp": amp, "copy": copy, "model": model, "torch": torch}
    exec(code, scope)
    ema, update = scope["ema"], scope["update"]
    before = ema.state_dict()["weight"].clone()
    with torch.no_grad():
        model.weight.add_(1)
    for _ in range(100):
        update(ema, model)
    moved = ema.state_dict()["weight"] - before
    torch.testing.assert_close(moved, torch.full_like(moved, 0.01), rtol=0.02, atol=0)

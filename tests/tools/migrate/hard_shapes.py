"""Trees that analysis of the source cannot follow: what happens is decided when they run."""

from spread_shapes import DATA, HEAD

APEX = "from apex import amp\n"
NET = """\
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 3)
    def forward(self, x):
        return self.second(torch.relu(self.first(x)))
"""

EXIT_STACK = f"""\
{HEAD}import contextlib
{APEX}{DATA}
model = nn.Linear(4, 3)
opt = torch.optim.SGD(model.parameters(), lr=0.1)
model, opt = amp.initialize(model, opt, opt_level="O2", verbosity=0)
def backward(losses):
    with contextlib.ExitStack() as stack:
        for loss in losses[:1]:
            scaled = stack.enter_context(amp.scale_loss(loss, opt))
            scaled.backward()
for i in range(5):
    opt.zero_grad()
    loss = F.cross_entropy(model(x), y)
    backward([loss])
    nn.utils.clip_grad_norm_(amp.master_params(opt), 0.1)
    opt.step()
    LOSSES.append(loss.item())
"""

IN_A_DICT = f"""\
{HEAD}{APEX}{DATA}
models = {{"a": nn.Linear(4, 4), "b": nn.Linear(4, 3)}}
opts = {{k: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for k, m in models.items()}}
made = amp.initialize(list(models.values()), list(opts.values()), opt_level="O1", verbosity=0, num_losses=2)
models, opts = (dict(zip("ab", part)) for part in made)
for i in range(5):
    for key in opts:
        opts[key].zero_grad()
    loss = F.cross_entropy(models["b"](models["a"](x)), y)
    with amp.scale_loss(loss, [opts[k] for k in sorted(opts)], loss_id=1) as scaled:
        scaled.backward()
    for key, opt in opts.items():
        nn.utils.clip_grad_norm_(amp.master_params(opt), 0.1)
    [opt.step() for opt in opts.values()]
    LOSSES.append(loss.item())
"""

MAYBE_AN_OPTIMIZER = {
    "engine.py": f"""\
{HEAD}{APEX}
def run(model, x, y, opt=None):
    loss = F.cross_entropy(model(x), y)
    if opt is not None:
        with amp.scale_loss(loss, opt) as scaled:
            scaled.backward()
        opt.step()
        opt.zero_grad()
    else:
        loss.backward()
        norm = sum(p.grad.norm() for p in model.parameters())
        model.zero_grad()
        return norm.item()
    return loss.item()
""",
    "train.py": f"""\
{HEAD}{APEX}from engine import run
{DATA}
model = nn.Linear(4, 3)
opt = torch.optim.Adam(model.parameters(), lr=0.1)
model, opt = amp.initialize(model, opt, opt_level="O1", verbosity=0)
for i in range(6):
    LOSSES.append(run(model, x, y, opt if i % 2 else None))
""",
}

A_PROPERTY = {
    "pkg/__init__.py": "",
    "pkg/base.py": f"""\
{HEAD}{APEX}
class Base:
    def __init__(self, model):
        self._optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        self.model, self._optimizer = amp.initialize(model, self._optimizer, opt_level="O1", verbosity=0)
    @property
    def optimizer(self):
        return self._optimizer
    def backward(self, loss):
        with amp.scale_loss(loss, self.optimizer) as scaled:
            scaled.backward()
""",
    "pkg/task.py": """\
import torch.nn.functional as F
from .base import Base
class Task(Base):
    def update(self, x, y):
        loss = F.cross_entropy(self.model(x), y)
        self._optimizer.zero_grad()
        self.backward(loss)
        self.optimizer.step()
        return loss.item()
""",
    "train.py": f"""\
{HEAD}from pkg.task import Task
{DATA}
task = Task(nn.Linear(4, 3))
for i in range(5):
    LOSSES.append(task.update(x, y))
""",
}

GAN = f"""\
{HEAD}{APEX}{DATA}{NET}
netD, netG = nn.Sequential(nn.Linear(4, 4), nn.LeakyReLU(0.2), nn.Linear(4, 1)), nn.Linear(4, 4)
optD, optG = (torch.optim.Adam(net.parameters(), lr=0.01) for net in (netD, netG))
[netD, netG], [optD, optG] = amp.initialize([netD, netG], [optD, optG], opt_level="O1", num_losses=3, verbosity=0)
criterion = nn.BCEWithLogitsLoss()
for i in range(5):
    netD.zero_grad()
    real = criterion(netD(x), torch.ones(16, 1))
    with amp.scale_loss(real, optD, loss_id=0) as scaled:
        scaled.backward()
    fake = netG(torch.randn(16, 4))
    judged = criterion(netD(fake.detach()), torch.zeros(16, 1))
    if i == 2:
        judged = judged * float("inf")
    with amp.scale_loss(judged, optD, loss_id=1) as scaled:
        scaled.backward()
    optD.step()
    netG.zero_grad()
    fooled = criterion(netD(fake), torch.ones(16, 1))
    with amp.scale_loss(fooled, optG, loss_id=2) as scaled:
        scaled.backward()
    optG.step()
    LOSSES += [real.item(), fooled.item()]
LOSSES += [scaler.loss_scale() for scaler in amp._amp_state.loss_scalers]
"""

RESUMED = {
    "train.py": f"""\
{HEAD}import io
{APEX}{DATA}{NET}
def make(seed):
    torch.manual_seed(seed)
    model = Net()
    opt = torch.optim.Adam(model.parameters(), lr=0.01)
    return amp.initialize(model, opt, opt_level="O2", verbosity=0)
def train(model, opt, scale=1.0):
    loss = F.cross_entropy(model(x), y) * scale
    opt.zero_grad()
    with amp.scale_loss(loss, opt) as scaled:
        scaled.backward()
    opt.step()
    return loss.item()
model, opt = make(0)
train(model, opt, float("inf"))
LOSSES += [train(model, opt) for _ in range(3)]
file = io.BytesIO()
torch.save({{"model": model.state_dict(), "opt": opt.state_dict(), "amp": amp.state_dict()}}, file)
file.seek(0)
saved = torch.load(file, weights_only=True)
model, opt = make(1)
model.load_state_dict(saved["model"])
opt.load_state_dict(saved["opt"])
amp.load_state_dict(saved["amp"])
LOSSES += [train(model, opt) for _ in range(3)]
LOSSES.append(amp.state_dict()["loss_scaler0"]["loss_scale"])
LOSSES.append(amp.state_dict()["loss_scaler0"]["unskipped"])
""",
}

ACCUMULATED = f"""\
{HEAD}{APEX}{DATA}{NET}
model = Net()
opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
model, opt = amp.initialize(model, opt, opt_level="O2", verbosity=0)
STEPS = 3
for i in range(11):
    loss = F.cross_entropy(model(x[i % 8:]), y[i % 8:]) / STEPS
    last = (i + 1) % STEPS == 0
    with amp.scale_loss(loss, opt, delay_unscale=not last) as scaled:
        scaled.backward()
    if last or i == 10:  # the last steps leave gradients that are still scaled
        nn.utils.clip_grad_norm_(amp.master_params(opt), 1.0) if last else None
        opt.step()
        opt.zero_grad()
    LOSSES.append(loss.item())
"""

TWO_PACKAGES = {
    "engine/__init__.py": "from .loop import train\n",
    "engine/loop.py": f"""\
{HEAD}{APEX}
def train(model, opt, x, y):
    loss = F.cross_entropy(model(x), y)
    opt.zero_grad()
    with amp.scale_loss(loss, opt) as scaled:
        scaled.backward()
    opt.step()
    return loss.item()
""",
    "saves/__init__.py": "",
    "saves/state.py": "try:\n    import apex\nexcept ImportError:\n    apex = None\n"
    "def state():\n    return apex.amp.state_dict() if apex is not None else {}\n",
    "train.py": f"""\
{HEAD}{APEX}from engine import train
from saves.state import state
{DATA}
model = nn.Linear(4, 3)
opt = torch.optim.SGD(model.parameters(), lr=0.1)
model, opt = amp.initialize(model, opt, opt_level="O1", verbosity=0, loss_scale=128.0)
LOSSES += [train(model, opt, x, y) for _ in range(4)]
LOSSES.append(state()["loss_scaler0"]["loss_scale"])
""",
}

BY_NAME = f"""\
{HEAD}import importlib
{DATA}
def amp(name, *args, **kwargs):
    return getattr(importlib.import_module("apex.amp"), name)(*args, **kwargs)
model = nn.Linear(4, 3)
opt = torch.optim.SGD(model.parameters(), lr=0.1)
model, opt = amp("initialize", model, opt, opt_level="O1", verbosity=0)
for i in range(4):
    loss = F.cross_entropy(model(x), y)
    opt.zero_grad()
    with amp("scale_loss", loss, opt) as scaled:
        scaled.backward()
    opt.step()
    LOSSES.append(loss.item())
"""

TREES = {
    "blocks of an ExitStack": {"train.py": EXIT_STACK},
    "optimizers in a dict": {"train.py": IN_A_DICT},
    "an optimizer or none": MAYBE_AN_OPTIMIZER,
    "an optimizer and its property": A_PROPERTY,
    "a GAN of three losses, one of which overflows": {"train.py": GAN},
    "a run that goes on": RESUMED,
    "accumulated, with a rest": {"train.py": ACCUMULATED},
    "two packages": TWO_PACKAGES,
    "amp by its name": {"train.py": BY_NAME},
}

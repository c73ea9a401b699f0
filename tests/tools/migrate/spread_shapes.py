"""Trees whose training is spread over modules, each with the file that is run."""

from legacy_shapes import SCALE, indented

HEAD = "import torch\nimport torch.nn.functional as F\nfrom torch import nn\n"
DATA = "torch.manual_seed(0)\nx, y = torch.randn(16, 4), torch.randint(3, (16,))\nLOSSES = []\n"
MADE = "model = nn.Linear(4, 3)\nopt = torch.optim.SGD(model.parameters(), lr=0.1)\n"
INIT = f"model, opt = amp.initialize(model, opt, {SCALE})\n"
LOOP = """\
for i in range(4):
    opt.zero_grad()
    loss = F.cross_entropy(model(x), y)
    with amp.scale_loss(loss, opt) as scaled:
        scaled.backward()
    opt.step()
    LOSSES.append(loss.item())
"""
APEX = "from apex import amp\n"
TRAIN = HEAD + APEX + DATA + MADE + INIT + LOOP
TRAINER = f"""\
class Trainer:
    def __init__(self, hooks=()):
        self.hooks = hooks
        self.model = nn.Linear(4, 3)
        self.opt = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.model, self.opt = amp.initialize(self.model, self.opt, {SCALE})
    def run(self):
        for i in range(4):
            self.opt.zero_grad()
            loss = F.cross_entropy(self.model(x), y)
            with amp.scale_loss(loss, self.opt) as scaled:
                scaled.backward()
            for hook in self.hooks:
                hook(self)
            self.step()
            LOSSES.append(loss.item())
    def step(self):
        self.opt.step()
"""
BASE = HEAD + APEX + DATA + TRAINER

ENGINE = f"""\
{HEAD}{APEX}
def train(model, opt, x, y):
    losses = []
    for i in range(4):
        loss = F.cross_entropy(model(x), y)
        opt.zero_grad()
        with amp.scale_loss(loss, opt) as s:
            s.backward()
        nn.utils.clip_grad_norm_(amp.master_params(opt), 0.1)
        opt.step()
        losses.append(loss.item())
    return losses
"""
ENGINE_RUN = HEAD + APEX + "from engine import train\n" + DATA + MADE + INIT + "LOSSES += train(model, opt, x, y)\n"
#: Trees that are run by ``train.py``.
NEAR = {
    "the network in another module": {
        "models.py": HEAD
        + "class Net(nn.Linear):\n    def forward(self, x):\n        return super().forward(x).relu()\n",
        "train.py": TRAIN.replace(APEX, APEX + "from models import Net\n").replace("nn.Linear(", "Net("),
    },
    "the loss in another module": {
        "losses.py": HEAD + "def compute(net, x, y):\n    return F.cross_entropy(net(x), y)\n",
        "train.py": TRAIN.replace(APEX, APEX + "from losses import compute\n").replace(
            "F.cross_entropy(model(x), y)", "compute(model, x, y)"
        ),
    },
    "the loss of an attribute in another module": {
        "losses.py": HEAD + "def compute(trainer, x, y):\n    return F.cross_entropy(trainer.model(x), y)\n",
        "train.py": (BASE + "Trainer().run()\n")
        .replace(APEX, APEX + "from losses import compute\n")
        .replace("F.cross_entropy(self.model(x), y)", "compute(self, x, y)"),
    },
    "the optimizer made in another module": {
        "parts.py": HEAD + "def make_optimizer(net):\n    return torch.optim.SGD(net.parameters(), lr=0.1)\n",
        "train.py": TRAIN.replace(APEX, APEX + "from parts import make_optimizer\n").replace(
            "torch.optim.SGD(model.parameters(), lr=0.1)", "make_optimizer(model)"
        ),
    },
    "model and optimizer made in a package": {
        "parts/__init__.py": "from .build import build\n",
        "parts/build.py": HEAD + "def build():\n" + indented(MADE) + "    return model, opt\n",
        "train.py": TRAIN.replace(APEX, APEX + "from parts import build\n").replace(MADE, "model, opt = build()\n"),
    },
    "a training class run from another module": {
        "engine.py": BASE,
        "train.py": "from engine import Trainer, LOSSES\nt = Trainer()\nt.run()\nprint(len(LOSSES))\n",
    },
    "a scheduler in another module": {
        "sched.py": "import torch\ndef make_scheduler(opt):\n    return torch.optim.lr_scheduler.StepLR(opt, 2)\n",
        "train.py": TRAIN.replace(APEX, APEX + "from sched import make_scheduler\n").replace(
            INIT, INIT + "s = make_scheduler(opt)\n"
        )
        + "    s.step()\n",
    },
}

NEAR["the loop in an engine"] = {"engine.py": ENGINE, "train.py": ENGINE_RUN}
NEAR["the loop in a package below"] = {
    "engine/__init__.py": "from .loop import train\n",
    "engine/loop.py": ENGINE,
    "train.py": ENGINE_RUN,
}
NEAR["an engine that has the name of the helper"] = {
    "engine.py": ENGINE.replace("x, y):", "x, y, mixed_precision=True):"),
    "train.py": ENGINE_RUN,
}
NEAR["checkpoints in another module"] = {
    "saves.py": APEX + "def save():\n    return {'amp': amp.state_dict()}\n",
    "train.py": TRAIN.replace(APEX, APEX + "from saves import save\n") + "save()['amp']\n",
}
NEAR["the loop in a folder without __init__"] = {
    "engine/loop.py": ENGINE,
    "train.py": ENGINE_RUN.replace("from engine import", "from engine.loop import"),
}
NEAR["amp in folders without __init__ alone"] = {
    "core/engine.py": ENGINE,
    "core/setup.py": HEAD + APEX + DATA + "def setup():\n" + indented(MADE + INIT) + "    return model, opt, x, y\n",
    "train.py": HEAD
    + "from core import engine\nfrom core.setup import setup\nmodel, opt, x, y = setup()\n"
    + "LOSSES = engine.train(model, opt, x, y)\n",
}
NEAR["a package, and a folder without __init__"] = {
    "core/__init__.py": "",
    "core/engine.py": ENGINE,
    "saves/state.py": APEX + "def state():\n    return amp.state_dict()\n",
    "train.py": ENGINE_RUN.replace("from engine import", "from saves.state import state\nfrom core.engine import")
    + "LOSSES.append(state()['loss_scaler0']['loss_scale'])\n",
}
RUN = "from engine import Trainer\n"
#: Trees whose parts are further apart, and a file of each.
APART = {
    "initialize, the block and the step in three modules": (
        "main.py",
        {
            "setup.py": HEAD + APEX + "def setup(model, opt):\n    return amp.initialize(model, opt, opt_level='O1')\n",
            "engine.py": APEX
            + "def backward(loss, opt):\n    with amp.scale_loss(loss, opt) as s:\n        s.backward()\n",
            "main.py": HEAD
            + "from setup import setup\nfrom engine import backward\n"
            + DATA
            + MADE
            + "model, opt = setup(model, opt)\n"
            + "for i in range(4):\n    loss = F.cross_entropy(model(x), y)\n    backward(loss, opt)\n    opt.step()\n",
        },
    ),
    "the loop in an engine, and a step beside it": (
        "train.py",
        {
            "engine.py": ENGINE,
            "train.py": HEAD
            + APEX
            + "from engine import train\n"
            + DATA
            + MADE
            + INIT
            + "LOSSES += train(model, opt, x, y)\nopt.step()\n",
        },
    ),
    "an engine in a package that may be run in two ways": (
        "pkg/engine.py",
        {
            "pkg/__init__.py": "",
            "pkg/engine.py": ENGINE,
            "pkg/train.py": HEAD
            + APEX
            + "from pkg.engine import train\n"
            + DATA
            + MADE
            + INIT
            + "train(model, opt, x, y)\n",
        },
    ),
    "a subclass steps": (
        "sub.py",
        {"engine.py": BASE, "sub.py": RUN + "class Mine(Trainer):\n    def step(self):\n        self.opt.step()\n"},
    ),
    "a subclass of a subclass steps": (
        "other.py",
        {
            "engine.py": BASE,
            "sub.py": RUN + "class Mine(Trainer):\n    pass\n",
            "other.py": "from sub import Mine\nclass More(Mine):\n    def step(self):\n        self.opt.step()\n",
        },
    ),
    "a mixin steps": (
        "mixin.py",
        {
            "mixin.py": "class Steps:\n    def go(self):\n        self.opt.step()\n",
            "engine.py": BASE.replace("class Trainer:", "from mixin import Steps\nclass Trainer(Steps):").replace(
                "self.step()", "self.go()"
            ),
        },
    ),
    "a hook steps": (
        "hooks.py",
        {
            "hooks.py": "def after(trainer):\n    trainer.opt.step()\n",
            "engine.py": BASE,
            "main.py": RUN + "from hooks import after\nTrainer([after]).run()\n",
        },
    ),
    "a hook clips": (
        "hooks.py",
        {
            "hooks.py": "from torch import nn\ndef after(trainer):\n"
            "    nn.utils.clip_grad_norm_(trainer.model.parameters(), 1.0)\n",
            "engine.py": BASE,
            "main.py": RUN + "from hooks import after\nTrainer([after]).run()\n",
        },
    ),
    "a hook edits gradients": (
        "hooks.py",
        {
            "hooks.py": "def after(trainer):\n    for p in trainer.model.parameters():\n        p.grad.data.div_(2)\n",
            "engine.py": BASE.replace(APEX, APEX + "import hooks\n").replace("hook(self)", "hooks.after(self)"),
        },
    ),
    "a step by way of a package": (
        "pkg/sub.py",
        {
            "pkg/__init__.py": "",
            "pkg/engine.py": BASE,
            "pkg/sub.py": "from .engine import Trainer\nt = Trainer()\nt.opt.step()\n",
        },
    ),
    "amp by way of another module": (
        "train.py",
        {
            "compat.py": "try:\n    from apex import amp\nexcept ImportError:\n    amp = None\n",
            "train.py": TRAIN.replace("from apex import", "from compat import"),
        },
    ),
    "amp by a star": (
        "train.py",
        {
            "compat.py": "from apex import amp\n",
            "train.py": TRAIN.replace("from apex import amp", "from compat import *"),
        },
    ),
    "amp as an attribute of another module": (
        "train.py",
        {
            "compat.py": "from apex import amp\n",
            "train.py": TRAIN.replace("from apex import amp", "import compat").replace("amp.", "compat.amp."),
        },
    ),
}

#: What runs a tree that only defines classes; a module of a package is run with ``-m``.
RUNS = {
    "a subclass steps": ("sub.py", "Mine().run()\n"),
    "a subclass of a subclass steps": ("other.py", "More().run()\n"),
    "a mixin steps": ("engine.py", "Trainer().run()\n"),
    "a hook steps": ("main.py", ""),
    "a hook clips": ("main.py", ""),
    "a hook edits gradients": ("engine.py", "Trainer([0]).run()\n"),
    "a step by way of a package": ("pkg/sub.py", "t.run()\n"),
    "an engine in a package that may be run in two ways": ("pkg/train.py", ""),
}
TREES = {name: ("train.py", files) for name, files in NEAR.items()}
for name, (script, files) in APART.items():
    script, line = RUNS.get(name, (script, ""))
    TREES[name] = (script, {**files, script: files[script] + line})

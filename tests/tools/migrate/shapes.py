"""Shapes of programs that use apex: scripts (``SHAPES``), and trees of several files (``TREES``).

Each is in the manner of public repositories, and differs from the others in what it does or in how its parts lie.
"""

HEAD = """\
import torch
import torch.nn.functional as F
from torch import nn
from apex import amp

torch.manual_seed(0)
x, y = torch.randn(16, 4), torch.randint(3, (16,))
LOSSES = []
"""
SETUP = """\
model = nn.Linear(4, 3)
opt = torch.optim.SGD(model.parameters(), lr=0.1)
model, opt = amp.initialize(model, opt, opt_level="O1", verbosity=0)
"""
SCALE = 'opt_level="O1", verbosity=0'


def indented(code, depth=1):
    return "".join("    " * depth + f"{line}\n" for line in code.splitlines())


def scaled_backward(loss="loss", optimizer="opt", arguments="", backward=""):
    return f"with amp.scale_loss({loss}, {optimizer}{arguments}) as scaled:\n    scaled.backward({backward})\n"


def turns(body):
    return "for i in range(6):\n" + indented(body)


def loop(
    step,
    before="",
    forward="loss = F.cross_entropy(model(x), y)",
    arguments="",
    after="    LOSSES.append(loss.item())\n",
):
    body = f"opt.zero_grad()\n{forward}\n" + scaled_backward(arguments=arguments) + f"{step}\n"
    return before + turns(body) + after


PAIR = f"""\
a, b = nn.Linear(4, 4), nn.Linear(4, 3)
oa, ob = torch.optim.SGD(a.parameters(), lr=0.1), torch.optim.SGD(b.parameters(), lr=0.1)
[a, b], [oa, ob] = amp.initialize([a, b], [oa, ob], {SCALE}%s)
"""


def one_of_pair(name, loss, arguments=""):
    body = f"o{name}.zero_grad()\nl{name} = {loss}\n" + scaled_backward(f"l{name}", f"o{name}", arguments)
    return body + f"o{name}.step()\nLOSSES.append(l{name}.item())\n"


def gan(first="", second=""):
    one = one_of_pair("a", "a(x).float().pow(2).mean()", first)
    return turns(one + one_of_pair("b", "F.cross_entropy(b(a(x).detach()), y)", second))


def together(steps):
    body = "loss = F.cross_entropy(b(a(x)), y)\noa.zero_grad(); ob.zero_grad()\n"
    return turns(body + scaled_backward(optimizer="[oa, ob]") + steps + "LOSSES.append(loss.item())\n")


ON_SELF = f"""\
self.model = nn.Linear(4, 3)
self.opt = torch.optim.SGD(self.model.parameters(), lr=0.1)
self.model, self.opt = amp.initialize(self.model, self.opt, {SCALE})
"""
TRAINER = f"""\
class Trainer:
    def __init__(self):
{indented(ON_SELF, 2)}\
    def backward(self):
        self.loss = F.cross_entropy(self.model(x), y)
{indented(scaled_backward("self.loss", "self.opt"), 2)}\
    def step(self):
        self.opt.step()
        self.opt.zero_grad()
%s
t = Trainer()
for i in range(6):
    t.backward()
%s    t.step()
    LOSSES.append(t.loss.item())
"""
MAIN = f"""\
def evaluate(net, data):
    net.eval()
    with torch.no_grad():
        return F.cross_entropy(net(data), y).item()
def train(loader, model, criterion, optimizer, epoch):
    for x, y in loader:
        output = model(x)
        loss = criterion(output, y)
        optimizer.zero_grad()
{indented(scaled_backward("loss", "optimizer"), 2)}\
        optimizer.step()
        LOSSES.append(loss.item())
def main():
    model = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = amp.initialize(model, optimizer, {SCALE})
    for epoch in range(2):
        train([(x, y)] * 3, model, nn.CrossEntropyLoss(), optimizer, epoch)
        LOSSES.append(evaluate(model, x))
main()
"""
CLIP = "torch.nn.utils.clip_grad_norm_(amp.master_params(opt), 0.1)"

PLAIN = {
    # Steps and losses.
    "step of an optimizer beside amp": SETUP
    + "w = nn.Parameter(torch.ones(2))\nplain = torch.optim.SGD([w], lr=0.1)\n"
    + loop("opt.step()\nplain.zero_grad()\nw.sum().backward()\nplain.step()"),
    "loss in the block's head": SETUP
    + """\
for i in range(6):
    opt.zero_grad()
    with amp.scale_loss(F.cross_entropy(model(x), y), opt) as scaled:
        scaled.backward()
        LOSSES.append(scaled.item() / 65536)
    opt.step()
""",
    # Where things are.
    "scaling in a function of the module": f"""\
def loss_backwards(fp16, loss, optimizer, **kwargs):
    if fp16:
{indented(scaled_backward("loss", "optimizer", backward="**kwargs"), 2)}\
    else:
        loss.backward(**kwargs)

class Trainer:
    def __init__(self, fp16=True):
        self.fp16 = fp16
        self.model = nn.Linear(4, 3)
        self.opt = torch.optim.Adam(self.model.parameters(), lr=0.01)
        if fp16:
            self.model, self.opt = amp.initialize(self.model, self.opt, {SCALE})
    def train(self):
        for i in range(6):
            for _ in range(2):
                loss = F.cross_entropy(self.model(x), y)
                loss_backwards(self.fp16, loss / 2, self.opt)
            self.opt.step()
            self.opt.zero_grad()
            LOSSES.append(loss.item())
Trainer().train()
""",
    "scaling by a partial, in another class": f"""\
import functools
from torch.autograd import grad as torch_grad

def loss_backwards(fp16, loss, optimizer, loss_id, **kwargs):
    if fp16:
{indented(scaled_backward("loss", "optimizer, loss_id", backward="**kwargs"), 2)}\
    else:
        loss.backward(**kwargs)

class GAN(nn.Module):
    def __init__(self):
        super().__init__()
        self.G, self.D = nn.Linear(4, 3), nn.Linear(3, 1)
        self.G_opt = torch.optim.SGD(self.G.parameters(), lr=0.01)
        self.D_opt = torch.optim.SGD(self.D.parameters(), lr=0.01)
        (self.G, self.D), (self.G_opt, self.D_opt) = amp.initialize(
            [self.G, self.D], [self.G_opt, self.D_opt], num_losses=2, {SCALE}
        )

class Trainer:
    def __init__(self):
        self.GAN = GAN()
    def train(self):
        backwards = functools.partial(loss_backwards, True)
        self.GAN.D_opt.zero_grad()
        for _ in range(2):
            fake = self.GAN.G(x).detach().requires_grad_()
            d = self.GAN.D(fake).float().pow(2).mean()
            d = d + torch_grad(d, fake, create_graph=True)[0].pow(2).sum()
            backwards(d / 2, self.GAN.D_opt, 0)
        self.GAN.D_opt.step()
        self.GAN.G_opt.zero_grad()
        g = self.GAN.D(self.GAN.G(x)).float().pow(2).mean()
        backwards(g, self.GAN.G_opt, 1)
        self.GAN.G_opt.step()
        LOSSES.append(g.item())
t = Trainer()
for i in range(6): t.train()
""",
    "lists of models and optimizers": f"""\
models = [nn.Linear(4, 4), nn.Linear(4, 3)]
opts = [torch.optim.SGD(m.parameters(), lr=0.1) for m in models]
models, opts = amp.initialize(models, opts, {SCALE})
for i in range(6):
    for o in opts:
        o.zero_grad()
    out = x
    for m in models:
        out = m(out)
    loss = F.cross_entropy(out, y)
    with amp.scale_loss(loss, opts) as scaled:
        scaled.backward()
    for o in opts:
        torch.nn.utils.clip_grad_norm_(amp.master_params(o), 1.0)
    for o in opts:
        o.step()
    LOSSES.append(loss.item())
""",
    # Gradients.
    "clip of masters": SETUP + loop(f"{CLIP}\nopt.step()"),
    "clip by value": SETUP + loop("nn.utils.clip_grad_value_(model.parameters(), 0.01)\nopt.step()"),
    "gradients edited": SETUP + loop("for p in model.parameters():\n    p.grad.clamp_(-0.01, 0.01)\nopt.step()"),
    "accumulation": SETUP
    + turns(
        "loss = F.cross_entropy(model(x), y) / 2\n"
        + scaled_backward()
        + f"if (i + 1) % 2 == 0:\n    {CLIP}\n    opt.step()\n    opt.zero_grad()\nLOSSES.append(loss.item())\n"
    ),
    "a norm clipped at each accumulated loss": SETUP
    + turns(
        "loss = F.cross_entropy(model(x), y) / 2\n"
        + scaled_backward()
        + f"norm = {CLIP}\nif (i + 1) % 2 == 0:\n    opt.step()\n    opt.zero_grad()\nLOSSES += [loss.item(), norm.item()]\n"
    ),
    "amp recognised by what it leaves on an optimizer": SETUP
    + turns(
        "opt.zero_grad()\nloss = F.cross_entropy(model(x), y)\nif hasattr(opt, '_amp_stash'):\n"
        + indented(scaled_backward())
        + "else:\n    loss.backward()\nopt.step()\nLOSSES.append(loss.item())\n"
    ),
    "the scale written and read": SETUP
    + "amp._amp_state.loss_scalers[0]._loss_scale = 2.0**7\n"
    + loop("opt.step()")
    + "LOSSES.append(amp.state_dict()['loss_scaler0']['loss_scale'])\n",
    "a float function": """\
class Loss(nn.Module):
    @amp.float_function
    def forward(self, out, y):
        return F.nll_loss(out.exp().log_softmax(1), y)


class Net(nn.Linear):
    def __init__(self):
        super().__init__(4, 3)
        self.loss = Loss()

    def forward(self, x, y):
        return self.loss(super().forward(x), y)


"""
    + SETUP.replace("nn.Linear(4, 3)", "Net()")
    + loop("opt.step()", forward="loss = model(x, y)"),
    "delayed unscaling": SETUP + loop("if i % 2: opt.step()", arguments=", delay_unscale=i % 2 == 0"),
    # Several losses.
    "two losses of one optimizer": SETUP.replace("verbosity=0", "verbosity=0, num_losses=2")
    + turns(
        "opt.zero_grad()\nout = model(x)\none, two = F.cross_entropy(out, y), out.float().pow(2).mean()\n"
        + scaled_backward("one", "opt", ", loss_id=0", "retain_graph=True")
        + scaled_backward("two", "opt", ", loss_id=1")
        + "opt.step()\nLOSSES += [one.item(), two.item()]\n"
    ),
    "two optimizers with a loss each": PAIR % ", num_losses=2" + gan(", loss_id=0", ", loss_id=1"),
    "two optimizers under one loss": PAIR % "" + together("oa.step(); ob.step()\n"),
    # Set-up.
    "amp's functions by a star": "from apex.amp import *\n"
    + SETUP.replace("amp.initialize", "initialize")
    + loop("opt.step()").replace("amp.scale_loss", "scale_loss"),
    "initialize by a partial": "import functools\nsetup = functools.partial(amp.initialize, opt_level='O1', verbosity=0)\n"
    + SETUP.replace('amp.initialize(model, opt, opt_level="O1", verbosity=0)', "setup(model, opt)")
    + loop("opt.step()"),
    "inference alone": "model = amp.initialize(nn.Linear(4, 3), opt_level='O1', verbosity=0)\n"
    "with torch.no_grad():\n    LOSSES.append(F.cross_entropy(model(x), y).item())\n",
    "a switch": """\
for fp16 in (True,):
    pass
model = nn.Linear(4, 3)
opt = torch.optim.SGD(model.parameters(), lr=0.1)
if fp16:
    model, opt = amp.initialize(model, opt, opt_level="O1", verbosity=0)
for i in range(6):
    opt.zero_grad()
    loss = F.cross_entropy(model(x), y)
    if fp16:
{block}\
    else:
        loss.backward()
    opt.step()
    LOSSES.append(loss.item())
""".replace("{block}", indented(scaled_backward(), 2)),
    "a level that does not cast": SETUP.replace('"O1"', '"O0"') + loop("opt.step()"),
    "O2 with evaluation": MAIN.replace('"O1"', '"O2"'),
    "apex probed and required": "try:\n    from apex import amp\nexcept ImportError:\n    raise ImportError('install apex')\n"
    + SETUP
    + loop("opt.step()"),
    "an average of the weights": "import copy\n"
    + SETUP.replace("model, opt = amp", "ema = copy.deepcopy(model)\nmodel, opt = amp")
    + loop("opt.step()")
    + "LOSSES.append(F.cross_entropy(ema(x), y).item())\n",
    "a gradient penalty": SETUP
    + loop(
        "opt.step()",
        forward="z = x.clone().requires_grad_()\nout = model(z)\n"
        "g, = torch.autograd.grad(out.float().sum(), z, create_graph=True)\nloss = F.cross_entropy(out, y) + g.pow(2).mean()",
    ),
}

PLAIN |= {
    "evaluation by a name of the forward": SETUP
    + loop("opt.step()")
    + "f = model.forward\nLOSSES.append(f(x).sum().item())\nLOSSES.append(getattr(model, 'forward')(x).sum().item())\n",
    "the scaled loss used after the block": SETUP
    + loop("opt.step()", after="    LOSSES.append(scaled.item() / 65536)\n"),
    "weights changed between forwards": SETUP
    + loop(
        "opt.step()",
        forward="out = model(x)\nfor p in model.parameters():\n    p.data.clamp_(-0.1, 0.1)\nloss = F.cross_entropy(model(x), y)",
    ),
    "a target made without gradients before the forward": SETUP
    + loop(
        "opt.step()",
        forward="with torch.no_grad():\n    target = model(x)\nloss = F.mse_loss(model(x) * 2, target)",
    ),
    "a forward by a method of its own": "class Net(nn.Linear):\n    def encode(self, x):\n        return self(x)\n"
    + SETUP.replace("nn.Linear", "Net")
    + loop("opt.step()", forward="loss = F.cross_entropy(model.encode(x), y)"),
    "forward under a checkpoint": "from torch.utils.checkpoint import checkpoint\n"
    + SETUP
    + loop("opt.step()", forward="out = checkpoint(model, x, use_reentrant=False)\nloss = F.cross_entropy(out, y)"),
}

#: Models and losses whose own code would meet what amp puts in the place of a forward or a step.
OWN = {
    "a zero_grad with an argument of its own": """\
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.G, self.D = nn.Linear(4, 4), nn.Linear(4, 3)
    def forward(self, x):
        return self.D(self.G(x))
    def zero_grad(self, which="all"):
        for name in "GD" if which == "all" else which:
            for p in getattr(self, name).parameters():
                p.grad = None


"""
    + SETUP.replace("nn.Linear(4, 3)", "Net()")
    + loop("opt.step()").replace("opt.zero_grad()", "model.zero_grad()")
    + loop("opt.step()").replace("opt.zero_grad()", "model.zero_grad('G'); model.zero_grad(which='D')"),
    "a batch filtered by the arguments of forward": """\
import inspect
class Net(nn.Linear):
    def forward(self, x, mask=None):
        return super().forward(x if mask is None else x * mask)


batch = {"x": x, "mask": (x > 0).float(), "length": 3}
def names(forward):
    spec = set(inspect.getfullargspec(forward).args) & set(forward.__code__.co_varnames)
    return spec & set(inspect.signature(forward).parameters)
"""
    + SETUP.replace("nn.Linear(", "Net(")
    + loop(
        "opt.step()",
        forward="given = {n: batch[n] for n in names(model.forward)}\nloss = F.cross_entropy(model(**given), y)",
    ),
    "delayed by one loss_id, ended by another": SETUP.replace("verbosity=0", "verbosity=0, num_losses=2")
    + turns(
        "opt.zero_grad()\nout = model(x)\none, two = F.cross_entropy(out, y), out.float().pow(2).mean()\n"
        + scaled_backward("one", "opt", ", loss_id=0, delay_unscale=True", "retain_graph=True")
        + scaled_backward("two", "opt", ", loss_id=1")
        + "opt.step()\nLOSSES += [s.loss_scale() for s in amp._amp_state.loss_scalers]\n"
    ),
    "a function whose backward multiplies, decorated": """\
class Multiply(torch.autograd.Function):
    @staticmethod
    @torch.amp.custom_fwd(device_type="cpu")
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x @ weight
    @staticmethod
    @torch.amp.custom_bwd(device_type="cpu")
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        return grad @ weight.t(), x.t() @ grad


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.weight = nn.Linear(4, 4), nn.Parameter(torch.eye(4)[:, :3].clone())
    def forward(self, x):
        return Multiply.apply(self.first(x), self.weight)


"""
    + SETUP.replace("nn.Linear(4, 3)", "Net()")
    + loop("opt.step()"),
}
PLAIN |= OWN

HARD = {
    "step after a look at the norm": SETUP
    + loop("norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)\nif torch.isfinite(norm):\n    opt.step()"),
    "one of two optimizers steps now and then": PAIR % "" + together("oa.step()\nif i % 2:\n    ob.step()\n"),
    "gradients left over from the last step": SETUP
    + loop("opt.step()\nif i % 2: opt.zero_grad()").replace("    opt.zero_grad()\n", "", 1),
    "step with a closure": SETUP
    + "def closure():\n    opt.zero_grad()\n    loss = F.cross_entropy(model(x), y)\n"
    + indented(scaled_backward() + "return loss")
    + "for i in range(6):\n    LOSSES.append(opt.step(closure).item())\n",
    "clip inside the block": SETUP
    + loop("opt.step()").replace("scaled.backward()", f"scaled.backward()\n        {CLIP}"),
    "clip in a method of its own": TRAINER
    % (
        "    def clip(self):\n        nn.utils.clip_grad_norm_(self.model.parameters(), 0.1)\n",
        "    t.clip()\n",
    ),
    "scale_loss by hand": SETUP
    + "for i in range(6):\n    block = amp.scale_loss(F.cross_entropy(model(x), y), opt)\n    scaled = block.__enter__()\n"
    "    scaled.backward()\n    block.__exit__(None, None, None)\n    opt.step()\n",
    "two calls of initialize": SETUP + SETUP + loop("opt.step()"),
    "O3": SETUP.replace('"O1"', '"O3"') + loop("opt.step()"),
    "options from a dict": SETUP.replace('opt_level="O1", verbosity=0', "**dict(opt_level='O1')") + loop("opt.step()"),
    "star import of fp16_utils": "from apex.fp16_utils import *\n"
    "model = network_to_half(nn.Linear(4, 3))\nopt = FP16_Optimizer(torch.optim.SGD(model.parameters(), lr=0.1))\n",
    "a registered function": SETUP.replace("model = nn", "amp.register_float_function(torch, 'sigmoid')\nmodel = nn", 1)
    + loop("opt.step()"),
    "wrapped optimizer of apex": "from apex.parallel import LARC\n"
    + SETUP.replace("model, opt = amp", "opt = LARC(opt)\nmodel, opt = amp")
    + loop("opt.step()"),
    "apex probed by name": "import importlib.util\nHAS = importlib.util.find_spec('apex') is not None\n"
    + SETUP
    + loop("opt.step()"),
    "another optimizer later": SETUP
    + turns(
        "if i == 3:\n    opt = torch.optim.Adam(model.parameters(), lr=0.01)\nopt.zero_grad()\n"
        + "loss = F.cross_entropy(model(x), y)\nif i < 3:\n"
        + indented(scaled_backward())
        + "else:\n    loss.backward()\nopt.step()\n"
    ),
    "a penalty on the weights that is not scaled": SETUP
    + loop(
        "opt.step()", forward="aux = model.weight.pow(2).sum()\naux.backward()\nloss = F.cross_entropy(model(x), y)"
    ),
    "an auxiliary loss after the block": SETUP
    + loop(
        "auxiliary.backward()\nopt.step()", forward="loss = F.cross_entropy(model(x), y)\nauxiliary = model(-x).mean()"
    ),
}

# What looks like the above and is right: another way of training behind a switch, gradients of what amp does not step.
PLAIN |= {
    "gradients of another network, emptied before the scaled ones": SETUP
    + "net = nn.Linear(4, 3)\nplain = torch.optim.SGD(net.parameters(), lr=0.1)\n"
    + turns(
        "plain.zero_grad()\nother = net(x).pow(2).mean()\nother.backward()\nplain.step()\n"
        "opt.zero_grad()\nloss = F.cross_entropy(model(x), y)\n"
        + scaled_backward()
        + "opt.step()\nLOSSES.append(loss.item())\n"
    ),
}

#: Shapes with a name of apex that torch has nothing for.
LEFT = ("star import of fp16_utils", "wrapped optimizer of apex")
SHAPES = {name: code for name, code in {**PLAIN, **HARD}.items() if name not in LEFT}

# -- trees ------------------------------------------------------------------------------------------------------------
IMPORTS = "import torch\nimport torch.nn.functional as F\nfrom torch import nn\n"
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
TRAIN = IMPORTS + APEX + DATA + MADE + INIT + LOOP

ENGINE = f"""\
{IMPORTS}{APEX}
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
ENGINE_RUN = IMPORTS + APEX + "from engine import train\n" + DATA + MADE + INIT + "LOSSES += train(model, opt, x, y)\n"
#: Trees that are run by ``train.py``.
NEAR = {
    "the loop in an engine": {"engine.py": ENGINE, "train.py": ENGINE_RUN},
    "the loop in a package below": {
        "engine/__init__.py": "from .loop import train\n",
        "engine/loop.py": ENGINE,
        "train.py": ENGINE_RUN,
    },
    "checkpoints in another module": {
        "saves.py": APEX + "def save():\n    return {'amp': amp.state_dict()}\n",
        "train.py": TRAIN.replace(APEX, APEX + "from saves import save\n") + "save()['amp']\n",
    },
    "the loop in a folder without __init__": {
        "engine/loop.py": ENGINE,
        "train.py": ENGINE_RUN.replace("from engine import", "from engine.loop import"),
    },
    "amp in folders without __init__ alone": {
        "core/engine.py": ENGINE,
        "core/setup.py": IMPORTS
        + APEX
        + DATA
        + "def setup():\n"
        + indented(MADE + INIT)
        + "    return model, opt, x, y\n",
        "train.py": IMPORTS
        + "from core import engine\nfrom core.setup import setup\nmodel, opt, x, y = setup()\n"
        + "LOSSES = engine.train(model, opt, x, y)\n",
    },
    "a package, and a folder without __init__": {
        "core/__init__.py": "",
        "core/engine.py": ENGINE,
        "saves/state.py": APEX + "def state():\n    return amp.state_dict()\n",
        "train.py": ENGINE_RUN.replace("from engine import", "from saves.state import state\nfrom core.engine import")
        + "LOSSES.append(state()['loss_scaler0']['loss_scale'])\n",
    },
}
#: Trees whose parts are further apart, and a file of each.
APART = {
    "initialize, the block and the step in three modules": (
        "main.py",
        {
            "setup.py": IMPORTS
            + APEX
            + "def setup(model, opt):\n    return amp.initialize(model, opt, opt_level='O1')\n",
            "engine.py": APEX
            + "def backward(loss, opt):\n    with amp.scale_loss(loss, opt) as s:\n        s.backward()\n",
            "main.py": IMPORTS
            + "from setup import setup\nfrom engine import backward\n"
            + DATA
            + MADE
            + "model, opt = setup(model, opt)\n"
            + "for i in range(4):\n    loss = F.cross_entropy(model(x), y)\n    backward(loss, opt)\n    opt.step()\n",
        },
    ),
    "an engine in a package that may be run in two ways": (
        "pkg/engine.py",
        {
            "pkg/__init__.py": "",
            "pkg/engine.py": ENGINE,
            "pkg/train.py": IMPORTS
            + APEX
            + "from pkg.engine import train\n"
            + DATA
            + MADE
            + INIT
            + "train(model, opt, x, y)\n",
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
    "an engine in a package that may be run in two ways": ("pkg/train.py", ""),
}
TREES = {name: ("train.py", files) for name, files in NEAR.items()}
for name, (script, files) in APART.items():
    script, line = RUNS.get(name, (script, ""))
    TREES[name] = (script, {**files, script: files[script] + line})

NET = """\
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 3)
    def forward(self, x):
        return self.second(torch.relu(self.first(x)))
"""

EXIT_STACK = f"""\
{IMPORTS}import contextlib
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
{IMPORTS}{APEX}{DATA}
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


GAN = f"""\
{IMPORTS}{APEX}{DATA}{NET}
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
{IMPORTS}import io
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
{IMPORTS}{APEX}{DATA}{NET}
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
{IMPORTS}{APEX}
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
{IMPORTS}{APEX}from engine import train
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
{IMPORTS}import importlib
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

#: Trees of which only a run shows what happens; each is run by ``train.py``.
RUN_TIME = {
    "blocks of an ExitStack": {"train.py": EXIT_STACK},
    "optimizers in a dict": {"train.py": IN_A_DICT},
    "a GAN of three losses, one of which overflows": {"train.py": GAN},
    "a run that goes on": RESUMED,
    "accumulated, with a rest": {"train.py": ACCUMULATED},
    "two packages": TWO_PACKAGES,
    "amp by its name": {"train.py": BY_NAME},
}
TREES |= {name: ("train.py", files) for name, files in RUN_TIME.items()}

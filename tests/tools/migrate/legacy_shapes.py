"""Shapes of scripts that use apex: how a step, a loss, a level, a model and an optimizer may be written."""

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
STEPPED = f"{scaled_backward()}{CLIP}\nopt.step()\nopt.zero_grad()\n"

PLAIN = {
    # How the step is written.
    "step behind a semicolon": SETUP + loop("pass; opt.step()"),
    "step on the line of an if": SETUP + loop("if i >= 0: opt.step()"),
    "step in a ternary": SETUP + loop("opt.step() if i >= 0 else None"),
    "step behind and": SETUP + loop("i >= 0 and opt.step()"),
    "step behind or": SETUP + loop("i < 0 or opt.step()"),
    "step of a default": SETUP + "def go(o=opt):\n    o.step()\n" + loop("go()"),
    "step assigned": SETUP + loop("result = opt.step()"),
    "step in a comprehension": SETUP + loop("[o.step() for o in [opt]]"),
    "steps over a list": SETUP + "optimizers = [opt]\n" + loop("for o in optimizers: o.step()"),
    "step of a dict's item": SETUP + "opts = {'g': opt}\n" + loop('opts["g"].step()'),
    "step in a helper": "def go(o):\n    o.step()\n" + SETUP + loop("go(opt)"),
    "step in try": SETUP + loop("try:\n    opt.step()\nexcept RuntimeError:\n    raise"),
    "step of an alias": SETUP + "other = opt\n" + loop("other.step()"),
    "step in while": SETUP + loop("opt.step()").replace("for i in range(6):", "i = 0\nwhile i < 6:\n    i += 1"),
    "step in an endless loop": SETUP
    + loop("opt.step()", after="    LOSSES.append(loss.item())\n    if len(LOSSES) == 6: break\n").replace(
        "for i in range(6):", "while True:"
    ),
    "step of an optimizer beside amp": SETUP
    + "w = nn.Parameter(torch.ones(2))\nplain = torch.optim.SGD([w], lr=0.1)\n"
    + loop("opt.step()\nplain.zero_grad()\nw.sum().backward()\nplain.step()"),
    "step of a scheduler": SETUP
    + "scheduler = torch.optim.lr_scheduler.StepLR(opt, 2)\n"
    + loop("opt.step()\nscheduler.step()").replace("opt.step()\n", "opt.step()\n"),
    # Where the loss comes from.
    "loss in both branches": SETUP
    + turns(
        "out = model(x)\nif i % 2:\n    loss = F.cross_entropy(out, y)\n    loss = loss / 2\n"
        + indented(STEPPED)
        + "else:\n    loss = F.cross_entropy(out, y)\n    opt.zero_grad()\n"
        + indented(STEPPED)
        + "LOSSES.append(loss.item())\n"
    ),
    "loss in the block's head": SETUP
    + """\
for i in range(6):
    opt.zero_grad()
    with amp.scale_loss(F.cross_entropy(model(x), y), opt) as scaled:
        scaled.backward()
        LOSSES.append(scaled.item() / 65536)
    opt.step()
""",
    "loss from a function": "def lossy(net):\n    return F.cross_entropy(net(x), y)\n"
    + SETUP
    + loop("opt.step()", forward="loss = lossy(model)"),
    "loss out of a tuple": "class Net(nn.Linear):\n    def forward(self, x, y):\n        out = super().forward(x)\n"
    "        return F.cross_entropy(out, y), out\n"
    + SETUP.replace("nn.Linear", "Net")
    + loop("opt.step()", forward="loss, logits = model(x, y)"),
    "forward in a comprehension": SETUP
    + loop(
        "opt.step()", forward="outs = [model(part) for part in (x, x)]\nloss = sum(F.cross_entropy(o, y) for o in outs)"
    ),
    "forward before an if": SETUP
    + loop("opt.step()", forward="out = model(x)\nif i > 1:\n    out = out * 2\nloss = F.cross_entropy(out, y)"),
    "forward with a loss that may not be": SETUP
    + loop("opt.step()", forward="loss = F.cross_entropy(model(x), y)\nif not torch.isfinite(loss):\n    continue"),
    "loss in another class": """\
class Loss:
    def __call__(self, out): return F.cross_entropy(out, y)
criterion = Loss()
"""
    + SETUP
    + loop("opt.step()", forward="out = model(x)\nloss = criterion(out)"),
    "forward in a method": f"""\
class Pix:
    def __init__(self):
        self.net = nn.Linear(4, 3)
        self.opt = torch.optim.SGD(self.net.parameters(), lr=0.1)
        self.net, self.opt = amp.initialize(self.net, self.opt, {SCALE})
    def forward(self):
        self.fake = self.net(x)
    def optimize_parameters(self):
        self.forward()
        self.opt.zero_grad()
        self.loss = F.cross_entropy(self.fake, y)
{indented(scaled_backward("self.loss", "self.opt"), 2)}\
        self.opt.step()
        LOSSES.append(self.loss.item())
p = Pix()
for i in range(6): p.optimize_parameters()
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
    "train and evaluate in functions": MAIN,
    "everything in one function": "def main():\n" + indented(SETUP + loop("opt.step()")) + "main()\n",
    "set up in a function": "def setup():\n"
    + indented(SETUP + "return model, opt\n")
    + "model, opt = setup()\n"
    + loop("opt.step()"),
    "a step function inside": "def main():\n"
    + indented(
        SETUP
        + "def train_step(data):\n    opt.zero_grad()\n    loss = F.cross_entropy(model(data), y)\n"
        + indented(scaled_backward() + "opt.step()\nreturn loss.item()")
        + turns("LOSSES.append(train_step(x))")
    )
    + "main()\n",
    "backward and step in methods": TRAINER % ("", ""),
    # Gradients.
    "clip of masters": SETUP + loop(f"{CLIP}\nopt.step()"),
    "clip of the model's": SETUP + loop("nn.utils.clip_grad_norm_(model.parameters(), 0.1)\nopt.step()"),
    "clip by value": SETUP + loop("nn.utils.clip_grad_value_(model.parameters(), 0.01)\nopt.step()"),
    "norm by hand": SETUP
    + loop("norm = sum(float(p.grad.norm()) for p in model.parameters())\nLOSSES.append(norm)\nopt.step()"),
    "gradients edited": SETUP + loop("for p in model.parameters():\n    p.grad.clamp_(-0.01, 0.01)\nopt.step()"),
    "gradients edited in place of step": SETUP
    + loop("for p in amp.master_params(opt):\n    p.grad.data.mul_(0.5)\nopt.step()"),
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
    "a norm of its own at each accumulated loss": "def get_grad_norm(params):\n"
    + "    return torch.stack([p.grad.norm() for p in params]).norm()\n"
    + SETUP
    + turns(
        "loss = F.cross_entropy(model(x), y) / 2\n"
        + scaled_backward()
        + "norm = get_grad_norm(amp.master_params(opt))\n"
        + "if (i + 1) % 2 == 0:\n    opt.step()\n    opt.zero_grad()\nLOSSES += [loss.item(), norm.item()]\n"
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
    "values clipped at each accumulated loss": SETUP
    + turns(
        "loss = F.cross_entropy(model(x), y) / 2\n"
        + scaled_backward()
        + "nn.utils.clip_grad_value_(model.parameters(), clip_value=0.02)\n"
        + "if (i + 1) % 2 == 0:\n    opt.step()\n    opt.zero_grad()\nLOSSES.append(loss.item())\n"
    ),
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
    "two optimizers that share a scale": PAIR % "" + gan(),
    "two optimizers under one loss": PAIR % "" + together("oa.step(); ob.step()\n"),
    # Set-up.
    "initialize by keywords": f"""\
model = nn.Linear(4, 3)
opt = torch.optim.SGD(model.parameters(), lr=0.1)
model, opt = amp.initialize(models=model, optimizers=opt, {SCALE})
"""
    + loop("opt.step()"),
    "initialize in place": SETUP.replace("model, opt = amp", "amp") + loop("opt.step()"),
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
    "O2": SETUP.replace('"O1"', '"O2"') + loop("opt.step()"),
    "O2 with evaluation": MAIN.replace('"O1"', '"O2"'),
    "apex probed and required": "try:\n    from apex import amp\nexcept ImportError:\n    raise ImportError('install apex')\n"
    + SETUP
    + loop("opt.step()"),
    "an evaluation loop": SETUP
    + loop("opt.step()")
    + "model.eval()\nright = 0\nfor part in (x, x):\n    with torch.no_grad():\n        out = model(part)\n"
    "    LOSSES.append(F.cross_entropy(out, y).item())\n",
    "evaluation under no_grad as a decorator": "@torch.no_grad()\ndef evaluate(net):\n    return net(x).float().sum().item()\n"
    + SETUP
    + loop("opt.step()")
    + "LOSSES.append(evaluate(model))\n",
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
    "evaluation by a function that is given the model": "def predict(fn, data):\n    return fn(data)\n"
    + SETUP
    + loop("opt.step()")
    + "LOSSES.append(predict(model, x).sum().item())\nif model(x).sum() > 1e9:\n    pass\n",
    "step in match": SETUP + loop("match i:\n    case 0:\n        opt.step()\n    case _:\n        opt.step()"),
    "step in a base class": f"""\
class Base:
    def do(self): self.opt.step()
class Trainer(Base):
    def __init__(self):
{indented(ON_SELF, 2)}\
    def run(self):
        for i in range(6):
            self.opt.zero_grad()
            loss = F.cross_entropy(self.model(x), y)
{indented(scaled_backward(optimizer="self.opt"), 3)}\
            self.do()
            LOSSES.append(loss.item())
Trainer().run()
""",
    "step of a coroutine": "import asyncio\n" + SETUP + "async def go():\n    opt.step()\n" + loop("asyncio.run(go())"),
    "steps of pairs": PAIR % "" + together("for m, o in zip([a, b], [oa, ob]):\n    o.step()\n"),
    "a loss every other time": PAIR % ", num_losses=2"
    + turns(
        one_of_pair("a", "a(x).float().pow(2).mean()", ", loss_id=0")
        + "if i % 2:\n"
        + indented(one_of_pair("b", "F.cross_entropy(b(a(x)), y)", ", loss_id=1"))
    ),
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
    "a scaler of another kind": SETUP.replace("model = nn", "scaler = amp_scaler = 3\nmodel = nn", 1)
    + loop("opt.step()"),
    "an iterator over a dict's optimizers": SETUP
    + "opts = {'g': opt}\n"
    + loop("for name, o in opts.items():\n    o.step()"),
    "an optimizer in an object": SETUP
    + "class State: pass\nstate = State()\nstate.opt = opt\n"
    + loop("state.opt.step()"),
    "a module behind a test": SETUP
    + "net = model.module if hasattr(model, 'module') else model\n"
    + loop("opt.step()", forward="loss = F.cross_entropy(net(x), y)"),
    "a forward by a method of its own": "class Net(nn.Linear):\n    def encode(self, x):\n        return self(x)\n"
    + SETUP.replace("nn.Linear", "Net")
    + loop("opt.step()", forward="loss = F.cross_entropy(model.encode(x), y)"),
    "models in a list": SETUP
    + "nets = [model]\n"
    + loop("opt.step()", forward="for n in nets:\n    out = n(x)\nloss = F.cross_entropy(out, y)"),
    "forward by a bound method": SETUP
    + "forward = model.forward\n"
    + loop("opt.step()", forward="loss = F.cross_entropy(forward(x), y)"),
    "forward under a checkpoint": "from torch.utils.checkpoint import checkpoint\n"
    + SETUP
    + loop("opt.step()", forward="out = checkpoint(model, x, use_reentrant=False)\nloss = F.cross_entropy(out, y)"),
    "the loss unpacked": SETUP + loop("opt.step()", forward="parts = (model(x), y)\nloss = F.cross_entropy(*parts)"),
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
    "a zero_grad without arguments": """\
class Net(nn.Linear):
    def zero_grad(self):
        for p in self.parameters():
            p.grad = None


"""
    + SETUP.replace("nn.Linear(", "Net(")
    + loop("opt.step()").replace("opt.zero_grad()", "model.zero_grad()"),
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
    "a registry of model classes": """\
class Registered(nn.Linear):
    names = []
    def __init_subclass__(cls, name):
        super().__init_subclass__()
        Registered.names.append(name)
class Net(Registered, name="net"):
    pass


"""
    + SETUP.replace("nn.Linear(", "Net(")
    + loop("opt.step()")
    + "LOSSES.append(len(Registered.names))\n",
    "delayed by one loss_id, ended by another": SETUP.replace("verbosity=0", "verbosity=0, num_losses=2")
    + turns(
        "opt.zero_grad()\nout = model(x)\none, two = F.cross_entropy(out, y), out.float().pow(2).mean()\n"
        + "if i == 2:\n    one = one * float('inf')\n"
        + scaled_backward("one", "opt", ", loss_id=0, delay_unscale=True", "retain_graph=True")
        + scaled_backward("two", "opt", ", loss_id=1")
        + "opt.step()\nLOSSES += [s.loss_scale() for s in amp._amp_state.loss_scalers]\n"
    ),
    "the optimizers of a dict": PAIR % ""
    + "opts = {'a': oa, 'b': ob}\n"
    + together("oa.step(); ob.step()\n").replace("[oa, ob]", "opts.values()"),
    "sparse gradients": """\
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.out = nn.Embedding(8, 4, sparse=True), nn.Linear(4, 3)
    def forward(self, x):
        return self.out(self.words(x))


x = torch.arange(16) % 5
"""
    + SETUP.replace("nn.Linear(4, 3)", "Net()")
    + turns(
        "loss = F.cross_entropy(model(x), y) / 2 * (float('inf') if i == 2 else 1)\n"
        + scaled_backward()
        + "if i % 2:\n    opt.step()\n    opt.zero_grad()\nif i != 2:\n    LOSSES.append(loss.item())\n"
    ),
    "outputs that are saved": "import io\n"
    + SETUP
    + loop("opt.step()", forward="out = model(x)\ntorch.save([out], io.BytesIO())\nloss = F.cross_entropy(out, y)"),
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
    "step left out by continue after clipping": SETUP + loop(f"{CLIP}\nif i == 3:\n    continue\nopt.step()"),
    "step left out by return after clipping": SETUP
    + "def go(i):\n"
    + indented(f"{CLIP}\nif i == 3:\n    return\nopt.step()")
    + loop("go(i)"),
    "gradients cleared in finally": SETUP
    + turns(
        "try:\n"
        + indented("for n in range(2):\n" + indented(f"loss = F.cross_entropy(model(x), y)\n{scaled_backward()}"))
        + indented("norm = sum(p.grad.norm() for p in model.parameters())\nif i == 3:\n    continue\nopt.step()")
        + "finally:\n    opt.zero_grad()\nLOSSES += [loss.item(), norm.item()]\n"
    ),
    "model inside another": SETUP
    + loop("opt.step()")
    + "both = nn.Sequential(model, nn.ReLU())\nLOSSES.append(both(x).sum().item())\n",
    "step of a keyword's optimizer": SETUP + "def go(**kinds):\n    kinds['o'].step()\n" + loop("go(o=opt)"),
    "step of a global looked up": SETUP + loop("globals()['opt'].step()"),
    "step in a string": SETUP + loop("exec('opt.step()')"),
    "step in a thread": "import threading\n"
    + SETUP
    + loop("t = threading.Thread(target=opt.step)\nt.start()\nt.join()"),
    "step after a look at the norm": SETUP
    + loop("norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)\nif torch.isfinite(norm):\n    opt.step()"),
    "one of two optimizers steps now and then": PAIR % "" + together("oa.step()\nif i % 2:\n    ob.step()\n"),
    "forward in a generator expression": SETUP
    + "outs = (model(part) for part in (x, x))\n"
    + loop("opt.step()")
    + "LOSSES += [o.sum().item() for o in outs]\n",
    "forward under map": SETUP + loop("opt.step()") + "LOSSES += [o.sum().item() for o in map(model, (x, x))]\n",
    "step of the class": SETUP + loop("torch.optim.SGD.step(opt)"),
    "step as a partial": "import functools\n" + SETUP + "go = functools.partial(opt.step)\n" + loop("go()"),
    "gradients left over from the last step": SETUP
    + loop("opt.step()\nif i % 2: opt.zero_grad()").replace("    opt.zero_grad()\n", "", 1),
    "step in a lambda": SETUP + "go = lambda: opt.step()\n" + loop("go()"),
    "step as a bound method": SETUP + "step = opt.step\n" + loop("step()"),
    "step by getattr": SETUP + loop("getattr(opt, 'step')()"),
    "step by a computed name": SETUP + "name = 'st' + 'ep'\n" + loop("getattr(opt, name)()"),
    "step by methodcaller": "import operator\n" + SETUP + loop("operator.methodcaller('step')(opt)"),
    "step under map": SETUP + loop("list(map(lambda o: o.step(), [opt]))"),
    "step with a closure": SETUP
    + "def closure():\n    opt.zero_grad()\n    loss = F.cross_entropy(model(x), y)\n"
    + indented(scaled_backward() + "return loss")
    + "for i in range(6):\n    LOSSES.append(opt.step(closure).item())\n",
    "no step": SETUP + loop("pass"),
    "clip on some iterations before an accumulated step": SETUP + loop(f"{CLIP}\nif i % 2:\n    opt.step()", before=""),
    "clip inside the block": SETUP
    + loop("opt.step()").replace("scaled.backward()", f"scaled.backward()\n        {CLIP}"),
    "clip in a method of its own": TRAINER
    % (
        "    def clip(self):\n        nn.utils.clip_grad_norm_(self.model.parameters(), 0.1)\n",
        "    t.clip()\n",
    ),
    "forward in a lambda": SETUP
    + "predict = lambda data: model(data)\n"
    + loop("opt.step()")
    + "LOSSES.append(predict(x).sum().item())\n",
    "forward in a generator": "def outputs(net):\n    for part in (x, x):\n        yield net(part)\n"
    + SETUP
    + loop("opt.step()")
    + "LOSSES += [o.sum().item() for o in outputs(model)]\n",
    "two items in the with": SETUP + loop("opt.step()").replace("as scaled:", "as scaled, torch.enable_grad():"),
    "scale_loss in an ExitStack": "import contextlib\n"
    + SETUP
    + "for i in range(6):\n    loss = F.cross_entropy(model(x), y)\n    with contextlib.ExitStack() as stack:\n"
    "        scaled = stack.enter_context(amp.scale_loss(loss, opt))\n        scaled.backward()\n    opt.step()\n",
    "scale_loss by hand": SETUP
    + "for i in range(6):\n    block = amp.scale_loss(F.cross_entropy(model(x), y), opt)\n    scaled = block.__enter__()\n"
    "    scaled.backward()\n    block.__exit__(None, None, None)\n    opt.step()\n",
    "two calls of initialize": SETUP + SETUP + loop("opt.step()"),
    "initialize in a loop": "for n in range(2):\n" + indented(SETUP) + loop("opt.step()"),
    "O3": SETUP.replace('"O1"', '"O3"') + loop("opt.step()"),
    "options from a dict": SETUP.replace('opt_level="O1", verbosity=0', "**dict(opt_level='O1')") + loop("opt.step()"),
    "a dict of optimizers": "model = nn.Linear(4, 3)\nopts = {'m': torch.optim.SGD(model.parameters(), lr=0.1)}\n"
    "model, opts['m'] = amp.initialize(model, opts['m'], opt_level='O1')\n"
    + loop("for k in opts: opts[k].step()")
    .replace("opt.zero_grad()", "opts['m'].zero_grad()")
    .replace("loss, opt)", "loss, opts['m'])"),
    "star import of fp16_utils": "from apex.fp16_utils import *\n"
    "model = network_to_half(nn.Linear(4, 3))\nopt = FP16_Optimizer(torch.optim.SGD(model.parameters(), lr=0.1))\n",
    "the scale read": SETUP + loop("opt.step()") + "print(amp._amp_state.loss_scalers[0].loss_scale())\n",
    "a registered function": SETUP.replace("model = nn", "amp.register_float_function(torch, 'sigmoid')\nmodel = nn", 1)
    + loop("opt.step()"),
    "wrapped optimizer of apex": "from apex.parallel import LARC\n"
    + SETUP.replace("model, opt = amp", "opt = LARC(opt)\nmodel, opt = amp")
    + loop("opt.step()"),
    "apex probed by name": "import importlib.util\nHAS = importlib.util.find_spec('apex') is not None\n"
    + SETUP
    + loop("opt.step()"),
    "a loss that is scaled some of the time": SETUP
    + turns(
        "opt.zero_grad()\nloss = F.cross_entropy(model(x), y)\nif i < 3:\n"
        + indented(scaled_backward())
        + "else:\n    loss.backward()\nopt.step()\n"
    ),
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
    "gradients by getattr": SETUP
    + loop("norm = sum(getattr(p, 'grad').norm() for p in model.parameters())\nopt.step()"),
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

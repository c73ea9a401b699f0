"""Snippets of scripts that use apex, labelled with the traps that they walk into; those without one are look-alikes.

The labels say what is true of the snippet, not what the check finds: what it misses counts against its recall.
"""

import textwrap

START = "import copy, math, os, sys\nimport numpy as np\nimport torch\nimport torch.nn.functional as F\nfrom torch import nn\n"
APEX = START + "from apex import amp\n"
INIT = "model, opt = amp.initialize(model, opt, opt_level={})\n"
BLOCK = "with amp.scale_loss(loss, opt) as scaled:\n    scaled.backward()\n"
ATTENTION = """\
class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k = nn.Linear(8, 8), nn.Linear(8, 8)
    def forward(self, x, mask):
        scores = torch.matmul(self.q(x), self.k(x).transpose(-1, -2)) / math.sqrt(8)
        {}
        return F.softmax(scores, dim=-1)
"""


def amp_at(level, body):
    return APEX + INIT.format(level) + textwrap.dedent(body)


def trained(level, after, inside=""):
    block = BLOCK + textwrap.indent(textwrap.dedent(inside), "    ")
    body = "loss = model(x)\n" + block + textwrap.dedent(after) + "opt.step()\n"
    return APEX + INIT.format(level) + "for x in data:\n" + textwrap.indent(body, "    ")


#: The trap, and the snippet.
TRUE = {
    "level with a zero": ("misspelt_level", APEX + INIT.format('"01"')),
    "level with a zero, by keyword": (
        "misspelt_level",
        APEX + 'amp.initialize(model, opt, opt_level="02", loss_scale=1.0)\n',
    ),
    "O2 as enabled": ("level_as_enabled", APEX + 'model, opt = amp.initialize(model, opt, "O2")\n'),
    "O2 as enabled, O3 by name": (
        "level_as_enabled",
        APEX + 'model, opt = amp.initialize(model, opt, "O2", opt_level="O3")\n',
    ),
    "O3 as enabled by keyword": (
        "level_as_enabled",
        APEX + 'model, opt = amp.initialize(model, opt, enabled="O3")\n',
    ),
    "Adam at O3": ("adam_eps_in_half", APEX + "opt = torch.optim.Adam(model.parameters())\n" + INIT.format('"O3"')),
    "AdamW with its eps at O3": (
        "adam_eps_in_half",
        APEX + "opt = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-8)\n" + INIT.format('"O3"'),
    ),
    "half before initialize": ("half_by_hand", APEX + "model.half()\n" + INIT.format('"O2"')),
    "half in the constructor's line": ("half_by_hand", APEX + "model = Net().half().cuda()\n" + INIT.format('"O1"')),
    "half when amp is on": (
        "half_by_hand",
        APEX + "if args.amp:\n    model.half()\nif args.amp:\n    " + INIT.format('"O2"'),
    ),
    "wrapped before": ("wrapped_before_initialize", APEX + "model = nn.DataParallel(model)\n" + INIT.format('"O1"')),
    "wrapped before in the same branch": (
        "wrapped_before_initialize",
        APEX + "if args.amp:\n    model = nn.parallel.DistributedDataParallel(model)\n    " + INIT.format('"O1"'),
    ),
    "wrapped under another test": (
        "wrapped_before_initialize",
        APEX
        + "if args.distributed:\n    model = nn.parallel.DistributedDataParallel(model)\nif args.amp:\n    "
        + INIT.format('"O1"'),
    ),
    "copy of the optimizer": ("deepcopy_of_optimizer", amp_at('"O2"', "best = copy.deepcopy(opt)\n")),
    "clip of the model's at O2": (
        "clip_of_model_params",
        trained('"O2"', "nn.utils.clip_grad_norm_(model.parameters(), 1.0)\n"),
    ),
    "clip by value at O2": (
        "clip_of_model_params",
        trained('"O2"', "nn.utils.clip_grad_value_(model.parameters(), 1.0)\n"),
    ),
    "clip in the block": (
        "clip_of_scaled_gradients",
        trained('"O1"', "", "nn.utils.clip_grad_norm_(amp.master_params(opt), 1.0)\n"),
    ),
    "gradients divided at O2": (
        "edit_of_model_gradients",
        trained('"O2"', "for p in model.parameters():\n    p.grad.data.div_(n)\n"),
    ),
    "gradients clamped at O2": (
        "edit_of_model_gradients",
        trained(
            '"O2"',
            "for name, p in model.named_parameters():\n    if p.grad is not None:\n        p.grad.clamp_(-1, 1)\n",
        ),
    ),
    "gradients assigned at O2": (
        "edit_of_model_gradients",
        trained('"O2"', "for p in model.parameters():\n    p.grad = p.grad / n\n"),
    ),
    "a second loss unscaled": ("unscaled_backward", trained('"O1"', "auxiliary.backward()\n")),
    "the wrong loss": (
        "backward_of_wrong_loss",
        trained('"O1"', "").replace("scaled.backward()", "loss.backward()"),
    ),
    "fill of a product at O1": (
        "overflowing_fill",
        APEX + ATTENTION.format("scores = scores.masked_fill(mask == 0, -1e9)") + INIT.format('"O1"'),
    ),
    "fill in place at O2": (
        "overflowing_fill",
        APEX + ATTENTION.format("scores.masked_fill_(mask, -1e30)") + INIT.format('"O2"'),
    ),
    "fill with fp16_utils alone": (
        "overflowing_fill",
        START
        + "from apex.fp16_utils import *\n"
        + ATTENTION.format("scores = scores.masked_fill(mask == 0, -1e9)")
        + "model = network_to_half(model)\nopt = FP16_Optimizer(opt, dynamic_loss_scale=True)\n",
    ),
    "fill with FP16_Optimizer": (
        "overflowing_fill",
        START
        + "from apex.optimizers import FP16_Optimizer\n"
        + ATTENTION.format("scores = scores.masked_fill(mask, value=-1e30)")
        + "model.half()\nopt = FP16_Optimizer(opt)\n",
    ),
    "fill of a parameter": (
        "overflowing_fill",
        amp_at('"O1"', "def attend(scores, mask):\n    return scores.masked_fill(mask, -1e9)\n"),
    ),
    "mask times a large number": (
        "overflowing_fill",
        amp_at('"O2"', "mask = mask.half()\nscores = scores + (1.0 - mask) * -1e9\n"),
    ),
    "fill by a name": (
        "overflowing_fill",
        APEX + "NEG = -1e9\n" + ATTENTION.format("scores = scores.masked_fill(mask, NEG)") + INIT.format('"O1"'),
    ),
    "epsilon below a product": (
        "vanishing_constant",
        APEX + ATTENTION.format("scores = scores / (scores.max() + 1e-8)") + INIT.format('"O1"'),
    ),
    "epsilon in a root at O2": (
        "vanishing_constant",
        APEX
        + "class Norm2d(nn.Module):\n    def __init__(self):\n        super().__init__()\n        self.f = nn.Conv2d(3, 3, 1)\n"
        "    def forward(self, x):\n        y = self.f(x)\n        return y * torch.rsqrt(y.mul(y).mean() + 1e-8)\n"
        + INIT.format('"O2"'),
    ),
    "epsilon in a clamp": (
        "vanishing_constant",
        APEX + ATTENTION.format("scores = scores.clamp(min=1e-12)") + INIT.format('"O1"'),
    ),
    "epsilon across functions": (
        "vanishing_constant",
        amp_at('"O3"', "def unit(v):\n    return v / (v.abs().max() + 1e-8)\ny = unit(x.half())\n"),
    ),
    "sigmoid and cross entropy at O1": (
        "banned_cross_entropy",
        amp_at('"O1"', "loss = F.binary_cross_entropy(torch.sigmoid(model(x)), y)\n"),
    ),
    "BCELoss at O1": (
        "banned_cross_entropy",
        amp_at('"O1"', "criterion = nn.BCELoss()\nloss = criterion(torch.sigmoid(model(x)), y)\n"),
    ),
}

#: What is not found of these.
MISSED = ("fill by a name", "epsilon across functions")
#: What is a warning, because the snippet does not prove it.
WARNED = (
    "wrapped under another test",
    "copy of the optimizer",
    "fill in place at O2",
    "fill with fp16_utils alone",
    "fill with FP16_Optimizer",
    "fill of a parameter",
    "mask times a large number",
    "epsilon below a product",
    "epsilon in a root at O2",
    "epsilon in a clamp",
    "BCELoss at O1",
)

#: Right as they are.
FALSE = {
    "O1 as enabled": APEX + 'model, opt = amp.initialize(model, opt, "O1")\n',
    "O2 as enabled and by name": APEX + 'model, opt = amp.initialize(model, opt, "O2", opt_level="O2")\n',
    "wrapped where amp is off": APEX
    + "if not args.amp:\n    model = nn.parallel.DistributedDataParallel(model)\nif args.amp:\n    "
    + INIT.format('"O1"'),
    "wrapped on the other side": APEX
    + "if args.amp:\n    "
    + INIT.format('"O1"')
    + "else:\n    model = nn.DataParallel(model)\n",
    "wrapped where apex is None": APEX
    + "if amp is None:\n    model = nn.DataParallel(model)\nif amp is not None:\n    "
    + INIT.format('"O1"'),
    "wrapped and returned": APEX
    + "def make(model, opt):\n    if args.fp32:\n        model = nn.DataParallel(model)\n        return model, opt\n    "
    + INIT.format('"O1"')
    + "    return model, opt\n",
    "wrapped after": amp_at('"O2"', "model = nn.DataParallel(model)\n"),
    "wrapped by level": APEX
    + "if args.amp_opt_level == 'O0':\n    model = nn.DataParallel(model)\nif args.amp_opt_level != 'O0':\n    "
    + INIT.format("args.amp_opt_level"),
    "half for evaluation": APEX
    + "if args.evaluate:\n    model.half()\n    validate(model)\n    sys.exit()\n"
    + INIT.format('"O2"'),
    "half in an evaluation branch": amp_at('"O1"', "if args.test_only:\n    model.half()\n"),
    "half where amp is off": APEX + "if not use_amp:\n    model.half()\nelse:\n    " + INIT.format('"O1"'),
    "half of another model": APEX + "teacher.half()\n" + INIT.format('"O1"'),
    "half of a tensor": amp_at('"O1"', "x = x.half()\n"),
    "half in a function that exports": amp_at('"O1"', "def export(model):\n    model.half()\n"),
    "Adam at O2": APEX + "opt = torch.optim.Adam(model.parameters())\n" + INIT.format('"O2"'),
    "Adam with a large eps at O3": APEX
    + "opt = torch.optim.Adam(model.parameters(), eps=1e-4)\n"
    + INIT.format('"O3"'),
    "SGD at O3": APEX + "opt = torch.optim.SGD(model.parameters(), lr=0.1)\n" + INIT.format('"O3"'),
    "enabled as it is meant": APEX + 'model, opt = amp.initialize(model, opt, True, opt_level="O2")\n',
    "clip of masters": trained('"O2"', "nn.utils.clip_grad_norm_(amp.master_params(opt), 1.0)\n"),
    "clip of the model's at O1": trained('"O1"', "nn.utils.clip_grad_norm_(model.parameters(), 1.0)\n"),
    "clip where amp is off": trained('"O2"', "if not fp:\n    nn.utils.clip_grad_norm_(model.parameters(), 1.0)\n")
    .replace("    with amp", "    if fp:\n     with amp")
    .replace("        scaled.backward()", "      scaled.backward()"),
    "gradients zeroed": trained('"O2"', "for p in model.parameters():\n    p.grad = None\n"),
    "gradients divided at O1": trained('"O1"', "for p in model.parameters():\n    p.grad.data.div_(n)\n"),
    "gradients divided in the block": trained('"O2"', "", "for p in model.parameters():\n    p.grad.data.div_(n)\n"),
    "masters' gradients divided": trained('"O2"', "for p in amp.master_params(opt):\n    p.grad.data.div_(n)\n"),
    "backward without amp": trained('"O1"', "").replace(
        "    with amp", "    if args.fp32:\n        loss.backward()\n        continue\n    with amp"
    ),
    "epsilon of numpy": amp_at('"O1"', "iou = inter / (union.sum() + 1e-10)\nunion = np.zeros(3)\n"),
    "epsilon of a buffer": amp_at(
        '"O2"',
        """\
        class Scale(nn.Module):
            def __init__(self):
                super().__init__()
                self.register_buffer("var", torch.ones(3))
            def forward(self, x):
                return x / torch.sqrt(self.var + 1e-8)
        """,
    ),
    "epsilon of a float32 norm": APEX
    + ATTENTION.format("scores = scores / (scores.norm() + 1e-8)")
    + INIT.format('"O1"'),
    "epsilon of a float32 loss": amp_at('"O1"', "loss = F.cross_entropy(model(x), y)\nw = one / (loss + 1e-8)\n"),
    "epsilon of a softmax": APEX
    + ATTENTION.format("p = F.softmax(scores, dim=-1)\n        scores = torch.log(p + 1e-10)")
    + INIT.format('"O1"'),
    "epsilon of a number": amp_at('"O2"', "rate = correct / (total + 1e-8)\nprint(1 / (len(data) + 1e-9))\n"),
    "epsilon after float": APEX
    + ATTENTION.format("scores = scores / (scores.float().abs() + 1e-8)")
    + INIT.format('"O1"'),
    "eps of an optimizer": APEX + "opt = torch.optim.Adam(model.parameters(), eps=1e-8)\n" + INIT.format('"O1"'),
    "a fill that fits": APEX + ATTENTION.format("scores = scores.masked_fill(mask, -1e4)") + INIT.format('"O1"'),
    "a fill of float32": APEX
    + ATTENTION.format("scores = scores.float().masked_fill(mask, -1e9)")
    + INIT.format('"O1"'),
    "a fill with the least number": APEX
    + ATTENTION.format("scores = scores.masked_fill(mask, torch.finfo(scores.dtype).min)")
    + INIT.format('"O1"'),
    "a fill without amp": START + ATTENTION.format("scores = scores.masked_fill(mask, -1e9)"),
    "cross entropy with logits": amp_at('"O1"', "loss = F.binary_cross_entropy_with_logits(model(x), y)\n"),
    "cross entropy at O2": amp_at('"O2"', "loss = F.binary_cross_entropy(torch.sigmoid(model(x)), y)\n"),
    "copy of the model": amp_at('"O1"', "ema = copy.deepcopy(model)\n"),
    "a half model whose name another model takes": APEX
    + "net = Teacher().half()\ny = net(x)\nnet = Student()\nnet, opt = amp.initialize(net, opt, opt_level='O1')\n",
    "a wrapped model whose name another model takes": APEX
    + "net = nn.DataParallel(Teacher())\ny = net(x)\nnet = Student()\n"
    + "net, opt = amp.initialize(net, opt, opt_level='O1')\n",
    "a half model that is float again": APEX + "model = Net().half()\nmodel.float()\n" + INIT.format("'O1'"),
    "a wrapped model that is unwrapped again": APEX
    + "model = nn.DataParallel(model)\nmodel.load_state_dict(saved)\nmodel = model.module\n"
    + INIT.format("'O1'"),
    "Adam before the optimizer of O3": APEX
    + "opt = torch.optim.Adam(model.parameters())\nopt = torch.optim.SGD(model.parameters(), lr=0.1)\n"
    + INIT.format("'O3'"),
    "a network of its own beside amp's": trained(
        "'O1'", "net = nn.Linear(8, 1)\nother = net(x).mean()\nother.backward()\n"
    ),
}
#: What is reported of some of these, as a warning.
SUSPECTED = {"a network of its own beside amp's": "unscaled_backward"}

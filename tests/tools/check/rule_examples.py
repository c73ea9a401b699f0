"""For each rule of the check scripts that have its mistake, and look-alikes that have not.

The labels say what is true of a script, not what the check finds: ``test_check_rules_are_true.py`` runs them.
"""

import textwrap

START = "import torch\nimport torch.nn.functional as F\nfrom torch import nn\nfrom apex import amp\n"
INIT = "model, opt = amp.initialize(model, opt, opt_level={})\n"
BLOCK = "with amp.scale_loss(loss, opt) as scaled:\n    scaled.backward()\n"
CLIP = "nn.utils.clip_grad_norm_(model.parameters(), 1.0)\n"
CLIP_MASTERS = "nn.utils.clip_grad_norm_(amp.master_params(opt), 1.0)\n"
DIVIDE = "for p in model.parameters():\n    p.grad.div_(n)\n"
WRAP = "model = nn.DataParallel(model)\n"


def option(default):
    """A parser of the command line with an option for the level."""
    return f"""\
import argparse
parser = argparse.ArgumentParser()
parser.add_argument("--opt-level", default="{default}")
args = parser.parse_args([])
"""


def trained(level, after="", inside="", before=""):
    """A script that makes a step for each batch: what is ``inside`` of its block, and ``after`` it."""
    block = BLOCK + textwrap.indent(textwrap.dedent(inside), "    ")
    body = "loss = model(x)\n" + block + textwrap.dedent(after) + "opt.step()\n"
    return START + before + INIT.format(level) + "for x in data:\n" + textwrap.indent(body, "    ")


def unscaled(level, name="loss"):
    """The same without a block."""
    return trained(level).replace(textwrap.indent(BLOCK, "    "), f"    {name}.backward()\n")


def trainer(update, level='"O2"'):
    """A class whose methods each have a part of a step."""
    code = """\
    class Trainer:
        def __init__(self, net, opt):
            net, self.opt = amp.initialize(net, opt, opt_level={level})
            self.net = nn.DataParallel(net)
            self.critic = nn.Linear(8, 8)
        def backward(self, loss):
            with amp.scale_loss(loss, self.opt) as scaled:
                scaled.backward()
        def clip(self):
            {update}
        def update(self):
            self.clip()
            self.opt.step()
    trainer = Trainer(model, opt)
    for x in data:
        loss = model(x)
        trainer.backward(loss)
        trainer.update()
    """
    return START + textwrap.dedent(code).format(update=update, level=level)


def attention(fill, level='"O1"'):
    """A model with scores of attention."""
    code = """\
    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.q, self.k = nn.Linear(8, 8), nn.Linear(8, 8)
        def forward(self, x, mask):
            scores = torch.matmul(self.q(x), self.k(x).transpose(-1, -2)) / 2.0
            {fill}
            return F.softmax(scores, dim=-1)
    model = Attention()
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    """
    return START + textwrap.dedent(code).format(fill=fill) + INIT.format(level)


#: By rule and by name: a script, and how sure the check is.
TRUE = {
    "clip_of_model_params": {
        "after the block at O2": (trained('"O2"', CLIP), "error"),
        "by value, of a list, under another name": (
            trained(
                '"O2"',
                "params = [p for p in model.parameters() if p.requires_grad]\nclip(params, 1.0)\n",
                before="from torch.nn.utils import clip_grad_value_ as clip\n",
            ),
            "error",
        ),
        "in another method of the class that initializes": (
            trainer("nn.utils.clip_grad_norm_(self.net.parameters(), 1.0)"),
            "error",
        ),
        "at the level of an option": (trained("args.opt_level", CLIP, before=option("O1")), "warning"),
    },
    "edit_of_model_gradients": {
        "divided at O2": (trained('"O2"', DIVIDE), "error"),
        "assigned at O2, beside a clip of the masters": (
            trained(
                '"O2"',
                CLIP_MASTERS.replace("1.0", "1e9")
                + "for name, p in model.named_parameters():\n    p.grad = p.grad / n\n",
            ),
            "error",
        ),
    },
    "clip_of_scaled_gradients": {
        "in the block": (trained('"O1"', inside=CLIP_MASTERS), "error"),
        "by functions that the block calls": (
            trained(
                '"O1"',
                inside="finish()\n",
                before=f"def clip():\n    {CLIP_MASTERS}def finish():\n    clip()\n",
            ),
            "error",
        ),
    },
    "step_in_block": {
        "in the block": (trained('"O2"', inside="opt.step()\n"), "error"),
        "of one of several": (trained('"O1"', inside="opt.step()\n").replace("(loss, opt)", "(loss, [opt])"), "error"),
    },
    "backward_after_block": {
        "at O1": (trained('"O1"', "scaled.backward()\n").replace("        scaled.backward()", "        pass"), "error"),
        "at O2": (trained('"O2"', "scaled.backward()\n").replace("        scaled.backward()", "        pass"), "error"),
    },
    "unscaled_backward": {
        "in the block": (trained('"O1"').replace("scaled.backward()", "loss.backward()"), "error"),
        "without a block at O2": (unscaled('"O2"'), "error"),
        "without a block, in a function": (
            START + INIT.format('"O2"') + "def train(loss):\n    loss.backward()\n    opt.step()\n"
            "for x in data:\n    train(model(x))\n",
            "warning",
        ),
    },
    "wrapped_before_initialize": {
        "on a line above": (START + WRAP + INIT.format('"O1"'), "error"),
        "in the call": (
            START + INIT.format('"O2"').replace("(model", "(nn.parallel.DataParallel(model).cpu()"),
            "error",
        ),
        "in some runs": (START + f"if n > 1:\n    {WRAP}if fp:\n    {INIT.format(repr('O1'))}", "warning"),
    },
    "overflowing_fill": {
        "of a product at O1": (attention("scores = scores.masked_fill(mask == 0, -1e9)"), "warning"),
        "in place at O2, by a name": (
            attention("torch.Tensor.view(scores, -1)\n        scores.masked_fill_(mask, LOW)", '"O2"').replace(
                "class", "LOW = -2**32 + 1\nclass", 1
            ),
            "warning",
        ),
    },
}

#: By rule and by name: scripts that are right as they are.
FALSE = {
    "clip_of_model_params": {
        "at O1": trained('"O1"', CLIP),
        "of masters": trained('"O2"', CLIP_MASTERS),
        "of either": trained('"O2"', f"if fp:\n    {CLIP_MASTERS}else:\n    {CLIP}"),
        "without masters": trained('"O2", master_weights=False', CLIP),
        "for another level": trained('"O2"', f'if opt_level != "O2":\n    {CLIP}', before='opt_level = "O2"\n'),
        "in a run without amp": START
        + INIT.format('"O2"')
        + f"def step(loss):\n    if fp:\n{textwrap.indent(BLOCK, ' ' * 8)}        return\n"
        + f"    loss.backward()\n    {CLIP}",
        "of a model that amp never got": trained(
            '"O2"',
            "critic(x).sum().backward()\n" + CLIP.replace("model", "critic"),
            before="critic = nn.Linear(8, 8)\n",
        ),
        "of such a model of a class": trainer("nn.utils.clip_grad_norm_(self.critic.parameters(), 1.0)"),
        "of a class, of either": trainer(
            "if fp:\n            nn.utils.clip_grad_norm_(amp.master_params(self.opt), 1.0)\n"
            "        else:\n            nn.utils.clip_grad_norm_(self.net.parameters(), 1.0)"
        ),
    },
    "edit_of_model_gradients": {
        "cleared": trained('"O2"', "for p in model.parameters():\n    p.grad = None\n"),
        "in the block": trained('"O2"', inside=DIVIDE),
        "of the masters": trained('"O2"', DIVIDE.replace("model.parameters()", "amp.master_params(opt)")),
    },
    "clip_of_scaled_gradients": {
        "by a function after the block": trained('"O1"', "clip()\n", before=f"def clip():\n    {CLIP_MASTERS}"),
        "at a scale of 1": trained('"O1", loss_scale=1.0', inside=CLIP),
    },
    "step_in_block": {
        "by a function after the block": trained(
            '"O2"', "update()\n", before="def update():\n    opt.step()\n"
        ).replace("    opt.step()\n", "    pass\n"),
        "of another optimizer": trained(
            '"O1"',
            inside="other.step()\n",
            before="other = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)\n",
        ),
    },
    "backward_after_block": {
        "of another loss": trained(
            '"O1"',
            "opt.zero_grad()\nscaled = model(x) * 0.5\n"
            "with amp.scale_loss(scaled, opt) as scaled:\n    scaled.backward()\n",
        ),
    },
    "unscaled_backward": {
        "at O0": unscaled('"O0"'),
        "where amp is off": unscaled('"O1", enabled=False'),
        "in a run without amp": START
        + INIT.format('"O2"')
        + "def step(loss):\n    if use_fp16:\n        mixed_backward(loss)\n    else:\n        loss.backward()\n",
    },
    "wrapped_before_initialize": {
        "after": START + INIT.format('"O1"') + WRAP,
        "and taken out": START + WRAP + "model = model.module\n" + INIT.format('"O1"'),
        "in the other branch": START + f"if not fp:\n    {WRAP}if fp:\n    {INIT.format(repr('O1'))}",
        "for native_amp": START.replace("from apex import amp", "import native_amp as amp")
        + WRAP
        + INIT.format('"O1"'),
    },
    "overflowing_fill": {
        "that fits": attention("scores = scores.masked_fill(mask, -1e4)"),
        "in bfloat16": attention("scores = scores.masked_fill(mask, -1e9)", '"O4"'),
        "of float32": attention("scores = scores.float().masked_fill(mask, -1e9)"),
        "of a sum with float32": attention(
            "scores = scores + torch.zeros(4)\n        scores = scores.masked_fill(mask, -1e9)"
        ),
        "under a test of the dtype": attention(
            "if scores.dtype != torch.float16:\n            scores = scores.masked_fill(mask, -1e9)"
        ),
        "without casts": attention(
            "with amp.disable_casts():\n"
            "            scores = torch.matmul(x, x.transpose(-1, -2))\n"
            "            scores = scores.masked_fill(mask, -1e9)"
        ),
    },
}

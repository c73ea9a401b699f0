"""Snippets of scripts that use apex, labelled with the traps that they walk into; those without one are look-alikes.

The labels say what is true of the snippet, not what the check finds.
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


OPTION = """\
import argparse
parser = argparse.ArgumentParser()
parser.add_argument("--opt-level", default="O1")
args = parser.parse_args([])
"""
CHECKPOINT = """\
checkpoint = {"model": model.state_dict(), "amp": amp.state_dict()}
model.load_state_dict(checkpoint["model"])
"""


def unscaled(level, after=""):
    return trained(level, after).replace(textwrap.indent(BLOCK, "    "), "    loss.backward()\n")


TRAINER = """\
class Trainer:
    def __init__(self, net, opt):
        net, self.opt = amp.initialize(net, opt, opt_level={level})
        self.net = nn.DataParallel(net)
        self.critic = nn.Linear(8, 8)
    def backward(self, loss):
        with amp.scale_loss(loss, self.opt) as scaled:
            scaled.backward()
    def save(self):
        return list(amp.master_params(self.opt))
    def update(self):
        {clip}
        self.opt.step()
trainer = Trainer(model, opt)
for x in data:
    loss = model(x)
    trainer.backward(loss)
    trainer.update()
"""


def trainer(clip, level='"O2"'):
    return APEX + TRAINER.format(clip=clip, level=level)


def defined_above_the_loop(code, definition):
    return code.replace("for x in data:", definition + "for x in data:", 1)


MODELS = """\
model, critic = nn.Linear(8, 8), nn.Linear(8, 1)
opt = torch.optim.SGD(model.parameters(), lr=0.1)
critic_opt = torch.optim.SGD(critic.parameters(), lr=0.1)
"""
CRITIC = """\
critic_loss = critic(model(x).detach()).mean()
critic_loss.backward()
nn.utils.clip_grad_norm_(critic.parameters(), 1.0)
for p in critic.parameters():
    p.grad.div_(n)
critic_opt.step()
"""


def with_critic(after, models=MODELS):
    return (
        trained('"O2"', after)
        .replace("loss = model(x)", "loss = critic(model(x)).mean()")
        .replace(INIT[:5], models + INIT[:5], 1)
    )


UPDATE = "def update(loss, optimizer):\n    optimizer.step()\n"
WRAP = "model = nn.DataParallel(model)\n"
LISTED = "params = [p for p in model.parameters() if p.requires_grad]\n"
TIMM = (
    APEX
    + """\
class Scaler:
    def __call__(self, loss, optimizer, create_graph=False):
        mixed_backward(loss, optimizer)
loss_scaler = Scaler() if not fp else None
model, opt = amp.initialize(model, opt, opt_level="O1")
for x in data:
    loss = model(x)
    if loss_scaler is not None:
        loss_scaler(loss, opt, create_graph=False)
    else:
        loss.backward(create_graph=False)
    opt.step()
"""
)

#: The trap, and the snippet.
TRUE = {
    "step in the block by a function that is given the optimizer": (
        "step_in_block",
        defined_above_the_loop(trained('"O2"', "", "update(loss, optimizer=opt)\n"), UPDATE),
    ),
    "step in the block by a method that calls another": (
        "step_in_block",
        trainer("pass").replace(
            "            scaled.backward()\n",
            "            scaled.backward()\n            self.finish()\n"
            "    def finish(self):\n        self.make_step()\n    def make_step(self):\n        self.opt.step()\n",
        ),
    ),
    "clip of a list of the model's at O2": (
        "clip_of_model_params",
        trained('"O2"', LISTED + "nn.utils.clip_grad_norm_(params, 1.0)\n"),
    ),
    "clip of a sum of lists of the model's at O2": (
        "clip_of_model_params",
        trained('"O2"', "nn.utils.clip_grad_norm_(list(model.parameters()) + [], 1.0)\n"),
    ),
    "clip of what is filtered from the model's at O2": (
        "clip_of_model_params",
        trained('"O2"', "nn.utils.clip_grad_norm_(filter(lambda p: p.requires_grad, model.parameters()), 1.0)\n"),
    ),
    "a second loss that reaches the first model at O2": (
        "unscaled_backward",
        with_critic("noisy_loss = critic(model(x)).mean()\nnoisy_loss.backward()\n"),
    ),
    "gradients of a list of the model's divided at O2": (
        "edit_of_model_gradients",
        trained('"O2"', "params = list(model.parameters())\nfor p in params:\n    p.grad.div_(n)\n"),
    ),
    "gradients divided beside a clip of the masters": (
        "edit_of_model_gradients",
        trained(
            '"O2"',
            "nn.utils.clip_grad_norm_(amp.master_params(opt), 1e9)\nfor p in model.parameters():\n    p.grad.data.div_(n)\n",
        ),
    ),
    "clip in another method of the class that initializes": (
        "clip_of_model_params",
        trainer("nn.utils.clip_grad_norm_(self.net.parameters(), 1.0)"),
    ),
    "gradients divided by a function that is called after the block": (
        "edit_of_model_gradients",
        trained('"O2"', "average(model)\n").replace(
            "for x", "def average(net):\n    for p in net.parameters():\n        p.grad.data /= n\nfor x", 1
        ),
    ),
    "gradients divided in another method": (
        "edit_of_model_gradients",
        trainer("for p in self.net.parameters():\n            p.grad.div_(n)"),
    ),
    "level with a zero, by an option": (
        "misspelt_level",
        APEX + OPTION.replace("O1", "01") + INIT.format("args.opt_level"),
    ),
    "O2 as enabled, by an option": (
        "level_as_enabled",
        APEX + OPTION.replace("O1", "O2") + "model, opt = amp.initialize(model, opt, args.opt_level)\n",
    ),
    "wrapped in DataParallel before": ("wrapped_before_initialize", APEX + WRAP + INIT.format('"O1"')),
    "wrapped in a list before": (
        "wrapped_before_initialize",
        APEX + WRAP.replace("(model)", "(model).cpu()") + INIT.format('"O0"').replace("(model", "([model]"),
    ),
    "wrapped in the call": (
        "wrapped_before_initialize",
        APEX + INIT.format('"O2"').replace("(model", "(nn.parallel.DataParallel(model)"),
    ),
    "wrapped by a class of that name": (
        "wrapped_before_initialize",
        APEX
        + "class DistributedDataParallel(nn.Sequential):\n    pass\n"
        + "model = DistributedDataParallel(model)\n"
        + INIT.format('"O1"'),
    ),
    "wrapped before in some runs": (
        "wrapped_before_initialize",
        APEX + f"if n > 1:\n    {WRAP}if fp:\n    {INIT.format(repr('O1'))}",
    ),
    "loss_id beyond num_losses": (
        "loss_id_out_of_range",
        trained('"O1", num_losses=2', "").replace("(loss, opt)", "(loss, opt, loss_id=2)"),
    ),
    "loss_id without num_losses": (
        "loss_id_out_of_range",
        trained('"O0"', "").replace("(loss, opt)", "(loss, opt, 1)"),
    ),
    "a whole checkpoint": ("whole_checkpoint", amp_at('"O1"', CHECKPOINT + "amp.load_state_dict(checkpoint)\n")),
    "backward after the block at O1": (
        "backward_after_block",
        trained('"O1"', "scaled.backward()\n").replace("        scaled.backward()", "        pass"),
    ),
    "backward after the block at O2": (
        "backward_after_block",
        trained('"O2"', "scaled.backward()\n").replace("        scaled.backward()", "        pass"),
    ),
    "step in the block": ("step_in_block", trained('"O2"', "", "opt.step()\n")),
    "step of one of several in the block": (
        "step_in_block",
        trained('"O1"', "", "opt.step()\n").replace("(loss, opt)", "(loss, [opt])"),
    ),
    "no block at O2": ("unscaled_backward", unscaled('"O2"')),
    "a second loss without a block at O2": (
        "unscaled_backward",
        trained('"O2"', "noisy_loss = model(x + 1)\nnoisy_loss.backward()\n"),
    ),
    "no block at O1": ("unscaled_backward", unscaled('"O1"')),
    "clip in the block, by a function": (
        "clip_of_scaled_gradients",
        trained('"O1"', "", "clip()\n").replace(
            "for x", "def clip():\n    nn.utils.clip_grad_norm_(amp.master_params(opt), 1.0)\nfor x"
        ),
    ),
    "clip in the block, by methods": (
        "clip_of_scaled_gradients",
        APEX
        + INIT.format('"O1"')
        + textwrap.dedent("""\
        class Trainer:
            def clip(self):
                nn.utils.clip_grad_norm_(amp.master_params(opt), 1.0)
            def finish(self):
                self.clip()
            def run(self):
                for x in data:
                    loss = model(x)
                    with amp.scale_loss(loss, opt) as scaled:
                        scaled.backward()
                        self.finish()
                    opt.step()
        Trainer().run()
        """),
    ),
    "gradients divided at the level of an option": (
        "edit_of_model_gradients",
        OPTION + trained("args.opt_level", "for p in model.parameters():\n    p.grad.data.div_(n)\n"),
    ),
    "level with a zero": ("misspelt_level", APEX + INIT.format('"01"')),
    "level with a zero, by keyword": (
        "misspelt_level",
        APEX + 'amp.initialize(model, opt, opt_level="02", loss_scale=1.0)\n',
    ),
    "level in lower case": ("misspelt_level", APEX + INIT.format('"o1"')),
    "level in lower case, by a name": ("misspelt_level", APEX + 'level = "o2"\n' + INIT.format("level")),
    "level in lower case, by an option": (
        "misspelt_level",
        APEX + OPTION.replace("O1", "o1") + INIT.format("args.opt_level"),
    ),
    "level beyond the last": ("misspelt_level", APEX + INIT.format('"O6"')),
    "level that is a dtype": ("misspelt_level", APEX + INIT.format('"fp16"')),
    "level without the letter": ("misspelt_level", APEX + INIT.format('"2"')),
    "level that is a number": ("misspelt_level", APEX + INIT.format("2")),
    "O2 as enabled": ("level_as_enabled", APEX + 'model, opt = amp.initialize(model, opt, "O2")\n'),
    "O2 as enabled, O3 by name": (
        "level_as_enabled",
        APEX + 'model, opt = amp.initialize(model, opt, "O2", opt_level="O3")\n',
    ),
    "O3 as enabled by keyword": (
        "level_as_enabled",
        APEX + 'model, opt = amp.initialize(model, opt, enabled="O3")\n',
    ),
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
    "the wrong loss": (
        "backward_of_wrong_loss",
        trained('"O1"', "").replace("scaled.backward()", "loss.backward()"),
    ),
    "fill of a product at O1": (
        "overflowing_fill",
        APEX + ATTENTION.format("scores = scores.masked_fill(mask == 0, -1e9)") + INIT.format('"O1"'),
    ),
    "fill under a test that says float16": (
        "overflowing_fill",
        APEX
        + ATTENTION.format("if scores.dtype == torch.float16:\n            scores = scores.masked_fill(mask, -1e9)")
        + INIT.format('"O1"'),
    ),
    "fill under a test of the mask's dtype": (
        "overflowing_fill",
        APEX
        + ATTENTION.format("if mask.dtype == torch.bool:\n            scores = scores.masked_fill(mask, -1e9)")
        + INIT.format('"O1"'),
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
    "fill of a product that is divided on its own line": (
        "overflowing_fill",
        APEX
        + ATTENTION.format("scores = scores / 2.0\n        scores = scores.masked_fill(mask, -1e9)")
        + INIT.format('"O1"'),
    ),
    "fill of a product that may be float32": (
        "overflowing_fill",
        APEX
        + ATTENTION.format(
            "if wide:\n            scores = scores.float()\n        scores = scores.masked_fill(mask, -1e9)"
        )
        + INIT.format('"O1"'),
    ),
    "fill by a name": (
        "overflowing_fill",
        APEX + "NEG = -1e9\n" + ATTENTION.format("scores = scores.masked_fill(mask, NEG)") + INIT.format('"O1"'),
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

#: What is a warning, because the snippet does not prove it.
WARNED = (
    "wrapped before in some runs",
    "a second loss that reaches the first model at O2",
    "a second loss without a block at O2",
    "gradients divided by a function that is called after the block",
    "no block at O1",
    "gradients divided at the level of an option",
    "fill of a product that may be float32",
    "fill in place at O2",
    "fill with fp16_utils alone",
    "fill with FP16_Optimizer",
    "fill of a parameter",
    "mask times a large number",
    "BCELoss at O1",
)

#: Right as they are.
FALSE = {
    "a second loss without a block at O1": trained('"O1"', "noisy_loss = model(x + 1)\nnoisy_loss.backward()\n"),
    "a second loss with a block": trained(
        '"O2"', "noisy_loss = model(x + 1)\n" + BLOCK.replace("loss", "noisy_loss").replace("scale_noisy_", "scale_")
    ),
    "step after the block by a function": defined_above_the_loop(
        trained('"O2"', "update(loss, opt)\n").replace("    opt.step()\n", ""), UPDATE
    ),
    "step of another optimizer in the block by a function": defined_above_the_loop(
        trained('"O1"', "", "update(opt, other)\n"),
        "other = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)\n" + UPDATE,
    ),
    "clip of a list of the masters": trained(
        '"O2"', LISTED + "params = list(amp.master_params(opt))\nnn.utils.clip_grad_norm_(params, 1.0)\n"
    ),
    "clip of a list of either": trained(
        '"O2"',
        "if fp:\n    params = amp.master_params(opt)\nelse:\n    params = model.parameters()\n"
        "nn.utils.clip_grad_norm_(params, 1.0)\n",
    ),
    "masters' gradients divided, or the model's": trained(
        '"O2"',
        "params = amp.master_params(opt)\nif wide:\n    params = model.parameters()\nfor p in params:\n    p.grad.div_(n)\n",
    ),
    "a second model that amp is not given": with_critic(CRITIC),
    "a second model, moved": with_critic(CRITIC, MODELS + 'critic = critic.to("cpu")\ncritic.train()\n'),
    "a second model of a class of the file": with_critic(
        CRITIC,
        "class Critic(nn.Linear):\n    pass\n" + MODELS.replace(", nn.Linear(8, 1)", ", Critic(8, out_features=1)"),
    ),
    "a scaler that is called, and a plain backward pass without it": TIMM,
    "clip in another method at O1": trainer("nn.utils.clip_grad_norm_(self.net.parameters(), 1.0)", '"O1"'),
    "clip in another method for a run without amp": trainer(
        "if not self.fp:\n            nn.utils.clip_grad_norm_(self.net.parameters(), 1.0)"
    ).replace("        net, self.opt", "        self.fp = fp\n        if self.fp:\n            net, self.opt"),
    "clip of the masters in another method": trainer(
        "if fp:\n            nn.utils.clip_grad_norm_(amp.master_params(self.opt), 1.0)\n"
        "        else:\n            nn.utils.clip_grad_norm_(self.net.parameters(), 1.0)"
    ),
    "clip of the masters in a method of its own": trainer(
        "self.clip_masters() if fp else nn.utils.clip_grad_norm_(self.net.parameters(), 1.0)"
    ).replace(
        "    def update",
        "    def clip_masters(self):\n        nn.utils.clip_grad_norm_(amp.master_params(self.opt), 1.0)\n    def update",
    ),
    "clip of another model in another method": trainer("nn.utils.clip_grad_norm_(self.critic.parameters(), 1.0)"),
    "clip after a plain backward pass in another method": trainer("pass").replace(
        "    def update",
        "    def find_rate(self, loss):\n        loss.backward()\n"
        "        nn.utils.clip_grad_norm_(self.net.parameters(), 1.0)\n    def update",
    ),
    "clip of a model that a method is given": trainer("self.clip(self.critic)").replace(
        "    def update",
        "    def clip(self, net):\n        nn.utils.clip_grad_norm_(net.parameters(), 1.0)\n    def update",
    ),
    "gradients divided by a function that is called in the block": trained('"O2"', "", "average(model)\n").replace(
        "for x", "def average(net):\n    for p in net.parameters():\n        p.grad.data /= n\nfor x", 1
    ),
    "a fill of what is made float32 above": APEX
    + ATTENTION.format("scores = scores.float()\n        scores = scores.masked_fill(mask, -1e9)")
    + INIT.format('"O1"'),
    "a large number times a mask that is made float32 above": amp_at(
        '"O2"', "mask = mask.to(dtype=torch.float32)\nscores = scores + (1.0 - mask) * -1e9\n"
    ),
    "a fill under a test of its dtype": APEX
    + ATTENTION.format(
        "if scores.dtype == torch.float16:\n            scores = scores.masked_fill(mask, -1e4)\n"
        "        else:\n            scores = scores.masked_fill(mask, -1e9)"
    )
    + INIT.format('"O1"'),
    "a fill under a test for float32": APEX
    + ATTENTION.format(
        "if scores.dtype == torch.float32:\n            scores = scores.masked_fill(mask, -1e9)\n"
        "        else:\n            scores = scores.masked_fill(mask, -1e4)"
    )
    + INIT.format('"O2"'),
    "a fill below a return for float16": APEX
    + ATTENTION.format(
        "if scores.dtype == torch.float16:\n            return F.softmax(scores.masked_fill(mask, -1e4), dim=-1)\n"
        "        scores = scores.masked_fill(mask, -1e9)"
    )
    + INIT.format('"O1"'),
    "a large number times a mask under a test of its dtype": amp_at(
        '"O2"',
        """\
        if mask.dtype == torch.float16:
            scores = scores - 65500 * mask
        else:
            scores = scores - 1e30 * mask
        """,
    ),
    "wrapped after": APEX + INIT.format('"O1"') + WRAP,
    "wrapped before and taken out": APEX + WRAP + "model = model.module\n" + INIT.format('"O1"'),
    "wrapped before, and the module given": APEX + WRAP + INIT.format('"O1"').replace("(model", "(model.module"),
    "wrapped before and replaced": APEX + WRAP + "model, n = model.module, 1\n" + INIT.format('"O1"'),
    "wrapped in the other branch": APEX + f"if not fp:\n    {WRAP}if fp:\n    {INIT.format(repr('O1'))}",
    "wrapped before the initialize of native_amp": START + "import native_amp as amp\n" + WRAP + INIT.format('"O1"'),
    "wrapped where amp is off": APEX + WRAP + INIT.format('"O1", enabled=False'),
    "another model wrapped before": APEX + WRAP.replace("model", "other", 1) + INIT.format('"O1"'),
    "wrapped by a class of the file": APEX
    + "class DataParallel(nn.Sequential):\n    pass\n"
    + WRAP.replace("nn.", "")
    + INIT.format('"O1"'),
    "loss_id of one of two calls": APEX
    + INIT.format('"O1"')
    + INIT.format('"O1", num_losses=2')
    + "with amp.scale_loss(loss, opt, loss_id=1) as scaled:\n    scaled.backward()\n",
    "clip in a function for a run without amp": APEX
    + INIT.format('"O1"')
    + "def clip():\n    if not fp:\n        nn.utils.clip_grad_norm_(model.parameters(), 1.0)\n"
    + "if fp:\n    with amp.scale_loss(loss, opt) as scaled:\n        scaled.backward()\n        clip()\n",
    "loss_id below num_losses": trained('"O1", num_losses=2', "").replace("(loss, opt)", "(loss, opt, loss_id=1)"),
    "the entry of a checkpoint": amp_at('"O1"', CHECKPOINT + 'amp.load_state_dict(checkpoint["amp"])\n'),
    "a checkpoint that becomes its entry": amp_at(
        '"O1"',
        'checkpoint = {"amp": amp.state_dict()}\ncheckpoint = checkpoint["amp"]\namp.load_state_dict(checkpoint)\n',
    ),
    "the entry of a checkpoint under the name of another": amp_at(
        '"O1"',
        CHECKPOINT.replace("checkpoint", "saved", 1)
        .replace("model.load", 'checkpoint = saved["amp"]\nmodel.load')
        .replace('checkpoint["model"]', 'saved["model"]')
        + 'amp.load_state_dict(checkpoint)\ncheckpoint = saved\nmodel.load_state_dict(checkpoint["model"])\n',
    ),
    "backward after the block at O3": trained('"O3"', "scaled.backward()\n").replace(
        "        scaled.backward()", "        pass"
    ),
    "backward after the block of another loss": trained(
        '"O1"',
        "opt.zero_grad()\nscaled = model(x) * 0.5\nwith amp.scale_loss(scaled, opt) as scaled:\n    scaled.backward()\n",
    ),
    "no block at O0": unscaled('"O0"'),
    "no block where amp is off": unscaled('"O1", enabled=False'),
    "no block in the other branch": APEX
    + INIT.format('"O2"')
    + "def step(loss):\n    if use_fp16:\n        mixed_backward(loss)\n    else:\n        loss.backward()\n",
    "clip after the block, by a function": trained('"O1"', "clip()\n").replace(
        "for x", "def clip():\n    nn.utils.clip_grad_norm_(amp.master_params(opt), 1.0)\nfor x"
    ),
    "clip in the block at a scale of 1": trained('"O3"', "", "nn.utils.clip_grad_norm_(model.parameters(), 1.0)\n"),
    "clip of the model's at O2 without masters": trained(
        '"O2", master_weights=False', "nn.utils.clip_grad_norm_(model.parameters(), 1.0)\n"
    ),
    "a fill in bfloat16": APEX + ATTENTION.format("scores = scores.masked_fill(mask, -1e9)") + INIT.format('"O4"'),
    "a level that stands for none": APEX
    + OPTION.replace("O1", "off")
    + 'if args.opt_level != "off":\n    '
    + INIT.format("args.opt_level"),
    "a level that is replaced": APEX
    + OPTION.replace("O1", "")
    + 'args.opt_level = args.opt_level or "O1"\n'
    + INIT.format("args.opt_level"),
    "a number for none": APEX
    + OPTION.replace('"O1"', "0")
    + "if args.opt_level:\n    "
    + INIT.format("args.opt_level"),
    "a level where amp is off": APEX + INIT.format('"o1", enabled=False'),
    "O1 as enabled": APEX + 'model, opt = amp.initialize(model, opt, "O1")\n',
    "O2 as enabled and by name": APEX + 'model, opt = amp.initialize(model, opt, "O2", opt_level="O2")\n',
    "enabled as it is meant": APEX + 'model, opt = amp.initialize(model, opt, True, opt_level="O2")\n',
    "clip of masters": trained('"O2"', "nn.utils.clip_grad_norm_(amp.master_params(opt), 1.0)\n"),
    "clip of the model's at O1": trained('"O1"', "nn.utils.clip_grad_norm_(model.parameters(), 1.0)\n"),
    "clip where amp is off": trained('"O2"', "if not fp:\n    nn.utils.clip_grad_norm_(model.parameters(), 1.0)\n")
    .replace("    with amp", "    if fp:\n     with amp")
    .replace("        scaled.backward()", "      scaled.backward()"),
    "clip on the other side": APEX
    + INIT.format('"O2"')
    + "if fp:\n    with amp.scale_loss(loss, opt) as scaled:\n        scaled.backward()\n"
    + "else:\n    nn.utils.clip_grad_norm_(model.parameters(), 1.0)\n",
    "clip where amp has returned": APEX
    + INIT.format('"O2"')
    + "def step(loss):\n    if fp:\n        with amp.scale_loss(loss, opt) as scaled:\n            scaled.backward()\n"
    + "        return\n    loss.backward()\n    nn.utils.clip_grad_norm_(model.parameters(), 1.0)\n",
    "clip in another function": APEX
    + INIT.format('"O2"')
    + BLOCK
    + "def other(model):\n    nn.utils.clip_grad_norm_(model.parameters(), 1.0)\n",
    "gradients cleared": trained('"O2"', "for p in model.parameters():\n    p.grad = None\n"),
    "gradients divided at O1": trained('"O1"', "for p in model.parameters():\n    p.grad.data.div_(n)\n"),
    "gradients divided in the block": trained('"O2"', "", "for p in model.parameters():\n    p.grad.data.div_(n)\n"),
    "masters' gradients divided": trained('"O2"', "for p in amp.master_params(opt):\n    p.grad.data.div_(n)\n"),
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
}

"""Ways of writing a trap, and look-alikes that must stay silent, beside those of the corpus."""

import textwrap

import pytest

from ampcompat.tools.check import scan_source

START = "import copy, torch\nimport torch.nn.functional as F\nfrom torch import nn\nfrom apex import amp\n"
INITIALIZE = "model, optimizer = amp.initialize(model, optimizer, opt_level={})\n"


def traps(code):
    found = scan_source(code)
    assert not [f for f in found if f.kind == "file"], found
    return {f.name: f.level for f in found if f.kind == "trap"}


def trained(body, level='"O2"'):
    return traps(START + textwrap.dedent(body).replace("INITIALIZE\n", INITIALIZE.format(level)).lstrip("\n"))


CROSS_ENTROPY = "loss = nn.functional.binary_cross_entropy(x.sigmoid(), target=y)\n"
CLIP = """
INITIALIZE
if args.fp32:
    loss.backward()
else:
    with amp.scale_loss(loss, optimizer) as scaled_loss:
        scaled_loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
"""
TEACHER = """
{made}
INITIALIZE
with amp.scale_loss(loss, optimizer) as scaled_loss:
    scaled_loss.backward()
nn.utils.clip_grad_norm_(teacher.parameters(), 1.0)
"""
CLIPS = {
    "from torch.nn.utils import clip_grad_norm_ as clip": "clip",
    "from torch.nn.utils.clip_grad import clip_grad_value_ as clip": "clip",
    "from apex.contrib.clip_grad import clip_grad_norm_ as clip": "clip",
    "import torch.nn.utils as U": "U.clip_grad_norm_",
    "import torch": "torch.nn.utils.clip_grad.clip_grad_norm_",
}
#: A script, its level, and what is found.
SCRIPTS = {
    "cross entropy by a method": (
        f"INITIALIZE\n{CROSS_ENTROPY}",
        '"O1"',
        {"banned_cross_entropy": "error"},
    ),
    "a sigmoid that is registered": (
        f'amp.register_float_function(torch, "sigmoid")\nINITIALIZE\n{CROSS_ENTROPY}',
        '"O1"',
        {},
    ),
    "casts are off": (f"INITIALIZE\nwith amp.disable_casts():\n    {CROSS_ENTROPY}", '"O1"', {}),
    "BCEWithLogitsLoss": ("INITIALIZE\ncriterion = nn.BCEWithLogitsLoss()\n", '"O1"', {}),
    "a clip in the branch of the block": (CLIP, '"O2"', {"clip_of_model_params": "error"}),
    "a clip where the level is not known": (CLIP, "args.opt_level", {"clip_of_model_params": "warning"}),
    "a clip at O3": (CLIP, '"O3"', {}),
    "two ways of training": (
        """
        INITIALIZE
        if args.fp16:
            with amp.scale_loss(loss, optimizer) as scaled_loss:
                scaled_loss.backward()
            torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), 1.0)
        else:
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        """,
        '"O2"',
        {},
    ),
}
#: Models that ``amp.initialize`` may have got under another name, or share with one that it got.
NOT_VISIBLY_ANOTHER = [
    "teacher = build(args)",
    "teacher = model",
    "teacher = nn.Sequential(model, nn.Linear(8, 1))",
    "teacher = nn.Linear(8, 8)\nmodels = [model, teacher]",
    "teacher = nn.Linear(8, 8)\nmodel = Pair(teacher)",
    "teacher = nn.Linear(8, 8)\nmodel = teacher.cuda()",
    "teacher = nn.Linear(8, 8)\nmodel.head = teacher",
    "backbone = nn.Linear(8, 8)\nmodel = Net(backbone)\nteacher = Net(backbone)",
    "teacher, other = make_both()",
    "teacher = Net(torch_parts.backbone)",
]


@pytest.mark.parametrize("made", NOT_VISIBLY_ANOTHER)
def test_a_model_that_is_not_visibly_another_one(made):
    assert trained(TEACHER.format(made=f"import torch_parts\n{made}")) == {"clip_of_model_params": "error"}


@pytest.mark.parametrize(
    "made", ["nn.Linear(8, 8)", "nn.Linear(8, 8).cuda()", "Net(8)", "Net(width)", "Net(args.width)"]
)
def test_a_model_that_is_visibly_another_one(made):
    start = "args = parser.parse_args()\nwidth = 8\n"
    assert trained(TEACHER.format(made=f"{start}teacher = {made}")) == {}


@pytest.mark.parametrize("imported", CLIPS)
def test_a_clip_under_every_name(imported):
    clip = CLIPS[imported]
    below = f"{imported}\n{CLIP}".replace("nn.utils.clip_grad_norm_", clip)
    assert trained(below) == {"clip_of_model_params": "error"}
    inside = f"{imported}\n{CLIP}".replace("    nn.utils.clip_grad_norm_(model.parameters()", f"        {clip}(params")
    assert trained(inside) == {"clip_of_scaled_gradients": "error"}


def test_another_function_under_the_name_of_a_clip_is_none():
    assert trained(f"from lib import find as clip\n{CLIP}".replace("nn.utils.clip_grad_norm_", "clip")) == {}


@pytest.mark.parametrize("name", SCRIPTS)
def test_what_is_found_in_a_script(name):
    body, level, found = SCRIPTS[name]
    assert trained(body, level) == found


def test_without_amp_nothing_is_a_trap():
    assert scan_source("import torch\ns = s.masked_fill(m, -1e9)\nloss.backward()\n") == []


def test_traps_are_seen_in_migrated_scripts_too():
    code = START.replace("apex", "ampcompat") + "model, o = amp.initialize(model, o)\ns.masked_fill(m, -1e9)\n"
    assert traps(code) == {"overflowing_fill": "warning"}


HALF = "from apex import amp\nimport torch\nm, o = amp.initialize(m, o)\nx = x.half()\n"
RIGHT = [
    "y = x.masked_fill(m, float('-inf'))\n",
    "best[0] = 1e10\nlimit = 1e9\n",
    "y = attention_mask * 2  # see https://github.com/a/b/issues/140457\n",
    "y = NBCELoss()(x) + my_binary_cross_entropy(x)\n",
    "text = 'x.masked_fill(mask, -1e9)'\n",
    "y = x.to(torch.float32) * mask * 1e9\n",
]
OVERFLOWING = [
    "x[mask] = -1e9\n",
    "x.masked_fill_(m, value=1e10)\n",
    "y = x + (1 - mask) * (  # as large as can be\n    -1_000_000\n)\n",
    "name = '#'; y = mask * 1e9\n",
    "name = '''\n# '''; y = mask * 1e9\n",
    "y = x + batch['attention_mask'] * -1e9\n",
]


@pytest.mark.parametrize("code", RIGHT)
def test_code_without_a_trap(code):
    assert traps(HALF + code) == {}


@pytest.mark.parametrize("code", OVERFLOWING)
def test_every_way_of_writing_a_fill(code):
    assert set(traps(HALF + code)) == {"overflowing_fill"}

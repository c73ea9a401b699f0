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
#: A script, its level, and what is found.
SCRIPTS = {
    "cross entropy by a method": (
        f"INITIALIZE\n{CROSS_ENTROPY}",
        '"O1"',
        {"banned_cross_entropy": "error"},
    ),
    "cross entropy at O2": (f"INITIALIZE\n{CROSS_ENTROPY}", '"O2"', {}),
    "a sigmoid that is registered": (
        f'amp.register_float_function(torch, "sigmoid")\nINITIALIZE\n{CROSS_ENTROPY}',
        '"O1"',
        {},
    ),
    "casts are off": (f"INITIALIZE\nwith amp.disable_casts():\n    {CROSS_ENTROPY}", '"O1"', {}),
    "BCELoss where no sigmoid is": (
        "INITIALIZE\ncriterion = nn.BCELoss()\n",
        '"O1"',
        {"banned_cross_entropy": "warning"},
    ),
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
    "two ways under two tests": (
        """
        INITIALIZE
        if not use_apex:
            loss.backward()
        if use_apex:
            with amp.scale_loss(loss, optimizer) as scaled_loss:
                scaled_loss.backward()
        """,
        '"O2"',
        {},
    ),
    "one way returns": (
        """
        INITIALIZE
        def step(loss):
            if flag:
                with amp.scale_loss(loss, optimizer) as scaled_loss:
                    scaled_loss.backward()
                return
            loss.backward()
        """,
        '"O2"',
        {},
    ),
    "another tool's backward": (
        """
        INITIALIZE
        if deepspeed:
            engine.backward(loss)
        else:
            with amp.scale_loss(loss, optimizer) as scaled_loss:
                scaled_loss.backward()
        """,
        '"O2"',
        {},
    ),
    "another function trains something else": (
        """
        INITIALIZE
        def one():
            with amp.scale_loss(loss, optimizer) as scaled_loss:
                scaled_loss.backward()
        def two():
            other.backward()
        """,
        '"O2"',
        {},
    ),
    "another model in another function": (
        """
        def teacher(model):
            model.half()
        def main():
            model, o = amp.initialize(model, o, opt_level='O2')
        """,
        '"O2"',
        {},
    ),
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_what_is_found_in_a_script(name):
    body, level, found = SCRIPTS[name]
    assert trained(body, level) == found


def test_without_amp_nothing_is_a_trap():
    assert scan_source("import torch\ns = s.masked_fill(m, -1e9)\nloss.backward()\n") == []


def test_traps_are_seen_in_migrated_scripts_too():
    code = START.replace("apex", "ampcompat") + "model, o = amp.initialize(model, o)\ns.masked_fill(m, -1e9)\n"
    assert traps(code) == {"overflowing_fill": "warning"}


@pytest.mark.parametrize(
    "model",
    [
        "Net().half()",
        "net.half()",
        "net.cuda().half()",
        "net.half().cuda()",
        "[a, net.half()]",
        "net.to(torch.float16)",
        "net.to('cuda', dtype=torch.half)",
        "network_to_half(net)",
    ],
)
@pytest.mark.parametrize("inline", [True, False])
def test_a_half_model_is_seen_where_it_is_made(model, inline):
    given = model if inline else "net"
    code = "import torch\nfrom apex import amp\nfrom apex.fp16_utils import network_to_half\n"
    code += "" if inline else f"net = {model}\n".replace("[a, net.half()]", "net.half()")
    code += f"m, o = amp.initialize({given}, o)\n"
    assert traps(code) == {"half_by_hand": "error"}


@pytest.mark.parametrize(
    "given", ["net.to(device)", "net.cuda()", "net", "build(args.half)", "net.to(dtype=torch.float32)"]
)
def test_a_float32_model_is_no_trap(given):
    code = f"import torch\nfrom apex import amp\nx = x.half()\nm, o = amp.initialize({given}, o)\n"
    assert traps(code) == {}


HALF = "from apex import amp\nimport torch\nm, o = amp.initialize(m, o)\nx = x.half()\n"
NO_TRAP = [
    "y = x / (x.abs() + 1e-6)\n",
    "y = x + 1e-9\n",
    "y = x.masked_fill(m, float('-inf'))\n",
    "best[0] = 1e10\nlimit = 1e9\n",
    "y = attention_mask * 2  # see https://github.com/a/b/issues/140457\n",
    "# mask * issue 107187\ny = mask * 2\n",
    "y = x.clamp(min=0)\nz = torch.allclose(x, y, atol=1e-8)\n",
    "def f(x, eps=1e-8):\n    return x.clamp(min=0)\n",
    "y = norm(x + 1e-8)\n",
    "y = [x + 1e-8] * 2\n",
    "# x / (y + 1e-8)\n",
    "y = NBCELoss()(x) + my_binary_cross_entropy(x)\n",
    "text = 'x / (x + 1e-8)'\n",
    "y = x / (x.float() + 1e-8)\n",
    "y = x / (np.abs(x) + 1e-8)\n",
    "y = x.to(torch.float32) * mask * 1e9\n",
]
VANISHING = [
    "y = x / (\n    x.abs()  # not a bracket: (\n    + 1e-8\n)\n",
    "y = torch.log(((x) + (1e-8)))\n",
    "y = torch.sqrt(1e-9 + x)\n",
    "y = x.clamp(min=1e-12)\n",
    "y = x / (1e-8 + x[')'].abs())\n",
    "y = x / \\\n    (x + 1e-9)\n",
    "y = x / (x['#'] + .00000001)\n",
    "y = torch.clamp(x, max=max(1, 2), min=(1e-8))\n",
    "y = x.clamp_min(\n    # as small as (\n    1E-08\n)\n",
    "y = x / (x + 1e-8) if '#' else x / (x + 1e-8)\n",
]
OVERFLOWING = [
    "x[mask] = -1e9\n",
    "x.masked_fill_(m, value=1e10)\n",
    "y = x + (1 - mask) * (  # as large as can be\n    -1_000_000\n)\n",
    "name = '#'; y = mask * 1e9\n",
    "name = '''\n# '''; y = mask * 1e9\n",
    "y = x + batch['attention_mask'] * -1e9\n",
]


@pytest.mark.parametrize("code", NO_TRAP)
def test_what_is_no_trap(code):
    assert traps(HALF + code) == {}


@pytest.mark.parametrize("code", VANISHING)
def test_every_way_of_writing_an_epsilon(code):
    """It is none where nothing shows that the value is half."""
    assert traps(HALF + code) == {"vanishing_constant": "warning"}
    assert traps(HALF.replace("x = x.half()\n", "") + code) == {}


@pytest.mark.parametrize("code", OVERFLOWING)
def test_every_way_of_writing_a_fill(code):
    assert set(traps(HALF + code)) == {"overflowing_fill"}

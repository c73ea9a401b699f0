"""Each trap: a script that walks into it, and the look-alikes that must stay silent."""

import textwrap

import pytest

from ampcompat.tools.check import scan_source

START = "import copy, torch\nimport torch.nn.functional as F\nfrom torch import nn\nfrom apex import amp\n"


def traps(body: str, level: str = '"O2"') -> dict[str, str]:
    setup = f"model, optimizer = amp.initialize(model, optimizer, opt_level={level})\n"
    found = scan_source(START + textwrap.dedent(body).replace("INITIALIZE\n", setup).lstrip("\n"))
    assert not [f for f in found if f.kind == "file"], found
    return {f.name: f.level for f in found if f.kind == "trap"}


LOOP = """
INITIALIZE
for x in data:
    loss = model(x)
    with amp.scale_loss(loss, optimizer) as scaled_loss:
        scaled_loss.backward()
    {}
    optimizer.step()
"""

WALKED_INTO = {
    "misspelt_level": ('model, opt = amp.initialize(model, opt, opt_level="01")', "error"),
    "half_by_hand": ("model.half()\nINITIALIZE\n", "error"),
    "wrapped_before_initialize": ("model = torch.nn.DataParallel(model)\nINITIALIZE\n", "error"),
    "deepcopy_of_optimizer": ("INITIALIZE\nbest = copy.deepcopy(optimizer)\n", "warning"),
    "clip_of_model_params": (LOOP.format("nn.utils.clip_grad_norm_(model.parameters(), 1.0)"), "error"),
    "clip_of_scaled_gradients": (
        LOOP.format("pass").replace(
            "scaled_loss.backward()",
            "scaled_loss.backward(); nn.utils.clip_grad_norm_(amp.master_params(o), 1)",
        ),
        "error",
    ),
    "unscaled_backward": (LOOP.format("aux.backward()"), "error"),
    "backward_of_wrong_loss": (LOOP.format("pass").replace("scaled_loss.backward()", "loss.backward()"), "error"),
    "vanishing_constant": ("INITIALIZE\nx = x.half()\ny = x / (x.abs() + 1e-8)\n", "warning"),
    "overflowing_fill": ("INITIALIZE\nscores = q.half()\nscores = scores.masked_fill(mask == 0, -1e9)\n", "error"),
}


@pytest.mark.parametrize("name", sorted(WALKED_INTO))
def test_the_trap_is_seen(name):
    body, level = WALKED_INTO[name]
    assert traps(body) == {name: level}


@pytest.mark.parametrize(
    "line",
    [
        "loss = F.binary_cross_entropy(torch.sigmoid(model(x)), y)",
        "loss = nn.functional.binary_cross_entropy(x.sigmoid(), target=y)",
    ],
)
def test_banned_cross_entropy_at_O1_only(line):
    assert traps(f"INITIALIZE\n{line}\n", '"O1"') == {"banned_cross_entropy": "error"}
    assert traps(f"INITIALIZE\n{line}\n", '"O2"') == {}
    with_sigmoid = f'amp.register_float_function(torch, "sigmoid")\nINITIALIZE\n{line}\n'
    assert traps(with_sigmoid, '"O1"') == {}
    assert traps(f"INITIALIZE\nwith amp.disable_casts():\n    {line}\n", '"O1"') == {}


def test_bce_loss_modules():
    assert traps("INITIALIZE\ncriterion = nn.BCELoss()\nact = nn.Sigmoid()\n", '"O1"') == {
        "banned_cross_entropy": "warning"
    }
    assert traps("INITIALIZE\ncriterion = nn.BCELoss()\n", '"O1"') == {"banned_cross_entropy": "warning"}
    assert traps("INITIALIZE\ncriterion = nn.BCEWithLogitsLoss()\n", '"O1"') == {}


def test_clipping_model_params_depends_on_the_level():
    """It is a warning where the level is not known, and correct at O1."""
    body, _ = WALKED_INTO["clip_of_model_params"]
    assert traps(body, "args.opt_level") == {"clip_of_model_params": "warning"}
    assert traps(body, '"O1"') == {}
    assert traps(body, '"O3"') == {}


def test_a_clip_beside_a_block_in_an_else_branch():
    body = """
    INITIALIZE
    if args.fp32:
        loss.backward()
    else:
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    """
    assert traps(body) == {"clip_of_model_params": "error"}


@pytest.mark.parametrize(
    "body",
    [
        # Two ways of training, told apart by a switch.
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
        """
        INITIALIZE
        if not use_apex:
            loss.backward()
        if use_apex:
            with amp.scale_loss(loss, optimizer) as scaled_loss:
                scaled_loss.backward()
        """,
        """
        INITIALIZE
        def step(loss):
            if flag:
                with amp.scale_loss(loss, optimizer) as scaled_loss:
                    scaled_loss.backward()
                return
            loss.backward()
        """,
        """
        INITIALIZE
        if deepspeed:
            engine.backward(loss)
        else:
            with amp.scale_loss(loss, optimizer) as scaled_loss:
                scaled_loss.backward()
        """,
        # Another function trains something else.
        """
        INITIALIZE
        def one():
            with amp.scale_loss(loss, optimizer) as scaled_loss:
                scaled_loss.backward()
        def two():
            other.backward()
        """,
        # Another model, in another function.
        """
        def teacher(model):
            model.half()
        def main():
            INITIALIZE
        """.replace("            INITIALIZE\n", "            model, o = amp.initialize(model, o, opt_level='O2')\n"),
        # Wrapped after.
        "INITIALIZE\nmodel = torch.nn.DataParallel(model)\n",
        "if x:\n    model = torch.nn.DataParallel(model)\nelse:\n    model, o = amp.initialize(model, o)\n",
        # Numbers that fit, or meet float32.
        "INITIALIZE\ny = x / (x.norm() + 1e-6)\n",
        "INITIALIZE\ny = x / (x.float().norm() + 1e-8)\n",
        "INITIALIZE\ny = total / (len(data) + 1e-8)\n",
        "INITIALIZE\nopt = torch.optim.Adam(model.parameters(), lr=1e-9, eps=1e-8)\n",
        "INITIALIZE\nloss = loss + 1e-9\n",
        "INITIALIZE\ns = s.masked_fill(m, -1e4)\n",
        "INITIALIZE\ns = s.masked_fill(m, float('-inf'))\n",
        "INITIALIZE\ns = s.float().masked_fill(m, -1e9)\n",
        "INITIALIZE\nbest[0] = 1e10\nlimit = 1e9\n",
        "INITIALIZE\nweights = copy.deepcopy(model)\n",
    ],
)
def test_look_alikes_stay_silent(body):
    assert traps(body) == {}


@pytest.mark.parametrize("line", ["x[mask] = -1e9", "y = x + (1.0 - mask) * -1e9", "x.masked_fill_(m, value=1e10)"])
def test_other_overflowing_fills(line):
    assert set(traps(f"INITIALIZE\n{line}\n")) == {"overflowing_fill"}


@pytest.mark.parametrize("line", ["y = torch.log(p + 1e-10)", "y = p.clamp(min=1e-12)", "y = torch.sqrt(1e-9 + p)"])
def test_other_vanishing_constants(line):
    assert set(traps(f"INITIALIZE\np = p.half()\n{line}\n")) == {"vanishing_constant"}
    # Nothing shows what p is.
    assert traps(f"INITIALIZE\n{line}\n") == {}


def test_without_amp_nothing_is_a_trap():
    assert scan_source("import torch\ns = s.masked_fill(m, -1e9)\nloss.backward()\n") == []


def test_traps_are_seen_in_migrated_scripts_too():
    body = START.replace("apex", "ampcompat") + "model, o = amp.initialize(model, o)\ns.masked_fill(m, -1e9)\n"
    assert [f.name for f in scan_source(body) if f.kind == "trap"] == ["overflowing_fill"]


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
    assert [f.name for f in scan_source(code) if f.kind == "trap"] == ["half_by_hand"]


@pytest.mark.parametrize(
    "given", ["net.to(device)", "net.cuda()", "net", "build(args.half)", "net.to(dtype=torch.float32)"]
)
def test_a_float32_model_is_no_trap(given):
    code = f"import torch\nfrom apex import amp\nx = x.half()\nm, o = amp.initialize({given}, o)\n"
    assert [f.name for f in scan_source(code) if f.kind == "trap"] == []


HALF = "from apex import amp\nimport torch\nm, o = amp.initialize(m, o)\nx = x.half()\n"
NO_TRAP = [
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
TRAP_EXPRESSIONS = [
    "y = x / (\n    x.abs()  # not a bracket: (\n    + 1e-8\n)\n",
    "y = torch.log(((x) + (1e-8)))\n",
    "y = x / (1e-8 + x[')'].abs())\n",
    "y = x / \\\n    (x + 1e-9)\n",
    "y = x / (x['#'] + .00000001)\n",
    "y = torch.clamp(x, max=max(1, 2), min=(1e-8))\n",
    "y = x.clamp_min(\n    # as small as (\n    1E-08\n)\n",
    "y = x / (x + 1e-8) if '#' else x / (x + 1e-8)\n",
    "x[mask] = -1e9\n",
    "y = x + (1 - mask) * (  # as large as can be\n    -1_000_000\n)\n",
    "name = '#'; y = mask * 1e9\n",
    "name = '''\n# '''; y = mask * 1e9\n",
    "y = x + batch['attention_mask'] * -1e9\n",
]


@pytest.mark.parametrize("code", NO_TRAP)
def test_what_is_no_trap(code):
    assert [f.name for f in scan_source(HALF + code) if f.kind == "trap"] == []


@pytest.mark.parametrize("code", TRAP_EXPRESSIONS)
def test_every_way_of_writing_one(code):
    assert [f.name for f in scan_source(HALF + code) if f.kind == "trap"] != []

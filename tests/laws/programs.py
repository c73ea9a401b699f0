"""Random training programs: plain data drawn from a seed, and what they share when torch runs them.

A program is ``{"config": ..., "steps": [...]}``. Both sides (amp, and the reference) build the same modules and compute
the same loss; any sequence of steps is a program, so that a failing one can be shortened by leaving steps out.
"""

import random

import torch
from seeded import seeded

LEVELS = ("O0", "O1", "O2", "O2", "O2", "O3", "O4", "O5", "O5")
FEATURES, BATCH = 4, 3
# eps: float16 must hold it, where there are no masters.
OPTIMIZERS = {
    "sgd": lambda groups: torch.optim.SGD(groups, lr=0.125),
    "momentum": lambda groups: torch.optim.SGD(groups, lr=0.125, momentum=0.5, weight_decay=2.0**-6, nesterov=True),
    "adam": lambda groups: torch.optim.Adam(groups, lr=0.01, eps=2.0**-10, weight_decay=2.0**-6),
    "fused": lambda groups: torch.optim.AdamW(groups, lr=0.01, eps=2.0**-10, fused=True),
}


class Net(torch.nn.Module):
    """A stack of layers, a linear one first; ``unused`` never gets a gradient.

    ``tied`` is a layer of several models, ``mirror`` a layer of its own with the weight of the first.
    """

    def __init__(self, layers, tied):
        super().__init__()
        made = {
            "linear": lambda: torch.nn.Linear(FEATURES, FEATURES),
            "batchnorm": lambda: torch.nn.BatchNorm1d(FEATURES),
            "relu": torch.nn.ReLU,
            "tied": lambda: tied,
            "mirror": lambda: torch.nn.Linear(FEATURES, FEATURES),
        }
        self.layers = torch.nn.Sequential(*[made[name]() for name in layers])
        for name, layer in zip(layers, self.layers, strict=True):
            if name == "mirror":
                layer.weight = self.layers[0].weight
        self.unused = torch.nn.Parameter(torch.randn(2))

    def forward(self, x):
        return self.layers(x)


def build(config, seed):
    """The models, and their weights, each once."""
    torch.manual_seed(seed)
    tied = torch.nn.Linear(FEATURES, FEATURES)
    models = [Net(layers, tied).float() for layers in config["models"]]
    weights = list({id(p): p for model in models for p in model.parameters()}.values())
    for number in config["frozen"]:
        weights[number].requires_grad_(False)
    return models, weights


def make_optimizers(config, tensors):
    """The optimizers, over ``tensors``, some of which several hold. Late weights join afterwards."""
    made = []
    for number, kind in enumerate(config["optimizers"]):
        held = zip(tensors, config["owners"], config["sharers"], strict=True)
        mine = [t for t, owner, sharers in held if owner == number or number in sharers]
        half = (len(mine) + 1) // 2
        groups = [{"params": mine[:half]}, {"params": mine[half:], "lr": 0.0625}] if config["groups"] else []
        made.append(OPTIMIZERS[kind]([g for g in groups if g["params"]] or [{"params": mine}]))
    return made


def join(config, optimizers, tensors):
    late = config["late"]
    for number, optimizer in enumerate(optimizers):
        mine = [t for t, owner in zip(tensors[: len(late)], late, strict=True) if owner == number]
        if mine:
            optimizer.add_param_group({"params": mine, "lr": 0.25})


def leave(optimizer):
    """Take a parameter out of ``optimizer``, and return it."""
    group = [group for group in optimizer.param_groups if group["params"]][-1]
    param = group["params"].pop()
    optimizer.state.pop(param, None)
    return param


# -- changes of the models themselves ----------------------------------------------------------------------------------
#: Weights laid out anew; a layer given to another model.
CHANGES = ("lay_out", "graft")


def places(models, tensor):
    """Where ``tensor`` is a parameter: modules and names, each once."""
    modules = dict.fromkeys(module for model in models for module in model.modules())
    return [(module, name) for module in modules for name, held in module._parameters.items() if held is tensor]


def first(tensor):
    """The first element, to be written."""
    return tensor[(0,) * tensor.dim()]


def laid_out_anew(tensor):
    """The values of ``tensor`` in columns, or if they were, in rows."""
    return tensor.t().contiguous().t() if tensor.is_contiguous() else tensor.contiguous()


def graft(models, step):
    """Replace a layer of a model by a layer of another model; return whether both have one."""
    target, source = models[step["model"]], models[step["from"] % len(models)]
    goes = [i for i, layer in enumerate(target.layers) if isinstance(layer, torch.nn.Linear)]
    comes = [layer for layer in source.layers if isinstance(layer, torch.nn.Linear)]
    index, layer = goes[step["layer"] % len(goes)], comes[step["data"] % len(comes)]
    if target is source or any(layer is own for own in target.layers):
        return False
    target.layers[index] = layer
    return True


def draw_change(rng, config, step):
    step |= {"weight": rng.randrange(100), "data": rng.randrange(99)}
    if step["do"] == "graft":
        count = len(config["models"])
        step |= {"model": rng.randrange(count), "from": rng.randrange(count), "layer": rng.randrange(6)}
    return step


def loss_of(forwards, step):
    """The loss of a block; ``forwards`` call the models."""
    data = seeded(step["data"])
    total = torch.zeros((), dtype=torch.float32)
    for path in step["paths"]:  # models, one after the other: a discriminator judges what a generator made
        out = torch.randn(BATCH, FEATURES, generator=data, dtype=torch.float32)
        for number in path:
            out = forwards[number](out)
        total = total + (out.float() * torch.randn(BATCH, FEATURES, generator=data, dtype=torch.float32)).sum()
    return total * step["size"]


def generate(seed):
    """The program of ``seed``."""
    rng = random.Random(seed)
    level = rng.choice(LEVELS)
    casts = level in ("O2", "O3", "O5")
    kinds = ["linear", "linear", "batchnorm", "relu", "tied", "tied", "mirror"]
    models = [["linear", *rng.choices(kinds, k=rng.randint(0, 3))] for _ in range(rng.choice([1, 1, 2, 2, 3]))]
    config = {
        "level": level,
        "bfloat16": casts and rng.random() < 0.2,
        "masters": rng.choice([None, None, None, True, False]) if casts else None,
        "batchnorm": rng.choice([None, None, True, False]) if casts else None,
        "loss_scale": rng.choice([None, None, None, "dynamic", "dynamic", 1.0, 128.0]),
        "minimum": rng.choice([None, None, 1.0, 16.0]),
        "maximum": rng.choice([2.0**24, 2.0**17, 2.0**10]),
        "losses": rng.choice([1, 1, 2, 3]),
        "window": rng.choice([1, 2, 3, 2000]),
        "models": models,
        "groups": rng.random() < 0.3,
        "frozen": [],
    }
    count = len(build(config, 0)[1])
    config["frozen"] = sorted(n for n in range(count) if rng.random() < 0.1)
    optimizers = rng.choice([1, 1, 2, 2, 2, 3, 3])
    owners, late = spread(rng, config, count, optimizers)
    kept = [n for n in range(optimizers) if n in owners]
    config["owners"] = [kept.index(n) if n in kept else None for n in owners]
    config["sharers"] = share(rng, config["owners"], len(kept))
    late = [kept.index(n) if n in kept else None for n in late]
    config["late"] = [other if n is None else n for n, other in zip(late, share_late(rng, config, len(kept)))]
    config["optimizers"] = [rng.choice(list(OPTIMIZERS)) for _ in kept]
    # Each program has habits of its own: rare things meet each other in those that do them often.
    names = ("delays", "puts off", "raises", "overflows", "edits", "steps again", "inside")
    habits = {name: rng.choice([0, 0.1, 0.3, 0.6]) for name in names}
    habits["weights"] = [12, 9, 7] + [rng.choice([0, 0.5, 2]) for _ in OTHERS]
    steps = []
    for _ in range(rng.randint(4, 24)):
        steps += draw_steps(rng, config, habits)
    return {"seed": seed, "config": config, "steps": steps}


def edit(gradients, how):
    """Edit ``gradients`` in place, as scripts do that clip the model's gradients."""
    for grad in gradients:
        if how == "value":
            grad.clamp_(-1e-9, 1e-9)
        else:
            grad.mul_({"half": 0.5, "nothing": 0.0}[how])


def spread(rng, config, count, optimizers):
    """The optimizer of each weight, from the start and late; None: no optimizer's."""
    by_model = {}
    models, weights = build(config, 0)
    for number, model in enumerate(models):
        for p in model.parameters():
            by_model.setdefault(id(p), number % optimizers)
    owners, late = [], []
    scattered = rng.random() < 0.2
    for p in weights:
        owner = rng.randrange(optimizers) if scattered else by_model[id(p)]
        when = rng.random()
        owners.append(owner if when < 0.9 else None)
        late.append(owner if 0.9 <= when < 0.97 else None)
    if all(owner is None for owner in owners):
        owners[0], late[0] = 0, None
    return owners, late


def share(rng, owners, optimizers):
    """For each weight the other optimizers that hold it: mostly none; or a few weights, or a whole model, have two."""
    chance = rng.choice([0, 0, 0.3, 0.6, 1.0]) if optimizers > 1 else 0
    sharers = []
    for owner in owners:
        others = [n for n in range(optimizers) if n != owner]
        shares = owner is not None and rng.random() < chance
        sharers.append(sorted(rng.sample(others, rng.randint(1, len(others)))) if shares else [])
    return sharers


def share_late(rng, config, optimizers):
    """The optimizer that some weights of another one are added to in mid-run; None: no optimizer."""
    chance = rng.choice([0, 0, 0.3]) if optimizers > 1 else 0
    late = []
    for owner, sharers in zip(config["owners"], config["sharers"], strict=True):
        others = [n for n in range(optimizers) if n != owner and n not in sharers]
        shares = owner is not None and others and rng.random() < chance
        late.append(rng.choice(others) if shares else None)
    return late


OTHERS = ("edit", "nested", "load_scaler", "clip", "save", "snapshot", "rewind", "write", "join", "scale", "freeze")
OTHERS += ("plain", "leave", "come_back", *CHANGES)
EDITS = ("half", "nothing", "value")
INSIDE = ("clear", "clear", "step", "block", "block", "clip", "scale")


def draw_steps(rng, config, habits):
    """One step; before a backward pass outside any block, what makes it possible; and what habits add."""
    step = draw_step(rng, config, habits)
    if step["do"] == "block" and rng.random() < habits["edits"]:
        return [step, {"do": "edit", "optimizer": 0, "how": rng.choice(EDITS)}]
    if step["do"] == "step" and rng.random() < habits["steps again"]:
        return [step, step]
    if step["do"] != "plain":
        return [step]
    optimizers = range(len(config["optimizers"]))
    taken = [{"do": "step", "optimizer": n, "asks": True} for n in optimizers if rng.random() < 0.5]
    clear = {"do": "clear", "how": "none", "weight": 0, "model": 0}
    cleared = [{**clear, "optimizer": n, "who": "optimizer"} for n in optimizers]
    return [*taken, *cleared, {**clear, "optimizer": 0, "who": "all"}, step, {**step, "do": "step", "asks": True}]


def draw_loss(rng, models):
    paths = [rng.sample(range(models), rng.randint(1, models)) for _ in range(rng.randint(1, 2))]
    size = 0.0 if rng.random() < 0.1 else 2.0 ** rng.randint(-12, 1)
    return {"data": rng.randrange(1000), "paths": paths, "size": size}


def draw_block(rng, config, habits):
    """What is scaled, and by which scaler."""
    drawn = {**draw_loss(rng, len(config["models"])), "loss_id": rng.randrange(config["losses"])}
    if rng.random() < habits["overflows"]:
        drawn["size"] = rng.choice([float("inf"), float("nan"), 2.0**20])
    return drawn


def draw_inside(rng, config, habits, late):
    """What a script does in a block, before the backward pass or ``late``, after it.

    Torch refuses a backward pass through weights that were stepped after the forward.
    """
    kinds = INSIDE if late else [kind for kind in INSIDE if kind != "step"]
    habits = habits if late else {**habits, "inside": 0}
    steps = []
    while len(steps) < 3 and rng.random() < habits["inside"]:
        steps.append(draw_step(rng, config, habits, rng.choice(kinds)))
    return steps


def draw_step(rng, config, habits, kind=None):
    optimizers, models = len(config["optimizers"]), len(config["models"])
    kind = kind or rng.choices(["block", "step", "clear", *OTHERS], habits["weights"])[0]
    step = {"do": kind, "optimizer": rng.randrange(optimizers)}
    if kind in CHANGES:
        return draw_change(rng, config, step)
    if kind == "plain":
        step |= draw_loss(rng, models)
    if kind == "nested":
        order = rng.sample(range(optimizers), optimizers)
        border = rng.randint(1, max(1, optimizers - 1))
        sides = (order[:border], order[border:] or order)
        parts = [{**draw_block(rng, config, habits), "optimizers": side} for side in sides]
        step |= {"outer": parts[0], "inner": parts[1], "how": rng.choice(["together", "apart", "outer first"])}
    elif kind == "block":
        step |= {
            **draw_block(rng, config, habits),
            "optimizers": rng.sample(range(optimizers), rng.choice([1, 1, optimizers])),
            "passes": rng.choice([0, 1, 1, 1, 1, 1, 1, 2]),
            "delay_unscale": rng.random() < habits["delays"],
            "delay_overflow_check": rng.random() < habits["puts off"],
            "raises": rng.choice(["before", "after"]) if rng.random() < habits["raises"] else None,
            "late": rng.random() < 0.6,
        }
        step["inside"] = draw_inside(rng, config, habits, step["late"])
    elif kind == "clear":
        step |= {"who": rng.choice(["optimizer", "model", "all", "one"]), "how": rng.choice(["none", "zeros"])}
        step |= {"weight": rng.randrange(len(config["owners"])), "model": rng.randrange(models)}
    elif kind == "step":
        step["asks"] = rng.random() < 0.7  # step_was_skipped may have to wait for the device
    elif kind == "clip":
        step["norm"] = rng.choice([2.0**-6, 1.0])
    elif kind == "save":
        names = [f"model{n}" for n in range(models)] + [f"optimizer{n}" for n in range(optimizers)] + ["amp"]
        step |= {"order": rng.sample(names, len(names)), "joined": False}
    elif kind == "write":
        how = rng.choice(["model", "and back", "masters", "data"])
        step |= {"how": how, "weight": rng.randrange(len(config["owners"])), "value": rng.randint(-63, 63) / 64}
    elif kind == "edit":
        step["how"] = rng.choice(EDITS)
    elif kind in ("scale", "load_scaler"):
        step |= {"loss_id": rng.randrange(config["losses"]), "value": 2.0 ** rng.randint(-2, 18)}
    elif kind == "freeze":
        step["weight"] = rng.randrange(len(config["owners"]))
    return step

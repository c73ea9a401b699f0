"""Training scenarios that any apex.amp-compatible module must run alike.

Each scenario is a function of ``(amp, **init_kwargs)``: it trains a tiny model on seeded random data on the CPU and
returns plain JSON data: per-step losses, per-step loss scales, which steps were skipped, and the final master
parameters' norms. ``amp`` is the module under test, e.g. ``from ampcompat import amp``.
``RUNS`` lists which scenarios are run with which arguments.
"""

import torch
import torch.nn as nn
import torch.nn.functional as F


def _scale(amp, i=0):
    return float(amp.state_dict()[f"loss_scaler{i}"]["loss_scale"])


def _norms(amp, optimizers):
    return [float(p.detach().double().norm()) for o in optimizers for p in amp.master_params(o)]


class MLP(nn.Module):
    def __init__(self, d=16, h=32, o=4):
        super().__init__()
        self.a, self.b = nn.Linear(d, h), nn.Linear(h, o)

    def forward(self, x):
        return self.b(torch.relu(self.a(x)))


class ConvBN(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.bn, self.fc = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.Linear(8, 4)

    def forward(self, x):
        return self.fc(F.relu(self.bn(self.conv(x))).mean((2, 3)))


class Block(nn.Module):
    """One attention block written as 2019 code wrote it: matmul, softmax, gelu, LayerNorm."""

    def __init__(self, d=16):
        super().__init__()
        self.qkv, self.out = nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.n1, self.n2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.up, self.down, self.head = nn.Linear(d, 2 * d), nn.Linear(2 * d, d), nn.Linear(d, 4)

    def forward(self, x):
        q, k, v = self.qkv(self.n1(x)).chunk(3, -1)
        w = F.softmax(torch.matmul(q, k.transpose(1, 2)) / 4.0, dim=-1)
        x = x + self.out(torch.matmul(w, v))
        x = x + self.down(F.gelu(self.up(self.n2(x))))
        return self.head(x.mean(1))


def _data(steps, shape, classes=4, seed=1):
    g = torch.Generator().manual_seed(seed)
    return [
        (torch.randn(shape, generator=g), torch.randint(0, classes, (shape[0],), generator=g)) for _ in range(steps)
    ]


def _train(amp, model, make_opt, data, clip=None, accumulate=1, delay_unscale=False, bad_steps=(), **kw):
    opt = make_opt(model.parameters())
    model, opt = amp.initialize(model, opt, verbosity=0, **kw)
    losses, scales, skipped = [], [], []
    for i, (x, y) in enumerate(data):
        loss = F.cross_entropy(model(x), y) / accumulate
        losses.append(float(loss.detach()))
        if i in bad_steps:
            loss = loss * float("inf")
        last = (i + 1) % accumulate == 0
        with amp.scale_loss(loss, opt, delay_unscale=delay_unscale and not last) as scaled:
            scaled.backward()
        if last:
            before = [p.detach().clone() for p in amp.master_params(opt)]
            if clip and i not in bad_steps:
                torch.nn.utils.clip_grad_norm_(amp.master_params(opt), clip)
            opt.step()
            skipped.append(all(torch.equal(a, b) for a, b in zip(before, amp.master_params(opt))))
            opt.zero_grad()
        scales.append(_scale(amp))
    return {"loss": losses, "scale": scales, "skipped": skipped, "norms": _norms(amp, [opt])}


def mlp(amp, steps=12, **kw):
    torch.manual_seed(0)
    return _train(amp, MLP(), lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), _data(steps, (32, 16)), **kw)


def convbn(amp, steps=10, **kw):
    torch.manual_seed(0)
    return _train(
        amp,
        ConvBN(),
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=1e-4),
        _data(steps, (16, 3, 8, 8)),
        **kw,
    )


def block(amp, steps=10, **kw):
    torch.manual_seed(0)
    return _train(amp, Block(), lambda p: torch.optim.AdamW(p, lr=1e-2), _data(steps, (8, 6, 16)), clip=1.0, **kw)


def gan(amp, steps=8, **kw):
    """Two models, two optimizers, three losses, one loss scaler each: the DCGAN pattern."""
    torch.manual_seed(0)
    gen, dis = MLP(8, 32, 16), MLP(16, 32, 1)
    og, od = torch.optim.Adam(gen.parameters(), lr=1e-3), torch.optim.Adam(dis.parameters(), lr=1e-3)
    (dis, gen), (od, og) = amp.initialize([dis, gen], [od, og], num_losses=3, verbosity=0, **kw)
    crit = nn.BCEWithLogitsLoss()
    g = torch.Generator().manual_seed(2)
    losses, scales = [], []
    for _ in range(steps):
        real, z = torch.randn(16, 16, generator=g), torch.randn(16, 8, generator=g)
        od.zero_grad()
        l0 = crit(dis(real), torch.ones(16, 1))
        with amp.scale_loss(l0, od, loss_id=0) as s:
            s.backward()
        fake = gen(z)
        l1 = crit(dis(fake.detach()), torch.zeros(16, 1))
        with amp.scale_loss(l1, od, loss_id=1) as s:
            s.backward()
        od.step()
        og.zero_grad()
        l2 = crit(dis(fake), torch.ones(16, 1))
        with amp.scale_loss(l2, og, loss_id=2) as s:
            s.backward()
        og.step()
        losses += [float(l0.detach()), float(l1.detach()), float(l2.detach())]
        scales += [_scale(amp, i) for i in range(3)]
    return {"loss": losses, "scale": scales, "norms": _norms(amp, [od, og])}


LEVELS = ("O0", "O1", "O2", "O3")
RUNS = [(f.__name__, {"opt_level": o}) for f in (mlp, convbn, block, gan) for o in LEVELS]
RUNS += [("mlp", {"opt_level": o, "loss_scale": s}) for o in ("O1", "O2") for s in (128.0, "64.0")]
RUNS += [("mlp", {"opt_level": o, "bad_steps": [2, 3, 7]}) for o in ("O1", "O2")]
RUNS += [("mlp", {"opt_level": o, "accumulate": 3}) for o in LEVELS]
RUNS += [("mlp", {"opt_level": o, "accumulate": 3, "delay_unscale": True}) for o in ("O1", "O2")]
RUNS += [
    ("convbn", {"opt_level": "O2", "keep_batchnorm_fp32": "False"}),
    ("convbn", {"opt_level": "O3", "keep_batchnorm_fp32": True}),
    ("mlp", {"opt_level": "O2", "bad_steps": [1, 2, 3, 4], "min_loss_scale": 16384.0}),
    ("mlp", {"opt_level": "O1", "max_loss_scale": 1024.0}),
]


def key(name, kw):
    return name + "(" + ", ".join(f"{k}={kw[k]!r}" for k in sorted(kw)) + ")"

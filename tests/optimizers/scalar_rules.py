"""The update rules once more, one Python float at a time, from their description alone."""

import math
from collections.abc import Callable
from typing import Any

Vector = list[float]
State = dict[str, Any]


def l2(values: Vector) -> float:
    return math.sqrt(sum(v * v for v in values))


def adam(p: Vector, g: Vector, s: State, step: int, o: dict[str, Any]) -> None:
    b1, b2 = o["betas"]
    m, v = s.setdefault("exp_avg", [0.0] * len(p)), s.setdefault("exp_avg_sq", [0.0] * len(p))
    c1, c2 = (1 - b1**step, 1 - b2**step) if o["bias_correction"] else (1.0, 1.0)
    for i in range(len(p)):
        grad = g[i] if o["adam_w_mode"] else g[i] + o["weight_decay"] * p[i]
        m[i] = b1 * m[i] + (1 - b1) * grad
        v[i] = b2 * v[i] + (1 - b2) * grad * grad
        if o.get("eps_inside_sqrt"):
            update = m[i] / c1 / math.sqrt((v[i] + o["eps"]) / c2)
        else:
            update = m[i] / c1 / (math.sqrt(v[i] / c2) + o["eps"])
        if o["adam_w_mode"]:
            update += o["weight_decay"] * p[i]
        p[i] -= o["lr"] * update


def sgd(p: Vector, g: Vector, s: State, step: int, o: dict[str, Any]) -> None:
    first = "momentum_buffer" not in s
    for i in range(len(p)):
        d = g[i] if o["wd_after_momentum"] else g[i] + o["weight_decay"] * p[i]
        if o["momentum"]:
            buffer = s.setdefault("momentum_buffer", [0.0] * len(p))
            buffer[i] = d if first else o["momentum"] * buffer[i] + (1 - o["dampening"]) * d
            d = d + o["momentum"] * buffer[i] if o["nesterov"] else buffer[i]
        if o["wd_after_momentum"]:
            d += o["weight_decay"] * p[i]
        p[i] -= o["lr"] * d


def adagrad(p: Vector, g: Vector, s: State, step: int, o: dict[str, Any]) -> None:
    h = s.setdefault("sum", [0.0] * len(p))
    for i in range(len(p)):
        grad = g[i] if o["adagrad_w_mode"] else g[i] + o["weight_decay"] * p[i]
        h[i] += grad * grad
        update = grad / (math.sqrt(h[i]) + o["eps"])
        if o["adagrad_w_mode"]:
            update += o["weight_decay"] * p[i]
        p[i] -= o["lr"] * update


def lamb(p: Vector, g: Vector, s: State, step: int, o: dict[str, Any]) -> None:
    b1, b2 = o["betas"]
    b3 = 1 - b1 if o["grad_averaging"] else 1.0
    m, v = s.setdefault("exp_avg", [0.0] * len(p)), s.setdefault("exp_avg_sq", [0.0] * len(p))
    c1, c2 = (1 - b1**step, 1 - b2**step) if o["bias_correction"] else (1.0, 1.0)
    limit = o["max_grad_norm"]
    clip = o["global_norm"] / limit if limit and o["global_norm"] > limit else 1.0
    update = []
    for i in range(len(p)):
        grad = g[i] / clip
        if not o["adam_w_mode"]:
            grad += o["weight_decay"] * p[i]
        m[i] = b1 * m[i] + b3 * grad
        v[i] = b2 * v[i] + (1 - b2) * grad * grad
        u = m[i] / c1 / (math.sqrt(v[i] / c2) + o["eps"])
        # apex's kernel kept the update in the memory of the gradient.
        update.append(o["rounded"](u + o["weight_decay"] * p[i] if o["adam_w_mode"] else u))
    ratio = 1.0
    if (o["use_nvlamb"] or o["weight_decay"] != 0) and l2(p) != 0 and l2(update) != 0:
        ratio = l2(p) / l2(update)
    for i in range(len(p)):
        p[i] -= o["lr"] * ratio * update[i]


def novograd(p: Vector, g: Vector, s: State, step: int, o: dict[str, Any]) -> None:
    b1, b2 = o["betas"]
    b3 = 1 - b1 if o["grad_averaging"] else 1.0
    c1, c2 = (1 - b1**step, math.sqrt(1 - b2**step)) if o["bias_correction"] else (1.0, 1.0)
    norm = l2(g) if o["norm_type"] == 2 else max(abs(x) for x in g)
    old = s.get("exp_avg_sq", 0.0 if o["init_zero"] else norm)
    if o["norm_type"] == 2:
        s["exp_avg_sq"] = math.sqrt(b2 * old * old + (1 - b2) * norm * norm)
    else:
        s["exp_avg_sq"] = b2 * old + (1 - b2) * norm
    denominator = s["exp_avg_sq"] / c2 + o["eps"]
    m = s.setdefault("exp_avg", [0.0] * len(p))
    for i in range(len(p)):
        if o["reg_inside_moment"]:
            m[i] = b1 * m[i] + b3 * (g[i] / denominator + o["weight_decay"] * p[i])
            update = m[i] / c1
        else:
            m[i] = b1 * m[i] + b3 * g[i]
            update = m[i] / c1 / denominator + o["weight_decay"] * p[i]
        p[i] -= o["lr"] * update


def larc_then(inner: Callable[..., None]) -> Callable[..., None]:
    def rule(p: Vector, g: Vector, s: State, step: int, o: dict[str, Any]) -> None:
        grads, decay = list(g), o["weight_decay"]
        if l2(p) != 0 and l2(g) != 0:
            rate = o["trust_coefficient"] * l2(p) / (l2(g) + l2(p) * decay + o["larc_eps"])
            if o["clip"]:
                rate = min(rate / o["lr"], 1.0)
            grads = o["rounded"]([(x + decay * w) * rate for x, w in zip(g, p, strict=True)])  # stored in p.grad
        inner(p, grads, s, step, {**o, "weight_decay": 0.0})

    return rule

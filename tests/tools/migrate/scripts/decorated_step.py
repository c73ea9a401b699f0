import functools
import logging
import time
from typing import Callable, Dict

import torch
from torch import nn, Tensor
from apex import amp

log = logging.getLogger(__name__)


def timed(fn: Callable) -> Callable:
    @functools.wraps(fn)
    def wrapper(*args, **kwargs):
        start = time.perf_counter()
        try:
            return fn(*args, **kwargs)
        finally:
            log.debug("%s took %.3fs", fn.__name__, time.perf_counter() - start)
    return wrapper


def skip_on_nan(default=None):
    def deco(fn):
        @functools.wraps(fn)
        def wrapper(*args, **kwargs):
            out = fn(*args, **kwargs)
            if isinstance(out, dict) and out["loss"] != out["loss"]:
                log.warning("nan loss, batch skipped")
                return default
            return out
        return wrapper
    return deco


def optimize(optimizer_name: str, clip: float = None):
    """The decorated method returns a loss; the decorator runs backward and steps."""
    def deco(fn):
        @functools.wraps(fn)
        def wrapper(self, *args, **kwargs):
            opt = getattr(self, optimizer_name)
            opt.zero_grad()
            loss, logs = fn(self, *args, **kwargs)
            with amp.scale_loss(loss, opt) as scaled_loss:
                scaled_loss.backward()
            if clip is not None:
                torch.nn.utils.clip_grad_norm_(amp.master_params(opt), clip)
            opt.step()
            logs["loss"] = loss.item()
            return logs
        return wrapper
    return deco


class Ranker(nn.Module):
    def __init__(self, n_users: int, n_items: int, dim: int = 12) -> None:
        super().__init__()
        self.users = nn.Embedding(n_users, dim)
        self.items = nn.Embedding(n_items, dim)
        self.mlp = nn.Sequential(nn.Linear(2 * dim, 24), nn.ReLU(), nn.Linear(24, 1))

    def forward(self, u: Tensor, i: Tensor) -> Tensor:
        return self.mlp(torch.cat([self.users(u), self.items(i)], dim=1)).squeeze(1)


class Experiment:
    def __init__(self, device: str) -> None:
        self.device = device
        self.net = Ranker(20, 30).to(device)
        self.opt = torch.optim.SGD(self.net.parameters(), lr=0.5, momentum=0.9)
        self.net, self.opt = amp.initialize(self.net, self.opt, opt_level="O1")

    @skip_on_nan(default={})
    @timed
    @optimize("opt", clip=0.25)
    def bpr_step(self, u: Tensor, pos: Tensor, neg: Tensor) -> Dict[str, float]:
        diff = self.net(u, pos) - self.net(u, neg)
        loss = nn.functional.softplus(-diff).mean()
        return loss, {"auc": (diff > 0).float().mean().item()}

    @timed
    @torch.no_grad()
    def evaluate(self, u: Tensor, pos: Tensor, neg: Tensor) -> float:
        self.net.eval()
        diff = self.net(u, pos) - self.net(u, neg)
        self.net.train()
        return nn.functional.softplus(-diff).mean().item()


def triples(n: int, g: torch.Generator):
    u = torch.randint(0, 20, (n,), generator=g)
    pos = torch.randint(0, 15, (n,), generator=g) * 2 + u % 2
    neg = torch.randint(0, 15, (n,), generator=g) * 2 + (u + 1) % 2
    return u, pos, neg


def main() -> None:
    torch.manual_seed(71)
    g = torch.Generator().manual_seed(72)
    exp = Experiment("cuda" if torch.cuda.is_available() else "cpu")
    for step in range(16):
        logs = exp.bpr_step(*(t.to(exp.device) for t in triples(32, g)))
        print("step", step, "loss", logs["loss"])
    print("eval", 0, "loss", exp.evaluate(*(t.to(exp.device) for t in triples(64, g))))


if __name__ == "__main__":
    main()

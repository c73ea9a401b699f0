"""Small models that the tests of this directory share; a module of its own so that they pickle."""

from __future__ import annotations

from collections.abc import Callable

import torch
from seeded import seeded
from torch import nn

from ampcompat import amp

LEVELS = ["O0", "O1", "O2", "O3", "O4", "O5"]
CAST_LEVELS = ["O2", "O3", "O5"]
MASTER_LEVELS = ["O2", "O5"]


class Net(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, width), nn.BatchNorm1d(width), nn.ReLU())
        self.head = nn.Linear(width, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x))


class Child(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * 2


class Routed(Net):
    """Sends its forward through an attribute of the instance."""

    def __init__(self) -> None:
        super().__init__()
        self.forward = self.implementation

    def implementation(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x))


class Proxy(nn.Module):
    """Hands unknown attributes on to a wrapped module, as many wrappers do."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def __getattr__(self, name: str) -> object:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.module(x)


class Slotted(Net):
    __slots__ = ("gain",)

    def __init__(self) -> None:
        super().__init__()
        object.__setattr__(self, "gain", 3.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.gain


class OwnDeepcopy(Net):
    copies = 0

    def __deepcopy__(self, memo: dict) -> OwnDeepcopy:
        new = type(self)()
        new.load_state_dict(self.state_dict())
        new.copies = self.copies + 1
        return new


class OwnReduce(Net):
    def __reduce__(self) -> tuple:
        return (restored, (self.state_dict(),))


def restored(state: dict) -> OwnReduce:
    model = OwnReduce()
    model.load_state_dict(state)
    return model


class OwnState(Net):
    def __getstate__(self) -> dict:
        kept = dict(self.__dict__)
        kept.pop("scratch", None)
        return kept

    def __setstate__(self, state: dict) -> None:
        super().__setstate__(state)
        self.scratch = "made anew"


class Registered(Net):
    registry: list[type] = []

    def __init_subclass__(cls, *, key: str, **kwargs: object) -> None:
        super().__init_subclass__(**kwargs)
        Registered.registry.append(cls)


class RegisteredChild(Registered, key="child"):
    pass


class Meta(type):
    made: list[str] = []

    def __new__(mcs, name: str, bases: tuple, body: dict, **kwargs: object) -> type:
        mcs.made.append(name)
        return super().__new__(mcs, name, bases, body, **kwargs)


class WithMeta(Net, metaclass=Meta):
    pass


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(4, 4, bias=False)
        self.decoder = nn.Linear(4, 4, bias=False)
        self.decoder.weight = self.encoder.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.decoder(self.encoder(x))


def batch(seed: int = 0, rows: int = 8) -> torch.Tensor:
    return torch.randn(rows, 4, generator=seeded(seed))


def made(kind: Callable[[], nn.Module] = Net, level: str = "O2", lr: float = 0.1, **options: object) -> tuple:
    """A model of ``kind`` under amp, whose weights are the same each time, and its optimizer."""
    torch.manual_seed(0)
    model = kind()
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    return amp.initialize(model, optimizer, opt_level=level, **{"verbosity": 0, **options})


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 1, seed: int = 0) -> None:
    """Train for ``steps``, the first with the batch of ``seed``; the gradients of the last stay."""
    for step in range(steps):
        optimizer.zero_grad()
        with amp.scale_loss(model(batch(seed + step)).float().pow(2).mean(), optimizer) as scaled:
            scaled.backward()
        optimizer.step()


def masters_agree(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> None:
    """The invariant, bitwise: every half tensor is its master rounded. A save has both follow what was written."""
    from internals import masters_of

    model.state_dict()
    masters = masters_of(model)
    for master in masters:
        assert torch.equal(master.half.detach(), master.value.detach().to(master.half.dtype))
    if optimizer is not None:
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        half = {id(m.half) for m in masters}
        assert not held & half, "an optimizer holds half parameters"

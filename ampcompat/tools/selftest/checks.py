"""The checks of one device: each raises :class:`Failed` where amp does not do what it should, or returns a remark."""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch.nn import functional as F

from ampcompat import _torch, amp
from ampcompat._state import state
from ampcompat.amp.frontend import OptLevel
from ampcompat.tools.dtypes import dtype_name

#: The half dtype of each level.
HALVES: dict[OptLevel, torch.dtype] = {
    "O1": torch.float16,
    "O2": torch.float16,
    "O3": torch.float16,
    "O4": torch.bfloat16,
    "O5": torch.bfloat16,
}
STEPS = 12


class Failed(Exception):
    """amp does something else here than it should."""


class Skipped(Exception):
    """The check is not for this machine."""


@contextmanager
def fresh() -> Iterator[None]:
    """Start from a torch that amp has not touched, and leave such a one."""
    state.reset()
    try:
        yield
    finally:
        state.reset()


# -- op rows -----------------------------------------------------------------------------------------------------------
Call = Callable[..., torch.Tensor]

#: Calls by the list that they are on: half from float32 arguments, float32 from half ones, the widest of both.
HALF_CALLS: dict[str, Call] = {
    "linear": lambda x: F.linear(x, x),
    "matmul": lambda x: torch.matmul(x, x),
    "@": lambda x: x @ x,
    "mm": lambda x: torch.mm(x, x),
    "addmm": lambda x: torch.addmm(x, x, x),
    "bmm": lambda x: torch.bmm(x[None], x[None]),
    "conv1d": lambda x: F.conv1d(x[None], x[:, :, None]),
    "conv2d": lambda x: F.conv2d(x[None, :, :, None], x[:, :, None, None]),
}
FLOAT_CALLS: dict[str, Call] = {
    "softmax": lambda x: F.softmax(x, -1),
    "log_softmax": lambda x: F.log_softmax(x, -1),
    "layer_norm": lambda x: F.layer_norm(x, x.shape[-1:]),
    "gelu": F.gelu,
    "softplus": F.softplus,
    "exp": torch.exp,
    "pow": lambda x: x**2,
    "sum": lambda x: x.sum(-1),
    "cumsum": lambda x: torch.cumsum(x, 0),
    "norm": lambda x: torch.norm(x),
    "mse_loss": lambda x: F.mse_loss(x, torch.zeros_like(x)),
    "cross_entropy": lambda x: F.cross_entropy(x, torch.arange(x.shape[0], device=x.device)),
}
PROMOTE_CALLS: dict[str, Call] = {
    "+": lambda x, y: x + y,
    "*": lambda x, y: x * y,
    "add": torch.add,
    "atan2": torch.atan2,
    "cat": lambda x, y: torch.cat([x, y]),
    "stack": lambda x, y: torch.stack([x, y]),
}


def check_ops(device: torch.device, level: OptLevel) -> str:
    """Each call has the dtype of its list at O1 (O4), and about the values that float32 has."""
    half = HALVES[level]
    if device.type not in _torch.autocast_device_types():
        raise Skipped("this torch has no autocast for the device")
    x = torch.linspace(-1.49, 2.0, 64).reshape(8, 8)
    wide = {"half": torch.float32, "float": half, "promote": half}
    calls = {"half": HALF_CALLS, "float": FLOAT_CALLS, "promote": PROMOTE_CALLS}
    known = {
        (kind, name): call(*[x] * (1 + (kind == "promote"))) for kind in calls for name, call in calls[kind].items()
    }
    wrong = []
    with fresh():
        amp.initialize(torch.nn.Linear(2, 2).to(device), opt_level=level, verbosity=0)
        for (kind, name), expected in known.items():
            given = [x.to(device, wide[kind]), *([x.to(device)] if kind == "promote" else [])]
            dtype = half if kind == "half" else torch.float32
            got = calls[kind][name](*given)
            if got.dtype != dtype:
                wrong.append(f"{name} gave {dtype_name(got.dtype)}, not {dtype_name(dtype)}")
            elif not torch.allclose(got.float().to("cpu"), expected, rtol=0.03, atol=0.1):
                wrong.append(f"{name} gave other values than float32")
        try:
            F.binary_cross_entropy(x.to(device, half).sigmoid(), x.to(device, half).sigmoid())
            wrong.append("binary_cross_entropy took half arguments")
        except NotImplementedError:
            pass
    if wrong:
        raise Failed("; ".join(wrong[:3]) + (f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""))
    return f"{len(known) + 1} calls"


# -- a small training --------------------------------------------------------------------------------------------------
def build(device: torch.device, optimizer: str = "SGD") -> tuple[torch.nn.Sequential, torch.optim.Optimizer]:
    """A model with a convolution, a batch norm and linear layers, and its optimizer; the same each time."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = torch.nn.Sequential(
            torch.nn.Conv2d(1, 8, 3),
            torch.nn.BatchNorm2d(8),
            torch.nn.ReLU(),
            torch.nn.Flatten(),
            torch.nn.Linear(8 * 36, 32),
            torch.nn.LayerNorm(32),
            torch.nn.GELU(),
            torch.nn.Linear(32, 4),
        ).to(device)
    options: dict[str, float] = {"momentum": 0.9} if optimizer == "SGD" else {}
    made: torch.optim.Optimizer = getattr(torch.optim, optimizer)(model.parameters(), lr=0.02, **options)
    return model, made


def batch(device: torch.device, size: int = 32) -> tuple[torch.Tensor, torch.Tensor]:
    """Images of four kinds that a few steps can tell apart."""
    generator = torch.Generator().manual_seed(1)
    kinds = torch.arange(size) % 4
    images = 0.5 * torch.randn(size, 1, 8, 8, generator=generator)
    for kind in range(4):
        images[kinds == kind, :, 2 * kind : 2 * kind + 2] += 1.0
    return images.to(device), kinds.to(device)


def step(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    data: tuple[torch.Tensor, torch.Tensor],
    factor: float = 1.0,
) -> float:
    """One step under amp; the loss times ``factor`` is what is scaled."""
    optimizer.zero_grad()
    loss = F.cross_entropy(model(data[0]), data[1]).float() * factor
    with amp.scale_loss(loss, optimizer) as scaled:
        scaled.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    return float(loss.detach())


def float32_losses(device: torch.device) -> list[float]:
    """The losses of the training in plain torch."""
    model, optimizer = build(device)
    images, kinds = batch(device)
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images), kinds)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def check_training(device: torch.device, level: OptLevel) -> str:
    """The losses of a small training follow those of plain float32, in the dtypes of the level."""
    expected, half = float32_losses(device), HALVES.get(level)
    with fresh():
        model, optimizer = amp.initialize(*build(device), opt_level=level, verbosity=0)
        _check_dtypes(model, optimizer, level)
        seen: list[torch.dtype] = []
        hook = model[4].register_forward_hook(lambda module, inputs, output: seen.append(output.dtype))
        losses = [step(model, optimizer, batch(device)) for _ in range(STEPS)]
        hook.remove()
        weights = [*model.parameters(), *amp.master_params(optimizer)]
        if not all(bool(weight.isfinite().all()) for weight in weights):
            raise Failed("a weight is not finite after the training")
    ran = half if device.type in _torch.autocast_device_types() or level not in ("O1", "O4") else torch.float32
    if seen[-1] != (ran or torch.float32):
        raise Failed(f"the linear layer ran in {dtype_name(seen[-1])}, not in {dtype_name(ran or torch.float32)}")
    apart = max(abs(loss - base) / (base + 0.1) for loss, base in zip(losses, expected, strict=True))
    allowed = 1e-4 if half is None else 0.05 if half == torch.float16 else 0.15
    if not apart <= allowed:  # NaN fails
        raise Failed(f"the loss is {apart:.1%} from float32's (at most {allowed:.2%})")
    if not losses[-1] < 0.5 * losses[0]:
        raise Failed(f"the loss did not fall: {losses[0]:.3g} to {losses[-1]:.3g}")
    return f"loss {losses[0]:.2f} to {losses[-1]:.3f}, within {apart:.2%} of float32"


def _check_dtypes(model: torch.nn.Sequential, optimizer: torch.optim.Optimizer, level: OptLevel) -> None:
    """The weights, the batch norm and the masters have the dtypes of the level's table."""
    half = HALVES.get(level)
    weights = half if level in ("O2", "O3", "O5") and half is not None else torch.float32
    norm = half if level == "O3" and half is not None else torch.float32
    stepped = half if level == "O3" and half is not None else torch.float32
    for what, dtype, wanted in (
        ("weights are", model[0].get_parameter("weight").dtype, weights),
        ("batch norm is", model[1].get_parameter("weight").dtype, norm),
        ("the optimizer steps", next(amp.master_params(optimizer)).dtype, stepped),
    ):
        if dtype != wanted:
            raise Failed(f"{what} {dtype_name(dtype)}, not {dtype_name(wanted)}")


# -- resume and overflow -----------------------------------------------------------------------------------------------
def check_resume(device: torch.device, level: OptLevel) -> str:
    """A training that was saved and loaded goes on with the losses of one that was not interrupted."""
    data = batch(device)
    with fresh():
        model, optimizer = amp.initialize(*build(device, "Adam"), opt_level=level, verbosity=0)
        for factor in (1.0, math.inf if level in ("O1", "O2") else 1.0, 1.0):  # the scale is not the first one
            step(model, optimizer, data, factor)
        file = io.BytesIO()
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "amp": amp.state_dict()}, file)
        expected = [step(model, optimizer, data) for _ in range(3)]
        scales = amp.state_dict()
    file.seek(0)
    saved = torch.load(file, map_location=device, weights_only=True)
    with fresh():
        model, optimizer = build(device, "Adam")
        with torch.no_grad():
            for param in model.parameters():
                param.add_(1.0)  # what is not loaded shows
        model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        amp.load_state_dict(saved["amp"])
        losses = [step(model, optimizer, data) for _ in range(3)]
        if amp.state_dict() != scales:
            raise Failed(f"the loss scale is {amp.state_dict()}, not {scales}")
    apart = max(abs(a - b) / (abs(b) + 1e-6) for a, b in zip(losses, expected, strict=True))
    # Kernels of an accelerator need not repeat themselves bit by bit.
    if not apart <= (0.0 if device.type == "cpu" else 1e-2):
        raise Failed(f"the loss after loading is {apart:.2%} from that of the uninterrupted training")
    return "the same bits" if apart == 0 else f"within {apart:.1e}"


def check_overflow(device: torch.device, level: OptLevel) -> str:
    """An overflow skips its step, halves the scale, and the next step is made."""
    data = batch(device)
    with fresh():
        model, optimizer = amp.initialize(*build(device), opt_level=level, verbosity=0)
        step(model, optimizer, data)
        scale = amp.state_dict()["loss_scaler0"]["loss_scale"]
        before = [param.detach().clone() for param in amp.master_params(optimizer)]
        step(model, optimizer, data, math.inf)
        after = amp.state_dict()["loss_scaler0"]["loss_scale"]
        if not amp.step_was_skipped(optimizer):
            raise Failed("step_was_skipped says that the step was made")
        if any(not torch.equal(a, b) for a, b in zip(before, amp.master_params(optimizer), strict=True)):
            raise Failed("the step with an infinite gradient changed the weights")
        if after != scale / 2:
            raise Failed(f"the loss scale went from {scale:g} to {after:g}, not to {scale / 2:g}")
        step(model, optimizer, data)
        if all(torch.equal(a, b) for a, b in zip(before, amp.master_params(optimizer), strict=True)):
            raise Failed("the step after the skipped one changed nothing")
        if not all(bool(p.isfinite().all()) for p in amp.master_params(optimizer)):
            raise Failed("a weight is not finite")
    return f"scale {scale:g} to {after:g}"


#: What is checked on each device: a name, the check and its levels.
CHECKS: tuple[tuple[str, Callable[[torch.device, OptLevel], str], tuple[OptLevel, ...]], ...] = (
    ("ops", check_ops, ("O1", "O4")),
    ("training", check_training, ("O0", *HALVES)),
    ("resume", check_resume, ("O1", "O2")),
    ("overflow", check_overflow, ("O1", "O2")),
)

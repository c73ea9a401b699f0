"""What amp must do on a device: each check raises :class:`Failed` where it does not, or returns what was seen."""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch.nn import functional as F

from ampcompat import _torch, amp
from ampcompat._state import state
from ampcompat.amp.levels import LEVELS, Level
from ampcompat.tools.dtypes import dtype_name

STEPS = 12


class Failed(Exception):
    """amp does something else here than it should."""


class Skipped(Exception):
    """The check is not for this machine."""


def expect(holds: bool, problem: str) -> None:
    """Raise :class:`Failed` unless something holds."""
    if not holds:
        raise Failed(problem)


@contextmanager
def fresh() -> Iterator[None]:
    """Start from a torch that amp has not touched, and leave it so."""
    state.reset()
    try:
        yield
    finally:
        state.reset()


# -- operations --------------------------------------------------------------------------------------------------------
#: Operations of O1's lists: half from float32 arguments, float32 from half ones, the wider of two.
HALF_CALLS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "linear": lambda x: F.linear(x, x),
    "matmul": lambda x: torch.matmul(x, x),
    "@": lambda x: x @ x,
    "addmm": lambda x: torch.addmm(x, x, x),
    "bmm": lambda x: torch.bmm(x[None], x[None]),
    "conv2d": lambda x: F.conv2d(x[None, :, :, None], x[:, :, None, None]),
}
FLOAT_CALLS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "softmax": lambda x: F.softmax(x, -1),
    "layer_norm": lambda x: F.layer_norm(x, x.shape[-1:]),
    "gelu": F.gelu,
    "exp": torch.exp,
    "pow": lambda x: x**2,
    "sum": lambda x: x.sum(-1),
    "norm": lambda x: torch.norm(x),
    "mse_loss": lambda x: F.mse_loss(x, torch.zeros_like(x)),
    "cross_entropy": lambda x: F.cross_entropy(x, torch.arange(x.shape[0], dtype=torch.long, device=x.device)),
}
PROMOTE_CALLS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "+": lambda x, y: x + y,
    "atan2": torch.atan2,
    "cat": lambda x, y: torch.cat([x, y]),
}


def check_ops(device: torch.device, level: str) -> str:
    """Each operation returns the dtype of its list, and about the values that float32 has."""
    if device.type not in _torch.autocast_device_types():
        raise Skipped("this torch has no autocast for the device")
    exact = torch.linspace(-1.49, 2.0, 64, dtype=torch.float32, device="cpu").reshape(8, 8)
    wide, half = exact.to(device), exact.to(device, LEVELS[level].half_dtype)
    with fresh():
        model = torch.nn.Linear(2, 2).to(device, torch.float32)  # operations outside of it are cast while it is alive
        amp.initialize(model, opt_level=level, verbosity=0)
        for name, call in HALF_CALLS.items():
            _compare(name, call(wide), call(exact), half.dtype)
        for name, call in FLOAT_CALLS.items():
            _compare(name, call(half), call(exact), torch.float32)
        for name, promote in PROMOTE_CALLS.items():
            _compare(name, promote(half, wide), promote(exact, exact), torch.float32)
        try:
            F.binary_cross_entropy(half.sigmoid(), half.sigmoid())
        except NotImplementedError:
            return f"{len(HALF_CALLS) + len(FLOAT_CALLS) + len(PROMOTE_CALLS) + 1} operations"
    raise Failed("binary_cross_entropy took half arguments")


def _compare(name: str, got: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    expect(got.dtype == dtype, f"{name} gave {dtype_name(got.dtype)}, not {dtype_name(dtype)}")
    close = torch.allclose(got.float().to("cpu"), expected.float(), rtol=0.03, atol=0.1)
    expect(close, f"{name} gave other values than float32")


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
        ).to(device, torch.float32)
    if optimizer == "Adam":
        return model, torch.optim.Adam(model.parameters(), lr=0.02)
    return model, torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)


def batch(device: torch.device, size: int = 32) -> tuple[torch.Tensor, torch.Tensor]:
    """Images of four kinds that a few steps can tell apart."""
    generator = torch.Generator().manual_seed(1)
    kinds = torch.arange(size, dtype=torch.long, device="cpu") % 4
    images = 0.5 * torch.randn(size, 1, 8, 8, generator=generator, dtype=torch.float32, device="cpu")
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


def check_training(device: torch.device, level: str) -> str:
    """The losses of a small training follow those of plain float32, in the dtypes of the level."""
    expected = float32_losses(device)
    seen: list[torch.dtype] = []
    with fresh():
        model, optimizer = amp.initialize(*build(device), opt_level=level, verbosity=0)
        _check_weights(model, optimizer, level)
        hook = model[4].register_forward_hook(lambda module, inputs, output: seen.append(output.dtype))
        losses = [step(model, optimizer, batch(device)) for _ in range(STEPS)]
        hook.remove()
        finite = all(bool(weight.isfinite().all()) for weight in amp.master_params(optimizer))
    expect(finite, "a weight is not finite after the training")
    row = LEVELS[level]
    casts_here = device.type in _torch.autocast_device_types()
    casts = row.casts_model or (row.patch_torch_functions and casts_here)
    ran = row.half_dtype if casts else torch.float32
    expect(seen[-1] == ran, f"the linear layer ran in {dtype_name(seen[-1])}, not in {dtype_name(ran)}")
    apart = max(abs(loss - base) / (base + 0.1) for loss, base in zip(losses, expected, strict=True))
    allowed = {torch.float32: 1e-4, torch.float16: 0.05, torch.bfloat16: 0.15}[ran]
    expect(apart <= allowed, f"the loss is {apart:.1%} from float32's (at most {allowed:.2%})")  # NaN fails
    expect(losses[-1] < 0.5 * losses[0], f"the loss did not fall: {losses[0]:.3g} to {losses[-1]:.3g}")
    return f"loss {losses[0]:.2f} to {losses[-1]:.3f}, within {apart:.2%} of float32"


def _check_weights(model: torch.nn.Sequential, optimizer: torch.optim.Optimizer, level: str) -> None:
    """The weights, the batch norm and what the optimizer steps have the dtypes of the level."""
    row = LEVELS[level]
    weights = row.half_dtype if row.casts_model else torch.float32
    norms = torch.float32 if row.keep_batchnorm_fp32 else weights
    stepped = torch.float32 if row.master_weights else weights
    for what, tensor, dtype in (
        ("weights are", model[0].get_parameter("weight"), weights),
        ("batch norm is", model[1].get_parameter("weight"), norms),
        ("the optimizer steps", next(amp.master_params(optimizer)), stepped),
    ):
        expect(tensor.dtype == dtype, f"{what} {dtype_name(tensor.dtype)}, not {dtype_name(dtype)}")


# -- resume and overflow -----------------------------------------------------------------------------------------------
def check_resume(device: torch.device, level: str) -> str:
    """A training that was saved and loaded continues with the losses of one that was not interrupted."""
    data = batch(device)
    with fresh():
        model, optimizer = amp.initialize(*build(device, "Adam"), opt_level=level, verbosity=0)
        for factor in (1.0, math.inf, 1.0):  # the overflow makes the scale another one than the first
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
        expect(amp.state_dict() == scales, f"the loss scale is {amp.state_dict()}, not {scales}")
    apart = max(abs(a - b) / (abs(b) + 1e-6) for a, b in zip(losses, expected, strict=True))
    # Kernels of an accelerator need not repeat themselves bit by bit.
    allowed = 0.0 if device.type == "cpu" else 1e-2
    expect(apart <= allowed, f"the loss after loading is {apart:.2%} from that of the uninterrupted training")
    return "the same bits" if apart == 0 else f"within {apart:.1e}"


def check_overflow(device: torch.device, level: str) -> str:
    """An overflow skips its step, halves the scale, and the next step is made."""
    data = batch(device)
    with fresh():
        model, optimizer = amp.initialize(*build(device), opt_level=level, verbosity=0)
        step(model, optimizer, data)
        scale = amp.state_dict()["loss_scaler0"]["loss_scale"]
        before = [param.detach().clone() for param in amp.master_params(optimizer)]
        step(model, optimizer, data, math.inf)
        expect(amp.step_was_skipped(optimizer), "step_was_skipped says that the step was made")
        expect(_equal(before, optimizer), "the step with an infinite gradient changed the weights")
        after = amp.state_dict()["loss_scaler0"]["loss_scale"]
        expect(after == scale / 2, f"the loss scale went from {scale:g} to {after:g}, not to {scale / 2:g}")
        step(model, optimizer, data)
        expect(not _equal(before, optimizer), "the step after the skipped one changed nothing")
    return f"scale {scale:g} to {after:g}"


def _equal(weights: list[torch.Tensor], optimizer: torch.optim.Optimizer) -> bool:
    """Whether the optimizer's parameters are still ``weights``."""
    return all(torch.equal(a, b) for a, b in zip(weights, amp.master_params(optimizer), strict=True))


# -- all checks --------------------------------------------------------------------------------------------------------
Check = Callable[[torch.device, str], str]


def each_check() -> Iterator[tuple[str, Check, str]]:
    """What is checked on each device: a name, the check, and a level that it is for."""
    for name, check, fits in _CHECKS:
        for level, row in LEVELS.items():
            if fits(row):
                yield name, check, level


def _casts_functions(row: Level) -> bool:
    return row.patch_torch_functions


def _moves_its_scale(row: Level) -> bool:
    return row.loss_scale == "dynamic"


def _is_any(row: Level) -> bool:
    return True


_CHECKS: tuple[tuple[str, Check, Callable[[Level], bool]], ...] = (
    ("ops", check_ops, _casts_functions),
    ("training", check_training, _is_any),
    ("resume", check_resume, _moves_its_scale),
    ("overflow", check_overflow, _moves_its_scale),
)

"""What amp must do on a device at a level: one small training that overflows once, and is saved and resumed."""

from __future__ import annotations

import io
import math
import os
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch.nn import functional as F

from ampcompat import _torch, amp
from ampcompat._state import state
from ampcompat.amp.levels import LEVELS
from ampcompat.tools.dtypes import dtype_name

STEPS = 12


class Failed(Exception):
    """amp does something else here than it should."""


def expect(holds: bool, problem: str) -> None:
    """Raise :class:`Failed` unless something holds."""
    if not holds:
        raise Failed(problem)


@dataclass(frozen=True)
class Row:
    """The outcome of a check.

    Attributes:
        device: Such as ``"cuda:0"``.
        level: The opt_level.
        passed: Whether amp does what it must.
        remark: What was seen, or what is wrong.
        seconds: How long it took.
    """

    device: str
    level: str
    passed: bool
    remark: str
    seconds: float


def check_all(devices: Sequence[str]) -> Iterator[Row]:
    """Check each of ``devices`` at each level; yield a row as soon as it is known. torch is as it was afterwards."""
    with _undisturbed():
        for device in devices:
            for level in LEVELS:
                yield _row(device, level)


def _row(device: str, level: str) -> Row:
    begin = time.perf_counter()
    try:
        passed, remark = True, check(torch.device(device), level)
    except Failed as why:
        passed, remark = False, str(why)
    except Exception as error:  # whatever a broken installation raises is a result
        passed, remark = False, f"{type(error).__name__}: {error}".strip(": ").splitlines()[0]
    return Row(device, level, passed, remark, time.perf_counter() - begin)


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Without the settings of the environment, and without warnings: both change what the checks look at."""
    before = {name: os.environ.pop(name) for name in list(os.environ) if name.startswith("AMPCOMPAT_")}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        os.environ.update(before)


def check(device: torch.device, level: str) -> str:
    """Raise :class:`Failed` where amp does not do on ``device`` at ``level`` what it must; return what was seen."""
    expected = _float32_losses(device)
    with _fresh():
        model, optimizer = amp.initialize(*build(device), opt_level=level, verbosity=0)
        ran = _check_dtypes(model, optimizer, device, level)
        losses = [step(model, optimizer, device) for _ in range(STEPS)]
        finite = all(bool(weight.isfinite().all()) for weight in amp.master_params(optimizer))
        expect(finite, "a weight is not finite after the training")
        apart = _check_losses(losses, expected, ran)
        seen = f"loss {losses[0]:.2f} to {losses[-1]:.3f}, within {apart:.2%} of float32"
        if LEVELS[level].loss_scale == "dynamic":
            seen += f"; {_check_overflow(model, optimizer, device)}"
        saved = _save(model, optimizer)
        following = [step(model, optimizer, device) for _ in range(3)]
        scales = amp.state_dict()
    return f"{seen}; {_check_resume(saved, following, scales, device, level)}"


@contextmanager
def _fresh() -> Iterator[None]:
    """Start from a torch that amp has not touched, and leave it so."""
    state.reset()
    try:
        yield
    finally:
        state.reset()


# -- a small training --------------------------------------------------------------------------------------------------
def build(device: torch.device) -> tuple[torch.nn.Sequential, torch.optim.Optimizer]:
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
    return model, torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)


def batch(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Images of four kinds that a few steps can tell apart."""
    generator = torch.Generator().manual_seed(1)
    kinds = torch.arange(32, dtype=torch.long, device="cpu") % 4
    images = 0.5 * torch.randn(32, 1, 8, 8, generator=generator, dtype=torch.float32, device="cpu")
    for kind in range(4):
        images[kinds == kind, :, 2 * kind : 2 * kind + 2] += 1.0
    return images.to(device), kinds.to(device)


def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, device: torch.device, factor: float = 1.0) -> float:
    """One step under amp; the loss times ``factor`` is what is scaled."""
    images, kinds = batch(device)
    optimizer.zero_grad()
    loss = F.cross_entropy(model(images), kinds).float() * factor
    with amp.scale_loss(loss, optimizer) as scaled:
        scaled.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    return float(loss.detach())


def _float32_losses(device: torch.device) -> list[float]:
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


# -- what must hold ----------------------------------------------------------------------------------------------------
def _check_dtypes(
    model: torch.nn.Sequential, optimizer: torch.optim.Optimizer, device: torch.device, level: str
) -> torch.dtype:
    """Weights, the batch norm, what the optimizer steps and what a layer computes in are those of the level.

    Returns:
        The dtype of the linear layer's result.
    """
    row = LEVELS[level]
    weights = row.half_dtype if row.casts_model else torch.float32
    norms = torch.float32 if row.keep_batchnorm_fp32 else weights
    stepped = torch.float32 if row.master_weights else weights
    _expect_dtype("weights are", model[0].get_parameter("weight"), weights)
    _expect_dtype("batch norm is", model[1].get_parameter("weight"), norms)
    _expect_dtype("the optimizer steps", next(amp.master_params(optimizer)), stepped)
    casts_here = row.patch_torch_functions and device.type in _torch.autocast_device_types()
    computes = row.half_dtype if row.casts_model or casts_here else torch.float32
    seen: list[torch.Tensor] = []
    hook = model[4].register_forward_hook(lambda module, inputs, output: seen.append(output))
    model(batch(device)[0])
    hook.remove()
    _expect_dtype("the linear layer ran in", seen[-1], computes)
    return computes


def _expect_dtype(what: str, tensor: torch.Tensor, dtype: torch.dtype) -> None:
    expect(tensor.dtype == dtype, f"{what} {dtype_name(tensor.dtype)}, not {dtype_name(dtype)}")


def _check_losses(losses: list[float], expected: list[float], ran: torch.dtype) -> float:
    """The losses follow those of float32, as closely as the dtype ``ran`` allows; returns how closely."""
    apart = max(abs(loss - base) / (base + 0.1) for loss, base in zip(losses, expected, strict=True))
    allowed = {torch.float32: 1e-4, torch.float16: 0.05, torch.bfloat16: 0.15}[ran]
    expect(apart <= allowed, f"the loss is {apart:.1%} from float32's (at most {allowed:.2%})")  # NaN fails
    expect(losses[-1] < 0.5 * losses[0], f"the loss did not fall: {losses[0]:.3g} to {losses[-1]:.3g}")
    return apart


def _check_overflow(model: torch.nn.Module, optimizer: torch.optim.Optimizer, device: torch.device) -> str:
    """An overflow skips its step and halves the scale, and the next step is made."""
    scale = amp.state_dict()["loss_scaler0"]["loss_scale"]
    before = [param.detach().clone() for param in amp.master_params(optimizer)]
    step(model, optimizer, device, math.inf)
    expect(amp.step_was_skipped(optimizer), "step_was_skipped says that the step was made")
    expect(_equal(before, optimizer), "the step with an infinite gradient changed the weights")
    after = amp.state_dict()["loss_scaler0"]["loss_scale"]
    expect(after == scale / 2, f"the loss scale went from {scale:g} to {after:g}, not to {scale / 2:g}")
    step(model, optimizer, device)
    expect(not _equal(before, optimizer), "the step after the skipped one changed nothing")
    return f"scale {scale:g} to {after:g}"


def _equal(weights: list[torch.Tensor], optimizer: torch.optim.Optimizer) -> bool:
    """Whether the optimizer's parameters are still ``weights``."""
    return all(torch.equal(a, b) for a, b in zip(weights, amp.master_params(optimizer), strict=True))


def _save(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> io.BytesIO:
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "amp": amp.state_dict()}, file)
    file.seek(0)
    return file


def _check_resume(file: io.BytesIO, expected: list[float], scales: object, device: torch.device, level: str) -> str:
    """A training that was saved and loaded continues with the losses of one that was not interrupted."""
    saved = torch.load(file, map_location=device, weights_only=True)
    with _fresh():
        model, optimizer = build(device)
        with torch.no_grad():
            for param in model.parameters():
                param.add_(1.0)  # what is not loaded shows
        model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        amp.load_state_dict(saved["amp"])
        losses = [step(model, optimizer, device) for _ in range(3)]
        expect(amp.state_dict() == scales, f"the loss scale is {amp.state_dict()}, not {scales}")
    apart = max(abs(a - b) / (abs(b) + 1e-6) for a, b in zip(losses, expected, strict=True))
    # Kernels of an accelerator need not repeat themselves bit by bit.
    allowed = 0.0 if device.type == "cpu" else 1e-2
    expect(apart <= allowed, f"the loss after loading is {apart:.2%} from that of the uninterrupted training")
    return "resumed with the same bits" if apart == 0 else f"resumed within {apart:.1e}"

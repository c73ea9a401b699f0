"""Training steps: hand-written ones, and the same step with ampcompat at each level."""

import importlib
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from ampcompat import amp

OPTIMIZERS = {
    "SGD": lambda params: torch.optim.SGD(params, lr=1e-3, momentum=0.9),
    "SGD(foreach)": lambda params: torch.optim.SGD(params, lr=1e-3, momentum=0.9, foreach=True),
    "AdamW": lambda params: torch.optim.AdamW(params, lr=1e-3),
    "AdamW(foreach)": lambda params: torch.optim.AdamW(params, lr=1e-3, foreach=True),
    "AdamW(fused)": lambda params: torch.optim.AdamW(params, lr=1e-3, fused=True),
}


@dataclass(frozen=True)
class Case:
    """What is trained, and how."""

    model: str
    dtype: torch.dtype = torch.float16
    optimizer: str = "AdamW"
    accumulated: bool = False  # two micro-batches per step
    clipped: bool = False
    device: str = "cpu"
    compiled: bool = False  # the whole step

    @property
    def title(self):
        extras = ", accumulated" * self.accumulated + ", clipped" * self.clipped + ", compiled" * self.compiled
        return f"{self.model}, {str(self.dtype).removeprefix('torch.')}, {self.optimizer}{extras}"


def make_step(variant, case, model, x, y):
    """A function that makes one training step of ``model`` on ``x`` and ``y``.

    Variants: levels; "apex O2" and the like, the same of the original; "hand-written masters", a half model and its
    float32 copies, which accumulates gradients in half; "hand-written, float32 sums", the same but that it accumulates
    them in float32, as ampcompat and apex do; "native", torch's own casts; "native, same casts", the same loop with
    ampcompat's rules registered; "fp32"; "fp32 again", the same in another process: how far the two differ is what a
    table of such ratios cannot resolve.
    """
    if variant.startswith("apex "):
        step = _with_amp(importlib.import_module("apex.amp"), variant.removeprefix("apex "), case, model, x, y)
    elif variant.startswith("O"):
        step = _with_amp(amp, variant, case, model, x, y)
    elif variant.startswith("hand-written"):
        step = _with_masters(case, model, x, y, float32_sums="float32 sums" in variant)
    else:
        step = _native(variant, case, model, x, y)
    return torch.compile(step) if case.compiled else step


def _clip(case, params):
    if case.clipped:
        torch.nn.utils.clip_grad_norm_(params, 1.0)


def _repeat(case, backward):
    # No loop: where the compiler cannot go on in one, it leaves all of it eager, the forward of torch's modules too.
    if case.accumulated:
        backward()
    backward()


def _native(variant, case, model, x, y):
    optimizer = OPTIMIZERS[case.optimizer](model.parameters())
    casts = not variant.startswith("fp32")
    if variant == "native, same casts":
        from ampcompat.amp.casts import ambience

        ambience.install_casting([case.device])
    scaler = torch.amp.GradScaler(case.device, enabled=casts and case.dtype == torch.float16)

    def backward():
        with torch.autocast(case.device, case.dtype, enabled=casts):
            loss = F.cross_entropy(model(x), y) / (1 + case.accumulated)
        scaler.scale(loss).backward()

    def step():
        _repeat(case, backward)
        if case.clipped:
            scaler.unscale_(optimizer)
            _clip(case, model.parameters())
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    return step


def _with_masters(case, model, x, y, float32_sums):
    if case.device == "cpu":
        from ampcompat.amp.casts import cpu_convolution

        cpu_convolution.install()  # torch's own half convolutions take up to ten times as long: loops are compared here
    model.to(case.dtype)
    for module in model.modules():
        if isinstance(module, torch.nn.modules.batchnorm._BatchNorm):
            module.float()
    halves = [p for p in model.parameters() if p.dtype == case.dtype]
    masters = [torch.nn.Parameter(p.detach().float()) for p in halves]
    stepped = masters + [p for p in model.parameters() if p.dtype != case.dtype]
    optimizer = OPTIMIZERS[case.optimizer](stepped)
    scaler = torch.amp.GradScaler(case.device, enabled=case.dtype == torch.float16)

    def backward():
        loss = F.cross_entropy(model(x.to(case.dtype)).float(), y) / (1 + case.accumulated)
        scaler.scale(loss).backward()
        if float32_sums:
            with torch.no_grad():
                for master, half in zip(masters, halves, strict=True):
                    wide, half.grad = half.grad.float(), None
                    master.grad = wide if master.grad is None else master.grad.add_(wide)

    def step():
        _repeat(case, backward)
        for master, half in zip(masters, halves, strict=True) if not float32_sums else ():
            master.grad, half.grad = half.grad.float(), None
        if case.clipped:
            scaler.unscale_(optimizer)
            _clip(case, stepped)
        scaler.step(optimizer)
        scaler.update()
        with torch.no_grad():
            for master, half in zip(masters, halves, strict=True):
                half.copy_(master)
        optimizer.zero_grad()

    return step


def _with_amp(amp, level, case, model, x, y):
    """``amp``: ampcompat's, or the original's, which knows no O4 and O5."""
    optimizer = OPTIMIZERS[case.optimizer](model.parameters())
    options = {}
    if case.dtype == torch.bfloat16:
        level = {"O1": "O4", "O2": "O5"}.get(level, level)
        if level == "O3":
            options["cast_model_type"] = torch.bfloat16
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0, **options)

    def backward():
        loss = F.cross_entropy(model(x), y) / (1 + case.accumulated)
        with amp.scale_loss(loss, optimizer) as scaled:
            scaled.backward()

    def step():
        _repeat(case, backward)
        if case.clipped:
            _clip(case, amp.master_params(optimizer))
        optimizer.step()
        optimizer.zero_grad()

    return step

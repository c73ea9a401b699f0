"""The functions of ``apex.amp`` on plain ``torch.amp``.

``ampcompat migrate --to native`` put this file here. It needs torch 2.4 or later and nothing else, and it is yours.

What differs from apex: weights stay float32 at every level. At O1 to O3 the forward of an initialized model runs under
``torch.autocast`` in float16 (O4, O5: bfloat16) and returns float32; O2 and O3 are O1 with another loss scale. Code
outside of ``forward`` runs in float32.

What happens in one step::

    model, optimizer = amp.initialize(model, optimizer)    # swaps the model's class, wraps optimizer.step
    loss = criterion(model(x), y)                          # autocast
    with amp.scale_loss(loss, optimizer) as scaled_loss:   # older gradients are set aside; loss * scale
        scaled_loss.backward()
                                                           # new gradients are divided by the scale and checked, the
                                                           # scale moves, older gradients are added
    optimizer.step()                                       # skipped if gradients of a block before it overflowed
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import types
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

__all__ = [
    "disable_casts",
    "float_function",
    "half_function",
    "initialize",
    "load_state_dict",
    "master_params",
    "promote_function",
    "register_float_function",
    "register_half_function",
    "register_promote_function",
    "scale_loss",
    "state_dict",
]

#: The dtype of a model's forward, and the loss scale, of each opt_level.
LEVELS: dict[str, tuple[torch.dtype | None, str | float]] = {
    "O0": (None, 1.0),
    "O1": (torch.float16, "dynamic"),
    "O2": (torch.float16, "dynamic"),
    "O3": (torch.float16, 1.0),
    "O4": (torch.bfloat16, 1.0),
    "O5": (torch.bfloat16, 1.0),
}
#: Before torch 2.7, weights that were cast under ``no_grad`` got no gradient from the rest of the same forward.
CACHE_ENABLED = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 7)

#: ``loss_scalers`` and ``opt_properties`` are those of the last call of ``initialize``.
_amp_state = types.SimpleNamespace(loss_scalers=[], verbosity=1)
_amp_state.optimizers = weakref.WeakSet()
_amp_state.not_run = weakref.WeakSet()


class LossScaler:
    """A loss scale. A dynamic one is halved by an overflow, and doubled after 2000 backward passes without one."""

    def __init__(
        self, loss_id: int, loss_scale: str | float, lowest: float | None = None, highest: float = 2.0**24
    ) -> None:
        self.loss_id = loss_id
        self.dynamic = loss_scale == "dynamic"
        self._loss_scale = min(2.0**16, highest) if self.dynamic else float(loss_scale)
        self._min_loss_scale = 2.0**-24 if lowest is None else lowest
        self._max_loss_scale = highest
        self._scale_seq_len = 2000
        self._unskipped = 0
        self._has_overflow = False

    def loss_scale(self) -> float:
        """Return the scale."""
        return self._loss_scale

    @property
    def is_off(self) -> bool:
        """Whether there is nothing to scale and nothing to check."""
        return not self.dynamic and self._loss_scale == 1.0

    def unscale(self, params: Iterable[torch.nn.Parameter], scale: float) -> None:
        """Divide gradients by ``scale`` and move the scale. With a dynamic scale this waits for the device, once."""
        gradients: Any = _Gradients(params)
        self._has_overflow = False
        if gradients.device is not None:
            scaler = torch.amp.GradScaler(gradients.device.type, init_scale=scale)
            scaler.scale(torch.zeros((), device=gradients.device))  # puts its scale on the device
            if self.dynamic:
                scaler.step(gradients)  # unscales, too
                self._has_overflow = not gradients.are_finite
            else:
                scaler.unscale_(gradients)
        self._adjust()

    def _adjust(self) -> None:
        if self._has_overflow:
            self._loss_scale = max(self._loss_scale / 2, self._min_loss_scale)
            self._unskipped = 0
            return
        self._unskipped += 1
        if self.dynamic and self._unskipped >= self._scale_seq_len:
            self._loss_scale = min(self._loss_scale * 2, self._max_loss_scale)
            self._unskipped = 0

    def state_dict(self) -> dict[str, float]:
        """Return the state as apex saved it."""
        return {"loss_scale": self._loss_scale, "unskipped": self._unskipped}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a saved state."""
        self._loss_scale = float(state["loss_scale"])
        self._unskipped = int(state["unskipped"])


class _Gradients:
    """The gradients of parameters in the place of an optimizer: GradScaler calls ``step`` if they are all finite."""

    def __init__(self, params: Iterable[torch.nn.Parameter]) -> None:
        having = [param for param in params if param.grad is not None]
        self.param_groups = [{"params": having}]
        self.device = having[0].device if having else None
        self.are_finite = False

    def step(self) -> None:
        self.are_finite = True


@dataclasses.dataclass
class _Pending:
    """Gradients that blocks with ``delay_unscale=True`` have left multiplied by ``scale``."""

    scaler: LossScaler
    scale: float
    optimizers: list[torch.optim.Optimizer]


@dataclasses.dataclass
class _Stash:
    """The state of one optimizer.

    Attributes:
        loss_scalers: Those of its call of ``initialize``.
        saved: Gradients from before the ``scale_loss`` block that is open, by parameter; None outside of blocks.
        pending: Its gradients that are still scaled.
        overflowed: The scaler of a block whose gradients overflowed; the next step is skipped.
        suspect: Whether gradients of an overflow may still be there; a step looks for itself.
    """

    loss_scalers: list[LossScaler]
    saved: dict[torch.nn.Parameter, torch.Tensor | None] | None = None
    pending: _Pending | None = None
    overflowed: LossScaler | None = None
    suspect: bool = False


def initialize(
    models: Any,
    optimizers: Any = None,
    enabled: bool = True,
    opt_level: str = "O1",
    cast_model_type: Any = None,
    patch_torch_functions: bool | None = None,
    keep_batchnorm_fp32: bool | str | None = None,
    master_weights: bool | None = None,
    loss_scale: float | str | None = None,
    cast_model_outputs: torch.dtype | None = None,
    num_losses: int = 1,
    verbosity: int = 1,
    min_loss_scale: float | None = None,
    max_loss_scale: float = 2.0**24,
) -> Any:
    """Have models run under autocast, and optimizers skip their step after an overflow; return the same objects.

    ``keep_batchnorm_fp32`` and ``master_weights`` have no effect: autocast keeps batch norms and weights in float32.
    """
    model_list = _as_list(models)
    optimizer_list = [] if optimizers is None else _as_list(optimizers)
    _check(model_list, optimizer_list, enabled, opt_level)
    dtype, default_scale = LEVELS[opt_level]
    if cast_model_type is not None:
        dtype = cast_model_type if cast_model_type in (torch.float16, torch.bfloat16) else None
    elif opt_level in ("O1", "O4") and patch_torch_functions is False:
        dtype = None
    scale = default_scale if loss_scale is None else loss_scale
    count = num_losses if enabled else 0
    scalers = [LossScaler(i, scale, min_loss_scale, max_loss_scale) for i in range(count)]
    _amp_state.loss_scalers = scalers
    _amp_state.verbosity = verbosity
    _amp_state.opt_properties = types.SimpleNamespace(
        enabled=bool(enabled), opt_level=opt_level, cast_model_type=dtype, master_weights=False, loss_scale=scale
    )
    devices = [param.device.type for model in model_list for param in model.parameters()]
    _amp_state.device_type = devices[0] if devices else "cuda" if torch.cuda.is_available() else "cpu"
    for model in model_list:
        _run_in_float32(model)
        if enabled and dtype is not None:
            _run_under_autocast(model, _amp_state.device_type, dtype, cast_model_outputs or torch.float32)
    for optimizer in optimizer_list:
        if enabled:
            _manage(optimizer, scalers)
        elif hasattr(optimizer, "_amp_stash"):
            del optimizer._amp_stash
            _amp_state.optimizers.discard(optimizer)
    return models if optimizers is None else (models, optimizers)


def _check(models: list[Any], optimizers: list[Any], enabled: object, opt_level: str) -> None:
    if opt_level not in LEVELS:
        raise RuntimeError(f"opt_level={opt_level!r} is not one of {', '.join(LEVELS)}; they begin with the letter O")
    if isinstance(enabled, str) and enabled != opt_level:
        raise TypeError(f"the third argument, enabled, is {enabled!r}; pass opt_level={enabled!r}")
    for model in models:
        if not isinstance(model, torch.nn.Module):
            raise TypeError(f"models has a {type(model).__name__}; pass a torch.nn.Module or a list of them")
        if isinstance(model, torch.jit.ScriptModule):
            raise TypeError("models has a ScriptModule, whose forward cannot be replaced; pass what it was made from")
        if any(param.dtype in (torch.float16, torch.bfloat16) for param in model.parameters()):
            raise RuntimeError("the model has half weights; drop .half(), autocast casts float32 weights as needed")
    for optimizer in optimizers:
        if not hasattr(optimizer, "param_groups"):
            raise TypeError(f"optimizers has a {type(optimizer).__name__}; pass an optimizer or a list of them")


def _as_list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, (list, tuple)) else [value]


# -- models ------------------------------------------------------------------------------------------------------------
def _run_under_autocast(
    model: torch.nn.Module, device_type: str, dtype: torch.dtype, output_dtype: torch.dtype
) -> None:
    """Give the model a subclass of its own class, whose forward runs under autocast.

    Copies and pickles of the model have the class that it had before.
    """
    model = getattr(model, "_orig_mod", model)  # of torch.compile
    plain: Any = type(model)
    has_run = False

    class Autocast(plain):  # type: ignore[misc]
        plain_class = plain

        @functools.wraps(plain.forward)
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            nonlocal has_run
            has_run = True
            with torch.autocast(device_type, dtype, cache_enabled=CACHE_ENABLED):
                outputs = plain.forward(self, *args, **kwargs)
            function = _cast if isinstance(outputs, torch.Tensor) else _as_output
            return _map(outputs, lambda tensor: function(tensor, output_dtype))

        def __reduce_ex__(self, protocol: Any) -> Any:
            function, args, *state = plain.__reduce_ex__(self, protocol)
            args = [plain if arg is type(self) else arg for arg in args]
            # pickle refuses this function with another class than the object's.
            is_default = getattr(function, "__name__", "") == "__newobj__"
            return (plain.__new__ if is_default else function, tuple(args), *state)

        def zero_grad(self, set_to_none: bool = True) -> None:
            plain.zero_grad(self, set_to_none)
            _note_cleared(self.parameters())

        @staticmethod
        def forward_has_run() -> bool:
            return has_run

    Autocast.__name__ = plain.__name__
    Autocast.__qualname__ = plain.__qualname__
    Autocast.__module__ = plain.__module__
    Autocast.__doc__ = plain.__doc__
    model.__class__ = Autocast
    _amp_state.not_run.add(model)


def _run_in_float32(model: torch.nn.Module) -> None:
    """Undo what an earlier call of ``initialize`` did to the model."""
    model = getattr(model, "_orig_mod", model)
    model.__class__ = getattr(type(model), "plain_class", type(model))
    _amp_state.not_run.discard(model)


def _warn_of_float32() -> None:
    """Warn of models that were trained while their forward has never run."""
    for model in list(_amp_state.not_run):
        if type(model).forward_has_run():
            _amp_state.not_run.discard(model)
        elif any(param.grad is not None for param in model.parameters()):
            _amp_state.not_run.discard(model)
            dtype = _amp_state.opt_properties.cast_model_type
            warnings.warn(
                f"{type(model).__name__}.forward never ran, and only forward runs in half precision. If the loss comes "
                f"from another method or a submodule, call that under torch.autocast({_amp_state.device_type!r}, "
                f"{dtype}) and use .float() of what it returns.",
                stacklevel=4,
            )


def _as_output(tensor: Any, dtype: torch.dtype) -> Any:
    """Return one of several outputs of a model in ``dtype``; hooks on it see the whole gradient.

    Other outputs may have been computed from the tensor that is cast here: the gradient of the copy is only a part.
    """
    output: Any = _cast(tensor, dtype)
    if output is tensor or not output.requires_grad or torch.compiler.is_compiling():
        return output
    held = weakref.ref(output)

    def retain_grad() -> None:
        tensor.register_hook(lambda grad: setattr(held(), "grad", grad.to(dtype)) if held() is not None else None)

    def register_hook(hook: Callable[[torch.Tensor], torch.Tensor | None]) -> Any:
        def on_tensor(grad: torch.Tensor) -> torch.Tensor | None:
            result = hook(grad.to(dtype))
            return None if result is None else result.to(tensor.dtype)

        return tensor.register_hook(on_tensor)

    output.retain_grad = retain_grad
    output.register_hook = register_hook
    return output


def _cast(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return tensor.to(dtype) if tensor.is_floating_point() and tensor.dtype != torch.float64 else tensor


def _map(value: Any, function: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Return ``value``, or a copy of it, with a function applied to the tensors in it."""
    if isinstance(value, torch.Tensor):
        return function(value)
    if type(value) is dict:
        return {key: _map(item, function) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        items = [_map(item, function) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if isinstance(value, dict):
        value = copy.copy(value)
        for key, item in value.items():
            value[key] = _map(item, function)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = copy.copy(value)
        for field in dataclasses.fields(value):
            object.__setattr__(value, field.name, _map(getattr(value, field.name), function))
    return value


# -- losses and optimizers ---------------------------------------------------------------------------------------------
@contextlib.contextmanager
def scale_loss(
    loss: torch.Tensor,
    optimizers: Any,
    loss_id: int = 0,
    model: Any = None,
    delay_unscale: bool = False,
    delay_overflow_check: bool = False,
) -> Iterator[torch.Tensor]:
    """Yield the scaled loss; at the end, unscale what ``backward`` left, and add it to the gradients from before.

    Args:
        loss: What is to be minimized.
        optimizers: The optimizer, or a list of those, whose parameters get gradients.
        loss_id: Which of the ``num_losses`` scales.
        model: Not used.
        delay_unscale: Leave the gradients scaled for the next block: for all but the last of several backward passes
            before a step. Under ``DistributedDataParallel.no_sync()`` it is needed, elsewhere it saves time.
        delay_overflow_check: Not used.
    """
    optimizer_list = _as_list(optimizers)
    if not any(hasattr(optimizer, "_amp_stash") for optimizer in optimizer_list):
        if not hasattr(_amp_state, "opt_properties"):
            raise RuntimeError("scale_loss before initialize; call amp.initialize(model, optimizer) first")
        if not _amp_state.opt_properties.enabled:
            yield loss
            return
    for optimizer in optimizer_list:
        _check_optimizer(optimizer)
    stashes = [_stash_of(optimizer) for optimizer in optimizer_list]
    scalers = stashes[0].loss_scalers if stashes else _amp_state.loss_scalers
    scaler = scalers[loss_id]
    if scaler.is_off:
        yield loss.float()
        _warn_of_float32()
        return
    params = _params_of(optimizer_list)
    _refuse_overlap(optimizer_list)
    scale = scaler.loss_scale()
    pending = _at_scale(optimizer_list, scale)
    saved = {param: param.grad for param in params if param not in pending}
    for param in saved:
        param.grad = None
    for stash in stashes:
        stash.saved = saved
        stash.pending = None
        if not pending and all(grad is None for grad in saved.values()):  # what overflowed was cleared
            stash.overflowed = None
            stash.suspect = False
    try:
        yield loss.float() * scale
    except BaseException:
        for param in params:
            param.grad = saved.get(param)
        raise
    finally:
        for stash in stashes:
            stash.saved = None
    if delay_unscale:
        _add(saved, scale)
        left = _Pending(scaler, scale, optimizer_list)
        for stash in stashes:
            stash.pending = left
    else:
        _unscale(scaler, scale, optimizer_list)
        _add(saved, 1.0)
    _warn_of_float32()


def _check_optimizer(optimizer: object) -> None:
    if not hasattr(optimizer, "param_groups"):
        raise TypeError(f"scale_loss got a {type(optimizer).__name__}; pass an optimizer or a list of them")
    for name in ("_prepare_amp_backward", "_post_amp_backward"):
        if hasattr(optimizer, name):
            raise RuntimeError(f"the optimizer has its own {name}, which nothing calls here; do that after the block")


def _at_scale(optimizers: list[torch.optim.Optimizer], scale: float) -> set[torch.nn.Parameter]:
    """Bring pending gradients from the scale that they have to ``scale``; return their parameters."""
    factors: dict[torch.nn.Parameter, float] = {}
    for optimizer in optimizers:
        pending = _stash_of(optimizer).pending
        if pending is not None:
            factors.update(dict.fromkeys(_params_of([optimizer]), scale / pending.scale))
    for param, factor in factors.items():
        if factor != 1.0 and param.grad is not None:
            param.grad = param.grad * factor
    return set(factors)


@torch.no_grad()
def _add(saved: dict[torch.nn.Parameter, torch.Tensor | None], factor: float) -> None:
    """Add the gradients from before a block to those of the block."""
    for param, grad in saved.items():
        if grad is None:
            continue
        if param.grad is None:
            param.grad = grad if factor == 1.0 else grad * factor
        else:
            param.grad.add_(grad, alpha=factor)


def _unscale(scaler: LossScaler, scale: float, optimizers: list[torch.optim.Optimizer]) -> None:
    """Unscale the gradients of optimizers, and note an overflow with all of them."""
    params = _params_of(optimizers)
    scaler.unscale(params, scale)
    for optimizer in optimizers:
        _stash_of(optimizer).pending = None
    if not scaler._has_overflow:
        return
    for optimizer in optimizers:
        _stash_of(optimizer).overflowed = scaler
    for other in _amp_state.optimizers:  # which may hold some of the parameters
        _stash_of(other).suspect = True


def _refuse_overlap(optimizers: list[Any]) -> None:
    """Refuse a block or a step of parameters whose gradients are scaled: by an open block, or pending with others."""
    for other in _amp_state.optimizers:
        stash = _stash_of(other)
        is_scaled = stash.saved is not None or (stash.pending is not None and other not in optimizers)
        if is_scaled and not _params_of(optimizers).keys().isdisjoint(_params_of([other])):
            raise RuntimeError(
                "gradients of these parameters are still scaled; end the scale_loss block that is open, or leave out "
                "delay_unscale in the last block of the other optimizer"
            )


def _params_of(optimizers: Iterable[torch.optim.Optimizer]) -> dict[torch.nn.Parameter, None]:
    """Return the parameters of optimizers, in order, each once."""
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    return dict.fromkeys(param for group in groups for param in group["params"])


def _stash_of(optimizer: Any) -> _Stash:
    """Return the state of an optimizer; one that ``initialize`` was not given joins its last call."""
    if not hasattr(optimizer, "_amp_stash"):
        _manage(optimizer, _amp_state.loss_scalers)
    stash: _Stash = optimizer._amp_stash
    return stash


def _manage(optimizer: Any, loss_scalers: list[LossScaler]) -> None:
    """Have the optimizer skip its step after an overflow."""
    optimizer._amp_stash = _Stash(loss_scalers)
    _amp_state.optimizers.add(optimizer)
    if not hasattr(optimizer.step, "asks_amp"):
        _wrap(optimizer, "step", _step)
        _wrap(optimizer, "zero_grad", _zero_grad)


def _wrap(optimizer: Any, name: str, function: Callable[..., Any]) -> None:
    """Have a method of the optimizer call ``function``. It stays a bound method: LR schedulers ask for that."""
    method = getattr(optimizer, name)

    @functools.wraps(getattr(method, "__func__", method))
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        return function(self, method, *args, **kwargs) if hasattr(self, "_amp_stash") else method(*args, **kwargs)

    wrapper.asks_amp = True  # type: ignore[attr-defined]
    setattr(optimizer, name, types.MethodType(wrapper, optimizer))


def _zero_grad(optimizer: Any, zero_grad: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    """Clear the gradients, those that an open block has set aside included."""
    zero_grad(*args, **kwargs)
    _note_cleared(_params_of([optimizer]))


def _note_cleared(params: Iterable[torch.nn.Parameter]) -> None:
    """Forget the gradients of ``params`` that an open block has set aside, and what is known of optimizers of these."""
    cleared = dict.fromkeys(params)
    for optimizer in _amp_state.optimizers:
        stash = _stash_of(optimizer)
        saved = stash.saved or {}
        for param in cleared:
            saved.pop(param, None)
        if _params_of([optimizer]).keys() <= cleared.keys():
            stash.pending = None
            stash.overflowed = None


def _unscale_pending(optimizer: Any) -> None:
    """Unscale what blocks with ``delay_unscale=True`` have left, to this optimizer and others."""
    pending = _stash_of(optimizer).pending
    if pending is not None:
        together = [other for other in pending.optimizers if _stash_of(other).pending is pending]
        _refuse_overlap(together)
        _unscale(pending.scaler, pending.scale, together)


def _step(optimizer: Any, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Step unless gradients overflowed."""
    stash = _stash_of(optimizer)
    if stash.pending is None:
        _refuse_overlap([optimizer])
    _unscale_pending(optimizer)
    closure, *rest = args or (kwargs.pop("closure", None),)
    if stash.overflowed is not None or (stash.suspect and closure is None and not _are_finite(optimizer)):
        return _skip(optimizer)
    stash.suspect = False
    if not callable(closure):
        return step(*args, **kwargs)
    try:
        return step(_checked(closure, stash), *rest, **kwargs)
    except _Overflow as overflow:
        _skip(optimizer)
        return overflow.args[0]


def _skip(optimizer: Any) -> None:
    """Leave out a step, and say so on the first rank."""
    stash = _stash_of(optimizer)
    scaler = stash.overflowed
    stash.overflowed = None
    stash.suspect = True
    optimizer._opt_called = True  # what LR schedulers look at, to warn of steps that were forgotten
    distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    if _amp_state.verbosity == 0 or (distributed and torch.distributed.get_rank() != 0):
        return
    if scaler is None:
        print("Gradient overflow.  Skipping step, since inf or NaN gradients were not cleared")
        return
    print(
        f"Gradient overflow.  Skipping step, loss scaler {scaler.loss_id} reducing loss scale to {scaler.loss_scale()}"
    )


def _are_finite(optimizer: Any) -> bool:
    grads = [param.grad for param in _params_of([optimizer]) if param.grad is not None]
    return all(bool(grad.isfinite().all()) for grad in grads)


class _Overflow(Exception):
    """The gradients of the first evaluation of a closure overflowed; holds its loss."""


def _checked(closure: Callable[[], Any], stash: _Stash) -> Callable[[], Any]:
    """Return the closure of a step, which raises where its gradients overflow."""
    evaluations = 0

    def checked() -> Any:
        nonlocal evaluations
        evaluations += 1
        loss = closure()
        if stash.overflowed is None:
            return loss
        if evaluations == 1:  # nothing has moved yet
            raise _Overflow(loss)
        raise RuntimeError("gradients overflowed in the midst of a line search; pass a static loss_scale to initialize")

    return checked


def master_params(optimizer: Any) -> Iterator[torch.nn.Parameter]:
    """Yield the parameters of an optimizer: its weights are float32, and their own masters; gradients are unscaled."""
    if hasattr(optimizer, "_amp_stash") and _stash_of(optimizer).saved is None:
        _unscale_pending(optimizer)
    for group in optimizer.param_groups:
        yield from group["params"]


# -- checkpoints -------------------------------------------------------------------------------------------------------
def state_dict() -> dict[str, dict[str, float]]:
    """Return the loss scales, as apex saved them."""
    if not hasattr(_amp_state, "opt_properties"):
        raise RuntimeError("state_dict before initialize; call amp.initialize of this module first")
    return {f"loss_scaler{i}": scaler.state_dict() for i, scaler in enumerate(_amp_state.loss_scalers)}


def load_state_dict(state: dict[str, dict[str, Any]]) -> None:
    """Go on with saved loss scales, of apex or of this module."""
    if not hasattr(_amp_state, "opt_properties"):
        raise RuntimeError("load_state_dict before initialize; call amp.initialize of this module first")
    unknown = [key for key in state if not key.startswith("loss_scaler")]
    if unknown:
        raise RuntimeError(f"the state has the unknown keys {unknown}; pass what amp.state_dict() returned")
    scalers = _amp_state.loss_scalers
    if scalers and len(state) != len(scalers):
        warnings.warn(f"the state has {len(state)} loss scales, initialize made {len(scalers)}", stacklevel=2)
    for scaler, saved in zip(scalers, state.values()):
        scaler.load_state_dict(saved)


# -- functions ---------------------------------------------------------------------------------------------------------
def disable_casts() -> torch.autocast:
    """Return a context in which nothing is cast."""
    return torch.autocast(_device_type(), enabled=False)


def half_function(function: Any) -> Any:
    """Cast the floating arguments of a function to autocast's dtype, where it is called under autocast."""
    return _with_cast_arguments(function, lambda dtypes: torch.get_autocast_dtype(_device_type()))


def float_function(function: Any) -> Any:
    """Cast the floating arguments of a function to float32, where it is called under autocast."""
    return _with_cast_arguments(function, lambda dtypes: torch.float32)


def promote_function(function: Any) -> Any:
    """Cast the floating arguments of a function to the widest of their dtypes, where it is called under autocast."""
    return _with_cast_arguments(function, lambda dtypes: functools.reduce(torch.promote_types, dtypes))


def register_half_function(module: Any, name: str) -> None:
    """Replace ``module.name`` by :func:`half_function` of it."""
    _register(module, name, half_function)


def register_float_function(module: Any, name: str) -> None:
    """Replace ``module.name`` by :func:`float_function` of it."""
    _register(module, name, float_function)


def register_promote_function(module: Any, name: str) -> None:
    """Replace ``module.name`` by :func:`promote_function` of it."""
    _register(module, name, promote_function)


def init(*args: Any, **kwargs: Any) -> Any:
    """Refuse: the handle that apex had before 2019."""
    raise NotImplementedError(
        "amp.init() and the handle that it returned are not in this file; call amp.initialize(model, optimizer) once, "
        "and write amp.scale_loss(loss, optimizer) for handle.scale_loss(loss, optimizer)"
    )


def _device_type() -> str:
    return getattr(_amp_state, "device_type", "cpu")


def _register(module: Any, name: str, cast: Callable[[Any], Any]) -> None:
    function = getattr(module, name)
    if isinstance(function, type):  # a class stays a class
        function.forward = cast(function.forward)  # type: ignore[attr-defined]
    else:
        setattr(module, name, cast(function))


def _with_cast_arguments(function: Any, choose: Callable[[list[torch.dtype]], torch.dtype]) -> Any:
    is_torchs = (getattr(function, "__module__", None) or "torch").partition(".")[0] == "torch"

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        dtypes: list[torch.dtype] = []

        def note(tensor: torch.Tensor) -> torch.Tensor:
            dtypes.extend([tensor.dtype] if tensor.is_floating_point() else [])
            return tensor

        _map((args, kwargs), note)
        if not dtypes or not torch.is_autocast_enabled(_device_type()):
            return function(*args, **kwargs)
        dtype = choose(dtypes)
        args, kwargs = _map((args, kwargs), lambda tensor: _cast(tensor, dtype))
        # Autocast would cast the arguments of torch's own functions again.
        with disable_casts() if is_torchs else contextlib.nullcontext():
            return function(*args, **kwargs)

    return wrapper

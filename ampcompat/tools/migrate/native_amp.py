"""The functions of ``apex.amp`` that training scripts call, on plain ``torch.autocast``.

``ampcompat migrate --to native`` put this file here. It needs torch 2.4 or later and nothing else, and it is yours.
Written by ampcompat.

One step of training, with a loss scale of 1024, that gives a weight a gradient of 3::

    model, optimizer = amp.initialize(model, optimizer)    # wraps model.forward and optimizer.step
    loss = criterion(model(x), y)                          # the model runs under autocast and returns float32
    with amp.scale_loss(loss, optimizer) as scaled_loss:   # scaled_loss is loss * 1024; older gradients are set aside
        scaled_loss.backward()                             # the gradient is 3 * 1024 = 3072
                                                           # at the end: divided by 1024, it is 3, and older ones are
                                                           # added; an overflow halves the scale, 2000 blocks without
                                                           # one double it
    optimizer.step()                                       # left out after an overflow
    optimizer.zero_grad()                                  # gradients that overflowed stay until they are cleared

What differs from apex:

- Weights are float32 at every level. O2 and O3 are O1 with another loss scale, O5 is O4.
- Casts hold in the model's forward. Code outside of it (a loss function, another method of the model) runs in float32;
  the first time that a part of the model does so, a warning has the line.
- Operations follow autocast's lists. On a CPU these have pow, sum and norms in half, which may become inf there; apex,
  and autocast on CUDA, compute them in float32. Many CPUs have no LSTM in half ("could not create a primitive").
- The backward of an ``autograd.Function`` of yours is not under autocast: decorate the class's two methods with
  ``torch.amp.custom_fwd`` and ``torch.amp.custom_bwd``.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import gc
import sys
import types
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch

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

#: What the last call of ``initialize`` made, and what is alive of all calls.
_amp_state = types.SimpleNamespace(
    loss_scalers=[],
    opt_properties=None,
    verbosity=1,
    device_type="cpu",
    casts=True,  # whether models run under autocast
    running_forwards=0,  # how many forwards of models are running
    warned=False,  # whether the warning of code outside of autocast was given
    optimizers=weakref.WeakKeyDictionary(),  # in the order of their calls
    wrappers=weakref.WeakSet(),  # each DistributedDataParallel that has called a model
)


class LossScaler:
    """A loss scale. A dynamic one is halved by an overflow, and doubled after 2000 blocks without one."""

    def __init__(self, loss_id: int, loss_scale: str | float, minimum: float | None, maximum: float) -> None:
        self.loss_id = loss_id
        self.dynamic = loss_scale == "dynamic"
        self._loss_scale = min(2.0**16, maximum) if self.dynamic else float(loss_scale)
        self._min_loss_scale = 2.0**-24 if minimum is None else minimum
        self._max_loss_scale = maximum
        self._scale_seq_len = 2000
        self._unskipped = 0
        self._has_overflow = False
        self._pending = False  # whether a block overflowed that has left its transition to the next one

    def loss_scale(self) -> float:
        """Return the scale."""
        return self._loss_scale

    def update(self, has_overflow: bool) -> None:
        """Count a block, and those that have left it to this one, and move the scale."""
        self._has_overflow = has_overflow
        if has_overflow or self._pending:
            self._loss_scale = self.backed_off()
            self._unskipped = 0
            self._pending = False
            return
        self._unskipped += 1
        if self.dynamic and self._unskipped >= self._scale_seq_len:
            self._loss_scale = min(self._loss_scale * 2, self._max_loss_scale)
            self._unskipped = 0

    def leave_to_next(self, has_overflow: bool) -> None:
        """Leave a block to the next one, which counts both."""
        self._has_overflow = has_overflow
        self._pending = self._pending or has_overflow

    def backed_off(self) -> float:
        """Return the scale after an overflow."""
        return max(self._loss_scale / 2, self._min_loss_scale)


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
    """Make models run under autocast and optimizers skip their step after an overflow; return the same objects.

    ``keep_batchnorm_fp32`` and ``master_weights`` have no effect: autocast keeps batch norms and weights in float32.
    """
    model_list = _as_list(models)
    optimizer_list = [] if optimizers is None else _as_list(optimizers)
    if opt_level not in LEVELS:
        raise RuntimeError(f"opt_level={opt_level!r} is not one of {', '.join(LEVELS)}; they begin with the letter O")
    dtype, default_scale = LEVELS[opt_level]
    if cast_model_type is not None:
        dtype = cast_model_type if cast_model_type in (torch.float16, torch.bfloat16) else None
    if opt_level in ("O1", "O4") and patch_torch_functions is False:
        dtype = None
    scale = default_scale if loss_scale is None else loss_scale
    count = num_losses if enabled else 0
    _amp_state.loss_scalers = [LossScaler(i, scale, min_loss_scale, max_loss_scale) for i in range(count)]
    _amp_state.verbosity = verbosity
    _amp_state.opt_properties = types.SimpleNamespace(
        enabled=bool(enabled), opt_level=opt_level, cast_model_type=dtype, master_weights=False, loss_scale=scale
    )
    _amp_state.device_type = _device_type_of(model_list)
    for model in model_list:
        model = getattr(model, "_orig_mod", model)  # of torch.compile
        if enabled or isinstance(model.forward, _Forward):
            _wrap_forward(model, dtype if enabled else None, cast_model_outputs or torch.float32)
    for optimizer in optimizer_list:
        if enabled or hasattr(optimizer, "_amp_stash"):
            _wrap_step(optimizer)
    return models if optimizers is None else (models, optimizers)


def _as_list(value: Any) -> list[Any]:
    """Return the models or optimizers of an argument: one, or a list, a tuple, the values of a dict."""
    is_one = isinstance(value, torch.nn.Module) or not isinstance(value, Iterable)
    return [value] if is_one else list(value)


# -- models ------------------------------------------------------------------------------------------------------------
class _Forward:
    """Stands in the place of ``model.forward``, and runs it under autocast."""

    def __init__(self, plain: Callable[..., Any], device_type: str, dtype: Any, output_dtype: torch.dtype) -> None:
        self.__wrapped__ = plain  # where ``inspect.signature`` looks
        self.device_type = device_type
        self.dtype = dtype
        self.output_dtype = output_dtype

    def __getattr__(self, name: str) -> Any:
        """Answer for the model's own forward, whose ``__code__`` and ``__name__`` some callers read."""
        if name == "__wrapped__":  # asked for while this is being copied
            raise AttributeError(name)
        return getattr(self.__wrapped__, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with _noted_forward():
            if self.dtype is None:
                return self.__wrapped__(*args, **kwargs)
            with torch.autocast(self.device_type, self.dtype, _amp_state.casts, CACHE_ENABLED):
                outputs = self.__wrapped__(*args, **kwargs)
        return _map(outputs, functools.partial(_cast_output, dtype=self.output_dtype))


def _wrap_forward(model: Any, dtype: torch.dtype | None, output_dtype: torch.dtype) -> None:
    """Make the forward of a model run under autocast in ``dtype``; None: as it did before amp."""
    is_wrapped = isinstance(model.forward, _Forward)
    plain = model.forward.__wrapped__ if is_wrapped else model.forward
    model.forward = _Forward(plain, _device_type_of([model]), dtype, output_dtype)
    model._replicate_for_data_parallel = types.MethodType(_replicate_for_data_parallel, model)
    if not is_wrapped:
        for part in model.children():
            part.register_forward_pre_hook(_warn_outside_of_autocast)


def _device_type_of(models: list[Any]) -> str:
    """Return where models run: not "cpu" if a weight is elsewhere. Models without weights run where the others do."""
    device_types: set[str] = {param.device.type for model in models for param in model.parameters()}
    device_types = device_types or {_amp_state.device_type}
    return (device_types - {"cpu"} or device_types).pop()


def _replicate_for_data_parallel(model: Any) -> Any:
    """Make a replica for ``torch.nn.DataParallel``, whose forward uses the weights of the replica."""
    replica = type(model)._replicate_for_data_parallel(model)
    replica.forward = copy.copy(model.forward)
    replica.forward.__wrapped__ = types.MethodType(model.forward.__wrapped__.__func__, replica)
    return replica


@contextlib.contextmanager
def _noted_forward() -> Iterator[None]:
    """Note that the forward of a model runs, and which DistributedDataParallel calls it."""
    if torch.compiler.is_compiling():
        yield
        return
    wrapper = getattr(torch.nn.parallel.DistributedDataParallel, "_active_ddp_module", None)
    if wrapper is not None:
        _amp_state.wrappers.add(wrapper)
    _amp_state.running_forwards += 1
    try:
        yield
    finally:
        _amp_state.running_forwards -= 1


def _warn_outside_of_autocast(part: Any, args: Any) -> None:
    """Warn once where something else than the forward of a model calls a part of it, which then runs in float32."""
    if torch.compiler.is_compiling() or _amp_state.running_forwards or _amp_state.warned or not _amp_state.casts:
        return
    device_type = _amp_state.device_type
    properties = _amp_state.opt_properties
    casts = properties is not None and properties.enabled and properties.cast_model_type is not None
    if not casts or torch.is_autocast_enabled(device_type):
        return
    _amp_state.warned = True
    caller = sys._getframe(1)
    while caller.f_back is not None and caller.f_globals.get("__name__", "").partition(".")[0] == "torch":
        caller = caller.f_back
    message = (
        f"{type(part).__name__} runs in float32 here: only the forward of a model is under autocast. Call this, or the"
        f" method that it stands in, under torch.autocast({device_type!r}, {properties.cast_model_type}), and use"
        " .float() of the result."
    )
    warnings.warn_explicit(message, UserWarning, caller.f_code.co_filename, caller.f_lineno)


def _cast_output(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return a copy in ``dtype`` of a tensor that a model returns.

    Another output may depend on ``tensor`` without passing through its copy. After ``output.retain_grad()``, give the
    copy the gradient of ``tensor``.
    """
    output = _cast(tensor, dtype)
    if output is tensor or not output.requires_grad or torch.compiler.is_compiling():
        return output
    held = weakref.ref(output)

    def hand_on(grad: torch.Tensor) -> None:
        output = held()
        if output is not None and output.retains_grad:
            output.grad = grad.to(dtype)

    tensor.register_hook(hand_on)  # type: ignore[no-untyped-call]
    return output


def _cast(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return tensor.to(dtype) if tensor.is_floating_point() and tensor.dtype != torch.float64 else tensor


def _map(value: Any, function: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Return ``value``, or a copy of it, with a function applied to the tensors in it."""
    if isinstance(value, torch.Tensor):
        return function(value)
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


# -- losses ------------------------------------------------------------------------------------------------------------
@dataclasses.dataclass(eq=False)
class _Block:
    """A ``scale_loss`` block: ``param._amp_block`` of each of its parameters while it is open.

    Attributes:
        params: The parameters of its optimizers, each once.
        scale: What its loss is multiplied by.
        older: What is set aside of gradients from before it.
    """

    optimizers: list[Any]
    scaler: LossScaler
    params: dict[Any, None]
    scale: float
    older: list[_Older]


class _Older(NamedTuple):
    """A gradient from before a block: its tensor, which is zero while the block is open, and what was in it."""

    param: Any
    gradient: torch.Tensor
    version: int
    value: torch.Tensor

    def was_cleared(self) -> bool:
        """Return whether the script cleared it in the block: then backward has made another, or none."""
        new = self.param.grad
        if new is None or new is self.gradient:
            return new is None
        # DistributedDataParallel may replace a gradient after it was added to; create_graph=True makes a new sum.
        was_added_to = self.gradient._version > self.version
        return not was_added_to and not new.requires_grad


@contextlib.contextmanager
def scale_loss(
    loss: torch.Tensor,
    optimizers: Any,
    loss_id: int = 0,
    model: Any = None,
    delay_unscale: bool = False,
    delay_overflow_check: bool = False,
) -> Iterator[torch.Tensor]:
    """Yield the scaled loss. At the end, divide the new gradients by the scale and add older ones.

    So it ends also where it raises. After an overflow, optimizers that hold these gradients skip their next step,
    whatever is cleared before it. ``loss_id`` says which of the ``num_losses`` scales is used; ``model`` is not. With
    ``delay_unscale`` or ``delay_overflow_check``, the next block moves the scale, for both; after ``delay_unscale`` it
    also begins with these gradients in ``p.grad``, multiplied by its scale.
    """
    optimizer_list = _as_list(optimizers)
    scalers = _loss_scalers_of(optimizer_list)
    if not scalers:  # enabled=False
        yield loss
        return
    scaler = scalers[loss_id]
    scales = scaler.dynamic or scaler.loss_scale() != 1.0
    block = _begin(optimizer_list if scales else [], scaler)  # without parameters, it has nothing to do
    try:
        yield loss.float() * block.scale
    except BaseException as error:
        _end(block, moves_scale=False, joins_next=delay_unscale, has_failed=True)
        _explain_dtypes(error)
        raise
    _end(block, moves_scale=not (delay_unscale or delay_overflow_check), joins_next=delay_unscale)


def _explain_dtypes(error: BaseException) -> None:
    """Name the fix where half and float32 tensors do not fit in a backward pass."""
    if not isinstance(error, RuntimeError) or ("Half" not in str(error) and "BFloat16" not in str(error)):
        return
    arguments = f"(device_type={_amp_state.device_type!r})"
    raise RuntimeError(
        f"{error}; if the backward of an autograd.Function raised this, decorate its forward with "
        f"torch.amp.custom_fwd{arguments} and its backward with torch.amp.custom_bwd{arguments}"
    ) from error


def _loss_scalers_of(optimizers: list[Any]) -> list[LossScaler]:
    """Return the loss scalers of the call of ``initialize`` that was given the optimizers; none where amp is off."""
    if _amp_state.opt_properties is None:
        raise RuntimeError("scale_loss before initialize; call amp.initialize of this module first")
    loss_scalers: list[LossScaler] = _amp_state.loss_scalers
    for optimizer in optimizers:
        if hasattr(optimizer, "_amp_stash"):
            loss_scalers = optimizer._amp_stash.loss_scalers
        elif _amp_state.opt_properties.enabled:
            kind = type(optimizer).__name__
            raise RuntimeError(f"scale_loss got a {kind} that initialize was not given; pass it to amp.initialize")
    return loss_scalers


@torch.no_grad()
def _begin(optimizers: list[Any], scaler: LossScaler) -> _Block:
    """Open a block, and set older gradients aside.

    Those of one process alone stay, multiplied by the scale: DistributedDataParallel averages them with the new ones.
    So do those of delayed blocks, for an average that the script takes in the last block.
    """
    block = _Block(optimizers, scaler, _params_of(optimizers), scaler.loss_scale(), [])
    _refuse_open(block.params)
    stashes = [optimizer._amp_stash for optimizer in optimizers]
    if any(stash.unaveraged or stash.joins_next for stash in stashes):
        _multiply(_gradients_of(block.params), block.scale)
    else:
        block.older = _set_aside(block.params)
    for param in block.params:
        param._amp_block = block
    return block


def _set_aside(params: Iterable[Any]) -> list[_Older]:
    """Zero the gradients that are there, and return what was in them."""
    there = [param for param in params if param.grad is not None]
    values = [param.grad.clone() for param in there]
    for param in there:
        if param.grad.requires_grad:  # a script may differentiate through it
            param.grad = torch.zeros_like(param.grad)
    if there:
        torch._foreach_zero_(_gradients_of(there))
    return [_Older(param, param.grad, param.grad._version, value) for param, value in zip(there, values)]


def _end(block: _Block, moves_scale: bool, joins_next: bool, has_failed: bool = False) -> None:
    """End a block; where that raises, as without memory, clear its gradients: some may be scaled still."""
    if not block.params:
        return
    try:
        has_overflow = block.scaler.dynamic and not _are_finite(_gradients_of(block.params))
        _unscale(block)
    except BaseException:
        for param in block.params:
            param.grad = None
        raise
    finally:
        for param in block.params:
            del param._amp_block
    if joins_next or any(optimizer._amp_stash.joins_next for optimizer in _amp_state.optimizers):
        for optimizer in _holders(block):
            optimizer._amp_stash.joins_next = joins_next
    if _is_unaveraged(block.params, has_failed):
        for optimizer in block.optimizers:
            optimizer._amp_stash.unaveraged[block.scaler] = None
    else:
        _count(block, has_overflow, moves_scale)


@torch.no_grad()
def _unscale(block: _Block) -> None:
    """Divide the new gradients of a block by its scale, and add older ones that were not cleared in it."""
    _multiply(_gradients_of(block.params), 1 / block.scale)
    sums: list[torch.Tensor] = []
    addends: list[torch.Tensor] = []
    for one in block.older:
        if one.was_cleared():
            continue
        new = one.param.grad
        if new.is_sparse or one.value.is_sparse:
            one.param.grad = new + one.value
        else:
            sums.append(new)
            addends.append(one.value)
    if sums:
        torch._foreach_add_(sums, addends)


def _count(block: _Block, has_overflow: bool, moves_scale: bool) -> None:
    """Move the scale, or leave that to the next block; note an overflow with the optimizers that hold the gradients.

    Scales of blocks that have left gradients to this one are moved, too: whose overflow it is, no process knows.
    """
    scalers = {block.scaler: None}
    for optimizer in block.optimizers:
        scalers.update(optimizer._amp_stash.unaveraged)
        optimizer._amp_stash.unaveraged = {}
    for scaler in scalers:
        if moves_scale:
            scaler.update(has_overflow)
        else:
            scaler.leave_to_next(has_overflow)
    if has_overflow:
        for optimizer in _holders(block):
            optimizer._amp_stash.overflows.update(scalers)


def _holders(block: _Block) -> list[Any]:
    """Return the optimizers that hold a parameter of a block."""
    optimizers = list(_amp_state.optimizers)
    return [one for one in optimizers if not block.params.keys().isdisjoint(_params_of([one]))]


def _is_unaveraged(params: dict[Any, None], has_failed: bool) -> bool:
    """Return whether gradients are of this process alone: under ``no_sync()``, or after an exception in one of several.

    Scales stay equal in all processes, since they move with gradients that all of them have.
    """
    for wrapper in _amp_state.wrappers:
        is_averaged = wrapper.require_backward_grad_sync and not has_failed
        if not is_averaged and not params.keys().isdisjoint(wrapper.parameters()):
            return True
    return False


def _refuse_open(params: Iterable[Any]) -> None:
    if any(hasattr(param, "_amp_block") for param in params):
        raise RuntimeError("gradients of these parameters are still scaled; end the scale_loss block that is open")


def _params_of(optimizers: Iterable[Any]) -> dict[Any, None]:
    """Return the parameters of optimizers, in order, each once."""
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    return dict.fromkeys(param for group in groups for param in group["params"])


def _gradients_of(params: Iterable[Any]) -> list[torch.Tensor]:
    """Return the gradients that are there; of sparse ones, the values."""
    grads = [param.grad for param in params if param.grad is not None]
    return [grad._values() if grad.is_sparse else grad for grad in grads]


@torch.no_grad()
def _multiply(gradients: list[torch.Tensor], factor: float) -> None:
    if gradients and factor != 1.0:
        torch._foreach_mul_(gradients, factor)


@torch.no_grad()
def _are_finite(gradients: list[torch.Tensor]) -> bool:
    """Return whether all gradients are finite, which waits for the device once."""
    gradients = [gradient for gradient in gradients if gradient.numel() > 0]
    if not gradients:
        return True
    largest = torch._foreach_norm(gradients, float("inf"))  # NaN where there is one
    return bool(torch.stack([norm.to(largest[0].device, torch.float32) for norm in largest]).isfinite().all())


def master_params(optimizer: Any) -> Iterator[Any]:
    """Yield the parameters of an optimizer, which are their own masters, with unscaled gradients."""
    for group in optimizer.param_groups:
        yield from group["params"]


# -- steps -------------------------------------------------------------------------------------------------------------
def _wrap_step(optimizer: Any) -> None:
    """Make an optimizer skip its step after an overflow.

    ``overflows``: scalers of blocks that overflowed since the last step. ``unaveraged``: scalers of blocks that have
    left gradients of this process alone. ``joins_next``: whether the next block adds to the gradients that are there.
    """
    optimizer._amp_stash = types.SimpleNamespace(
        loss_scalers=_amp_state.loss_scalers, overflows={}, unaveraged={}, joins_next=False
    )
    _amp_state.optimizers.pop(optimizer, None)
    _amp_state.optimizers[optimizer] = None
    step = optimizer.step
    if hasattr(step, "asks_amp"):
        return
    if isinstance(optimizer, (torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad)):
        optimizer.register_load_state_dict_pre_hook(_as_torch_saves)

    @functools.wraps(getattr(step, "__func__", step))
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        return _step(self, step, *args, **kwargs)

    wrapper.asks_amp = True  # type: ignore[attr-defined]
    optimizer.step = types.MethodType(wrapper, optimizer)  # LR schedulers ask for a bound method


def _step(optimizer: Any, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Step, unless a block overflowed. Its gradients stay: scripts look at them after the step."""
    params = _params_of([optimizer])
    _refuse_open(params)
    stash = optimizer._amp_stash
    if stash.unaveraged:  # the script has averaged them itself
        has_overflow = not _are_finite(_gradients_of(params))
        for scaler in stash.unaveraged:
            scaler.update(has_overflow and scaler.dynamic)
        if has_overflow:
            stash.overflows.update({scaler: None for scaler in stash.unaveraged if scaler.dynamic})
        stash.unaveraged = {}
    overflows = stash.overflows
    stash.overflows = {}
    stash.joins_next = False
    if not overflows:
        args = tuple(_checked(optimizer, argument) for argument in args)
        kwargs = {name: _checked(optimizer, argument) for name, argument in kwargs.items()}
        return step(*args, **kwargs)
    optimizer._opt_called = True  # what LR schedulers look at, to warn of steps that were forgotten
    distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    if _amp_state.verbosity > 0 and not (distributed and torch.distributed.get_rank() > 0):
        for scaler in overflows:
            scale = scaler.backed_off() if scaler._pending else scaler.loss_scale()
            print(f"Gradient overflow.  Skipping step, loss scaler {scaler.loss_id} reducing loss scale to {scale}")
    return None


def _checked(optimizer: Any, closure: Any) -> Any:
    """Make a closure raise where gradients overflow in it: its step cannot be undone."""
    if not callable(closure):
        return closure

    def checked() -> Any:
        loss = closure()
        if optimizer._amp_stash.overflows:
            raise RuntimeError("gradients overflowed in the closure of a step; pass a static loss_scale to initialize")
        return loss

    return checked


# -- functions ---------------------------------------------------------------------------------------------------------
@contextlib.contextmanager
def disable_casts() -> Iterator[None]:
    """Inside, nothing is cast, nor in the forward of a model."""
    before, _amp_state.casts = _amp_state.casts, False
    try:
        with torch.autocast(_amp_state.device_type, enabled=False):
            yield
    finally:
        _amp_state.casts = before


def half_function(function: Any) -> Any:
    """Cast the floating arguments of a function to autocast's dtype, where it is called under autocast."""
    return _with_cast_arguments(function, None)


def float_function(function: Any) -> Any:
    """Cast the floating arguments of a function to float32, where it is called under autocast."""
    return _with_cast_arguments(function, torch.float32)


def register_half_function(module: Any, name: str) -> None:
    """Replace ``module.name`` by :func:`half_function` of it."""
    _register(module, name, half_function)


def register_float_function(module: Any, name: str) -> None:
    """Replace ``module.name`` by :func:`float_function` of it."""
    _register(module, name, float_function)


def _register(module: Any, name: str, cast: Callable[[Any], Any]) -> None:
    function = getattr(module, name)
    if isinstance(function, type):  # a class stays a class
        function.forward = cast(function.forward)  # type: ignore[attr-defined]
    else:
        setattr(module, name, cast(function))


def _with_cast_arguments(function: Any, dtype: torch.dtype | None) -> Any:
    is_torchs = (getattr(function, "__module__", None) or "torch").partition(".")[0] == "torch"

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_autocast_enabled(_amp_state.device_type):
            return function(*args, **kwargs)
        wanted = dtype or torch.get_autocast_dtype(_amp_state.device_type)
        args, kwargs = _map((args, kwargs), lambda tensor: _cast(tensor, wanted))
        # Autocast would cast the arguments of torch's own functions again.
        with disable_casts() if is_torchs else contextlib.nullcontext():
            return function(*args, **kwargs)

    return wrapper


# -- checkpoints -------------------------------------------------------------------------------------------------------
def state_dict() -> dict[str, dict[str, float]]:
    """Return the loss scales, as apex saved them: of the last call, then of earlier ones whose optimizers are alive."""
    return {
        f"loss_scaler{i}": {"loss_scale": scaler._loss_scale, "unskipped": scaler._unskipped}
        for i, scaler in enumerate(_living_scalers())
    }


def load_state_dict(state: dict[str, dict[str, Any]]) -> None:
    """Go on with saved loss scales, of apex or of this module; all calls of ``initialize`` come before."""
    for key in state:
        if not key.startswith("loss_scaler"):
            raise RuntimeError(f"{key!r} is not a loss scale; of a whole checkpoint, pass checkpoint['amp']")
    scalers = _living_scalers()
    if scalers and len(state) != len(scalers):
        warnings.warn(f"the state has {len(state)} loss scales, initialize made {len(scalers)}", stacklevel=2)
    for scaler, saved in zip(scalers, state.values()):
        scaler._loss_scale = float(saved["loss_scale"])
        scaler._unskipped = int(saved["unskipped"])


def _living_scalers() -> list[LossScaler]:
    if _amp_state.opt_properties is None:
        raise RuntimeError("a checkpoint of amp before initialize; call amp.initialize of this module first")
    gc.collect()  # an optimizer that is gone holds itself until then, by its bound step
    scalers = list(_amp_state.loss_scalers)
    for optimizer in reversed(list(_amp_state.optimizers)):
        scalers += [scaler for scaler in optimizer._amp_stash.loss_scalers if scaler not in scalers]
    return scalers


def _as_torch_saves(optimizer: Any, state_dict: dict[str, Any]) -> dict[str, Any]:
    """Return a checkpoint of apex's FusedAdam or FusedAdagrad as one of torch's optimizer.

    The ``step`` of a group goes into the state of its parameters; options that only torch's optimizer has stay as they
    are.
    """
    state = dict(state_dict["state"])
    groups = []
    for group in state_dict["param_groups"]:
        group = {**optimizer.defaults, **group}
        step = group.pop("step", 0)
        for param in group["params"]:
            if param in state:
                state[param] = {"step": step, **state[param]}
        groups.append(group)
    return {**state_dict, "state": state, "param_groups": groups}

"""The functions of ``apex.amp`` that training scripts call, on plain ``torch.autocast``.

``ampcompat migrate --to native`` put this file here. It needs torch 2.4 or later and nothing else, and it is yours.
Written by ampcompat with all of its parts.

One step of training, with a loss scale of 1024, that gives a weight a gradient of 3::

    model, optimizer = amp.initialize(model, optimizer)    # wraps model.forward and optimizer.step
    loss = criterion(model(x), y)                          # the model runs under autocast and returns float32
    with amp.scale_loss(loss, optimizer) as scaled_loss:   # scaled_loss is loss * 1024
        scaled_loss.backward()                             # the gradient is 3 * 1024 = 3072
                                                           # at the end: divided by 1024, it is 3; an overflow
                                                           # halves the scale, 2000 blocks without one double it
    optimizer.step()                                       # left out after an overflow
    optimizer.zero_grad()                                  # gradients that overflowed stay until they are cleared

What differs from apex:

- Weights are float32 at every level. O2 and O3 are O1 with another loss scale, O5 is O4.
- Casts hold in the model's forward. Code outside of it (a loss function, another method of the model) runs in float32.
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
import gc  # <checkpoints>
import types
import warnings  # <checkpoints, unused_forwards>
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

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

#: What the last call of ``initialize`` made, and the optimizers and models of all calls that are alive.
_amp_state = types.SimpleNamespace(
    loss_scalers=[],
    opt_properties=None,
    verbosity=1,
    device_type="cpu",
    casts=True,  # whether models run under autocast
    optimizers=weakref.WeakKeyDictionary(),  # in the order of their calls
    # <unused_forwards>
    models_to_watch=weakref.WeakSet(),  # models whose forward has not run yet
    # </unused_forwards>
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

    def loss_scale(self) -> float:
        """Return the scale."""
        return self._loss_scale

    def update(self, has_overflow: bool) -> None:
        """Count a block, and move the scale."""
        self._has_overflow = has_overflow
        if has_overflow:
            self._loss_scale = max(self._loss_scale / 2, self._min_loss_scale)
            self._unskipped = 0
            return
        self._unskipped += 1
        if self.dynamic and self._unskipped >= self._scale_seq_len:
            self._loss_scale = min(self._loss_scale * 2, self._max_loss_scale)
            self._unskipped = 0


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
        self.has_run = False  # <unused_forwards>

    # <forward_attributes>
    def __getattr__(self, name: str) -> Any:
        """Answer for the model's own forward, whose ``__code__`` and ``__name__`` some callers read."""
        if name == "__wrapped__":  # asked for while this is being copied
            raise AttributeError(name)
        return getattr(self.__wrapped__, name)

    # </forward_attributes>
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.has_run = True  # <unused_forwards>
        if self.dtype is None:
            return self.__wrapped__(*args, **kwargs)
        enabled = _amp_state.casts
        with torch.autocast(self.device_type, self.dtype, enabled=enabled, cache_enabled=CACHE_ENABLED):
            outputs = self.__wrapped__(*args, **kwargs)
        outputs = _map(outputs, functools.partial(_cast_output, dtype=self.output_dtype))  # <retained_gradients>
        return _map(outputs, functools.partial(_cast, dtype=self.output_dtype))


def _wrap_forward(model: Any, dtype: torch.dtype | None, output_dtype: torch.dtype) -> None:
    """Make the forward of a model run under autocast in ``dtype``; None: as it did before amp."""
    model = getattr(model, "_orig_mod", model)  # of torch.compile
    _amp_state.models_to_watch.discard(model)  # <unused_forwards>
    is_wrapped = isinstance(model.forward, _Forward)
    if dtype is None and not is_wrapped:
        return
    plain = model.forward.__wrapped__ if is_wrapped else model.forward
    model.forward = _Forward(plain, _device_type_of([model]), dtype, output_dtype)
    model._replicate_for_data_parallel = types.MethodType(_replicate_for_data_parallel, model)  # <data_parallel>
    # <unused_forwards>
    if dtype is not None:
        _amp_state.models_to_watch.add(model)
    # </unused_forwards>


def _device_type_of(models: list[Any]) -> str:
    """Return where models run: not "cpu" if a weight is elsewhere. Models without weights run where the others do."""
    device_types: set[str] = {param.device.type for model in models for param in model.parameters()}
    device_types = device_types or {_amp_state.device_type}
    return (device_types - {"cpu"} or device_types).pop()


# <data_parallel>
def _replicate_for_data_parallel(model: Any) -> Any:
    """Make a replica for ``torch.nn.DataParallel``, whose forward uses the weights of the replica."""
    model.forward.has_run = True  # <unused_forwards>
    replica = type(model)._replicate_for_data_parallel(model)
    replica.forward = copy.copy(model.forward)
    replica.forward.__wrapped__ = types.MethodType(model.forward.__wrapped__.__func__, replica)
    return replica


# </data_parallel>
# <unused_forwards>
def _warn_of_unused_forwards() -> None:
    """Warn once of a model whose weights have gradients while its forward has never run."""
    for model in list(_amp_state.models_to_watch):
        if not model.forward.has_run and all(param.grad is None for param in model.parameters()):
            continue
        _amp_state.models_to_watch.discard(model)
        if not model.forward.has_run:
            warnings.warn(
                f"{type(model).__name__}.forward never ran, and only forward runs in half precision. If the loss comes "
                f"from another method or a submodule, call that under torch.autocast({model.forward.device_type!r}, "
                f"{model.forward.dtype}) and use .float() of what it returns.",
                stacklevel=4,
            )


# </unused_forwards>
# <retained_gradients>
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


# </retained_gradients>
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
    """A ``scale_loss`` block: ``param._amp_block`` of each of its parameters while their gradients are scaled."""

    params: dict[Any, None]
    scale: float
    scaler: LossScaler
    set_aside: list[tuple[Any, torch.Tensor, torch.Tensor]]  # see _set_aside
    # <delayed_blocks>
    earlier_scalers: list[LossScaler] = dataclasses.field(default_factory=list)  # of delayed blocks before it
    # </delayed_blocks>


@contextlib.contextmanager
def scale_loss(
    loss: torch.Tensor,
    optimizers: Any,
    loss_id: int = 0,
    model: Any = None,
    # <delayed_blocks>
    delay_unscale: bool = False,
    delay_overflow_check: bool = False,
    # </delayed_blocks>
) -> Iterator[torch.Tensor]:
    """Yield the scaled loss. At the end, divide the gradients by the scale.

    If the block raises, set them to None (accumulated ones too). ``loss_id`` says which of the ``num_losses`` scales is
    used; ``model`` is not.
    # <delayed_blocks>

    With ``delay_unscale=True``, the next block, step or ``master_params`` looks for an overflow, and moves the scale:
    for all but the last of several backward passes before a step. Under ``DistributedDataParallel.no_sync()`` it is
    needed, elsewhere it saves time. ``delay_overflow_check`` has no effect.
    # </delayed_blocks>
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
    # <explanations>
    except RuntimeError as error:
        _abandon(block)
        _explain_dtypes(error)
        raise
    # </explanations>
    except BaseException:
        _abandon(block)
        raise
    # <delayed_blocks>
    if delay_unscale:
        _delay(block)
        return
    # </delayed_blocks>
    _end(block)
    _warn_of_unused_forwards()  # <unused_forwards>


# <explanations>
def _explain_dtypes(error: RuntimeError) -> None:
    """Name the fix where half and float32 tensors do not fit in a backward pass."""
    if "Half" not in str(error) and "BFloat16" not in str(error):
        return
    arguments = f"(device_type={_amp_state.device_type!r})"
    raise RuntimeError(
        f"{error}; if the backward of an autograd.Function raised this, decorate its forward with "
        f"torch.amp.custom_fwd{arguments} and its backward with torch.amp.custom_bwd{arguments}"
    ) from error


# </explanations>
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


def _begin(optimizers: list[Any], scaler: LossScaler) -> _Block:
    """Open a block, and multiply the gradients that are there by its scale: its end divides these, too."""
    block = _Block(_params_of(optimizers), scaler.loss_scale(), scaler, [])
    _refuse_scaled(block.params)
    for optimizer in optimizers:
        if _has_overflow_left(optimizer):
            block.set_aside += _set_aside(_params_of([optimizer]))
    _multiply(_gradients_of(block.params), block.scale)
    for param in block.params:
        param._amp_block = block
    return block


def _end(block: _Block) -> None:
    """Unscale the gradients of a block, move the scale, and note an overflow with the optimizers that use these."""
    has_overflow = block.scaler.dynamic and not _are_finite(_gradients_of(block.params))
    _unscale(block)
    _take_delayed(block)  # <delayed_blocks>
    _count(block, has_overflow)


def _unscale(block: _Block) -> None:
    """Divide the gradients of a block by its scale."""
    _multiply(_gradients_of(block.params), 1 / block.scale)
    for param, gradient, value in block.set_aside:
        if param.grad is gradient:  # it was not cleared in the block
            gradient += value
    for param in block.params:
        del param._amp_block


def _count(block: _Block, has_overflow: bool) -> None:
    """Move the scale after a block, and note an overflow with the optimizers that use its gradients."""
    if block.params:
        block.scaler.update(has_overflow)
    # <delayed_blocks>
    for scaler in block.earlier_scalers:
        scaler.update(has_overflow)
    # </delayed_blocks>
    if has_overflow:
        for optimizer in _amp_state.optimizers:
            if not block.params.keys().isdisjoint(_params_of([optimizer])):
                optimizer._amp_stash.overflowed = block.scaler


def _abandon(block: _Block) -> None:
    """Drop the gradients of a block that raised."""
    for param in block.params:
        param.grad = None
        del param._amp_block


def _refuse_scaled(params: Iterable[Any]) -> None:
    if any(hasattr(param, "_amp_block") for param in params):
        raise RuntimeError("gradients of these parameters are still scaled; end the scale_loss block that is open")


# <delayed_blocks>
def _delay(block: _Block) -> None:
    """Unscale the gradients of a block, and leave its overflow to the next block or step.

    In ``no_sync`` of ``DistributedDataParallel``, only then all processes have it: their scales must stay equal. Until
    then it is ``param._amp_delayed``. An overflow counts for the scales of all blocks that were delayed before it.
    """
    _unscale(block)
    if not block.scaler.dynamic:
        return
    _take_delayed(block)
    for param in block.params:
        param._amp_delayed = block


def _delayed_blocks_of(params: Iterable[Any]) -> list[_Block]:
    """Return the delayed blocks of any of the parameters, which are delayed no longer."""
    blocks = list(dict.fromkeys(param._amp_delayed for param in params if hasattr(param, "_amp_delayed")))
    for block in blocks:
        for param in block.params:
            del param._amp_delayed
    return blocks


def _take_delayed(block: _Block) -> None:
    """Have a block count for the delayed ones before it, too."""
    for delayed in _delayed_blocks_of(block.params):
        block.params |= delayed.params
        scalers = [delayed.scaler, *delayed.earlier_scalers]
        block.earlier_scalers += [scaler for scaler in scalers if scaler is not block.scaler]


def _end_delayed(params: Iterable[Any]) -> None:
    """Look for an overflow in the gradients of delayed blocks, and move the scale."""
    for block in _delayed_blocks_of(params):
        _count(block, not _are_finite(_gradients_of(block.params)))


# </delayed_blocks>
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


@torch.no_grad()
def _set_aside(params: Iterable[Any]) -> list[tuple[Any, torch.Tensor, torch.Tensor]]:
    """Zero gradients that overflowed: what is added is looked at. Return each with what it was."""
    there = [(param, param.grad, param.grad.clone()) for param in params if param.grad is not None]
    for _, gradient, _ in there:
        gradient.zero_()
    return there


def master_params(optimizer: Any) -> Iterator[Any]:
    """Yield the parameters of an optimizer, which are their own masters, with unscaled gradients."""
    _end_delayed(_params_of([optimizer]))  # <delayed_blocks>
    for group in optimizer.param_groups:
        yield from group["params"]


# -- steps -------------------------------------------------------------------------------------------------------------
def _wrap_step(optimizer: Any) -> None:
    """Make an optimizer skip its step after an overflow.

    ``overflowed`` is the scaler of a block that overflowed since the last step; ``cleared`` the same, of gradients that
    were cleared since: a script may have kept copies. ``skipped``: gradients that overflowed before the last step may
    be left.
    """
    optimizer._amp_stash = types.SimpleNamespace(
        loss_scalers=_amp_state.loss_scalers, overflowed=None, cleared=None, skipped=False
    )
    _amp_state.optimizers.pop(optimizer, None)
    _amp_state.optimizers[optimizer] = None
    step = optimizer.step
    if hasattr(step, "asks_amp"):
        return
    # <fused_checkpoints>
    if isinstance(optimizer, (torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad)):
        optimizer.register_load_state_dict_pre_hook(_as_torch_saves)
    # </fused_checkpoints>

    @functools.wraps(getattr(step, "__func__", step))
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        return _step(self, step, *args, **kwargs)

    wrapper.asks_amp = True  # type: ignore[attr-defined]
    optimizer.step = types.MethodType(wrapper, optimizer)  # LR schedulers ask for a bound method


def _step(optimizer: Any, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Step, unless gradients overflowed. These stay: scripts look at them after the step."""
    params = _params_of([optimizer])
    _refuse_scaled(params)
    _end_delayed(params)  # <delayed_blocks>
    step = _with_checked_closure(optimizer, step)  # <closures>
    reason = _reason_to_skip(optimizer)
    if reason is None:
        return step(*args, **kwargs)
    optimizer._amp_stash.overflowed = None
    optimizer._amp_stash.skipped = True
    optimizer._opt_called = True  # what LR schedulers look at, to warn of steps that were forgotten
    distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    if _amp_state.verbosity > 0 and not (distributed and torch.distributed.get_rank() > 0):
        print(f"Gradient overflow.  Skipping step, {reason}")
    return None


def _has_overflow_left(optimizer: Any) -> bool:
    """Return whether gradients that overflowed may be there. There are none any more once all are None."""
    stash = optimizer._amp_stash
    has_overflowed: bool = stash.overflowed is not None or stash.skipped
    if has_overflowed and all(param.grad is None for param in _params_of([optimizer])):
        stash.cleared = stash.overflowed or stash.cleared
        stash.overflowed, stash.skipped, has_overflowed = None, False, False
    return has_overflowed


def _reason_to_skip(optimizer: Any) -> str | None:
    """Return why a step has to be skipped; None where it is made."""
    stash = optimizer._amp_stash
    if not _has_overflow_left(optimizer) and stash.cleared is None:
        return None
    scaler = stash.overflowed
    if scaler is None:  # then it depends on what is there now
        if _are_finite(_gradients_of(_params_of([optimizer]))):
            stash.skipped, stash.cleared = False, None
            return None
        scaler = stash.cleared
    stash.cleared = None
    if scaler is None:
        return "gradients that overflowed before were not cleared; call zero_grad"
    return f"loss scaler {scaler.loss_id} reducing loss scale to {scaler.loss_scale()}"


# <closures>
def _with_checked_closure(optimizer: Any, step: Callable[..., Any]) -> Callable[..., Any]:
    """Make a step raise where gradients overflow in its closure: it cannot be undone."""

    def checked_step(*args: Any, **kwargs: Any) -> Any:
        closure = args[0] if args else kwargs.pop("closure", None)
        if not callable(closure):
            return step(*args, **kwargs)

        def checked() -> Any:
            loss = closure()
            if optimizer._amp_stash.overflowed is not None:
                raise RuntimeError(
                    "gradients overflowed in the closure of a step; pass a static loss_scale to initialize"
                )
            return loss

        return step(checked, *args[1:], **kwargs)

    return checked_step


# </closures>
# <functions>
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


# </functions>
# <checkpoints>
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


# </checkpoints>
# <fused_checkpoints>
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


# </fused_checkpoints>

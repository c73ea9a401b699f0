"""Half convolutions on the CPU in float32, while a model is half or functions are cast there."""

from contextlib import ExitStack

from ampcompat import _torch
from ampcompat._state import state
from ampcompat.amp.casts.contexts import cast_state


def install() -> None:
    """Compute half convolutions on the CPU in float32 from here on, and no others. Idempotent."""
    if cast_state.cpu_convolution is None:
        with ExitStack() as undo:
            _torch.convolve_on_cpu_in_float(_torch.halves_without_cpu_convolution(), undo)
            cast_state.cpu_convolution = undo.pop_all()
        state.undo_once(uninstall)


def uninstall() -> None:
    """Give torch its own convolutions back. Idempotent."""
    undo = cast_state.cpu_convolution
    cast_state.cpu_convolution = None
    if undo is not None:
        undo.close()

"""Home of names that scripts import from ``apex.amp.rnn_compat``: recurrent layers are cast by the op rules."""

from typing import Any

RNN_NAMES = ["rnn_relu", "rnn_tanh", "gru", "lstm"]


def has_old_rnns() -> bool:
    """Return False: torch has had today's recurrent layers since 1.0."""
    return False


def whitelist_rnn_cells(handle: Any, verbose: bool) -> None:
    """Do nothing: recurrent cells are on the half list."""

"""Home of a name that files import from ``apex.amp.rnn_compat`` at their top; recurrent layers need no help here."""

__all__ = ["has_old_rnns"]


def has_old_rnns() -> bool:
    """Whether torch computes recurrent layers as before its version 1.0: no torch that ampcompat runs on does."""
    return False

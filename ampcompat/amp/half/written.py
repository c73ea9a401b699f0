"""Which copy of a weight was written since both were equal, and what is due for it.

That is known, not guessed, and nothing here reads the device. Writes in place move a tensor's version counter, and
``half.to(...)`` its address; of a half weight, other code alone moves either. Writes through ``param.data`` move
neither, so each copy has a flag: whether its ``data`` was taken, and may have been written. To *push* is to round the
master into its half weight, to *pull* is to take what was written to the half weight into its master:

===================================================  =======
since both copies were equal (the first match wins)  due
===================================================  =======
half's version or address has moved                  pull
value's version has moved                            push
half's ``data`` was taken                            pull
value's ``data`` was taken                           push
none of these                                        nothing
===================================================  =======

A moved version counts before ``data`` that was taken. Between two of the same kind, the half weight counts. The half's
flag ends with a push, at the latest at the next step; the master's ends with a push or a pull. A write through an alias
from before is found by :func:`ampcompat.amp.half.masters.align_all` alone.
"""

from __future__ import annotations

from enum import Enum


class Due(Enum):
    """What makes both copies of a weight equal again."""

    NOTHING = "nothing"
    PUSH = "push"
    PULL = "pull"


def due(*, half_moved: bool, value_moved: bool, half_taken: bool, value_taken: bool) -> Due:
    """Return what is due, by the table above.

    Args:
        half_moved: Whether the half weight has another version or address than when both copies were equal.
        value_moved: Whether the master has another version than then.
        half_taken: Whether ``data`` of the half weight was taken since the last push.
        value_taken: Whether ``data`` of the master was taken since both were equal.
    """
    if half_moved:
        return Due.PULL
    if value_moved:
        return Due.PUSH
    if half_taken:
        return Due.PULL
    if value_taken:
        return Due.PUSH
    return Due.NOTHING

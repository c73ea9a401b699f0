"""Home of a name that scripts import from ``apex.amp._initialize``."""

from ampcompat.amp.casts.trees import map_tree as applier

__all__ = ["applier"]

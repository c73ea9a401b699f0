"""Home of the class that scripts import from ``apex.amp.opt``."""

from ampcompat.amp.handle import OptimWrapper

__all__ = ["OptimWrapper"]

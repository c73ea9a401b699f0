"""Home of the classes that scripts import from ``apex.amp.opt``."""

from ampcompat.amp.handle import OptimWrapper, PlainOptimWrapper

__all__ = ["OptimWrapper", "PlainOptimWrapper"]

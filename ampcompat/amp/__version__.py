"""Version of apex.amp."""

from ampcompat import __version__

__all__ = ["__version__"]

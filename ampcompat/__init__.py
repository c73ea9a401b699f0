"""``apex.amp``, whole, on native torch AMP.

``from apex import X`` becomes ``from ampcompat import X``. Importing this package changes nothing in torch and does
not initialise CUDA; every change to torch is made by ``amp.initialize`` (or by the alias) and can be undone.
"""

__version__ = "0.1.0"

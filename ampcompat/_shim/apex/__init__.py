"""The alias for child processes: ``ampcompat run`` puts this directory on ``sys.path`` and ``PYTHONPATH``.

A spawned worker imports the script anew, without the runner; its ``import apex`` lands here.
"""

import importlib
import importlib.util
import sys
from pathlib import Path

if importlib.util.find_spec("ampcompat") is None:  # a source tree that only the parent's directory made importable
    sys.path.append(str(Path(__file__).parents[3]))

from ampcompat.alias import install_as_apex

del sys.modules["apex"]
install_as_apex(force=True)
importlib.import_module("apex")  # this time it is ampcompat, which takes the place of this module

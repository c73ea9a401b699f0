"""``import amp_C`` in a child process: the same as beside ``import apex``."""

import importlib
import sys

importlib.import_module("apex")  # puts the alias in force
sys.modules.pop("amp_C", None)
importlib.import_module("amp_C")  # this time it is ampcompat's, which takes the place of this module

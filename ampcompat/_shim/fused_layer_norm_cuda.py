"""``import fused_layer_norm_cuda`` in a child process: the same as beside ``import apex``."""

import importlib
import sys

importlib.import_module("apex")  # puts the alias in force
sys.modules.pop("fused_layer_norm_cuda", None)
importlib.import_module("fused_layer_norm_cuda")  # this time it is ampcompat's, which takes the place of this module

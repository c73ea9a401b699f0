"""Name the top-level modules that apex's distribution has beside ``apex``."""

from typing import Final

EXTENSIONS: Final = ("amp_C", "apex_C", "fused_adam_cuda", "fused_layer_norm_cuda")

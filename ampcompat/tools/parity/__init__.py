"""One script at several opt_levels, each in a process of its own, compared step by step with O0.

Nothing here imports torch, but for the two modules that run beside the script: ``recorder`` and ``child``.
"""

"""One script at several opt_levels, each in a process of its own, compared step by step with O0.

Nothing here imports torch: the scripts run in processes of :mod:`ampcompat.tools.recording`.
"""

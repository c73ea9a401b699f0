"""A model in half precision: its weights and their float32 masters, how its forward runs, how it is saved.

docs/architecture.md lists the modules, each above the modules that import it.
"""

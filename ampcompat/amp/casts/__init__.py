"""Function casts at O1 and O4: where they are on, which op runs in which dtype, and functions that users register.

docs/architecture.md lists the modules.
"""

"""Look at where a file is to be written, before the work whose result it is to hold."""

from __future__ import annotations

import os


def why_not_writable(file: str) -> str:
    """Why ``file`` cannot be written, as in "it is a folder"; "" if it can."""
    target = os.path.abspath(file)
    folder = os.path.dirname(target)
    if os.path.isdir(target):
        return "it is a folder"
    if not os.path.isdir(folder):
        return "its folder does not exist"
    if not os.access(folder, os.W_OK) or (os.path.exists(target) and not os.access(target, os.W_OK)):
        return "it is not allowed to be written"
    return ""

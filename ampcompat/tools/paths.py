"""Look at where a file is to be written, before the work whose result it is to hold."""

from __future__ import annotations

import os


def why_not_writable(file: str) -> str:
    """Why ``file`` cannot be written, as in "it is a folder"; "" if it can."""
    target = os.path.realpath(file)
    folder = os.path.dirname(target)
    if os.path.isdir(target):
        return "it is a folder"
    if _is_stream(file):
        return "" if os.access(file, os.W_OK) else "it is not allowed to be written"
    # As /dev/stdout does in `> log.txt`: two writers would overwrite each other.
    if os.path.abspath(file).startswith("/dev/"):
        return "it leads to a plain file"
    if not os.path.isdir(folder):
        return "its folder does not exist"
    if not os.access(folder, os.W_OK) or (os.path.exists(target) and not os.access(target, os.W_OK)):
        return "it is not allowed to be written"
    return ""


def _is_stream(file: str) -> bool:
    """Whether ``file`` is a device or a pipe, which stays when something is written to it."""
    return os.path.exists(file) and not os.path.isfile(file) and not os.path.isdir(file)

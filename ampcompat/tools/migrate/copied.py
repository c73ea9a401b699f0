"""The file that ``--to native`` copies into a repository."""

from pathlib import Path

#: The name of its module.
NAME = "native_amp"
TEXT = Path(__file__).with_name(f"{NAME}.py").read_text("utf-8")

"""Note what both runs do: losses, steps, and the dtypes that modules return. Imports neither ampcompat nor apex."""

from __future__ import annotations

import contextlib
import json
import os
import random
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


class EnoughSteps(SystemExit):
    """Leaves the script after the last step asked for."""


class Recording:
    """A file of JSON lines, flushed at once.

    Args:
        path: The file.
        steps: Optimizer steps after which the script is ended.
    """

    def __init__(self, path: str, steps: int) -> None:
        # Open as long as the process runs: the script ends it as it likes.
        self.file = open(path, "a", encoding="utf-8")  # noqa: SIM115
        self.steps = steps
        self.made = 0
        self.process = os.getpid()
        self.folder = os.getcwd()
        self.seen: set[tuple[str, str, bool]] = set()

    def _write(self, kind: str, **content: object) -> None:
        if os.getpid() == self.process:
            plain = {key: str(v) if isinstance(v, float) and v - v != 0 else v for key, v in content.items()}
            self.file.write(json.dumps({"kind": kind, **plain}) + "\n")
            self.file.flush()

    def loss(self, value: float, scale: float, dtype: str) -> None:
        """A loss that was scaled for its backward pass."""
        self._write("loss", value=value, scale=scale, dtype=dtype)

    def step(self, optimizer: int, skipped: bool) -> None:
        """A step of an optimizer; the script ends after the last."""
        self.made += 1
        self._write("step", optimizer=optimizer, skipped=skipped, place=self._place())
        if self.made >= self.steps:
            raise EnoughSteps(0)

    def _place(self) -> str:
        """The line of the script, or of a module next to it, that is being run."""
        frame = sys._getframe(1)
        while frame is not None and frame.f_back is not None:
            name = os.path.relpath(frame.f_code.co_filename, self.folder)
            if not name.startswith("..") and os.path.exists(frame.f_code.co_filename):
                return f"{name}:{frame.f_lineno}"
            frame = frame.f_back
        return ""

    def watch_modules(self) -> None:
        """Note the dtype that each kind of module with weights of its own returns, in training and in evaluation."""
        import torch
        from torch.nn.modules.module import register_module_forward_hook

        def note(module: torch.nn.Module, _given: object, result: object) -> None:
            own = list(module.parameters(recurse=False))
            floats = bool(own) and all(p.is_floating_point() for p in own)
            if floats and isinstance(result, torch.Tensor) and result.is_floating_point():
                key = type(module).__name__, dtype_of(result), bool(module.training)
                if key not in self.seen:
                    self.seen.add(key)
                    self._write("dtype", module=key[0], dtype=key[1], training=key[2])

        register_module_forward_hook(note)

    @contextlib.contextmanager
    def ending(self) -> Iterator[None]:
        """Note how the script ended."""
        error: str | None = None
        try:
            yield
        except SystemExit as left:
            error = None if left.code in (None, 0) else f"it exited with {left.code!r}"
            raise
        except BaseException as raised:
            error = (f"{type(raised).__name__}: {raised}".strip(": ").splitlines() or ["error"])[0]
            raise
        finally:
            self._write("end", error=error)


def dtype_of(tensor: torch.Tensor) -> str:
    """``float16`` for ``torch.float16``."""
    return str(tensor.dtype).removeprefix("torch.")


def seed_all(seed: int) -> None:
    """Seed Python, torch, and numpy where it is there."""
    import torch

    random.seed(seed)
    torch.manual_seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed % 2**32)

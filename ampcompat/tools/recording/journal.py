"""Write down what a script does, a line of JSON for each event, and end the script after its last step.

Needs the standard library alone, torch only where it is called.
"""

from __future__ import annotations

import contextlib
import importlib.abc
import json
import os
import random
import sys
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import torch


#: What a script that was moved off apex must do without.
APEX = ("apex", "amp_C", "apex_C", "fused_adam_cuda", "fused_layer_norm_cuda")


class Settings(NamedTuple):
    """Tell the recorded process what to do; a line of JSON on its command line.

    Attributes:
        journal: The file to write.
        steps: Optimizer steps after which the script is ended.
        seed: Of Python, numpy and torch.
        skips: Numbers of the steps that are skipped, as after an overflow.
        details: Whether to record each loss and the dtypes that modules return, too.
        no_apex: Whether ``import apex`` fails instead of finding ampcompat.
    """

    journal: str
    steps: int
    seed: int
    skips: Sequence[int] = ()
    details: bool = False
    no_apex: bool = False

    def to_words(self, target: Sequence[str]) -> list[str]:
        """The arguments of the process that records ``target``."""
        return [json.dumps(self._asdict()), *target]


def read_words(words: Sequence[str]) -> tuple[Settings, list[str]]:
    """The settings, and the script with its arguments, of the process that got ``words``."""
    return Settings(**json.loads(words[0])), list(words[1:])


class EnoughSteps(SystemExit):
    """Leaves the script after the last step asked for, as ``sys.exit(0)`` would."""


class Missing(importlib.abc.MetaPathFinder):
    """A finder that has ``packages`` fail to import, as where they are not installed; it leaves others alone."""

    def __init__(self, packages: Collection[str]) -> None:
        self.packages = frozenset(packages)

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> None:
        """Refuse the packages."""
        if fullname.partition(".")[0] in self.packages:
            raise ModuleNotFoundError(f"No module named {fullname!r}", name=fullname)


class Journal:
    """A file of lines, flushed at once: whatever happens to the process, what it did so far is there to be read.

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
        self._forked = False
        self._forwards = threading.local()  # how many run in each other
        self._returned: set[tuple[str, str, bool]] = set()

    @property
    def is_copy(self) -> bool:
        """Whether this process was forked from the one that began the journal: its steps are not the script's."""
        return os.getpid() != self.process

    def write(self, kind: str, **content: object) -> None:
        """Write one line."""
        self.file.write(json.dumps({"kind": kind, **content}) + "\n")
        self.file.flush()

    def loss(self, value: float, scale: float, dtype: torch.dtype) -> None:
        """Write a loss that was scaled for its backward pass."""
        if not self.is_copy:
            self.write("loss", value=value, scale=scale, dtype=str(dtype))

    def step(self, **content: object) -> None:
        """Write a step of an optimizer and the place in the script that made it; end the script after the last."""
        if self.is_copy:
            if not self._forked:
                self.write("forked")
            self._forked = True
            return
        self.made += 1
        if self.made <= self.steps:
            self.write("step", place=self._place(), **content)
        # The exit of another thread would not end the script; the process that waits for this one ends it then.
        if self.made >= self.steps and threading.current_thread() is threading.main_thread():
            raise EnoughSteps(0)

    def _place(self) -> str:
        """The line that is being run of the script or of a module next to it, as in ``train.py:12``; "" for none."""
        frame = sys._getframe(1)
        while frame is not None and frame.f_back is not None:
            name = os.path.relpath(frame.f_code.co_filename, self.folder)
            if not name.startswith("..") and os.path.exists(frame.f_code.co_filename):
                return f"{name}:{frame.f_lineno}"
            frame = frame.f_back
        return ""

    def watch_modules(self) -> None:
        """Write the dtype that each kind of module with weights of its own returns, in training and in evaluation.

        Of modules inside of others only: what a whole model returns is float32 after a migration, as it was at O2.
        """
        from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

        register_module_forward_pre_hook(self._before_forward)
        register_module_forward_hook(self._after_forward, always_call=True)

    def _before_forward(self, _module: torch.nn.Module, _given: object) -> None:
        self._forwards.depth = getattr(self._forwards, "depth", 0) + 1

    def _after_forward(self, module: torch.nn.Module, _given: object, result: object) -> None:
        import torch

        self._forwards.depth -= 1
        is_whole_model = self._forwards.depth == 0
        if is_whole_model:
            return
        own = list(module.parameters(recurse=False))
        if not own or not all(param.is_floating_point() for param in own):
            return
        if not isinstance(result, torch.Tensor) or not result.is_floating_point():
            return
        returned = type(module).__name__, str(result.dtype), bool(module.training)
        if returned in self._returned or self.is_copy:
            return
        self._returned.add(returned)
        self.write("dtype", module=returned[0], dtype=returned[1], training=returned[2])

    @contextlib.contextmanager
    def ending(self, seen: Callable[[], Mapping[str, object]] = dict) -> Iterator[None]:
        """Write how the script ended, whatever it raises, and what ``seen`` then returns."""
        error: BaseException | None = None
        try:
            yield
        except BaseException as raised:
            error = raised
            raise
        finally:
            if not self.is_copy:
                self.write("end", error=error_line(error), **seen())


def error_line(error: BaseException | None) -> str | None:
    """``error`` in one line, or an exit status that is not zero; None for a good end."""
    if error is None:
        return None
    if isinstance(error, SystemExit):
        return None if error.code in (None, 0) else f"it exited with {error.code!r}"
    return f"{type(error).__name__}: {error}".strip(": ").splitlines()[0]


def seed_all(seed: int) -> None:
    """Seed Python, torch, and numpy where it has been imported."""
    import torch

    random.seed(seed)
    torch.manual_seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed % 2**32)

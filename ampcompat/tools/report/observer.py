"""The observer behind a precision report, which can be shown at any time."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from ampcompat.tools import core
from ampcompat.tools.at_end import at_end
from ampcompat.tools.data import to_json
from ampcompat.tools.devices import slow_halves
from ampcompat.tools.dtypes import dtype_name
from ampcompat.tools.frames import hide_tools
from ampcompat.tools.paths import why_not_writable
from ampcompat.tools.recording.journal import error_line
from ampcompat.tools.recording.recorder import Recorder
from ampcompat.tools.recording.steps import Step
from ampcompat.tools.report.facts import Facts, Float32Product, OpCount, half_share, sentences
from ampcompat.tools.report.ops import OpTrace
from ampcompat.tools.report.show import as_text


class PrecisionReport:
    """Record what really ran since ``amp.report()``. ``print`` it, or :meth:`write` it.

    Args:
        steps: Optimizer steps whose ops are counted; overflow and scale are followed to the end.
    """

    def __init__(self, steps: int) -> None:
        self._steps = steps
        self._trace = OpTrace()
        self._recorder = Recorder(self._keep)
        self._loss_scales: dict[int, float] = {}
        self._skipped = 0
        self._traced_steps = 0
        self._first: int | None = None  # the optimizer that stepped first
        self._initialized = core.latest_session() is not None
        self._waits_for_initialize = False
        self._latest: core.LatestSession | None = None
        self._rank, self._world = core.rank(), core.world_size()
        self._error: BaseException | None = None

    def start(self) -> None:
        """Observe from here on."""
        self._observe()
        self._trace.start()

    def start_as_child(self, file: str) -> None:
        """Observe from ``initialize`` on, and :meth:`save` under the name ``file`` when this process ends."""
        self._waits_for_initialize = True
        self._observe()

        def save() -> None:
            if self._initialized:
                self.stop()
                told = self.save(file, is_child=True)
                if told:
                    core.say(told, all_ranks=True)

        at_end(save)

    def _observe(self) -> None:
        core.observers().append(self)
        core.at_reset(self.stop)

    def stop(self) -> None:
        """Observe no more. What was seen stays."""
        self._trace.stop()
        core.observers()[:] = [one for one in core.observers() if one is not self]

    def ended_by(self, error: BaseException) -> None:
        """Note that ``error`` ended the script."""
        self._error = error

    # -- events ------------------------------------------------------------------------------------------------------
    def on_initialize(self) -> None:
        """Begin to count: what ran before the first ``initialize`` could not be half."""
        if not self._initialized:
            self._initialized = True
            self._trace.forget()
        if self._waits_for_initialize:
            self._waits_for_initialize = False
            self._trace.start()

    def on_scale_loss(self, loss: torch.Tensor, scaler: core.LossScaler, optimizers: Sequence[core.Optimizer]) -> None:
        """Record the block."""
        self._recorder.on_scale_loss(loss, scaler, optimizers)

    def on_gradients(self, scaler: core.LossScaler, optimizers: Sequence[core.Optimizer]) -> None:
        """Record the loss scale, by ops that are not the script's."""
        with self._trace.paused():
            self._recorder.on_gradients(scaler, optimizers)

    def on_failure(self, error: Exception) -> None:
        """Leave no frame of the trace in the traceback."""
        hide_tools(error.__traceback__)

    def on_step(self, optimizer: core.Optimizer, skipped: bool | None) -> None:
        """Record the step; stop counting ops after enough steps of the optimizer that stepped first."""
        with self._trace.paused():
            self._recorder.on_step(optimizer, skipped)
        if self._first is None:
            self._first = id(optimizer)
        if not self._trace.running:
            return
        self._note()
        self._traced_steps += id(optimizer) == self._first
        if self._traced_steps >= self._steps:
            self._trace.stop()

    def _keep(self, step: Step) -> None:
        self._skipped += step.skipped
        self._loss_scales |= {one.loss_id: one.scale for one in step.scales}

    def _note(self) -> None:
        """Note what may be gone when the process ends: the rank, and what ``initialize`` was asked for."""
        self._rank, self._world = core.rank(), core.world_size()
        self._latest = core.latest_session() or self._latest

    # -- what was seen -----------------------------------------------------------------------------------------------
    def facts(self) -> dict[str, Any]:
        """Everything as plain data, as in the JSON file. Reads the device."""
        return asdict(self._facts())

    def _facts(self) -> Facts:
        """Everything. Reads the device."""
        self._recorder.deliver(wait=True)
        if not self._traced_steps:
            self._note()
        latest = core.latest_session() or self._latest
        half = None if latest is None else latest.half_dtype
        trace = self._trace
        ops = [OpCount(*op, count, trace.flops[op]) for op, count in trace.counts.most_common()]
        ops.sort(key=lambda one: -one.flops)
        float32 = [Float32Product(*where, *numbers) for where, numbers in trace.float32.items()]
        float32.sort(key=lambda one: -one.flops)
        facts = Facts(
            rank=self._rank,
            world=self._world,
            error=error_line(self._error),
            initialized=latest is not None,
            enabled=latest is not None and latest.enabled,
            opt_level=None if latest is None else latest.opt_level,
            half="" if half is None else dtype_name(half),
            traced_steps=self._traced_steps,
            steps=self._recorder.steps,
            skipped=self._skipped,
            blocks=self._recorder.blocks,
            loss_scales=self._loss_scales,
            ops=ops,
            float32_products=float32,
            slow=[] if half is None else _slow_sentences(trace.devices, half),
            half_flops_share=half_share(ops),
        )
        facts.sentences = sentences(facts)
        return facts

    def __str__(self) -> str:
        return as_text(self._facts())

    def write(self, path: str | os.PathLike[str]) -> None:
        """Write ``path``: data for ``.json``, the text for anything else.

        Raises:
            OSError: It cannot be written.
        """
        problem = why_not_writable(os.fspath(path))
        if problem:
            raise OSError(f"report.write({os.fspath(path)!r}) - {problem} - name a file that can be written.")
        _write(self._facts(), Path(path))

    def save(self, file: str, is_child: bool = False) -> str:
        """Write ``file``, named by the rank where there are several processes.

        Returns:
            What rank 0 says of that: for "", and where the file cannot be written, the report itself; nothing on other
            ranks.
        """
        facts = self._facts()
        if not file:
            return "" if facts.rank else as_text(facts)
        if facts.world > 1:
            path = named_by(file, f"rank{facts.rank}")
        else:
            path = named_by(file, f"process{os.getpid()}") if is_child else file
        problem = why_not_writable(path)
        if not problem:
            try:
                _write(facts, Path(path))
            except OSError as error:
                problem = str(error.strerror)
        if problem:
            return f"{as_text(facts)}\n\nThe precision report could not be written to {path}: {problem}"
        shown = os.path.relpath(path)
        if shown.startswith(".."):
            shown = path
        several = "; each rank writes its own" if facts.world > 1 else ""
        return "" if facts.rank else f"wrote the precision report to {shown}{several}"


def _write(facts: Facts, target: Path) -> None:
    """Write a file in the form that its name asks for."""
    content = to_json(asdict(facts), indent=1) if target.suffix == ".json" else as_text(facts)
    target.write_text(content + "\n", encoding="utf-8")


def _slow_sentences(devices: set[str], half: torch.dtype) -> list[str]:
    return [sentence for device in sorted(devices) if (sentence := slow_halves(device, half))]


def named_by(file: str, process: str) -> str:
    """``file`` with the name of a process before its ending, as in ``report.rank1.json``."""
    stem, suffix = os.path.splitext(file)
    return f"{stem}.{process}{suffix}"

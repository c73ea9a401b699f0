"""The receipt itself: an observer of the run that can be shown at any time."""

from __future__ import annotations

import json
import os
import platform
import sys
import time
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

from ampcompat import __version__
from ampcompat._log import rank
from ampcompat._state import state
from ampcompat._types import Optimizer
from ampcompat.amp.observers import observers
from ampcompat.amp.scaler import LossScaler
from ampcompat.tools.data import as_data
from ampcompat.tools.frames import hide_tools
from ampcompat.tools.report import processes, text
from ampcompat.tools.report.facts import facts_of, process_row
from ampcompat.tools.report.history import History
from ampcompat.tools.report.models import look
from ampcompat.tools.report.record import Record, merged
from ampcompat.tools.report.schema import Crash, Facts, Process, Provenance
from ampcompat.tools.report.sentences import ending, of_missing_ranks, of_processes
from ampcompat.tools.report.trace import OpTrace

NEEDS_JINJA = "a page needs jinja2 - pip install 'ampcompat[report]', or name a file that ends in .txt or .json"


class Receipt:
    """Record what really ran since ``amp.report()``. ``print`` it, or :meth:`write` it; notebooks show the page.

    Args:
        steps: Optimizer steps whose ops are counted; overflow and scale are followed to the end.
        folder: Where the processes that this one starts leave their facts, if they do.
        argv: The script and its arguments, as ``sys.argv`` has them.
    """

    def __init__(self, steps: int, folder: str | None = None, argv: list[str] | None = None) -> None:
        self._steps = steps
        self._trace, self._history = OpTrace(), History()
        self._record = _new_record()
        self._first: int | None = None
        self._initialized = state.session is not None
        self._folder, self._argv = folder, list(sys.argv if argv is None else argv)
        self._started, self._clock = datetime.now(timezone.utc).astimezone(), time.monotonic()
        self._child = False
        self._error: Crash | None = None
        self._exit: int | str | None = None

    def start(self) -> None:
        """Observe from here on."""
        self._observe()
        self._trace.start()

    def start_as_child(self) -> None:
        """Observe a process that the script has started, from its ``initialize`` on."""
        self._child = True
        self._observe()

    def _observe(self) -> None:
        observers().append(self)
        state.undo.callback(self.stop)

    def stop(self) -> None:
        """Observe no more. What was seen stays."""
        self._trace.stop()
        observers()[:] = [one for one in observers() if one is not self]

    def crashed(self, error: BaseException) -> None:
        """Note that ``error`` ended the script."""
        if isinstance(error, SystemExit):
            self._exit = error.code if isinstance(error.code, (int, str)) else None
        else:
            self._error = Crash(type(error).__name__, str(error))

    # -- events ----------------------------------------------------------------------------------------------------
    def on_initialize(self) -> None:
        """Begin to count: what ran before the first ``initialize`` could not be half."""
        self._heed_fork()
        if not self._initialized:
            self._initialized = True
            self._trace.forget()
        if self._child and not self._trace.running and not self._record.traced_steps:
            self._record.process.rank = rank()
            self._trace.start()
            self._leave()
            processes.at_exit(self._leave_at_exit)

    def on_scale_loss(self, loss: torch.Tensor, scaler: LossScaler | None, optimizers: object) -> None:
        """Count blocks."""
        self._heed_fork()
        self._history.blocks += 1

    def on_forward(self, model: torch.nn.Module, args: object, kwargs: object) -> None:
        """Look at the models before the first op runs in them."""
        self._heed_fork()
        if not self._record.parameters:
            look(self._record)

    def on_failure(self, error: Exception) -> None:
        """Leave no frame of the trace in the traceback."""
        hide_tools(error.__traceback__)

    def on_step(self, optimizer: Optimizer, skipped: bool | None) -> None:
        """Note the scale; stop counting ops after enough steps of the optimizer that stepped first."""
        self._heed_fork()
        self._history.step(optimizer, skipped)
        if self._first is None:
            self._first = id(optimizer)
        if self._trace.running:
            look(self._record)
            self._record.process.rank = rank()
            if torch.distributed.is_available() and torch.distributed.is_initialized():
                self._record.process.world = torch.distributed.get_world_size()
            self._record.traced_steps += id(optimizer) == self._first
            if self._record.traced_steps >= self._steps and self._trace.stop() and self._child:
                self._leave()

    # -- other processes ---------------------------------------------------------------------------------------------
    def _heed_fork(self) -> None:
        """Begin anew in a forked process: what it inherited is its parent's."""
        if os.getpid() == self._record.process.pid:
            return
        self._record, self._history = _new_record(), History()
        self._child, self._first = True, None
        self._trace.forget()
        if not self._trace.running:
            self._trace.start()
        self._leave()
        processes.at_exit(self._leave_at_exit)

    def _leave(self) -> None:
        """Leave what is known so far for the process that the script is."""
        if self._folder is not None and os.path.isdir(self._folder):
            processes.leave(self._folder, self._own())

    def _leave_at_exit(self) -> None:
        if self._record.process.ended or os.getpid() != self._record.process.pid:
            return
        self._record.process.ended = True
        # What a worker of multiprocessing ends with, or what the interpreter has printed. torch.multiprocessing exits
        # while it handles the script's error.
        error = sys.exc_info()[1] or getattr(sys, "last_value", None)
        if isinstance(error, SystemExit) and error.code and error.__context__ is not None:
            error = error.__context__
        if isinstance(error, BaseException):
            self.crashed(error)
        self._leave()

    # -- what was seen -----------------------------------------------------------------------------------------------
    def _own(self) -> Record:
        """What is known of this process alone. Reads the device."""
        own = self._record
        look(own)
        self._history.note(own)
        own.tally = self._trace.tally
        own.whole_steps = own.traced_steps >= self._steps
        if not self._child:
            own.process.ended = True
        elif self._error is not None:
            own.process.error = f"{self._error.type}: {self._error.message}"
        return own

    def facts(self) -> dict[str, Any]:
        """Everything as plain data, as in the JSON file. Reads the device."""
        data: dict[str, Any] = as_data(self._read())
        return data

    def _read(self) -> Facts:
        """Everything. Reads the device."""
        own = self._own()
        others = [one for one in processes.left(self._folder) if one.process.pid != own.process.pid]
        trained = [one for one in (own, *others) if one.setting.initialized] or [own]
        rows = [process_row(one) for one in trained] if others else []
        remarks = of_processes(rows)
        record = merged(trained)
        lead = record.process
        missing = lead.world - len(trained)
        if missing > 0:
            remarks.append(of_missing_ranks(missing, lead.world, lead.rank, alone=self._folder is None))
        return facts_of(record, self._provenance(record.steps), rows, remarks)

    def _provenance(self, steps: int) -> Provenance:
        return Provenance(
            script=self._argv[0] if self._argv else "",
            arguments=self._argv[1:],
            date=self._started.isoformat(timespec="seconds"),
            seconds=round(time.monotonic() - self._clock, 1),
            torch=str(torch.__version__),
            versions={
                "ampcompat": __version__,
                "torch": str(torch.__version__),
                "python": platform.python_version(),
                "cuda": torch.version.cuda,
            },
            children_counted=self._folder is not None,
            error=self._error,
            exit=self._exit,
            ending=ending(self._error, self._exit, steps),
        )

    def __str__(self) -> str:
        return text.render(self._read())

    def _repr_html_(self) -> str | None:
        try:
            from ampcompat.tools.report import html
        except ImportError:
            return None  # without jinja2 a notebook shows the text
        return html.fragment(self._read())

    def write(self, path: str | os.PathLike[str]) -> None:
        """Write ``path`` in one piece: a page for ``.html``, data for ``.json``, the table for anything else.

        Raises:
            ImportError: A page is asked for and jinja2 is missing.
        """
        facts, target = self._read(), Path(path)
        if target.suffix == ".json":
            content = json.dumps(as_data(facts), indent=1) + "\n"
        elif target.suffix in (".html", ".htm"):
            content = _page(facts, target)
        else:
            content = text.render(facts) + "\n"
        processes.write(target, content.encode())


def _new_record() -> Record:
    """The record of this process, in which nothing was seen so far."""
    return Record(process=Process(pid=os.getpid(), rank=rank(), world=int(os.environ.get("WORLD_SIZE", "1"))))


def _page(facts: Facts, target: Path) -> str:
    try:
        from ampcompat.tools.report import html
    except ImportError as problem:
        raise ImportError(f"{target} - {NEEDS_JINJA}", name=problem.name) from None
    return html.render(facts)

"""Start Python processes that have torch imported already: a server imports it once, and forks for each of them.

Importing torch and its compiler costs each process two to three seconds of a core. A process started here differs from
one that ``python`` starts in that alone: the arguments, the environment, the paths of imports and the end are its own,
and ``ampcompat`` is not imported. Tests of what happens before torch is imported start ``python`` itself.
"""

import gc
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType, TracebackType


class ForkServer:
    """Context that starts the server and ends it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.runs = folder, 0

    def __enter__(self) -> "ForkServer":
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        self.server = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        return self

    def __exit__(self, *exc: object) -> None:
        self.server.stdin.close()
        self.server.wait()
        self.server.stdout.close()

    def run(
        self,
        arguments: Sequence[object],
        *,
        cwd: Path | None = None,
        env: Mapping[str, str] | None = None,
        timeout: int = 120,
    ) -> subprocess.CompletedProcess[str]:
        """Run what ``python *arguments`` would: ``-m NAME``, ``-c CODE``, or a script, and what follows.

        Args:
            arguments: those after the name of the interpreter.
            cwd: the folder to run in; by default this process's.
            env: the whole environment; by default this process's.
            timeout: seconds until the process is killed.

        Raises:
            subprocess.TimeoutExpired: it was killed.
        """
        self.runs += 1
        out, err = self.folder / f"{self.runs}.out", self.folder / f"{self.runs}.err"
        command = list(map(str, arguments))
        request = {"command": command, "cwd": str(cwd or Path.cwd()), "env": dict(os.environ if env is None else env)}
        request |= {"out": str(out), "err": str(err), "timeout": timeout}
        self.server.stdin.write(json.dumps(request) + "\n")
        self.server.stdin.flush()
        code = int(self.server.stdout.readline())
        texts = [file.read_text(encoding="utf-8") for file in (out, err)]
        if code == -signal.SIGALRM:
            raise subprocess.TimeoutExpired(command, timeout, *texts)
        return subprocess.CompletedProcess(command, code, *texts)


def serve() -> dict[str, object]:
    """Fork for each request and tell the exit status; returns the request, in the child."""
    for line in sys.stdin:
        child = os.fork()
        if not child:
            return json.loads(line)
        _, status = os.waitpid(child, 0)
        os.write(1, f"{os.waitstatus_to_exitcode(status)}\n".encode())
    sys.exit()


def become(request: dict[str, object]) -> None:
    """Take the folder, the files, the environment and the paths of the process that was asked for."""
    signal.alarm(request["timeout"])
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    files = [os.open(os.devnull, os.O_RDONLY)]
    files += [os.open(request[name], os.O_CREAT | os.O_WRONLY | os.O_TRUNC | os.O_APPEND) for name in ("out", "err")]
    for to, file in enumerate(files):
        os.dup2(file, to)
        os.close(file)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115 - the process's own
    sys.path[0:1] = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]


def start(command: list[str]) -> None:
    """Run as ``__main__`` what the interpreter would, and show of its errors what the interpreter would."""
    import runpy

    def show(kind: type[BaseException], error: BaseException, frames: TracebackType | None) -> None:
        while frames and frames.tb_frame.f_code.co_filename in (__file__, runpy.__file__, "<frozen runpy>"):
            frames = frames.tb_next
        sys.__excepthook__(kind, error.with_traceback(frames), frames)

    sys.excepthook = show
    what, *rest = command
    if what == "-m":
        sys.argv = rest
        sys.path.insert(0, os.getcwd())
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    else:
        main = sys.modules["__main__"] = ModuleType("__main__")
        if what == "-c":
            sys.argv = ["-c", *rest[1:]]
            sys.path.insert(0, "")
            code = compile(rest[0], "<string>", "exec")
        else:
            sys.argv = command
            path = Path(what).absolute()
            sys.path.insert(0, str(path.parent))
            main.__file__ = str(path)
            code = compile(path.read_bytes(), str(path), "exec")
        exec(code, main.__dict__)


if __name__ == "__main__":
    import torch

    torch.set_num_threads(1)
    torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)  # the first optimizer makes torch import its compiler
    gc.collect()
    gc.freeze()  # what the children share is neither walked nor copied
    asked = serve()
    become(asked)
    start(asked["command"])

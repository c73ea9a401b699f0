"""Start Python processes that have torch imported already: a server imports it once, and forks for each of them.

Importing torch and its compiler costs each process two to three seconds of a core. A process started here differs from
one that ``python`` starts in that alone, and in its process group and seed of hashes: the arguments, the environment,
the paths of imports and the end are its own, and ``ampcompat`` is not imported. Tests of what happens before torch is
imported start ``python`` itself.
"""

import atexit
import gc
import itertools
import json
import os
import select
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType, ModuleType, TracebackType
from typing import IO


class ForkServer:
    """Context that starts the server, which imports torch when it is first asked, and ends it.

    Attributes:
        address: where ``WarmPython``, in this process and in others, finds it.
    """

    def __enter__(self) -> "ForkServer":
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        self.home = tempfile.TemporaryDirectory(prefix="warm", dir="/tmp")  # the path of a socket must be short
        self.address = str(Path(self.home.name, "socket"))
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(self.address)
            listener.listen()
            command = [sys.executable, __file__, "serve", str(listener.fileno())]
            self.server = subprocess.Popen(
                command, stdin=subprocess.PIPE, env=environment, pass_fds=[listener.fileno()]
            )
        return self

    def __exit__(self, *exc: object) -> None:
        self.server.stdin.close()
        self.server.wait()
        self.home.cleanup()


class WarmPython:
    """The server's processes; threads may share it.

    Args:
        address: the server's.
        folder: for what the processes print.

    Attributes:
        executable: A program in the place of ``sys.executable``, for code that starts processes by itself.
    """

    def __init__(self, address: str, folder: Path) -> None:
        self.address, self.folder, self.runs = address, folder, itertools.count()
        self.executable = str(folder / "python")
        words = shlex.join([sys.executable, "-IS", __file__, "stand-in", address])
        Path(self.executable).write_text(f'#!/bin/sh\nexec {words} "$@"\n')
        Path(self.executable).chmod(0o700)

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
        run = next(self.runs)
        out, err = self.folder / f"{run}.out", self.folder / f"{run}.err"
        command = list(map(str, arguments))
        with out.open("ab") as to_out, err.open("ab") as to_err, Path(os.devnull).open() as nothing:
            files = [file.fileno() for file in (nothing, to_out, to_err)]
            answers = ask(self.address, command, cwd or Path.cwd(), os.environ if env is None else env, timeout, files)
        with answers:
            answers.readline()  # its process id
            code = int(answers.readline())
        texts = [file.read_text(encoding="utf-8") for file in (out, err)]
        if code == -signal.SIGALRM:
            raise subprocess.TimeoutExpired(command, timeout, *texts)
        return subprocess.CompletedProcess(command, code, *texts)


def ask(
    address: str, command: list[str], cwd: Path, env: Mapping[str, str], timeout: int, files: list[int]
) -> IO[bytes]:
    """Ask the server for a process whose standard files are ``files``; returns its answers, a line each.

    They are the process id and, when it has ended, the exit status. Closing them ends the process and those it started.
    """
    request = {"command": command, "cwd": str(cwd), "env": dict(env), "timeout": timeout}
    text = json.dumps(request).encode()
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(address)
        socket.send_fds(connection, [b"%9d" % len(text)], files)
        connection.sendall(text)
        return connection.makefile("rb")


def stand_in(address: str, *command: str) -> None:
    """Be the process that the server forks: pass on the files, the signals and the end."""
    with ask(address, list(command), Path.cwd(), os.environ, 0, [0, 1, 2]) as answers:
        process = int(answers.readline())

        def pass_on(number: int, frame: FrameType | None) -> None:
            with suppress(ProcessLookupError):
                os.killpg(process, number)

        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, pass_on)
        code = int(answers.readline())
    if code < 0:
        with suppress(OSError):  # some signals cannot be handled
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    sys.exit(code)


def serve(listener: socket.socket) -> tuple[dict[str, object], list[int]]:
    """Fork for each request and tell the exit status; returns the request and its files, in the child.

    A child whose connection is closed is killed, with those it started.
    """
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    running: dict[socket.socket, int] = {}
    while 0 not in (ready := select.select([0, woken, listener, *running], [], [])[0]):
        for connection in running.keys() & set(ready):
            with suppress(ProcessLookupError):  # it has left its group
                os.killpg(running[connection], signal.SIGKILL)
        if woken in ready:
            os.read(woken, 4096)
        for connection, process in list(running.items()):
            ended, status = os.waitpid(process, os.WNOHANG)
            if ended:
                with connection, suppress(BrokenPipeError):
                    connection.sendall(b"%d\n" % os.waitstatus_to_exitcode(status))
                del running[connection]
        if listener in ready:
            connection, _ = listener.accept()
            length, files, _, _ = socket.recv_fds(connection, 9, 3)
            with connection.makefile("rb") as stream:
                request = json.loads(stream.read(int(length)))
            process = os.fork()
            if not process:
                os.setpgid(0, 0)
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                for inherited in (woken, wake, listener.detach(), *(one.detach() for one in (connection, *running))):
                    os.close(inherited)
                return request, files
            with suppress(OSError):  # it has done so, or ended
                os.setpgid(process, process)
            for file in files:
                os.close(file)
            connection.sendall(b"%d\n" % process)
            running[connection] = process
    sys.exit()  # the tests have ended


def become(request: dict[str, object], files: list[int]) -> None:
    """Take the folder, the files, the environment and the paths of the process that was asked for."""
    signal.alarm(request["timeout"])
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    for to, file in enumerate(files):
        os.dup2(file, to)
        os.close(file)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(write_through=bool(os.environ.get("PYTHONUNBUFFERED")))
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
    if command[0][:2] == "-m" and command[0] != "-m":
        command = ["-m", command[0][2:], *command[1:]]
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
    if sys.argv[1] == "stand-in":
        stand_in(*sys.argv[2:])
    requests = socket.socket(fileno=int(sys.argv[2]))
    if 0 in select.select([0, requests], [], [])[0]:
        sys.exit()  # no test has asked
    import torch

    torch.set_num_threads(1)
    torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)  # the first optimizer makes torch import its compiler
    gc.collect()
    gc.freeze()  # what the children share is neither walked nor copied
    asked, standard_files = serve(requests)
    become(asked, standard_files)
    if "triton" in sys.modules:  # its bindings print what outlives them at the end of a process, as frozen objects do
        atexit.register(gc.unfreeze)
    start(asked["command"])

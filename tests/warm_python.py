"""A Python that has imported torch, and forks for each program that a test runs.

``python_process.run_python`` starts one in each worker of pytest. A request is a line of JSON on standard input: the
program's arguments, folder and environment, and the files for its output. The answers are two lines: the number of the
program's process, and its status when it has ended.

A program finds what a new interpreter has: its own ``__main__``, ``sys.argv``, ``sys.path``, folder, environment and
warning filters, and it ends as any other. Three things are otherwise: torch is imported, variables that Python and
torch read at their start are not read again, and a traceback begins with two lines of this file.
"""

import gc
import json
import os
import runpy
import signal
import sys
import types
import warnings

import numpy
import torch

HERE = os.path.dirname(os.path.abspath(__file__))
#: ``sys.path`` of an interpreter, without the folder of its script.
PATH = [entry for entry in sys.path if entry != HERE]


def serve() -> dict:
    """Answer requests; end when there are no more. Return only in a new process: the request that it is for."""
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            return json.loads(line)
        os.setpgid(pid, pid)  # a program that is killed takes its children along
        print(pid, flush=True)
        _, status = os.waitpid(pid, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)
    os._exit(0)


def take_over(request: dict) -> None:
    """Give this process the files, the folder and the environment of the request."""
    redirect(0, os.devnull, os.O_RDONLY)
    redirect(1, request["out"], os.O_WRONLY)
    redirect(2, request["err"], os.O_WRONLY)
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["cwd"])
    # Each interpreter begins with other random numbers; Python's module does after a fork.
    torch.default_generator.seed()
    numpy.random.seed()


def redirect(descriptor: int, name: str, flags: int) -> None:
    """Let a descriptor of this process be a file."""
    file = os.open(name, flags)
    os.dup2(file, descriptor)
    os.close(file)


def run(arguments: list[str]) -> None:
    """Run what ``python *arguments`` would, as ``__main__``."""
    filters = os.environ.get("PYTHONWARNINGS", "").split(",")
    warnings._processoptions([text for text in filters if text])
    first, *rest = arguments
    main = types.ModuleType("__main__")
    main.__dict__.update(__builtins__=__builtins__, __annotations__={})
    sys.modules["__main__"] = main
    if first == "-c":
        begin("", ["-c", *rest[1:]])
        exec(compile(rest[0], "<string>", "exec"), main.__dict__)
    elif first == "-m":
        begin(os.getcwd(), rest)
        runpy._run_module_as_main(rest[0])
    else:
        file = os.path.abspath(first)
        begin(os.path.dirname(file), arguments)
        main.__dict__.update(__file__=file, __cached__=None)
        with open(file, "rb") as opened:
            code = compile(opened.read(), file, "exec")
        exec(code, main.__dict__)


def begin(folder: str, argv: list[str]) -> None:
    """Set ``sys.path`` and ``sys.argv``; ``folder`` is where a program's own modules are."""
    entries = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    sys.path[:] = [folder, *entries, *PATH]
    sys.argv[:] = argv


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)  # the first optimizer imports torch's compiler
    gc.collect()
    gc.freeze()
    # An interrupt is for the tests; a program has Python's own handler again.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    request = serve()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    take_over(request)
    run(request["arguments"])

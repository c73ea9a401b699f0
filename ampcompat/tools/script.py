"""Start a script, module or piece of code as ``__main__``, where ``import apex`` finds ampcompat.

The one place that starts scripts: ``ampcompat run`` and the processes that ``ampcompat parity`` records use it. Besides
the alias, a script cannot tell it from ``python``.
"""

from __future__ import annotations

import builtins
import linecache
import os
import runpy
import sys
import textwrap
from collections.abc import Callable, Sequence
from importlib.machinery import BuiltinImporter, SourceFileLoader
from types import CodeType, ModuleType, TracebackType

from ampcompat._distribution import SHIM

#: First words of a target that are not files; the module or the code follows.
WORDS = ("-m", "-c")


def start(target: Sequence[str], force: bool = False) -> None:
    """Run ``target`` (see :func:`run`) and the processes that it starts with ampcompat for apex.

    Args:
        target: The script with its arguments.
        force: Take the place of an installed apex that still has amp.
    """
    from ampcompat.alias import install_as_apex

    if install_as_apex(force=force):
        hand_alias_to_children()
    run(target)


def why_amp_is_unused() -> str:
    """Why nothing that ran in this process was under amp, in words; "" where something may have been."""
    if "ampcompat.amp" not in sys.modules:
        return "the script never called amp.initialize"
    from ampcompat.tools.core import latest_session

    latest = latest_session()
    if latest is None:
        return "the script never called amp.initialize"
    return "" if latest.enabled else "the script called amp.initialize with enabled=False"


def run(target: Sequence[str]) -> None:
    """Run ``target``: ``[script, args…]``, ``["-m", module, args…]`` or ``["-c", code, args…]``."""
    first, *rest = target
    if first == "-m":
        run_module(rest[0], rest[1:])
    elif first == "-c":
        run_code(rest[0], rest[1:])
    else:
        run_path(first, rest)


def run_path(script: str, args: Sequence[str]) -> None:
    """Run the file ``script`` with ``args`` in ``sys.argv``."""
    sys.argv[:] = [script, *args]
    main = _new_main()
    path = os.path.abspath(script)
    _set_first_path(os.path.dirname(os.path.realpath(script)))
    main.__dict__.update(__file__=path, __package__=None, __loader__=SourceFileLoader("__main__", path))
    if sys.version_info < (3, 15):  # later pythons have no such name
        main.__dict__["__cached__"] = None

    def execute() -> None:
        with open(path, "rb") as file:
            source = file.read()
        exec(compile(source, path, "exec", dont_inherit=True), main.__dict__)

    _as_python_would(execute, ours=2)


def run_module(name: str, args: Sequence[str]) -> None:
    """Run the module ``name``, as ``python -m`` does, with ``args`` in ``sys.argv``."""
    sys.argv[:] = ["-m", *args]
    _new_main()
    _set_first_path(os.getcwd())
    _as_python_would(lambda: _runpy_main(name), ours=3)


def run_code(source: str, args: Sequence[str]) -> None:
    """Run ``source``, as ``python -c`` does, with ``args`` in ``sys.argv``."""
    if sys.version_info >= (3, 14):
        source = textwrap.dedent(source)
    sys.argv[:] = ["-c", *args]
    main = _new_main()
    _set_first_path("")
    main.__dict__.update(__package__=None, __loader__=BuiltinImporter)

    def execute() -> None:
        code = compile(source, "<string>", "exec", dont_inherit=True)
        _keep_lines(code, source)
        exec(code, main.__dict__)

    _as_python_would(execute, ours=2)


def hand_alias_to_children() -> None:
    """Let child processes find a stand-in for apex: spawned workers get ``sys.path``, the others ``PYTHONPATH``."""
    shim = str(SHIM)
    if shim not in sys.path:
        sys.path.append(shim)
    paths = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    if shim not in paths:
        os.environ["PYTHONPATH"] = os.pathsep.join([*paths, shim])


def _new_main() -> ModuleType:
    main = ModuleType("__main__")
    main.__dict__["__builtins__"] = builtins
    if sys.version_info < (3, 14):  # later pythons make it when it is asked for
        main.__annotations__ = {}
    sys.modules["__main__"] = main
    return main


def _keep_lines(code: CodeType, source: str) -> None:
    """Let tracebacks and ``inspect`` show the lines of ``source``, which no file has, as ``python -c`` does."""
    if sys.version_info >= (3, 13):
        name = "<string>"
        is_keyed_by_code = hasattr(linecache, "_interactive_cache")  # the first 3.13s know one source for each name
        linecache._register_code(code if is_keyed_by_code else name, source, name)


def _set_first_path(path: str) -> None:
    if not getattr(sys.flags, "safe_path", False):
        sys.path[0] = path


def _runpy_main(name: str) -> None:
    # What ``python -m`` itself calls: it runs in the present __main__ and words its errors as python does.
    run: Callable[..., object] = runpy._run_module_as_main  # type: ignore[attr-defined]
    run(name)


def _as_python_would(execute: Callable[[], None], ours: int) -> None:
    """Call ``execute``; if it raises, the interpreter prints and exits as it always does, less ``ours`` frames of ours.

    The exception is let through to the interpreter, which knows all about exit statuses, SIGINT and faulty hooks;
    only the hook that it will call is wrapped.
    """
    try:
        execute()
    except SystemExit:
        raise
    except BaseException as error:
        frames: TracebackType | None = error.__traceback__
        for _ in range(ours):
            frames = frames.tb_next if frames else None
        failure, hook = error, sys.excepthook

        def show(kind: type[BaseException], value: BaseException, trace: TracebackType | None) -> None:
            shown = _with_hint(value, frames if value is failure else trace)
            hook(kind, value.with_traceback(shown), shown)

        sys.excepthook = show
        raise


def _with_hint(error: BaseException, trace: TracebackType | None) -> TracebackType | None:
    """Add a hint to ``error`` if amp ran and provoked it; return its ``trace`` from the user's line to torch's."""
    if "ampcompat.amp" not in sys.modules or not isinstance(error, Exception):
        return trace
    from ampcompat.tools.core import add_hint
    from ampcompat.tools.frames import hide_tools

    if not why_amp_is_unused():
        add_hint(error)
    is_about_environment = str(error).startswith("AMPCOMPAT_")  # which of our lines reads it says nothing
    return hide_tools(trace, all_of_ours=True, last_too=is_about_environment)

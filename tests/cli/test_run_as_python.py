"""``ampcompat run X`` beside ``python X``: the same exit status, output and last line of the traceback."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from python_process import run_python

ROOT = Path(__file__).parents[2]
OURS = [sys.executable, "-m", "ampcompat", "run"]

SCRIPTS = {
    "fine": "print('fine')",
    "identity": """
import sys
print(sys.argv, __file__, __name__, __spec__, __package__, sys.path[0], __loader__.__class__.__name__)
print(globals().get('__cached__', 'no __cached__'))
print(sys.modules['__main__'].__dict__ is globals(), __builtins__, sorted(globals()))
""",
    "syntax_error": "x = 1\nif x\n    pass\n",
    "null_byte": "x = 1\n\0",
    "wrong_encoding": b"x = '\xff'\n",
    "exception": "def f():\n    raise ValueError('inside')\nf()\n",
    "chained": "try:\n    1 / 0\nexcept ZeroDivisionError as e:\n    raise RuntimeError('second') from e\n",
    "exit_3": "import sys; sys.exit(3)",
    "exit_text": "import sys; sys.exit('text')",
    "exit_none": "import sys; sys.exit()",
    "os_exit": "import os; os._exit(7)",
    "interrupt": "raise KeyboardInterrupt",
    "killed": "import os, signal; os.kill(os.getpid(), signal.SIGTERM)",
    "atexit_raises": "import atexit\n@atexit.register\ndef last():\n    raise ValueError('at exit')\n",
    "thread_raises": "import threading\nt = threading.Thread(target=lambda: 1 / 0)\nt.start()\nt.join()\n",
    "thread_goes_on": """
import sys, threading, time
def work():
    time.sleep(0.05)
    print(sys.modules['__main__'].__name__)
threading.Thread(target=work).start()
raise ValueError('main is done')
""",
    "own_hook": "import sys\nsys.excepthook = lambda k, v, t: print('hook', k, v, t.tb_lineno)\nraise ValueError\n",
    "broken_hook": "import sys\nsys.excepthook = None\nraise ValueError('x')\n",
    "parses": """
import argparse
p = argparse.ArgumentParser()
p.add_argument('--opt-level'); p.add_argument('-m'); p.add_argument('--lr', type=float)
p.add_argument('rest', nargs='*')
print(p.parse_args())
""",
    "sibling": "import helper\nfrom package import part\nprint(helper.NAME, part.NAME)\n",
    "pickles": "import pickle\nclass A: pass\nprint(pickle.loads(pickle.dumps(A())).__class__ is A, A.__module__)\n",
    "reads_stdin": "import sys\nprint(sys.stdin and sys.stdin.read())\n",
    "patches_torch": """
import sys, torch
from ampcompat import amp
backward, step, linear, call, to = (torch.Tensor.backward, torch.optim.SGD.step, torch.nn.functional.linear,
                                    torch.nn.Module.__call__, torch.Tensor.to)
torch.Tensor.backward = lambda self, *args, **kwargs: (print("backward"), backward(self, *args, **kwargs))[1]
torch.optim.SGD.step = lambda self, closure=None: (print("step"), step(self, closure))[1]
torch.nn.functional.linear = lambda x, w, b=None: linear(x, w, b) * 1
model = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer = amp.initialize(model, optimizer, opt_level=sys.argv[1])
torch.nn.Module.__call__ = lambda self, *args, **kwargs: call(self, *args, **kwargs)
torch.Tensor.to = lambda self, *args, **kwargs: to(self, *args, **kwargs)
torch.autocast = torch.amp.autocast = torch.softmax = None
with amp.scale_loss(model(torch.ones(1, 2)).sum(), optimizer) as scaled_loss:
    scaled_loss.backward()
optimizer.step()
torch.autograd._engine_run_backward = torch.optim.Optimizer = None
raise ValueError(f"{model(torch.ones(1, 2)).dtype} after patching")
""",
    "takes_torch_away": """
import sys, torch
torch.Tensor.half = torch.nn.Module.forward = torch.set_autocast_enabled = torch.distributed = None
del torch.matmul
sys.modules["torch"] = None
raise RuntimeError("gone")
""",
    "annotated": "x: int = 3\nprint(__annotations__)\n",
}


# The same ways as others here take: an exit status, an exception, a module that fails, options of the script's own.
LIKE_OTHERS = ("fine", "exit_none", "exception")
OF_TORCH = ("patches_torch", "takes_torch_away")
# A hook that raises is reported with its own frames; python's file tokenizer words two errors otherwise than compile().
WORDED_APART = ("broken_hook", "null_byte", "wrong_encoding")


@pytest.fixture(scope="module")
def scripts(tmp_path_factory):
    folder = tmp_path_factory.mktemp("scripts")
    for name, source in SCRIPTS.items():
        (folder / f"{name}.py").write_bytes(source if isinstance(source, bytes) else source.encode())
    (folder / "helper.py").write_text("NAME = 'helper'\n")
    package = folder / "package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "part.py").write_text("NAME = 'part'\n")
    (package / "relative.py").write_text(
        "import sys\nfrom .part import NAME\nprint(NAME, sys.argv, __spec__.name, __package__)\nsys.path[9999]\n"
    )
    (package / "__main__.py").write_text("from package.part import NAME\nprint(NAME, __name__)\n")
    return folder


def run(command, folder, **keywords):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "100"}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=240, **keywords)


def both(folder, *arguments, **keywords):
    keywords.setdefault("input", "typed\n")
    return run([sys.executable, *arguments], folder, **keywords), run([*OURS, *arguments], folder, **keywords)


@pytest.mark.rotate(3)
@pytest.mark.parametrize(
    "arguments",
    [
        *[
            pytest.param([f"{name}.py"], marks=[pytest.mark.slow] * (name in LIKE_OTHERS))
            for name in SCRIPTS
            if name not in (*WORDED_APART, *OF_TORCH)
        ],
        ["missing.py"],
        ["missing folder/missing.py"],
        ["parses.py", "--opt-level", "O9", "-m", "x", "--lr=-1e-3", "--", "-a", "--dtype"],
        ["parses.py", "--help"],
        pytest.param(["parses.py", "--lr"], marks=pytest.mark.slow),
        ["-m", "exception"],
        *[
            pytest.param(["-m", *words], marks=pytest.mark.slow)
            for words in (
                *(["syntax_error"], ["sibling"], ["exit_3"], ["interrupt"], ["killed"], ["own_hook"]),
                ["patches_torch", "O1"],
            )
        ],
        ["-m", "package.relative", "--flag", "--", "-x"],
        ["-m", "package"],
        ["-m", "package.absent"],
        ["-m", "absent"],
        ["-c", SCRIPTS["identity"].replace("'__main__'", '"__main__"'), "--opt-level", "x"],
        ["-c", "import helper; print(helper.NAME)\n1 / 0"],
        ["-c", "x = 1\nif x\n"],
        ["-c", "import inspect\ndef f():\n    return 1 / 0\nprint(inspect.getsource(f))\nf()\n"],
        ["-c", "\n    class A:\n        pass\n   \n    print(A.__name__)\n    1 / 0\n"],
        pytest.param(["-c", "import sys; sys.exit(3)"], marks=pytest.mark.slow),
    ],
    ids=" ".join,
)
def test_same_as_python(scripts, arguments):
    plain, ours = both(scripts, *arguments)
    assert ours.returncode == plain.returncode
    assert ours.stdout == plain.stdout
    assert without_addresses(ours.stderr) == without_addresses(plain.stderr)


@pytest.mark.rotate(2)
@pytest.mark.parametrize("arguments", [["patches_torch.py", "O1"], ["takes_torch_away.py"]], ids=" ".join)
def test_same_as_python_with_torch(scripts, arguments):
    plain, ours = (
        run_python([*words, *arguments], cwd=scripts, fresh=True) for words in ([], ["-m", "ampcompat", "run"])
    )
    assert (ours.returncode, ours.stdout) == (plain.returncode, plain.stdout)
    assert without_addresses(ours.stderr) == without_addresses(plain.stderr)


def without_addresses(text):
    return re.sub("0x[0-9a-f]+", "0x", text)


@pytest.mark.parametrize(("name", "last"), [*zip(WORDED_APART, ("ValueError: x", "SyntaxError:", "SyntaxError:"))])
def test_same_but_for_the_wording(scripts, name, last):
    plain, ours = both(scripts, f"{name}.py")
    if name == "null_byte" and plain.returncode == 0:
        pytest.skip("this Python (3.10, 3.11.2) ends a file at its null byte, and says nothing")
    assert ours.returncode == plain.returncode == 1
    assert ours.stderr.splitlines()[-1].startswith(last)
    assert plain.stderr.splitlines()[-1].startswith(last)


def test_an_interrupt_kills_by_signal(scripts):
    _, ours = both(scripts, "interrupt.py")
    assert ours.returncode == -signal.SIGINT
    assert ours.stderr.splitlines()[-1] == "KeyboardInterrupt"


def test_closed_stdin(scripts):
    command = f"exec {sys.executable} -m ampcompat run reads_stdin.py <&-"
    ours = run(["sh", "-c", command], scripts)
    assert (ours.returncode, ours.stdout) == (0, "None\n")


def test_the_help_and_the_version_of_the_command(scripts):
    version = run([sys.executable, "-m", "ampcompat", "--version"], scripts)
    assert (version.returncode, version.stdout.split()[0]) == (0, "ampcompat")
    usage = run([sys.executable, "-m", "ampcompat", "--help"], scripts)
    assert usage.returncode == 0
    assert "run a script that imports apex" in usage.stdout

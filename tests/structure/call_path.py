"""Follow one warm training step through ampcompat's own Python code, and ``initialize`` before it.

    python tests/structure/call_path.py O2 [O1 ...] [--list]

Prints for each level, as a line of JSON, the calls of functions defined under ``ampcompat/``, how many functions and
files these are, and the moves: calls from another file than the callee's. ``--list`` prints the path instead. Torch's
functions are not counted. Python 3.11 and older count a comprehension as a call; newer ones inline it.
"""

import json
import os
import sys
import warnings
from pathlib import Path

import torch

import ampcompat
from ampcompat import amp

OWN = str(Path(ampcompat.__file__).parent) + "/"
WARM = 40  # steps: past what happens in the first ones only


class CallPath:
    """Context that follows the calls made inside."""

    def __init__(self):
        self.calls, self.moves, self.functions, self.files, self.lines = 0, 0, set(), set(), []

    def __enter__(self):
        self.stack = [""]
        sys.setprofile(self.see)

    def __exit__(self, *exc):
        sys.setprofile(None)

    def see(self, frame, event, _):
        code = frame.f_code
        if event not in ("call", "return") or not code.co_filename.startswith(OWN):
            return
        if event == "return":
            if len(self.stack) > 1:
                self.stack.pop()
            return
        file = code.co_filename[len(OWN) :]
        self.calls += 1
        self.moves += file != self.stack[-1]
        self.functions.add((file, code.co_name, code.co_firstlineno))
        self.files.add(file)
        self.lines.append("  " * len(self.stack) + f"{file}: {code.co_name}")
        self.stack.append(file)

    def figures(self):
        return {
            "calls": self.calls,
            "functions": len(self.functions),
            "files": len(self.files),
            "moves": self.moves,
        }


def follow(level):
    """The call paths of ``initialize`` and of one warm step at ``level``: three linear layers, SGD with momentum."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(*[torch.nn.Linear(16, 16) for _ in range(3)])
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    beginning, step, x = CallPath(), CallPath(), torch.randn(8, 16)
    scale = None if level in ("O0", "O3") else "dynamic"
    with beginning:
        amp.initialize(model, optimizer, opt_level=level, loss_scale=scale, verbosity=0)
    for index in range(WARM):
        now = step if index == WARM - 1 else CallPath()
        with now:
            loss = model(x).float().pow(2).mean()
        block = amp.scale_loss(loss, optimizer)  # finds the optimizer's session; the figures leave it out
        with now:
            with block as scaled:
                scaled.backward()
            optimizer.step()
            optimizer.zero_grad()
    return {"initialize": beginning, "step": step}


def show(level):
    paths = follow(level)
    if "--list" in sys.argv:
        for name, path in paths.items():
            print(f"-- {name}", *path.lines, sep="\n")
    else:
        print(json.dumps({name: path.figures() for name, path in paths.items()}))


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)  # the first optimizer makes torch import its compiler
    for level in [word for word in sys.argv[1:] if word != "--list"]:
        child = os.fork()  # a process for each: the first model imports what the next ones find
        if not child:
            show(level)
            sys.exit()
        if os.waitpid(child, 0)[1]:
            sys.exit(1)

"""Scripts in the manner of well-known apex users train unedited under ``ampcompat run`` at every level."""

import json
from pathlib import Path

import pytest
from python_process import run_python, without_leaks_of_triton

ROOT = Path(__file__).parents[2]
SCRIPTS = sorted((Path(__file__).parent / "scripts").glob("*.py"))
LEVELS = ["O1 O2", pytest.param("O0 O3", marks=pytest.mark.slow)]

# One process forks for each script, which runs at each level.
# What tells the levels apart is looked at from outside: weights and outputs of the layers that multiply, and what the
# optimizer steps.
DRIVER = """
import json, os, sys, torch
folder, levels, *scripts = sys.argv[1:]
for script in scripts:
    if not os.fork():
        break
    os.wait()
else:
    sys.exit()
log = os.open(os.path.join(folder, os.path.basename(script)), os.O_CREAT | os.O_WRONLY)
os.dup2(log, 1)
os.dup2(log, 2)

from ampcompat.cli import main
from internals import reset
from torch.optim.optimizer import register_optimizer_step_pre_hook

layers, stepped = set(), set()

def layer(module, args, output):
    if isinstance(module, (torch.nn.Linear, torch.nn.Conv2d, torch.nn.ConvTranspose2d)):
        layers.add((str(module.weight.dtype), str(output.dtype)))

def step(optimizer, args, kwargs):
    stepped.update(str(p.dtype) for group in optimizer.param_groups for p in group["params"])

torch.nn.modules.module.register_module_forward_hook(layer)
register_optimizer_step_pre_hook(step)
for at in levels.split():
    print("==", at, flush=True)
    assert main(["run", "--opt-level", at, script]) == 0
    print("seen", json.dumps([sorted(layers), sorted(stepped)]), flush=True)
    layers.clear(); stepped.clear()
    reset()
print("== end")
"""
FLOAT, HALF = "torch.float32", "torch.float16"
# Level: (weight, output) of the layers, dtypes that are stepped.
MARKS = {
    "O0": ([[FLOAT, FLOAT]], [FLOAT]),
    "O1": ([[FLOAT, HALF]], [FLOAT]),
    "O2": ([[HALF, HALF]], [FLOAT]),
    "O3": ([[HALF, HALF]], [HALF]),
}


def run(arguments, fresh=False):
    done = run_python(arguments, cwd=ROOT, fresh=fresh)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


def losses(lines):
    return [json.loads(line)["loss"] for line in lines if line.startswith("{")]


def assert_falls(seen, steps):
    assert len(seen) >= steps
    assert sum(seen[-5:]) < 0.9 * sum(seen[:5])


@pytest.fixture(scope="module")
def outputs(levels, tmp_path_factory):
    """The folder of what each script printed."""
    folder = tmp_path_factory.mktemp("outputs")
    run(["-c", DRIVER, folder, levels, *SCRIPTS])
    return folder


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
@pytest.mark.parametrize("levels", LEVELS, scope="module")
def test_trains_at_every_level(script, levels, outputs):
    out = (outputs / script.name).read_text()
    *parts, end = without_leaks_of_triton(out).split("== ")[1:]
    assert end == "end\n", out[-4000:]
    by_level = {part[:2]: part.splitlines() for part in parts}
    assert list(by_level) == levels.split()
    for level, lines in by_level.items():
        assert_falls(losses(lines), steps=20)
        # The scripts fall back to float32 in silence when the import fails: that amp was in force has to be seen.
        (seen,) = [json.loads(line[5:]) for line in lines if line.startswith("seen ")]
        assert (seen[0], seen[1]) == MARKS[level], level


#: Without its last lines torch aborts a rank now and then, when it tears down what DDP and its group hold.
AS_A_RANK = """
import os, runpy, sys
runpy.run_path(sys.argv.pop(1), run_name="__main__")
sys.stdout.flush()
os._exit(0)
"""


@pytest.mark.slow
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_trains_under_torchrun(script):
    launcher = ["-m", "torch.distributed.run", "--nproc_per_node=2", "--master_port=0", "--standalone"]
    out = run([*launcher, "-m", "ampcompat", "run", "--opt-level", "O1", "-c", AS_A_RANK, script], fresh=True)
    assert_falls(losses(out.splitlines()), steps=20)

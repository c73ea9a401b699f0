"""Run a folder of scripts in this process, under ampcompat's ``apex`` or where neither is installed."""

import contextlib
import runpy
import sys

import pytest
import torch
from internals import reset

from ampcompat.alias import install_as_apex
from ampcompat.tools.migrate.tree import migrate_paths

#: What a migrated script does without.
OURS = ("apex", "amp_C", "apex_C", "fused_adam_cuda", "fused_layer_norm_cuda")


def write(folder, files):
    """Write the files of a tree."""
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


def migrate_tree(folder, to="ampcompat"):
    """The changes of a folder; nothing is written."""
    return migrate_paths([folder], to)


def migrate(folder):
    """Migrate a folder in place; what is left to the reader, by file."""
    changes = migrate_tree(folder, "native")
    for change in changes:
        if change.changed:
            change.write()
    return {change.name: [*change.todos, change.problem] for change in changes if change.todos or change.problem}


def train(folder, script, apex):
    """What a script of a folder leaves in ``LOSSES`` and in weights, and how many linear layers ran under autocast."""
    under_autocast = 0
    linear = torch.nn.functional.linear

    def counted(*args, **kwargs):
        nonlocal under_autocast
        under_autocast += torch.is_autocast_enabled("cpu")
        return linear(*args, **kwargs)

    with imports(folder, apex), pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.nn.functional, "linear", counted)
        left = run(folder, script)
        modules = [module for module in sys.modules.values() if is_of(module, folder)]
        losses = [loss for names in [left, *map(vars, modules)] for loss in names.get("LOSSES", ())]
    models = [value for name, value in sorted(left.items()) if isinstance(value, torch.nn.Module)]
    weights = [float(param.detach().sum()) for model in models for param in model.parameters()]
    return losses + weights, under_autocast


def run(folder, script):
    """Run a script as ``python`` does, or ``python -m`` in a package; the names that it leaves."""
    path = folder / script
    if (path.parent / "__init__.py").exists():
        return runpy.run_module(script.removesuffix(".py").replace("/", "."), run_name="__main__", alter_sys=True)
    return runpy.run_path(str(path), run_name="__main__")


def is_of(module, folder):
    """Whether a module is of a folder; a package without ``__init__.py`` has paths, and no file."""
    names = getattr(module, "__dict__", {})
    places = [names.get("__file__"), *names.get("__path__", ())]
    return any(str(place).startswith(str(folder)) for place in places)


@contextlib.contextmanager
def imports(folder, apex):
    """Make the modules of a folder importable, and apex: as ampcompat, or not at all."""
    before = {name: module for name, module in sys.modules.items() if name.partition(".")[0] not in OURS}
    functions = {name: getattr(torch, name) for name in ("sigmoid", "einsum")}
    with pytest.MonkeyPatch.context() as patch:
        for name in set(sys.modules) - set(before):
            patch.delitem(sys.modules, name)
        if apex:
            install_as_apex(force=True)
        else:
            for name in OURS:
                patch.setitem(sys.modules, name, None)
        for name, function in functions.items():  # scripts register them
            patch.setattr(torch, name, function)
        patch.syspath_prepend(folder)
        patch.chdir(folder)
        try:
            yield
        finally:
            reset()
            for name in [name for name, module in sys.modules.items() if is_of(module, folder)]:
                del sys.modules[name]


def assert_trains_alike(folder, script="train.py"):
    """Train under apex, migrate, train again, and compare the losses; return what was left to the reader."""
    expected, _ = train(folder, script, apex=True)
    left = migrate(folder)
    losses, under_autocast = train(folder, script, apex=False)
    assert len(losses) == len(expected) > 0
    # Operations outside of forward run in float32 where apex casts them to half: 2^-7.
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected), rtol=2**-7, atol=2**-7)
    return left, under_autocast

"""The public names and signatures are those of ``public_api.json``: a change must be made there too, on purpose.

After such a change: ``PYTHONPATH=. python tests/packaging/test_public_api.py`` writes the file anew.
"""

import argparse
import importlib
import inspect
import json
import pkgutil
import re
from pathlib import Path

from ampcompat import cli

FILE = Path(__file__).with_name("public_api.json")
MODULES = [
    "ampcompat",
    "ampcompat.RNN",
    "ampcompat.amp",
    "ampcompat.amp._process_optimizer",
    "ampcompat.amp.amp",
    "ampcompat.amp.frontend",
    "ampcompat.amp.handle",
    "ampcompat.amp.opt",
    "ampcompat.amp.scaler",
    "ampcompat.amp_C",
    "ampcompat.apex_C",
    "ampcompat.contrib.clip_grad",
    "ampcompat.contrib.xentropy",
    "ampcompat.tools.explain",
    "ampcompat.fused_adam_cuda",
    "ampcompat.fused_layer_norm_cuda",
    "ampcompat.fp16_utils",
    "ampcompat.fp16_utils.loss_scaler",
    "ampcompat.mlp",
    "ampcompat.multi_tensor_apply",
    "ampcompat.normalization",
    "ampcompat.optimizers",
    "ampcompat.parallel",
    "ampcompat.tools.report",
    "ampcompat.tools.scale_log",
    "ampcompat.testing",
    "ampcompat.testing.common_utils",
]


def signature(function):
    """Names, kinds and defaults; without annotations and addresses, which print differently each time."""
    found = inspect.signature(function)
    bare = [p.replace(annotation=inspect.Parameter.empty) for p in found.parameters.values()]
    return re.sub(" at 0x[0-9a-f]+", "", str(found.replace(parameters=bare, return_annotation=inspect.Signature.empty)))


def described(name, value):
    """A function by its signature, a class by its public members that are ours (torch's vary with torch)."""
    if inspect.isfunction(value):
        return {name: signature(value)}
    members = {name: type(value).__name__ if not inspect.isclass(value) else "class"}
    for owner in reversed(value.__mro__ if inspect.isclass(value) else ()):
        if owner.__module__.startswith("ampcompat"):
            for key, member in vars(owner).items():
                function = member.__func__ if isinstance(member, (staticmethod, classmethod)) else member
                if key == "__init__" or not key.startswith("_"):
                    kind = signature(function) if inspect.isfunction(function) else type(member).__name__
                    members[f"{name}.{key}"] = kind
    return members


def public_names(module):
    """``__all__``, or what the module itself defines."""
    own = [name for name, value in vars(module).items() if getattr(value, "__module__", None) == module.__name__]
    return [name for name in getattr(module, "__all__", own) if not name.startswith("__")]


def command_line():
    """The options of each command."""
    commands = argparse.ArgumentParser().add_subparsers()
    found = {}
    for name in [name for _, name, _ in pkgutil.iter_modules(cli.__path__) if not name.startswith("_")]:
        parser = importlib.import_module(f"{cli.__name__}.{name}").add_parser(commands)
        found[name] = sorted("/".join(action.option_strings) or action.dest for action in parser._actions)
    return found


def public_api():
    """Names and signatures by module."""
    found = {"command line": command_line()}
    for module_name in MODULES:
        module = importlib.import_module(module_name)
        found[module_name] = {}
        for name in public_names(module):
            found[module_name].update(described(name, getattr(module, name)))
    return found


def test_the_public_api_is_the_recorded_one():
    recorded, now = json.loads(FILE.read_text(encoding="utf-8")), public_api()
    changed = [
        f"{module}.{name}: {recorded.get(module, {}).get(name)} -> {now.get(module, {}).get(name)}"
        for module in sorted({*recorded, *now})
        for name in sorted({*recorded.get(module, {}), *now.get(module, {})})
        if recorded.get(module, {}).get(name) != now.get(module, {}).get(name)
    ]
    assert not changed, "the public API changed; if on purpose, write the record anew:\n" + "\n".join(changed)


if __name__ == "__main__":
    FILE.write_text(json.dumps(public_api(), indent=1, sort_keys=True) + "\n", encoding="utf-8")

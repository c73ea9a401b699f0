"""Collect what a bug report needs to know of a machine."""

from __future__ import annotations

import importlib.util
import os
import platform
import sys
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from ampcompat import __version__
from ampcompat.alias import real_apex
from ampcompat.tools.dtypes import dtype_name

if TYPE_CHECKING:
    import torch

#: Packages that amp works with, or that its tools need.
PACKAGES = ("numpy", "transformers", "timm", "pytorch-lightning", "triton", "matplotlib", "pytest")


#: Facts by name, or by name and that of what they are about.
Facts: TypeAlias = dict[str, str | dict[str, str]]
#: What stands between the two.
_BETWEEN = {"devices": ": ", "variables": "=", "packages": " "}


def environment() -> Facts:
    """Versions, devices and settings, as plain data; imports torch and asks its devices what they are."""
    return {
        "ampcompat": __version__,
        "python": f"{platform.python_version()} ({platform.python_implementation()}, {platform.platform()})",
        **_torch_facts(),
        "apex": _apex(),
        "variables": {name: value for name, value in sorted(os.environ.items()) if name.startswith("AMPCOMPAT_")},
        "packages": {name: found for name in PACKAGES if (found := _version(name))},
    }


def text(facts: Facts) -> str:
    """``facts``, a line each."""
    rows: list[tuple[str, str]] = []
    for name, value in facts.items():
        if isinstance(value, dict):
            lines = [f"{key}{_BETWEEN[name]}{one}" for key, one in value.items()]
            rows += zip([name, *[""] * len(lines)], lines or ["none"], strict=False)
        else:
            rows.append((name, value))
    return "\n".join(f"{name:<10} {value}" for name, value in rows)


def _torch_facts() -> Facts:
    try:
        import torch
    except Exception as problem:  # whatever is wrong with it, the rest is worth reporting
        return {"torch": f"cannot be imported: {type(problem).__name__}: {problem}", "devices": {}}
    built = [
        f"{name} {number}" for name, number in (("CUDA", torch.version.cuda), ("ROCm", torch.version.hip)) if number
    ]
    return {
        "torch": f"{torch.__version__} ({', '.join(built) or 'no CUDA'})",
        "devices": {name: describe_device(name) for name in device_names()},
    }


def device_names() -> list[str]:
    """``"cpu"``, and every device of the accelerator that torch sees, such as ``"cuda:0"``."""
    import torch

    from ampcompat import _torch

    kind = _torch.accelerator()
    if kind == "cpu":
        return ["cpu"]
    count = getattr(getattr(torch, kind), "device_count", lambda: 1)()
    return ["cpu", *(f"{kind}:{index}" for index in range(count))]


def describe_device(name: str) -> str:
    """Name the device type ``name`` and its fast half dtypes."""
    import torch

    from ampcompat import _torch
    from ampcompat._types import HALF_DTYPES
    from ampcompat.tools.devices import LEAST_CAPABILITY

    device = torch.device(name)
    if device.type == "cpu":
        slow = _torch.halves_without_cpu_convolution()
        halves = _halves((half, half not in slow) for half in HALF_DTYPES)
        return f"{_processor()}, {torch.get_num_threads()} threads; {halves}"
    if device.type == "cuda":
        found = torch.cuda.get_device_properties(device)
        if torch.version.hip:
            return f"{found.name}, {found.total_memory / 2**30:.0f} GiB"
        capability = found.major, found.minor
        halves = _halves((half, capability >= least) for half, least in LEAST_CAPABILITY.items())
        return f"{found.name}, {found.total_memory / 2**30:.0f} GiB, capability {found.major}.{found.minor}; {halves}"
    return "which half dtypes are fast here is not known"


def _halves(fast: Iterable[tuple[torch.dtype, bool]]) -> str:
    return ", ".join(f"{dtype_name(half)} {'fast' if is_fast else 'slow'}" for half, is_fast in fast)


def _processor() -> str:
    """The processor's name, as well as the system tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _apex() -> str:
    """Which apex ``import apex`` would find without ampcompat."""
    place = real_apex()
    if place is not None:
        return f"{_version('apex') or 'of unknown version'}, with amp, at {place}"
    if "apex" in sys.modules or importlib.util.find_spec("apex") is not None:
        return f"{_version('apex') or 'of unknown version'}, without amp"
    return "not installed"


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""

"""What this machine is, which half dtypes its arithmetic is native for, and how to measure time on it."""

import platform
import re
import time
from pathlib import Path

import torch

#: Flags of /proc/cpuinfo (x86's and Arm's) of processors that multiply matrices in a half dtype.
FLAGS = {
    torch.bfloat16: {"avx512_bf16", "amx_bf16", "avx_ne_convert", "bf16", "svebf16"},
    torch.float16: {"avx512_fp16", "amx_fp16", "asimdhp"},
}


def _cpuinfo(*keys):
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return [line.partition(":")[2].strip() for line in lines if line.partition(":")[0].strip() in keys]


def clock(device):
    """Choose a function that returns seconds: processor time where all work is the caller's, in one thread.

    That leaves out what other programs take, and what the host of a virtual machine gives to others, which can be most
    of a second here. A GPU works beside its host, and needs the time on the wall.
    """
    return time.perf_counter if device == "cuda" else time.process_time


def native_halves(device):
    """Half dtypes that ``device`` computes in natively; elsewhere they are emulated, and slower than float32."""
    if device != "cpu":
        return [torch.float16] + [torch.bfloat16] * torch.cuda.is_bf16_supported()
    flags = {flag for line in _cpuinfo("flags", "Features") for flag in line.split()}
    return [dtype for dtype, names in FLAGS.items() if names & flags]


def describe(device):
    """A name for files, and a sentence."""
    if device == "cuda":
        name = torch.cuda.get_device_name()
        return _file_name(name), f"{name}, CUDA {torch.version.cuda}"
    names = _cpuinfo("model name")
    cpu = f"{names[0]}, {len(names)} logical cores" if names else platform.processor() or platform.machine()
    native = " and ".join(str(dtype).removeprefix("torch.") for dtype in native_halves(device)) or "no half dtype"
    return _file_name(names[0] if names else cpu), f"{cpu}; native for {native}; one thread per process; no GPU"


def _file_name(model):
    """As in "intel-xeon" for "Intel(R) Xeon(R) Processor"."""
    plain = re.sub(r"\(\w+\)|\bprocessor\b|@.*", " ", model.lower())
    return "-".join(re.findall(r"[a-z0-9_]+", plain))

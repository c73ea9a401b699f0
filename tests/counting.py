"""Counts, which do not depend on how busy the machine is: dispatcher calls, host syncs, bytes, kernel launches."""

import warnings

import torch
from torch.utils._python_dispatch import TorchDispatchMode

#: Ops that make the host wait for the device.
SYNCS = {"aten::_local_scalar_dense", "aten::equal", "aten::is_nonzero", "aten::nonzero"}


class Counter(TorchDispatchMode):
    """Counts the ops below autograd and autocast, and those that make the host wait."""

    def __init__(self):
        super().__init__()
        self.ops = self.syncs = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.ops += 1
        self.syncs += func.name().partition(".")[0] in SYNCS
        return func(*args, **(kwargs or {}))


def counted(call):
    """Ops and host syncs of ``call()``."""
    with Counter() as counter:
        call()
    return {"ops": counter.ops, "syncs": counter.syncs}


def peak_bytes(call, names):
    """The most bytes that the CPU held in the ``torch.profiler.record_function`` regions ``names`` of ``call()``.

    Counted from zero at the start of ``call()``; temporaries inside of ops included.
    """
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        call()
    events = sorted(profile.profiler.kineto_results.events(), key=lambda event: event.start_ns())
    regions = [(e.name(), e.start_ns(), e.start_ns() + e.duration_ns()) for e in events if e.name() in names]
    now, peaks = 0, {}
    changes = [(event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]"]
    for name, start, end in regions:
        now = sum(change for when, change in changes if when < start)
        peak = now
        for when, change in changes:
            if start <= when <= end:
                now += change
                peak = max(peak, now)
        peaks[name] = peak
    return peaks


def page_faults(step, steps=16):
    """Page faults per step: each is memory that glibc gave back to the system, and takes from it again."""
    import resource

    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(steps):
        step()
    return (resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) // steps


def peak_of_a_step(make_step):
    """The most bytes that the CPU held in the eighth step of ``make_step()``, everything that it made included."""

    def trained():
        step = make_step()
        for _ in range(7):  # the first steps compare masters by value
            step()
        with torch.profiler.record_function("measured step"):
            step()

    return peak_bytes(trained, {"measured step"})["measured step"]


def counted_on_cuda(call):
    """Peak memory, host syncs and kernel launches of ``call()`` on CUDA."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    torch.cuda.set_sync_debug_mode("warn")
    with warnings.catch_warnings(record=True) as waits:
        warnings.simplefilter("always")
        call()
    torch.cuda.set_sync_debug_mode("default")
    syncs = sum("synchroniz" in str(wait.message) for wait in waits)
    peak = torch.cuda.max_memory_allocated()
    kinds = torch.profiler.ProfilerActivity
    with torch.profiler.profile(activities=[kinds.CPU, kinds.CUDA]) as profile:
        call()
        torch.cuda.synchronize()
    launches = sum(event.count for event in profile.key_averages() if "LaunchKernel" in event.key)
    return {"peak bytes": peak, "syncs": syncs, "launches": launches}

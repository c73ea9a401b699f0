"""How a test leaves a process group."""

import time

import torch.distributed as dist


def destroy_process_group():
    """Destroy the default group, a moment after its last collective.

    torch 2.4 joins gloo's threads with the GIL held. A thread that still drops the last reference to a tensor needs it,
    and both would wait for ever.
    """
    time.sleep(0.2)
    dist.destroy_process_group()

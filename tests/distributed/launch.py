"""Runs the checks on N ranks: ``python launch.py N DIR`` forks them, ``torchrun launch.py DIR`` is started N times.

Each rank writes what failed to ``DIR/RANK.json``; the exit status is 0 only if every rank finished and nothing failed.
"""

import datetime
import json
import os
import sys
import traceback
from pathlib import Path
from typing import NoReturn

import torch.distributed as dist


def rank_main(directory: str) -> int:
    from all_checks import CHECKS
    from checks import run_all

    dist.init_process_group("gloo", timeout=datetime.timedelta(minutes=10))
    failed = run_all(CHECKS)
    Path(directory).mkdir(parents=True, exist_ok=True)
    Path(directory, f"{dist.get_rank()}.json").write_text(json.dumps(failed))
    dist.barrier()  # torchrun ends the others as soon as one has failed
    return 1 if failed else 0


def run_rank(directory: str) -> NoReturn:
    """Run this process as a rank, and end it.

    The process group is not destroyed and the interpreter not ended: torch hangs or aborts there now and then, when a
    thread of gloo's has not dropped the last Python object yet.
    """
    status = 1
    try:
        status = rank_main(directory)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def fork_rank(rank: int, directory: str) -> int:
    """Start a rank; returns its process id."""
    child = os.fork()
    if not child:
        os.environ["RANK"] = str(rank)
        run_rank(directory)
    return child


def main() -> int:
    if "RANK" in os.environ:
        run_rank(sys.argv[1])
    import all_checks  # noqa: F401 - imported once, before the ranks fork
    import torch.distributed.checkpoint.state_dict
    import torch.distributed.fsdp
    import torch.distributed.optim  # noqa: F401

    world, directory = int(sys.argv[1]), sys.argv[2]
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=os.environ["TEST_PORT"], WORLD_SIZE=str(world))
    children = [fork_rank(rank, directory) for rank in range(world)]
    return int(any([os.waitpid(child, 0)[1] for child in children]))  # noqa: C419 - waits for each


if __name__ == "__main__":
    sys.exit(main())

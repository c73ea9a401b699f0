"""Runs the checks on N ranks: ``python launch.py N DIR`` forks them, ``torchrun launch.py DIR`` is started N times.

Each rank writes what failed to ``DIR/RANK.json``; the exit status is 0 only if every rank finished and nothing failed.
"""

import datetime
import json
import os
import sys
import traceback
from pathlib import Path

import torch.distributed as dist


def rank_main(directory: str) -> int:
    import checks

    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
    failed = checks.run_all()
    Path(directory).mkdir(parents=True, exist_ok=True)
    Path(directory, f"{dist.get_rank()}.json").write_text(json.dumps(failed))
    dist.barrier()  # torchrun ends the others as soon as one has failed
    dist.destroy_process_group()
    return 1 if failed else 0


def fork_rank(rank: int, directory: str) -> int:
    """Start a rank; returns its process id."""
    child = os.fork()
    if child:
        return child
    os.environ["RANK"] = str(rank)
    status = 1
    try:
        status = rank_main(directory)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def main() -> int:
    if "RANK" in os.environ:
        return rank_main(sys.argv[1])
    import checks  # noqa: F401 - imported once, before the ranks fork

    world, directory = int(sys.argv[1]), sys.argv[2]
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=os.environ["TEST_PORT"], WORLD_SIZE=str(world))
    children = [fork_rank(rank, directory) for rank in range(world)]
    return int(any([os.waitpid(child, 0)[1] for child in children]))  # noqa: C419 - waits for each


if __name__ == "__main__":
    sys.exit(main())

"""Runs the checks on N ranks: ``python launch.py N DIR`` forks them, ``torchrun launch.py DIR`` is started N times."""

import datetime
import json
import os
import sys
from pathlib import Path

import torch.distributed as dist


def rank_main(directory: str) -> None:
    import checks

    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
    failed = checks.run_all()
    rank = dist.get_rank()
    Path(directory, f"{rank}.json").write_text(json.dumps(failed))
    dist.destroy_process_group()


def main() -> None:
    if "RANK" in os.environ:
        rank_main(sys.argv[1])
        return
    import checks  # noqa: F401 - imported once, before the ranks fork

    world, directory = int(sys.argv[1]), sys.argv[2]
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=os.environ["TEST_PORT"], WORLD_SIZE=str(world))
    children = []
    for rank in range(world):
        child = os.fork()
        if child == 0:
            os.environ["RANK"] = str(rank)
            try:
                rank_main(directory)
            finally:
                sys.stdout.flush()
                os._exit(0)
        children.append(child)
    for child in children:
        os.waitpid(child, 0)


if __name__ == "__main__":
    main()

"""``migrate --verify``: the script before and after its migration, run on this machine and compared step by step.

Nothing here imports torch, but for the two modules that run beside the script: ``before`` and ``after``.
"""

from ampcompat.migrate.verify.compare import Verdict, verdict
from ampcompat.migrate.verify.copies import copies
from ampcompat.migrate.verify.launch import Options, Trace, run

__all__ = ["Options", "Trace", "Verdict", "copies", "run", "verdict"]

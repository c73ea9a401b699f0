"""``migrate --verify``: the script before and after its migration, run on this machine and compared step by step.

Nothing here imports torch: both runs are processes of :mod:`ampcompat.tools.recording`.
"""

from ampcompat.tools.migrate.verify.compare import Verdict, verdict
from ampcompat.tools.migrate.verify.copies import copies
from ampcompat.tools.migrate.verify.launch import Options, Trace, run
from ampcompat.tools.migrate.verify.near import rewritten_near

__all__ = ["Options", "Trace", "Verdict", "copies", "rewritten_near", "run", "verdict"]

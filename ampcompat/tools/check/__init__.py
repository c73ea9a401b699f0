"""Static check of a repository that uses apex.

It reads each file without running any, and says of each name of apex in it whether that works here. Rules find mistakes
in mixed precision that a run does not tell, at the levels of the ``amp.initialize`` calls that govern the code: those
of its file, or else of the files that an import ties to it.
"""

from ampcompat.tools.check.findings import Finding, Report
from ampcompat.tools.check.scan import scan, scan_source

__all__ = ["Finding", "Report", "scan", "scan_source"]

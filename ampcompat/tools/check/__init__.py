"""Static check of a repository that uses apex: what it calls, whether that works here, and mistakes in it.

Nothing is imported from the scanned code and torch is not needed: files are read as bytes and parsed with :mod:`ast`.
"""

from ampcompat.tools.check.findings import Finding, Report
from ampcompat.tools.check.scan import scan, scan_source

__all__ = ["Finding", "Report", "scan", "scan_source"]

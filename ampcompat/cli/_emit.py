"""Where the tools write: results to standard output, complaints to standard error."""

import sys


def emit(text: str, error: bool = False, end: str = "\n") -> None:
    """Write ``text`` and ``end``; characters that the stream cannot show are escaped."""
    stream = sys.stderr if error else sys.stdout
    encoding = getattr(stream, "encoding", None) or "utf-8"
    stream.write(text.encode(encoding, "backslashreplace").decode(encoding) + end)
    stream.flush()

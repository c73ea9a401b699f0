"""Write results to standard output and complaints to standard error, in colours on terminals."""

import os
import sys

_COLOURS = {"red": "31", "green": "32", "yellow": "33", "cyan": "36"}


def emit(text: str, error: bool = False, end: str = "\n") -> None:
    """Write ``text`` and ``end``; characters that the stream cannot show are escaped.

    Where the stream is read no further, as by ``| head -1``, the rest is dropped.
    """
    stream = sys.stderr if error else sys.stdout
    encoding = getattr(stream, "encoding", None) or "utf-8"
    try:
        stream.write(text.encode(encoding, "backslashreplace").decode(encoding) + end)
        stream.flush()
    except BrokenPipeError:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())  # what is in its buffer goes there, too, when Python ends
        os.close(nowhere)


def painted(text: str, colour: str) -> str:
    """``text`` in ``colour`` (red, green, yellow or cyan) where standard output is a terminal that shows colours.

    ``NO_COLOR`` switches colours off (no-color.org), ``FORCE_COLOR`` on.
    """
    if os.environ.get("NO_COLOR"):
        return text
    terminal = sys.stdout.isatty() and os.environ.get("TERM", "") not in ("", "dumb")
    return f"\x1b[{_COLOURS[colour]}m{text}\x1b[0m" if terminal or os.environ.get("FORCE_COLOR") else text


def painted_diff(text: str) -> str:
    """A unified diff, added lines green, removed ones red, places cyan."""
    colours = {"+": "green", "-": "red", "@": "cyan"}
    lines = text.split("\n")
    return "\n".join(painted(line, colours[line[0]]) if line[:1] in colours else line for line in lines)

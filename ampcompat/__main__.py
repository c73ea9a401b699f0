"""``python -m ampcompat``: the same as ``ampcompat``."""

import sys

from ampcompat.cli import main

if __name__ == "__main__":
    sys.exit(main())

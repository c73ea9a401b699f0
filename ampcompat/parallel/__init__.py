"""``apex.parallel``."""

"""A script in a process of its own, ended after some optimizer steps, and what it did at each of them.

``ampcompat parity`` stands on it. The command imports :mod:`.process` and :mod:`.events`, which need no torch. The
process that it starts runs :mod:`.child`, which writes a journal (:mod:`.journal`), a line of JSON for each event.
"""

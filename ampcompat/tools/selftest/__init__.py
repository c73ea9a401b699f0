"""``ampcompat test`` and ``ampcompat env``: whether amp works on this machine, and what the machine is."""

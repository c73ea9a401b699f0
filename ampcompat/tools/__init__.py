"""Tools that work on scripts, beside the library that scripts import."""

"""Mutation of ``ampcompat/amp``: ``python -m tests.mutation map`` and then ``run``, from the repository's root."""

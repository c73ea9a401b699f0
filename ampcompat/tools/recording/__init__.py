"""What a run did, step by step.

:class:`.recorder.Recorder` observes the run of this process. It hands a :class:`.steps.Step` to ``amp.on_step``, to the
precision report and to ``assert_opt_level_parity``. ``ampcompat parity`` runs a script in a process of its own
(:mod:`.child`), which records it into a journal (:mod:`.journal`), and follows that process (:mod:`.process`) without
importing torch.
"""

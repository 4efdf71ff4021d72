"""The stages of a run: a module each, named as in `infalign.runs.STAGES`, whose ``units`` declares its work.

A stage takes the settings and paths that it needs, reports progress through ``on_progress(done, total, note)`` and
returns a summary that JSON can encode. `infalign.runs.pipeline` decides when it runs and whether its result is stale.
"""

"""The stages of a run: a module each, named as in `infalign.runs.STAGES`, whose ``units`` declares its work.

A stage takes the settings and paths that it needs, reports progress through ``on_progress(done, total, note)`` and
returns a JSON-able summary. When to do it, and whether its result still holds, is `infalign.runs.pipeline`'s business.
"""

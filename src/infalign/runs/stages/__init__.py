"""The work of each stage: read tables and models of the run directory, write tables and models.

Every function takes the recipe and the run's root, reports progress through ``report(done, total, note)`` and returns a
JSON-able summary. When to run it, and whether its result still holds, is `infalign.pipeline`'s business.
"""

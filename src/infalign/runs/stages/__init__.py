"""The stages of a run, in their order: a module each, named like it, whose ``units`` declares its work.

A stage takes the settings and paths that it needs, reports progress through ``on_progress(done, total, note)`` and
returns a JSON-able summary. When to do it, and whether its result still holds, is `infalign.runs.pipeline`'s business.
"""

STAGES = {
    "data": "Read and split the data, make the tokenizer.",
    "sft": "Fine-tune the policy on demonstrations: the reference.",
    "reward-model": "Fit the reward model and, on other rows, the judge.",
    "rollout": "Draw K responses to every training prompt.",
    "score": "Score the rollouts with the reward.",
    "calibrate": "Give every training prompt its reference_rewards.",
    "train": "Train the policies on calibrated, transformed rewards.",
    "evaluate": "Measure win rates and KL on fresh samples.",
    "report": "Write the report with its figures.",
}

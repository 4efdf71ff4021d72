"""The steps of a run, a file each: what it needs, what it makes, and how. `STAGES` names the stages in their order."""

STAGES = {
    "data": "Read and split the data; make the tokenizer.",
    "sft": "Fine-tune the policy on demonstrations: the reference.",
    "reward-model": "Fit the reward model and, on other rows, the judge.",
    "rollout": "Sample K responses to every training prompt.",
    "score": "Score the rollouts with the reward.",
    "calibrate": "Add reference_rewards to every training prompt.",
    "train": "Train the policies on calibrated, transformed rewards.",
    "evaluate": "Measure win rates and KL on fresh samples.",
    "report": "Write the report and its figures.",
}

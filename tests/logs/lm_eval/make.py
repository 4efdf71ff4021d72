"""Logs of lm-eval: tasks with four repeats, with two filters and with choices, for a model that is right by luck."""

import json
import os
import random
import shutil
import sys
from pathlib import Path

from lm_eval.__main__ import cli_evaluate
from lm_eval.api.model import LM
from lm_eval.api.registry import register_model

HERE = Path(__file__).parent
ANSWERS = {row["question"]: row["answer"] for row in map(json.loads, (HERE / "questions.jsonl").open())}


@register_model("lucky")
class Lucky(LM):
    """Answers half of the questions."""

    def __init__(self, **_) -> None:
        super().__init__()
        self.luck = random.Random(1)

    def generate_until(self, requests, disable_tqdm=False):
        """Return the right answer, the right one in a sentence, or another number."""
        return [
            self.luck.choice([right, right, f"It is {right}", "7"])
            for right in (ANSWERS[request.args[0]] for request in requests)
        ]

    def loglikelihood(self, requests, disable_tqdm=False):
        return [(-self.luck.random(), False) for _ in requests]

    def loglikelihood_rolling(self, requests, disable_tqdm=False):
        raise NotImplementedError  # no task needs it


# Write the folder that the command line writes, and numbers.json with what its results say.
work, output = HERE / "work", HERE / "output"
shutil.rmtree(output, ignore_errors=True)
work.mkdir()
os.environ["HF_HOME"] = str(work / "hub")
for file in HERE.glob("*.yaml"):
    (work / file.name).write_text(file.read_text().replace("QUESTIONS", str(HERE / "questions.jsonl")))
sys.argv = [
    *("lm_eval", "run", "--model", "lucky", "--model_args", "pretrained=lucky-1b", "--include_path", str(work)),
    *("--tasks", "sums,sums_two_filters,choices", "--log_samples", "--output_path", str(output)),
]
cli_evaluate()
(results,) = output.rglob("results_*.json")
found = json.loads(results.read_text())
kept = {key: found[key] for key in ("results", "configs", "n-samples", "model_name", "lm_eval_version")}
for config in kept["configs"].values():
    for key in ("dataset_kwargs", "metadata", "fewshot_config"):  # paths of this machine, and what is long
        config.pop(key, None)
results.write_text(json.dumps(kept, indent=1) + "\n")
(HERE / "numbers.json").write_text(json.dumps(found["results"], indent=1) + "\n")
shutil.rmtree(work)

"""Logs of inspect_ai: a task for two mock models, four epochs, two scorers, samples that fail; its numbers beside."""

import json
import random
from pathlib import Path

from inspect_ai import Epochs, Task, eval
from inspect_ai.dataset import Sample
from inspect_ai.log import read_eval_log, write_eval_log
from inspect_ai.model import ModelOutput, ModelUsage, get_model
from inspect_ai.scorer import includes, match
from inspect_ai.solver import generate

HERE = Path(__file__).parent
SUMS = {"2+2": "4", "3*3": "9", "10-7": "3", "6/2": "3", "5+8": "13"}
RIGHT = {"strong": 0.7, "weak": 0.3}  # share of right answers


def answers(model: str):
    """Return a mock model's function: the right answer, the right one in a sentence, a wrong one, or an exception."""
    luck = random.Random(model)

    def answer(messages, tools, tool_choice, config):
        question, draw = messages[-1].text, luck.random()
        if model == "weak" and question == "6/2" and draw > 0.2:
            raise RuntimeError("the server went away")
        wrong = f"{SUMS[question]}, or maybe 0" if draw < 0.85 else "17"
        output = ModelOutput.from_content(model, SUMS[question] if draw < RIGHT[model] else wrong)
        output.usage = ModelUsage()  # counting tokens would fetch a tokenizer
        return output

    return answer


# Write arithmetic-MODEL.eval, one of them also as JSON, and numbers.json with what inspect_ai reports.
samples = [
    Sample(question, target=answer, id=f"sum-{i}", metadata={"level": "easy" if i < 3 else "hard"})
    for i, (question, answer) in enumerate(SUMS.items())
]
numbers = {}
for model in RIGHT:
    task = Task(
        name="arithmetic",
        dataset=samples,
        solver=generate(),
        scorer=[match(), includes()],
        epochs=Epochs(4, ["mean", "pass_at_2"]),
        fail_on_error=False,
    )
    (log,) = eval(
        task,
        model=get_model(f"mockllm/{model}", custom_outputs=answers(model)),
        log_dir="build/logs-of-inspect",
        display="none",
        max_connections=1,
        max_samples=1,
    )
    small = read_eval_log(log.location, exclude_fields={"events"})
    small.eval.revision = None
    for sample in small.samples:
        if sample.error:
            sample.error.traceback = sample.error.traceback_ansi = ""  # with paths of this machine
    write_eval_log(small, str(HERE / f"arithmetic-{model}.eval"))
    if model == "weak":
        write_eval_log(small, str(HERE / "json" / "arithmetic-weak.json"))
    numbers[f"arithmetic-{model}"] = {f"{s.name}/{s.reducer}": s.metrics["accuracy"].value for s in log.results.scores}
(HERE / "numbers.json").write_text(json.dumps(numbers, indent=1) + "\n")

"""Results of evalplus on three problems with base and extra tests, four solutions each, by its own evaluator."""

import json
import os
import re
import shutil
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

HERE = Path(__file__).parent
WORK, RUN = HERE / "work", HERE / "coder-1b"
PROBLEMS = {  # the right body, one that only the base tests find right, a wrong one, one that never ends
    "increment": ("return x + 1", "return 2 if x == 1 else x + 1 if x < 9 else 0", "return x", "while True: pass"),
    "double": ("return 2 * x", "return 2 * x if x < 9 else 0", "return x", "return None"),
    "negate": ("return -x", "return -x if x < 9 else 0", "return x", "raise ValueError"),
}
TAKEN = {"increment": (0, 0, 1, 3), "double": (0, 1, 1, 2), "negate": (2, 2, 3, 2)}


def main() -> None:
    """Write the results file, and numbers.json with the pass@k that evalplus prints."""
    shutil.rmtree(WORK, ignore_errors=True)
    shutil.rmtree(RUN, ignore_errors=True)
    WORK.mkdir()
    RUN.mkdir()
    problems, solutions = [], []
    for i, (name, bodies) in enumerate(PROBLEMS.items()):
        head = f"def {name}(x):\n"
        problems.append(
            {
                "task_id": f"HumanEval/{i}",
                "prompt": head,
                "entry_point": name,
                "contract": "",
                "atol": 0,
                "canonical_solution": f"    {bodies[0]}\n",
                "base_input": [[1], [2]],
                "plus_input": [[9], [10]],
                "test": "",
            }
        )
        solutions += [
            {"task_id": f"HumanEval/{i}", "solution": f"{head}    {bodies[taken]}\n"} for taken in TAKEN[name]
        ]
    for file, rows in ((WORK / "problems.jsonl", problems), (RUN / "samples.jsonl", solutions)):
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    os.environ |= {"HUMANEVAL_OVERRIDE_PATH": str(WORK / "problems.jsonl"), "XDG_CACHE_HOME": str(WORK)}
    from evalplus.evaluate import evaluate  # reads the environment

    with redirect_stdout(StringIO()) as said:
        evaluate("humaneval", str(RUN / "samples.jsonl"), parallel=1)
    (RUN / "samples.jsonl").unlink()
    shutil.rmtree(WORK)
    base, plus = re.findall(r"pass@1:\s*([\d.]+)", said.getvalue())
    (HERE / "numbers.json").write_text(json.dumps({"base": float(base), "plus": float(plus)}) + "\n")


if __name__ == "__main__":
    main()

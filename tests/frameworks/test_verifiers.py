"""Tasks of verifiers, scored by its own code, become a law, and the law a reward of the task."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from shaped import inside

from infalign import optimum
from infalign.core.errors import DataError
from infalign.integrations.verifiers import reference_rewards

pytestmark = inside("verifiers")
SUMS = {"2+2": "4", "3*3": "9", "10-7": "3"}
RIGHT = {"2+2": 1, "3*3": 3, "10-7": 0}  # of four rollouts


@pytest.fixture
def task_class() -> Any:
    """Return a task whose reward is whether the last message is the answer."""
    import verifiers.v1 as vf

    class SumData(vf.TaskData):
        answer: str

    class Sum(vf.Task[SumData]):
        @vf.reward
        async def exact(self, trace: Any) -> float:
            return float(trace.nodes[-1].message.content == self.data.answer)

    Sum.make = lambda question: Sum(SumData(idx=list(SUMS).index(question), prompt=question, answer=SUMS[question]))
    return Sum


def scored(task: Any, said: str) -> Any:
    """Return a trace with what is said to a task, and its rewards by verifiers' own scoring."""
    import verifiers.v1 as vf
    from verifiers.v1.trace import TraceTask

    about = TraceTask(type=type(task).__name__, data=task.data, key=task.key)
    trace = vf.Trace(task=about, agent=vf.AgentInfo(config=vf.AgentConfig(model="lucky-1b")))
    trace.nodes = [
        vf.MessageNode(message=vf.UserMessage(content=task.data.prompt)),
        vf.MessageNode(message=vf.AssistantMessage(content=said), parent=0, sampled=True),
    ]
    asyncio.run(task.score(trace))
    trace.ok = True
    return trace


def write(folder: Path, traces: list[Any]) -> Path:
    """Return traces.jsonl with an episode for each trace."""
    from verifiers.v1 import EnvInfo, Episode, EvalRunInfo
    from verifiers.v1.utils.trace_store import write_episode

    for trace in traces:
        episode = Episode(env=EnvInfo(id="sums"), task=trace.task, traces=[trace], ok=True, run=EvalRunInfo(id="r"))
        write_episode(folder, episode)
    return folder / "traces.jsonl"


def test_rollouts_become_a_law_and_the_law_a_reward(task_class: Any, tmp_path: Path) -> None:
    """The reward of a right answer is what the optimum for pass@2 gives it on the stored rewards of its task."""
    import verifiers.v1 as vf

    tasks = {question: task_class.make(question) for question in SUMS}
    said = {question: [SUMS[question]] * RIGHT[question] + ["?"] * (4 - RIGHT[question]) for question in SUMS}
    traces = [scored(tasks[question], text) for question in SUMS for text in said[question]]
    stored = reference_rewards(write(tmp_path, traces))
    assert stored == {task.key: [0.0] * (4 - RIGHT[q]) + [1.0] * RIGHT[q] for q, task in tasks.items()}
    best = optimum(list(stored.values()), "best-of-2", kl=0.1, smoothed=True)

    class Shaped(task_class):
        @vf.reward
        async def exact(self, trace: Any) -> float:
            return float(best.shaping(await super().exact(trace), stored[self.key]))

    for row, task in enumerate(tasks.values()):
        shaped = Shaped(task.data)
        rewards = [scored(shaped, text).reward for text in ("?", task.data.answer)]
        assert min(rewards) == pytest.approx(best.shaped_PK[row].min())
        assert rewards[1] > rewards[0]


def test_rollouts_that_failed_are_refused(task_class: Any, tmp_path: Path) -> None:
    """And tasks with a single rollout."""
    trace = scored(task_class.make("2+2"), "4")
    with pytest.raises(DataError, match="1 tasks have one rollout"):
        reference_rewards(write(tmp_path, [trace]))
    trace.record_error(RuntimeError("the sandbox went away"))
    trace.ok = False
    with pytest.raises(DataError, match="a rollout has no reward"):
        reference_rewards(write(tmp_path, [trace]))

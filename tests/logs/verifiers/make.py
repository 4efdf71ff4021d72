"""Episodes as verifiers writes them to traces.jsonl, built from its own classes: its harnesses start containers."""

import json
import random
from pathlib import Path

from verifiers.v1.configs.agent import AgentConfig
from verifiers.v1.episode import EnvInfo, Episode, EvalRunInfo
from verifiers.v1.graph import MessageNode
from verifiers.v1.task import TaskData, task_key
from verifiers.v1.trace import AgentInfo, Trace, TraceTask
from verifiers.v1.types import AssistantMessage, UserMessage
from verifiers.v1.utils.trace_store import read_episodes, write_episode

HERE = Path(__file__).parent
SUMS = {"2+2": "4", "3*3": "9", "10-7": "3"}

# Write traces.jsonl with four rollouts of three tasks, one with an error, and numbers.json with their rewards.
(HERE / "traces.jsonl").unlink(missing_ok=True)
luck = random.Random(2)
for idx, (question, answer) in enumerate(SUMS.items()):
    data = TaskData(idx=idx, prompt=question)
    task = TraceTask(type="Sum", data=data, key=task_key(data.model_dump(mode="json")))
    for rollout in range(4):
        trace = Trace(task=task, agent=AgentInfo(config=AgentConfig(model="lucky-1b")))
        said = answer if luck.random() < 0.5 else f"{answer}?"
        trace.nodes = [
            MessageNode(message=UserMessage(content=question)),
            MessageNode(message=AssistantMessage(content=said), parent=0, sampled=True),
        ]
        if (idx, rollout) == (2, 1):
            trace.record_error(RuntimeError("the sandbox went away"))
        else:
            trace.record_reward("exact", float(said == answer))
            trace.record_reward("short", float(len(said) < 2), weight=0.5)
            trace.record_metric("length", len(said))
            trace.ok = True
            trace.stop("agent_completed")
        write_episode(
            HERE, Episode(env=EnvInfo(id="sums"), task=task, traces=[trace], ok=trace.ok, run=EvalRunInfo(id="r"))
        )
traces = [trace for episode in read_episodes(HERE, Trace) for trace in episode.traces]
numbers = [{"task": t.task.data.idx, "reward": t.reward, "error": t.has_error} for t in traces]
(HERE / "numbers.json").write_text(json.dumps(numbers) + "\n")

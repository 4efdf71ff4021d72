"""Episodes of verifiers, ``traces.jsonl``."""

from collections.abc import Iterator
from pathlib import Path

from infalign.core.errors import DataError
from infalign.data.files import read_rows
from infalign.data.messages import digest
from infalign.integrations.logs.samples import Note, Sample, choose, number

KNOWN_BY = ({"env", "task", "traces"},)
FORMAT = 1  # of its traces


def read(path: Path, score: str | None, _: Note) -> Iterator[Sample]:
    """Yield the trace of each agent with ``reward``, the weighted sum, or one of its rewards or metrics."""
    first = None
    for where, row in read_rows(path):
        run, env = (row.get("run") or {}).get("id"), row["env"]["id"]
        first = first or run
        if run != first:
            raise DataError(f"{where}: the run {run} begins after {first}; give a file for each run")
        if not row["traces"] or any(trace["version"] != FORMAT for trace in row["traces"]):
            raise DataError(f"{where}: the episode has no trace of format {FORMAT}; finish it with `vf-eval --resume`")
        for trace in row["traces"]:
            data, agent = trace["task"]["data"], trace["agent"]
            rewards = {name: reward for name, reward in trace["rewards"].items() if reward}
            total = sum(reward["score"] * reward["weight"] for reward in rewards.values()) if rewards else None
            scores = trace["metrics"] | {name: reward["score"] for name, reward in rewards.items()} | {"reward": total}
            said = [node["message"].get("content") for node in trace["nodes"] if node["sampled"]]
            failed = None if trace["ok"] else (trace["errors"] or [{"message": "the rollout failed"}])[-1]["message"]
            yield Sample(
                f"{env} {data.get('idx')} {digest(data)[:6]}",
                agent["config"]["model"] + ("" if agent["name"] == "agent" else f" as {agent['name']}"),
                None if failed else number(scores[choose(list(scores), score, "reward")]),
                text=said[-1] if said else None,
                error=failed,
                asked=data.get("prompt") or "",
                about=data | {"env": env, "task": trace["task"]["type"], "key": trace["task"]["key"]},
            )

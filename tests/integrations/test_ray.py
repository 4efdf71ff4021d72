"""What actors on a cluster draw is what the run itself would draw, also after a kill.

``make test-frameworks`` runs those with a real Ray on this machine, of four logical CPUs on however many cores.
"""

import io
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import micro
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from rich.console import Console
from rows import user

from infalign.core.errors import ConfigError, DataError, InfalignError
from infalign.integrations.ray import TRIES, Actor, Part, _cluster, on_cluster, parts_of
from infalign.recipe.reading import load_recipe
from infalign.rewards.base import Batch
from infalign.rewards.scores import NamedReward, score_shard
from infalign.rewards.settings import RewardSource
from infalign.sampling.engine import Engine, Response
from infalign.sampling.prompts import PromptTable
from infalign.sampling.rollouts import draw_shard, shard_path
from infalign.steps.run import Run
from infalign.world import gold

on_ray = pytest.mark.ray
pytestmark = pytest.mark.filterwarnings("ignore")

HELD = '''
import time
from pathlib import Path

def reward(prompts, responses):
    """Return the number of vowels, once fewer than three shards are scored or nobody holds the job up."""
    while Path("hold").exists() and len(list(Path("cluster/scores").glob("part-*/part-*.parquet"))) >= 3:
        time.sleep(0.05)
    return [float(sum(letter in "aeiou" for letter in text)) for text in responses]
'''
RAY = ("--ray-actors", "2", "--ray-cpus", "4")


@pytest.fixture
def folder(calibrated_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder with the same recipe for a run on a cluster and for one here: eight shards of prompts."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "held.py").write_text(HELD, encoding="utf-8")
    for name in ("cluster", "here"):
        recipe = micro.given(Path(name), str(calibrated_run.parent / "policy"))
        recipe |= {"reward": {"function": "held.py:reward"}, "rollout": {"prompts": 100, "k": 6, "max_new_tokens": 12}}
        micro.write(tmp_path / f"{name}.yaml", recipe)
    return tmp_path


def shards(root: Path, kind: str) -> dict[str, tuple[int, int]]:
    """Return inode and time of change of each shard of rollouts or scores."""
    found = sorted(root.glob(f"{kind}/part-*/part-*.parquet"))
    return {path.relative_to(root).as_posix(): (path.stat().st_ino, path.stat().st_mtime_ns) for path in found}


def wait_for(happened: Callable[[], Any], process: subprocess.Popen[bytes]) -> None:
    """Wait until something happened in a process that goes on."""
    while not happened():
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)


@on_ray
def test_a_job_that_was_killed_goes_on_and_ends_as_one_here_does(folder: Path) -> None:
    """Its actors go with it, no finished shard is touched again, and the run takes all shards as its own."""
    assert micro.infalign("run", "cluster.yaml", "--until", "data")[0] == 0
    (folder / "hold").touch()
    root, command = folder / "cluster", [micro.COMMAND, "run", "cluster.yaml", *RAY]
    job = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    wait_for(lambda: len(shards(root, "scores")) >= 3 and len(shards(root, "rollouts")) >= 4, job)
    workers = psutil.Process(job.pid).children(recursive=True)
    os.kill(job.pid, signal.SIGKILL)
    job.communicate()
    _, alive = psutil.wait_procs(workers, timeout=120)
    assert not alive
    before = shards(root, "rollouts") | shards(root, "scores")
    assert 7 <= len(before) < 16
    (folder / "hold").unlink()

    code, out, err = micro.infalign("run", "cluster.yaml", *RAY)
    assert code == 0, err
    done = [name for name in before if name.startswith("scores") and name.replace("scores", "rollouts") in before]
    assert f"{8 - len(done)} shards of 16 prompts × 6 rollouts left" in out
    after = shards(root, "rollouts") | shards(root, "scores")
    assert before.items() <= after.items()
    assert len(after) == 16

    # Nothing is drawn or scored again; the law of the recipe's policy follows the calibration.
    assert micro.done(load_recipe("cluster.yaml"), until="calibrate") == ["calibrate", "law-aware"]
    micro.done(load_recipe("here.yaml"), until="calibrate")
    assert micro.rollouts(root / "rollouts") == micro.rollouts(folder / "here" / "rollouts")
    assert pq.read_table(root / "calibrated.parquet").equals(pq.read_table(folder / "here" / "calibrated.parquet"))


@on_ray
def test_what_cannot_work_is_said_before_anything_is_drawn(folder: Path) -> None:
    """Stages that rollouts need, and a cluster without a CPU to spare or a GPU."""
    code, _, err = micro.infalign("run", "cluster.yaml", *RAY)
    assert code == 2
    assert "data must be done before sampling on a cluster" in err
    assert micro.infalign("run", "cluster.yaml", "--until", "data")[0] == 0
    for words, said in (
        (("--ray-actors", "2", "--ray-cpus", "2"), "2 actors need 3 CPUs, but Ray has 2"),
        (("--ray-actors", "2", "--ray-cpus", "4", "--ray-gpus", "64"), "2 actors need 128 GPUs"),
    ):
        code, _, err = micro.infalign("run", "cluster.yaml", *words)
        assert (code, said in err) == (2, True), err


@on_ray
def test_an_error_of_an_actor_is_said_as_elsewhere(folder: Path) -> None:
    """A reward that fails there is named, and the exit code is the same as without a cluster."""
    (folder / "held.py").write_text("def reward(prompts, responses):\n    raise OSError('down')\n", encoding="utf-8")
    assert micro.infalign("run", "cluster.yaml", "--until", "data")[0] == 0
    code, _, err = micro.infalign("run", "cluster.yaml", *RAY)
    assert (code, "raised OSError in held.py, line 2: down" in err) == (1, True), err


@on_ray
def test_a_cluster_that_cannot_be_reached_is_named_at_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray itself would try for a quarter of an hour, and Ray Data fails inside through ray://."""
    assert micro.infalign("run", "cluster.yaml", "--until", "data")[0] == 0
    for address, what, said in (
        ("127.0.0.1:1", 4, "ConnectionRefusedError"),
        ("ray://127.0.0.1:1", 2, "not through ray://"),
    ):
        monkeypatch.setenv("RAY_ADDRESS", address)
        code, _, err = micro.infalign("run", "cluster.yaml", "--ray-actors", "2")
        assert (code, said in err, f"({address})" in err) == (what, True, True), err


@on_ray
def test_sigterm_stays_ours_while_ray_runs() -> None:
    """Ray's own handler ends the process with another exit code, and does not say how to resume."""
    before = signal.getsignal(signal.SIGTERM)
    with _cluster(1, 0, 2):
        assert signal.getsignal(signal.SIGTERM) == before


@on_ray
def test_gpus_on_two_nodes_are_not_for_one_actor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two nodes of one GPU have two, but an actor that needs two would wait for ever."""
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "num_gpus": 1})
    try:
        cluster.add_node(num_cpus=1, num_gpus=1)
        monkeypatch.setenv("RAY_ADDRESS", cluster.address)
        with pytest.raises(ConfigError, match="needs 2 GPUs of one node"), _cluster(1, 2, None):
            pass
        with _cluster(2, 1, None):
            pass
    finally:
        cluster.shutdown()


@pytest.fixture
def copied(calibrated_run: Path, tmp_path: Path) -> Run:
    """Return a copy of a run whose rollouts are drawn and scored, three prompts in each of four parts."""
    root = shutil.copytree(calibrated_run, tmp_path / "run")
    recipe = load_recipe(root / "recipe.yaml").model_copy(update={"run_dir": str(root)})
    return Run.of(recipe)


def test_an_actor_draws_and_scores_what_the_run_did(copied: Run) -> None:
    """A shard that is missing comes back the same, and one without rewards keeps its rollouts."""
    for number, part in enumerate(parts_of(copied)[:2]):
        drawn, scored = (shard_path(folder, 0) for folder in (part.rollouts, part.scores))
        before = [pq.read_table(path) for path in (drawn, scored)]
        assert part.missing(6) == []
        scored.unlink()
        if number == 0:
            drawn.unlink()
        assert part.missing(6) == [0]
        assert Actor(copied, str(Path.cwd()), "job")({"part": [number], "shard": [0]}) == {"kind": [""], "said": [""]}
        assert [pq.read_table(path) for path in (drawn, scored)] == before


def test_a_shard_in_which_actors_die_ends_the_job(copied: Run) -> None:
    """After four processes; only the scores of that shard are missing then, and no other file is left."""
    part, actor = parts_of(copied)[0], Actor(copied, str(Path.cwd()), "job")
    shard_path(part.scores, 0).unlink()
    actor.__dict__["reward"] = NamedReward(lambda prompts, responses: os._exit(7), "deadly", "deadly")
    for _ in range(TRIES):
        if (child := os.fork()) == 0:
            actor({"part": [0], "shard": [0]})
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    said = actor({"part": [0], "shard": [0]})
    assert said["kind"] == ["InfalignError"]
    assert f"4 actors died while making {shard_path(part.scores, 0)}; if memory ran out, lower" in said["said"][0]
    assert list(part.scores.iterdir()) == []


def test_a_node_without_the_folder_is_told_by_its_path(copied: Run) -> None:
    """Not by an error of Ray."""
    said = Actor(copied, "/no/such/folder", "job")({"part": [0], "shard": [0]})
    assert (said["kind"], "'/no/such/folder'" in said["said"][0]) == (["InfalignError"], True)


@pytest.mark.parametrize(
    ("name", "changes", "kind", "said"),
    [
        ("data/test_prompts.parquet", {}, DataError, "data/test_prompts.parquet is damaged"),
        (None, {"reward": RewardSource(function="held.py:reward")}, ConfigError, "held.py"),
    ],
)
def test_what_a_run_refuses_is_refused_before_anything_is_drawn(
    copied: Run, name: str | None, changes: dict[str, Any], kind: type[InfalignError], said: str
) -> None:
    """A damaged output, from which shards would be drawn that look finished, and a reward that is not there."""
    if name is not None:
        path = copied.layout.root / name
        path.write_bytes(path.read_bytes()[:-1] + b"x")
    rollout = copied.recipe.rollout.model_copy(update={"k": 8})
    recipe = copied.recipe.model_copy(update={"rollout": rollout, **changes})
    with pytest.raises(kind, match=said):
        on_cluster(recipe, actors=1, gpus=0, cpus=None, console=Console(file=io.StringIO()))


class Parrot(Engine):
    """An engine that says the number of each rollout."""

    def sample_together(self, draws: Any) -> list[Response]:
        return [Response((index,), str(index), "length", 0.0) for _, index in draws]


def test_a_shard_of_which_another_command_drew_prompts_is_left_to_it(tmp_path: Path) -> None:
    """So is one that is there with its rewards; more rollouts of old prompts are refused by name."""
    rows = [{"prompt_id": str(i), "prompt": [user(f"Say {i}.")], "token_ids": [i]} for i in range(80)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "prompts.parquet")
    part = Part(PromptTable(tmp_path / "prompts.parquet", 72), tmp_path / "rollouts", tmp_path / "scores")
    part.rollouts.mkdir()
    part.scores.mkdir()
    assert part.missing(2) == [0, 1, 2, 3, 4]
    prompts = list(part.table.read().asked())
    draw_shard(Parrot(), prompts[:16], 2, shard_path(part.rollouts, 0))
    asked = [row["prompt"] for row in rows[:16] for _ in range(2)]
    score_shard(shard_path(part.scores, 0), NamedReward(gold, "gold", "gold"), Batch(asked, ["0", "1"] * 16))
    draw_shard(Parrot(), prompts[16:32], 2, shard_path(part.rollouts, 1))
    draw_shard(Parrot(), prompts[40:43], 2, shard_path(part.rollouts, 9))
    assert part.missing(2) == [1, 3, 4]
    with pytest.raises(ConfigError, match=r"has 2 rollouts for a prompt, but rollout\.k is 3"):
        part.missing(3)


def test_without_ray_the_extra_is_named(copied: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of the run is touched."""
    monkeypatch.setitem(sys.modules, "ray", None)
    recipe = copied.recipe.model_copy(update={"rollout": copied.recipe.rollout.model_copy(update={"k": 8})})
    before = {path: path.stat().st_mtime_ns for path in (copied.layout.root / "stages").iterdir()}
    with pytest.raises(ConfigError, match=r"pip install 'infalign\[ray\]'"):
        on_cluster(recipe, actors=1, gpus=0, cpus=None, console=Console(file=io.StringIO()))
    assert {path: path.stat().st_mtime_ns for path in (copied.layout.root / "stages").iterdir()} == before

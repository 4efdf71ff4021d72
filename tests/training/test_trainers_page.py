"""What docs/trainers.md has for TRL runs as pasted."""

import re
from pathlib import Path

import micro
import pytest
import trl

PAGE = Path(__file__).parents[2] / "docs" / "trainers.md"


def test_the_code_for_trl_runs_as_pasted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a tiny model, with four short responses per prompt and one step each."""
    monkeypatch.chdir(tmp_path)
    namespace = {"MODEL": micro.write_policy(tmp_path / "policy")}
    for name in ("RLOOConfig", "GRPOConfig"):
        settings, made = getattr(trl, name), {"max_steps": 1, "max_completion_length": 4, "use_cpu": True}
        monkeypatch.setattr(trl, name, lambda *a, of=settings, made=made, **b: of(*a, **b, **made, report_to="none"))
    for block in re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL):
        exec(block.replace("k=32", "k=4, max_new_tokens=4"), namespace)
    assert 0 < namespace["best"].kl < namespace["best"].largest_kl

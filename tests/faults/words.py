"""What a dry run says of a recipe that cannot work, and what is said of odd files in a run directory."""

from unittest.mock import patch

import torch

from faults.lab import Lab, Seen, again, infalign, refused, told
from faults.registry import fault


@fault(
    2,
    {
        "heads do not divide the width": ("policy.scratch.hidden=30",),
        "prompt and response exceed the context": (
            "policy={model: FINISHED/models/aware, fit: {max_length: 100}}",
            "data.max_prompt_tokens=190",
        ),
    },
    brief=("heads do not divide the width",),
)
def dry_run(lab: Lab, *settings: str) -> Seen:
    """A model that does not fit the recipe → In a dry run: both numbers."""
    words = [word for setting in settings for word in ("--set", setting.replace("FINISHED", str(lab.finished)))]
    seen = refused("run", lab.recipe(), "--dry-run", *words)
    assert not (lab.folder / "run").exists()
    return seen


def warned(lab: Lab, setting: str, about: str) -> Seen:
    """Plan a run with a setting that may be a mistake: the plan has a warning."""
    code, out, said = infalign("run", lab.recipe(), "--dry-run", "--set", setting)
    assert (code, said) == (0, "")
    (found,) = (line for line in out.splitlines() if line.startswith("! ") and about in line)
    return Seen(code, found)


@fault(2, brief=True)
def no_gpu(lab: Lab) -> Seen:
    """`compute.device` is cuda where there is no GPU → In a dry run a warning; a run stops at once."""
    root = lab.copy()
    with patch.object(torch.cuda, "is_available", lambda: False):
        assert "no GPU" in warned(lab, "compute.device=cuda", "GPU").said
        seen = told(lambda: again(root, "compute.device=cuda", "policies.aware.kl_budget=0.7"))
    assert (root / "models" / "aware").is_dir()
    return seen


@fault(0)
def few_prompts(lab: Lab) -> Seen:
    """`rollout.prompts` is more than the data has → A warning in the dry run."""
    return warned(lab, "rollout.prompts=100000", "rollout.prompts")


@fault(2, brief=True)
def escapes(lab: Lab) -> Seen:
    """An error repeats terminal escapes of a model folder → Their characters, printable."""
    folder = lab.model("reference")
    (folder / "chat_template.jinja").write_text("{{ raise_exception('\x1b[31mred\x1b]0;mine\x07') }}")
    seen = dry_run(lab, f"policy={{model: {folder}}}")
    assert "red" in seen.said
    assert seen.said.isprintable()
    return seen

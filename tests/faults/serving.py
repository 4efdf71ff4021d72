"""What is said when a run's policy cannot be served."""

import shutil

import micro

from faults.lab import Lab, Seen, infalign, refused
from faults.registry import fault
from infalign.models.scratch import train_tokenizer
from infalign.models.settings import Scratch
from infalign.recipe.reading import dump_recipe, load_recipe


@fault(2, {"untrained": False, "its tokenizer differs": True}, brief=("untrained",))
def no_policy(lab: Lab, elsewhere: bool) -> Seen:
    """A policy to serve is not trained, or its tokenizer differs → The step that trains it, or the folder."""
    if elsewhere:
        folder = lab.model("aware")
        words = train_tokenizer(["Quite another text, with other words!"] * 9, Scratch(**micro.SCRATCH))
        words.save_pretrained(folder)
        return refused("generate", lab.finished, "--prompt", "Hello", "--policy", folder)
    root = lab.copy()
    shutil.rmtree(root / "models" / "aware")
    return refused("generate", root, "--prompt", "Hello")


@fault(3, brief=True)
def too_long(lab: Lab) -> Seen:
    """A prompt to answer exceeds the policy's context → The prompt and both numbers; no prompt is answered."""
    (lab.folder / "prompts.txt").write_text(f"Hello\n{'word ' * 300}\n")
    return refused("generate", lab.finished, "--input", lab.folder / "prompts.txt")


@fault(0, brief=True)
def of_another_recipe(lab: Lab) -> Seen:
    """The recipe has changed since the policy to serve was trained → The answer, and a warning: what has changed."""
    root = lab.copy()
    changed = load_recipe(root / "recipe.yaml", ["policies.aware.kl_budget=2.5"])
    (root / "recipe.yaml").write_text(dump_recipe(changed), encoding="utf-8")
    code, out, said = infalign("generate", root, "--prompt", "Hello", "--policy", "plain")
    assert (code, said) == (0, "")
    code, out, said = infalign("generate", root, "--prompt", "Hello")
    assert out
    assert said
    return Seen(code, said)

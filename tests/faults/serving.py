"""What is said when a run's policy cannot be served."""

import shutil

import micro

from faults.artefacts import model
from faults.data import infalign
from faults.registry import Lab, Seen, fault
from infalign.models.scratch import train_tokenizer
from infalign.models.settings import Scratch
from infalign.recipe.reading import dump_recipe, load_recipe


@fault("the policy that is to be served is not trained", brief=True)
def untrained(lab: Lab) -> Seen:
    """The stage is named that trains it."""
    root = lab.copy()
    shutil.rmtree(root / "models" / "aware")
    code, out, said = infalign("generate", root, "--prompt", "Hello")
    assert (code, out) == (2, "")
    return Seen(code, said)


@fault("a prompt that is to be answered exceeds the policy's context", brief=True)
def too_long(lab: Lab) -> Seen:
    """No prompt of the same file is answered."""
    (lab.folder / "prompts.txt").write_text(f"Hello\n{'word ' * 300}\n")
    code, out, said = infalign("generate", lab.finished, "--input", lab.folder / "prompts.txt")
    assert (code, out) == (3, "")
    return Seen(code, said)


@fault("the recipe of a run has changed since the policy was trained that is to be served", brief=True)
def of_another_recipe(lab: Lab) -> Seen:
    """It is served, with a warning that says what has changed."""
    root = lab.copy()
    changed = load_recipe(root / "recipe.yaml", ["policies.aware.kl_budget=2.5"])
    (root / "recipe.yaml").write_text(dump_recipe(changed), encoding="utf-8")
    code, out, said = infalign("generate", root, "--prompt", "Hello", "--policy", "plain")
    assert (code, said) == (0, "")
    code, out, said = infalign("generate", root, "--prompt", "Hello")
    assert code == 0
    assert out
    return Seen(code, said)


@fault("a policy from elsewhere that is to be served has another tokenizer")
def other_tokenizer(lab: Lab) -> Seen:
    """It would answer another prompt than it is asked."""
    folder = model(lab, "aware")
    words = train_tokenizer(["Quite another text, with other words!"] * 9, Scratch(**micro.SCRATCH))
    words.save_pretrained(folder)
    code, out, said = infalign("generate", lab.finished, "--prompt", "Hello", "--policy", folder)
    assert (code, out) == (2, "")
    return Seen(code, said)

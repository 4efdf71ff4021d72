"""What is said when a run's policy cannot be served."""

import shutil

from faults.data import infalign
from faults.registry import Lab, Seen, fault


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

"""Untrusted model folders, checkpoints and texts that try to run code or to pass for something else."""

import io
import json
from collections.abc import Callable
from html import escape
from pathlib import Path
from typing import Any
from unittest.mock import patch

import micro
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from rich.console import Console

from faults.lab import Lab, Seen, told
from faults.registry import fault
from infalign.core.storage import write_table
from infalign.models.pretrained import load_classifier, load_policy
from infalign.models.tokenizers import load_tokenizer
from infalign.pipeline.records import records
from infalign.recipe.layout import Layout
from infalign.recipe.reading import load_recipe
from infalign.report.page import write
from infalign.report.tables import print_table
from infalign.rewards.classifier import ClassifierReward


class Marks:
    """Touches a file when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.mark,)


def harmless(lab: Lab, work: Callable[[], object]) -> Seen:
    """Return what is said when ``work`` is refused; no untrusted code may have run, and no question may be asked."""
    with patch("builtins.input", side_effect=AssertionError("a question on the terminal")):
        seen = told(work)
    assert not (lab.folder / "mark").exists()
    return seen


def pickled(folder: Path, mark: Path) -> None:
    """Give a model a pickle for its weights."""
    (folder / "model.safetensors").unlink()
    torch.save({"weight": Marks(mark)}, folder / "pytorch_model.bin")


def pickled_adapter(folder: Path, mark: Path) -> None:
    """Make the folder that of an adapter, which is a pickle."""
    settings = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 4, "target_modules": ["q_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(settings | {"base_model_name_or_path": str(folder)}))
    torch.save({"weight": Marks(mark)}, folder / "adapter_model.bin")


def own_code(file: str, classes: dict[str, Any]) -> Callable[[Path, Path], None]:
    """Return what brings code of its own, named in a file of settings."""

    def change(folder: Path, mark: Path) -> None:
        code = f"from pathlib import Path\n\nPath({str(mark)!r}).touch()\n"
        (folder / "own.py").write_text(f"{code}\nclass Own:\n    pass\n")
        settings = json.loads((folder / file).read_text()) | {"model_type": "own", "tokenizer_class": "Own"}
        (folder / file).write_text(json.dumps(settings | {"auto_map": classes}))

    return change


def long_header(folder: Path, mark: Path) -> None:
    """Claim a header of 2^60 bytes."""
    (folder / "model.safetensors").write_bytes((2**60).to_bytes(8, "little") + b"{}")


@fault(
    2,
    {
        "weights of a policy": ("reference", pickled, load_policy),
        "weights of a reward model": ("reward", pickled, ClassifierReward.load),
        "weights to start a reward model": ("reference", pickled, load_classifier),
        "an adapter": ("reference", pickled_adapter, load_policy),
        "code of a model": ("reference", own_code("config.json", {"AutoConfig": "own.Own"}), load_policy),
        "code of a tokenizer": (
            "reference",
            own_code("tokenizer_config.json", {"AutoTokenizer": [None, "own.Own"]}),
            load_tokenizer,
        ),
        "an endless header": ("reference", long_header, load_policy),
    },
    brief=("weights of a policy", "code of a model", "an endless header"),
)
def untrusted(lab: Lab, name: str, change: Callable[[Path, Path], None], load: Callable[[Path], object]) -> Seen:
    """A model folder has a pickle, its own code, or a header without end → What is missing or refused; nothing runs."""
    folder = lab.model(name)
    change(folder, lab.folder / "mark")
    return harmless(lab, lambda: load(folder))


@fault(
    2,
    {
        "runs a command": "{{ cycler.__init__.__globals__.os.system('touch MARK') }}",
        "repeats itself 10^9 times": "{% for i in range(10**9) %}x{% endfor %}",
        "torn": "{% for message in",
    },
    brief=True,
)
def bad_template(lab: Lab, template: str) -> Seen:
    """A chat template is torn or malicious → The folder and the template's error; it stays in its sandbox."""
    folder = lab.model("reference")
    (folder / "chat_template.jinja").write_text(template.replace("MARK", str(lab.folder / "mark")))
    seen = harmless(lab, lambda: load_tokenizer(folder))
    assert f"the chat template of {folder} cannot render" in seen.said
    return seen


@fault(0)
def script_in_response(lab: Lab) -> None:
    """A response holds HTML with a script → Its characters in the report, which runs no script."""
    root, attack = lab.copy(), "<script>alert(1)</script><img src=x onerror=alert(2)>[/red]"
    for shard in root.glob("evaluation/*/samples/part-*.parquet"):
        table = pq.read_table(shard)
        texts = pa.array([attack] * table.num_rows)
        write_table(shard, table.set_column(table.column_names.index("text"), "text", texts))
    write(load_recipe(root / "recipe.yaml"), Layout(root), list(records(root)), on_progress=micro.silent)
    html = (root / "report.html").read_text(encoding="utf-8")
    assert "<script" not in html
    assert "<img src=x" not in html
    assert escape(attack) in html


@fault(0, brief=True)
def markup_in_name(lab: Lab) -> None:
    """A name looks like markup of the terminal, or has escapes → The name as it is, with its escapes spelled."""
    root = lab.copy("[red]run[\x1b[2J")
    console = Console(file=io.StringIO(), width=200)
    print_table(root, console)
    said = str(root / "report.html").replace("\x1b", r"\x1b")
    assert f"Report: {said}\n" in console.file.getvalue()

"""What the tests inside other trainers share: marks, and prompts with reference rewards, responses and their Φ."""

from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest

from infalign.method.calibration import calibrate
from infalign.world import gold

PROMPTS = [[{"role": "user", "content": f"How do I bake {what}?"}] for what in ("bread", "a cake")]
REFERENCES = [[-3.0, -1.0, 0.0, 0.5, 2.0], [-2.0, -0.5, 0.1, 0.2, 3.0]]
SAID = ["Knead the dough.", "Please, please knead.", "No.", "Wait an hour, then bake the dough."]


def inside(package: str) -> list[pytest.MarkDecorator]:
    """Return the marks of tests that need a trainer's package and take its warnings as they are."""
    absent = pytest.mark.skipif(find_spec(package) is None, reason=f"make test-frameworks installs {package}")
    return [absent, pytest.mark.filterwarnings("ignore")]


def expected(tokenizer: Any) -> np.ndarray:
    """Return Φ of each response's rank, (prompts, responses), for the responses as they decode."""
    texts = [tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) for text in SAID]
    pairs = zip(PROMPTS, REFERENCES, strict=True)
    ranks = [calibrate(gold([prompt] * len(texts), texts), references) for prompt, references in pairs]
    return np.exp(10 * (np.array(ranks) - 1))

"""How many rows per second become token ids on one core: ``python benchmarks/rows.py [TOKENIZER [TEMPLATE]]``.

A row is a prompt of twelve words; seconds are those of the processor. The tokenizer is a folder, by default one that is
trained on the rows.
"""

import os
import random
import sys
import time
from pathlib import Path

os.environ["RAYON_NUM_THREADS"] = "1"  # before tokenizers reads it
ROWS, WORDS, VOCABULARY, ROUNDS = 20_000, 12, 5_000, 5
AT_LEAST = 15_000  # rows per second


def texts_of(count: int) -> list[str]:
    """Return texts of twelve words, short ones the most frequent, as words are."""
    draw = random.Random(0)
    words = ["".join(draw.choices("etaoinshrdlu", k=draw.randint(2, 8))) for _ in range(VOCABULARY)]
    weights = [1 / rank for rank in range(1, VOCABULARY + 1)]
    return [" ".join(draw.choices(words, weights, k=WORDS)) for _ in range(count)]


def main() -> None:
    """Print the best rate of some rounds, of each step and of all."""
    from infalign.data.examples import parse_example
    from infalign.models.conversations import prompt_ids
    from infalign.models.scratch import train_tokenizer
    from infalign.models.settings import Scratch
    from infalign.models.tokenizers import load_tokenizer

    texts = texts_of(ROWS)
    tokenizer = load_tokenizer(sys.argv[1]) if len(sys.argv) > 1 else train_tokenizer(texts, Scratch())
    if len(sys.argv) > 2:
        tokenizer.chat_template = Path(sys.argv[2]).read_text(encoding="utf-8")
    best = [float("inf")] * 2
    for _ in range(ROUNDS):  # what else the machine does only takes time
        start = time.process_time()
        rows = [parse_example({"prompt": text, "completion": "Yes."}, f"line {n}") for n, text in enumerate(texts, 1)]
        read = time.process_time()
        ids = prompt_ids(tokenizer, [row.prompt for row in rows])
        best = [min(best[0], read - start), min(best[1], time.process_time() - read)]
    print(f"{ROWS / best[0]:9,.0f} rows/s become examples")
    print(f"{ROWS / best[1]:9,.0f} rows/s become token ids, {sum(map(len, ids)) / ROWS:.1f} of each")
    print(f"{ROWS / sum(best):9,.0f} rows/s in all; {AT_LEAST:,} are promised")
    sys.exit(ROWS / sum(best) < AT_LEAST)


if __name__ == "__main__":
    main()

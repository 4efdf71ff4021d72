"""Rows of preference data, as files have them."""

import csv
import gzip
import json
import lzma

import pyarrow as pa
import pyarrow.parquet as pq

from infalign.data.examples import parse_example


def user(text):
    """Return a user message."""
    return {"role": "user", "content": text}


def assistant(text):
    """Return an assistant message."""
    return {"role": "assistant", "content": text}


def transcript(*turns):
    """Alternate Human and Assistant, as Anthropic's files do."""
    return "".join(f"\n\n{'Assistant' if n % 2 else 'Human'}: {turn}" for n, turn in enumerate(turns))


def comparison(first="Why is the sky blue?", chosen="Air scatters blue light.", rejected="It is paint."):
    """Return a row of Anthropic's files."""
    return {"chosen": transcript(first, chosen), "rejected": transcript(first, rejected)}


def examples_of(*starts):
    """Return one example for each first user turn."""
    return [parse_example(comparison(start), f"row {n}") for n, start in enumerate(starts)]


def lines(rows):
    """Return rows as lines of JSON."""
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def written(path, rows):
    """Write rows as the ending of the file says, and return its path."""
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    elif path.suffix == ".csv":
        with path.open("w", newline="", encoding="utf-8-sig") as file:  # as Excel does, byte-order mark included
            writer = csv.DictWriter(file, rows[0])
            writer.writeheader()
            writer.writerows(rows)
    else:
        path.write_bytes({".gz": gzip.compress, ".xz": lzma.compress}.get(path.suffix, bytes)(lines(rows)))
    return path


PROMPT = [user("Hi"), assistant("Hello."), user("Name a colour")]

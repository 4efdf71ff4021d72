"""Rows of preference data, as files have them."""

import gzip
import json

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


def write_gzip(path, rows):
    """Write rows as gzipped lines of JSON."""
    path.write_bytes(gzip.compress("".join(json.dumps(row) + "\n" for row in rows).encode()))


PROMPT = [user("Hi"), assistant("Hello."), user("Name a colour")]

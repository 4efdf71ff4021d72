"""Inject the faults, those whose name contains one of the words given or all, and print the table of what was seen.

python -m faults [WORD …] [--write FILE]
"""

import argparse
import sys
import tempfile
import time
import traceback
from collections.abc import Iterable
from pathlib import Path

import torch
from micro import finish

from faults.registry import Case, Seen, cases, inject

HEAD = """\
# Faults and what a user sees of them

`make test-faults` injects each of these into a real run and checks what follows: every file that was finished is
intact, none under its final name is partial, and the same command, run again, ends with the tables of an undisturbed
run, bit for bit. It writes this table. Exit code 0 means that the run went on by itself; RUN is the run directory.

"""


def row(*cells: object) -> str:
    """Return a row of a Markdown table."""
    return "| " + " | ".join(str(cell).replace("|", "\\|") for cell in cells) + " |"


def table(seen: Iterable[tuple[Case, Seen]]) -> str:
    """Return the table of faults and what was seen of them."""
    lines = [row("fault", "exit code", "what the user sees", "lost"), row("---", "--:", "---", "---")]
    lines += [row(case.fault, found.code, found.said or "nothing", found.lost) for case, found in seen]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Inject, print, and exit with 1 if a fault was not handled as it must be."""
    parser = argparse.ArgumentParser(prog="faults", description=__doc__)
    parser.add_argument("words", nargs="*")
    parser.add_argument("--write", type=Path, help="also write the table to a file, if nothing failed")
    asked = parser.parse_args()
    wanted = [case for case in cases() if not asked.words or any(word in case.fault for word in asked.words)]
    torch.set_num_threads(1)
    seen: list[tuple[Case, Seen]] = []
    with tempfile.TemporaryDirectory() as scratch:
        begun = time.monotonic()
        folder = Path(scratch)
        finished = finish(folder)
        print(f"an undisturbed run: {time.monotonic() - begun:.0f} s", flush=True)
        for i, case in enumerate(wanted, 1):
            begun = time.monotonic()
            try:
                seen.append((case, inject(case, folder / str(i), finished)))
                said = "held"
            except Exception:
                traceback.print_exc()
                said = "FAILED"
            print(f"{i}/{len(wanted)} {said} {time.monotonic() - begun:.1f} s  {case.fault}", flush=True)
    print(f"\n{table(seen)}\n{len(seen)} of {len(wanted)} faults held")
    if len(seen) < len(wanted):
        sys.exit(1)
    if asked.write:
        asked.write.write_text(HEAD + table(seen), encoding="utf-8")


if __name__ == "__main__":  # worker processes import this module too
    main()

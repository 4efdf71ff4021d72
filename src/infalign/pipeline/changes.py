"""What changed between the settings that an output was made with and those of now."""

import json
from collections.abc import Iterator
from typing import Any


def changes(before: Any, now: Any, key: str = "") -> Iterator[str]:
    """Yield the differences between two settings, one clause each: ``rollout.k 6 → 10``.

    >>> list(changes({"rollout": {"k": 6}, "seed": 0}, {"rollout": {"k": 10}, "seed": 0}))
    ['rollout.k 6 → 10']
    """
    if before == now:
        return
    if _is_content(before) and _is_content(now) and before.get("name") == now.get("name"):
        named = f" ({now['name']})" if "name" in now else ""
        yield f"the content of {key}{named} {'changed' if now['content'] else 'is not found'}"
    elif isinstance(before, dict) and isinstance(now, dict) and not _is_content(before) and not _is_content(now):
        for inner in before | now:
            yield from changes(before.get(inner), now.get(inner), f"{key}.{inner}" if key else inner)
    elif isinstance(before, list) and isinstance(now, list) and len(before) == len(now):
        for place, pair in enumerate(zip(before, now, strict=True)):
            yield from changes(*pair, f"{key}.{place}")
    else:
        yield f"{key} {_shown(before)} → {_shown(now)}"


def _is_content(value: Any) -> bool:
    return isinstance(value, dict) and "content" in value


def _shown(value: Any) -> str:
    if _is_content(value):
        return str(value.get("name", "a local one"))
    text = value if isinstance(value, str) else "none" if value is None else json.dumps(value)
    return text if len(text) <= 60 else f"{text[:59]}…"

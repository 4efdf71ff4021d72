"""Pages in a real browser."""

from pathlib import Path
from typing import Any


def show(browser: Any, page: Path, width: int, scheme: str = "light") -> None:
    """Open a page in a window of that width."""
    size = {"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": width < 600}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    feature = {"name": "prefers-color-scheme", "value": scheme}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [feature]})
    browser.get(page.as_uri())

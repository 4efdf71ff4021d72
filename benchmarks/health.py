"""Print how long /health takes while clients send the largest prompts that a server of a finished run reads.

    python benchmarks/health.py runs/demo [CLIENTS]

CLIENTS (10) at once send one long text, then as many short turns as fit. Exits with 1 if /health takes 50 ms.
"""

import subprocess
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from itertools import product
from statistics import median

import httpx2

from infalign.serving.app import MAX_BYTES

PORT, CLIENTS = 8765, int(sys.argv[2]) if len(sys.argv) > 2 else 10
URL = f"http://127.0.0.1:{PORT}"
TURNS = {
    "one text": lambda size: [{"role": "user", "content": "word " * (size // 5)}],
    "short turns": lambda size: [{"role": "user", "content": "a"}] * (size // 35),
}


def post(kind: str, size: int, model: str) -> int:
    """Return the status of the answer."""
    body = {"model": model, "messages": TURNS[kind](size)}
    return int(httpx2.post(f"{URL}/v1/chat/completions", json=body, timeout=600).status_code)


def main() -> int:
    """Serve, load and measure."""
    server = subprocess.Popen(["infalign", "serve", sys.argv[1], "--port", str(PORT)], stderr=subprocess.DEVNULL)
    worst = 0.0
    try:
        while True:
            try:
                model = httpx2.get(f"{URL}/health").json()["policy"]
                break
            except httpx2.TransportError:
                time.sleep(0.5)
        with ProcessPoolExecutor(CLIENTS) as clients, httpx2.Client(timeout=60) as client:
            for kind, size in [("", 0), *product(TURNS, (100_000, 250_000, MAX_BYTES - 100))]:
                asked = [clients.submit(post, kind, size, model) for _ in range(CLIENTS if size else 0)]
                waits, until = list[float](), time.perf_counter() + 1.0
                while time.perf_counter() < until or not all(one.done() for one in asked):
                    begun = time.perf_counter()
                    client.get(f"{URL}/health")
                    waits.append(time.perf_counter() - begun)
                    time.sleep(0.02)
                statuses = sorted({one.result() for one in asked})
                about = f"{kind or 'idle':<12}{size:>10,} bytes  status {statuses or ''!s:<8}"
                print(f"{about}/health at most {1000 * max(waits):.0f} ms, median {1000 * median(waits):.1f}")
                worst = max(worst, *waits)
    finally:
        server.terminate()
        server.wait()
    return int(worst > 0.05)


if __name__ == "__main__":
    sys.exit(main())

"""The command ``infalign``; ``python -m infalign`` is for launchers such as ``accelerate launch -m infalign``."""

import signal


def main() -> None:
    """Run the command line. Ctrl-C while it loads, before anything has begun, ends it without a word."""
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:  # as in a background job
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from infalign.cli import main as run

    run()


if __name__ == "__main__":
    main()

"""``python -m infalign``, as launchers such as ``accelerate launch -m infalign`` need it."""

from infalign.cli import main

main()

"""``python -m launcher.cli``: the same as the command ``zerun``."""

from .main import main

main()

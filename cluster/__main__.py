"""``python -m octavo.cluster`` is the command ``octavo``."""

from .cli import main

main(prog_name="octavo")

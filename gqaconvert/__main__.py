"""``python -m gqaconvert``."""

from gqaconvert.cli.app import main

main()

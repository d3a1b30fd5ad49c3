"""`python -m featherweight`."""

from featherweight.cli import main

main()

"""What fits into a memory, by dry runs of `featherweight.anatomy`."""

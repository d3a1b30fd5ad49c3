"""Where the time goes: operations by group, under this machine's roofline."""

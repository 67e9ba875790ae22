"""Tables and reports of runs."""

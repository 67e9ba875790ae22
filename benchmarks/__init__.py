"""Scripts that print a measured ratio against a reference, both sides in one run."""

"""Environment families, one folder each: engine, environment class and card."""

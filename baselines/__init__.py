"""Reference trainers: `core` is the trainer, `methods` has one file a method, `configs` the settings of runs."""

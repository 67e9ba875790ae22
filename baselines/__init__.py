"""Reference trainers: `core` is the trainer, `methods` has one file a published method, `configs` the settings of runs."""

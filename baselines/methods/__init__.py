"""One file a method: its card, its numbers, its mathematics. A file's `METHOD` is what `--method NAME` loads."""

"""ALFWorld tasks: a generator of household games in the official file format, and the loader of the official games."""

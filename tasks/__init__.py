"""Task sets: one folder a family with its generators, loaders of official data and cards."""

"""The trainer that all methods share; it knows no method by name.

method.py      what a method is: card, numbers, hooks          sample.py   trajectories and per-token training samples
estimators.py  advantages in numpy                             losses.py   loss terms and their normalisation
batch.py       token-budget micro-batches                      actor.py    model with value head and adapters
models.py      loading tiny, smollm2-135m and folders          bank.py     reference, EMA, stale and proximal copies
collect.py     rollouts                                        trainer.py  the loop
"""

"""Random attacks on runs and their files: `python -m tests.attack --minutes=20`.

Each attack does harm at random and then asks whether a promise of docs/reliability.md
was kept. How to add a kind of attack:

1. Write a module here with a function `(rng, place) -> outcome`, see `kind.Attack`. It
   draws every choice from `rng` alone, so that the same seed repeats it, works in
   `place.folder`, which is new and empty, and makes what all attacks can share by
   `place.once`. It returns in a few words what became of the attack ("same bits",
   "refused: config.json"); these are counted. If a promise is broken it raises
   `kind.Broken`; any other exception is a failure, too.
2. List it in the module's `KINDS`, a tuple of `kind.Kind`, and the module in
   `kinds.py`.

An attack should take seconds: CI makes as many as fit into a minute.
"""

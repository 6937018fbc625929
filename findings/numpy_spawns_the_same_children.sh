#!/usr/bin/env bash
# Guess: a Generator that gets back the state that was saved from it goes on as if there had been no break, with spawn()
#   too: `bit_generator.state` is its state.
# Seen: spawn() counts the children in the seed sequence, which is not in `bit_generator.state`. A restored generator
#   that was made from the same seed spawns its first children again; one from another seed spawns children that belong
#   to neither run. The generator's own numbers go on rightly. Pickle keeps the count.
# Version: numpy 2.4.6, Generator.spawn and BitGenerator.state.
# Why it matters: a loader that spawns one generator for each worker in each epoch repeats the augmentations, noise and
#   subsets of its first epochs after each resume. A check that compares the next number of the parent finds no fault.
#   Save bit_generator.seed_seq.n_children_spawned as well, or pickle the generator.
source "$(dirname "$0")/environment"
packages numpy==2.4.6
program <<'PYTHON'
import json
import pickle

import numpy as np
from finding import compare, show_versions

show_versions("numpy")


def epoch(generator):
    """Return the first number of the generator of each of two workers, and the next one of their parent."""
    workers = [int(worker.integers(1000)) for worker in generator.spawn(2)]
    return {"workers": workers, "parent": int(generator.integers(1000))}


def restored(seed):
    generator = np.random.default_rng(seed)
    generator.bit_generator.state = json.loads(state)
    return generator


generator = np.random.default_rng(7)
first = epoch(generator)
state, pickled = json.dumps(generator.bit_generator.state), pickle.dumps(generator)
second = epoch(generator)
compare("epoch 0", guess=first, seen=first, known={"workers": [305, 681], "parent": 944})
for words, resumed, known in (
    ("with the pickled generator", pickle.loads(pickled), second),
    ("with its state and its seed", restored(7), {**second, "workers": first["workers"]}),
    ("with its state and another seed", restored(8), {**second, "workers": [869, 811]}),
):
    compare(f"epoch 1 after a resume {words}", guess=second, seen=epoch(resumed), known=known)
PYTHON

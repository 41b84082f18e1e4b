"""Faults in a real training: processes of `psstore run` are killed and stopped at seeded moments, and the training must
end with the bytes of the undisturbed one, or say why not.

    python -m tests.chaos --seed 7            one run, as it happens
    python -m tests.chaos --seed 1 --runs 50  many
    python -m tests.chaos --soak-s 7200       one that goes on for hours
"""

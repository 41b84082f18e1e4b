"""Whether anybody ever reads a torn version: a reader takes snapshots and pulls of stores of every mode, with one to
eight shards, over every transport, while workers train without a pause and are killed.

    python -m tests.torn                     a few hundred views
    python -m tests.torn --views 100000      what the documents say of them
"""

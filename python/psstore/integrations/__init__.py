"""Sessions in loops of others: `psstore.integrations.lightning`, `psstore.integrations.huggingface`. Each needs its
framework, which nothing else of psstore does."""

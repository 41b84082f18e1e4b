"""Sessions in loops of others: `psstore.integrations.lightning`, `psstore.integrations.huggingface`; and readers in
servers of others: `psstore.integrations.vllm`. Each needs its framework, which nothing else of psstore does."""

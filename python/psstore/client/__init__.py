"""What a program sees of a store: `connect`, `Store`, `AsyncStore` and the embedded `LocalStore`."""

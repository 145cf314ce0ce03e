"""Use cases by actor. They own the borders of transactions, and the crash windows between them."""

"""Cases, strategies, worker, engine and command line."""

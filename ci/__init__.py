"""Gates, statistics, history and reports."""

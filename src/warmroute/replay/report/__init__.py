"""Reports of replays: a table for the terminal, JSON, and a page to look at."""

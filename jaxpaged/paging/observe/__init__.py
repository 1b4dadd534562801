"""What happened in a pool, as a trace, as words, as pictures."""

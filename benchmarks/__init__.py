"""One file a question, each run as `python -m benchmarks.<name>`; results in results/<device>/."""

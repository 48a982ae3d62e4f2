"""What README.md claims, measured: one command for each figure."""

"""What the site claims, measured: one command for each figure."""

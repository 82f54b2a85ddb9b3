"""What cudalens costs, measured side by side with other tools in one run: ``make bench``."""

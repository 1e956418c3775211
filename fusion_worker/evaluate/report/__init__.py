"""The report of an evaluation: stored results, rows, confidence intervals and the page."""

"""The report of an evaluation: stored results, rows, confidence intervals, charts and the page."""

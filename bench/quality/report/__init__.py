"""What is said of it: rows, intervals, charts, the report page."""

"""One model over several processes: each has some of its heads."""
